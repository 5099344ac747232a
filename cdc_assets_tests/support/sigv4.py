"""Whether a request is signed by AWS's Signature Version 4, reckoned anew by botocore."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import Any

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<id>[^/]+)/\d{8}/(?P<region>[^/]+)/(?P<service>[^/]+)"
    r"/aws4_request, ?SignedHeaders=(?P<names>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
_HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Key:
    """A key; with a token it is one that ends."""

    id: str
    secret: str
    token: str | None = None
    until: float = math.inf
    """When it is over, by the monotonic clock; who looks at a signature may ask."""


def signed_with(
    keys: Mapping[str, Key], service: str, region: str, request: tuple[str, str, Any, bytes]
) -> Key | None:
    """Which of the ``keys`` (by id) a request (method, target, headers, body) is signed with."""
    method, target, headers, body = request
    found = _AUTHORIZATION.fullmatch(headers.get("Authorization", ""))
    if found is None or (found["service"], found["region"]) != (service, region):
        return None
    key = keys.get(found["id"])
    if key is None or headers.get("X-Amz-Security-Token") != key.token:
        return None
    names = found["names"].split(";")
    if not {"host", "x-amz-date"} <= set(names) or (
        key.token and "x-amz-security-token" not in names
    ):
        return None
    signed, digest = HTTPMessage(), hashlib.sha256(body).hexdigest()
    for name in names:
        signed[name] = ",".join(headers.get_all(name, []))
    if service == "s3":  # it may leave the body out, or sign it in pieces
        said = headers["X-Amz-Content-SHA256"]
        if _HEX.fullmatch(said) and said != digest:
            return None
        digest = said
    kind = S3SigV4Auth if service == "s3" else SigV4Auth
    signer = kind(Credentials(key.id, key.secret, key.token), service, region)
    signer.headers_to_sign = lambda _: signed
    signer.payload = lambda _: digest
    asked = AWSRequest(method, f"http://{headers['Host']}{target}", dict(signed.items()), body)
    asked.context["timestamp"] = headers["X-Amz-Date"]
    canonical = f"{signer.canonical_request(asked)}"
    if "x-amz-content-sha256" in names:  # botocore takes the header for the digest
        canonical = canonical.rpartition("\n")[0] + f"\n{digest}"
    signature = signer.signature(signer.string_to_sign(asked, canonical), asked)
    return key if signature == found["signature"] else None
