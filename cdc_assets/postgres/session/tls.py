"""Connections that TLS refuses: the certificate's fault, and the way out.

libpq reports a fault in one of a few sentences, from this side or the server's. The errors stay
psycopg.OperationalErrors, so that callers that wait for a database go on waiting: certificates are
renewed under a running process, and the next try may succeed. The words are the same everywhere: in
a flusher's log and its line in ``status``, a sensor, a command.
"""

from __future__ import annotations

import re

import psycopg

from cdc_assets.errors import CdcError


class TlsProblem(CdcError, psycopg.OperationalError):
    """The server and this side don't agree on certificates, or on encryption at all."""


# libpq's sentence, its meaning, the remedy.
_SENTENCES = (
    (
        r"root certificate file .* does not exist|could not read root certificate file",
        "the file of certificate authorities (sslrootcert) isn't there or can't be read",
        "Put it there, on every machine of Spark's too, or correct sslrootcert in the DSN.",
    ),
    (
        r"certificate verify failed|self[- ]signed certificate|unable to get local issuer",
        "the server's certificate isn't of an authority in sslrootcert, or it has expired",
        "Give the authority's file as sslrootcert (a cloud's bundle); renew what has expired.",
    ),
    (
        r"does not match host name|host name must be specified for a verified",
        "the server's certificate is for another host name",
        "Connect by a name that is in the certificate (sslmode=verify-full checks it).",
    ),
    (
        r"requires a valid client certificate|certificate required|handshake failure",
        "the server wants a client certificate",
        "Give sslcert and sslkey in the DSN; the certificate's common name is the role's name.",
    ),
    (
        r"alert unknown ca|alert bad certificate|alert certificate (unknown|expired|revoked)",
        "the server doesn't accept the client certificate",
        "Have it signed by the authority in the server's ssl_ca_file, or renew it.",
    ),
    (
        r"certificate authentication failed",
        "the client certificate isn't this role's",
        "Its common name has to be the role's name, or pg_ident.conf has to map it.",
    ),
    (
        r"private key file|could not load private key|certificate file .*(does not exist|read)",
        "the client certificate or its key (sslcert, sslkey) can't be used",
        "Both files have to be there, and the key readable by its owner only (chmod 600).",
    ),
    (
        r"does not support SSL",
        "the server has no TLS, and sslmode wants it",
        "Set ssl = on there (with a certificate), or another sslmode in the DSN.",
    ),
    (
        r"no pg_hba\.conf entry .*no encryption",
        "the server doesn't let this role in without TLS",
        "Add sslmode=verify-full and sslrootcert to the DSN.",
    ),
)
_FOUND = tuple((re.compile(p, re.IGNORECASE), what, remedy) for p, what, remedy in _SENTENCES)


def tls_problem(text: str) -> TlsProblem | None:
    """The problem that a failed connection's message reports; None if it isn't one of TLS."""
    for pattern, what, remedy in _FOUND:
        # The line itself: others are of other addresses.
        said = next((line.strip() for line in text.splitlines() if pattern.search(line)), None)
        if said is not None:
            return TlsProblem(f"{what}: {said.rstrip('.')}.", remedy)
    return None
