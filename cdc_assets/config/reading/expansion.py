"""References in the configuration: ``${VAR}``, ``{{ env.VAR }}`` and ``${aws-secret:NAME#KEY}``.

``$${`` is ``${`` itself. What AWS Secrets Manager keeps is read with the configuration, by the
first process that reads it: a code server, a run or a command; its children are handed the values.
A component reads by the ``SecretsManagerResource`` that it is given (``dagster.resources.aws``).
Without one, as in commands, which don't load Dagster, it is boto3's client, found and authorized as
boto3 does, with short time-outs, which the resource doesn't have. A rotated secret is read anew at
the next start. The value of a secret is never in an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from cdc_assets.errors import ConfigurationError

_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 3
_REFERENCE = re.compile(
    r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)|aws-secret:([^}#]+)(?:#([^}]+))?)\}"
)

Client = Callable[[str | None], Any]
"""Makes boto3's client of Secrets Manager, in a region or, by None, where it thinks best."""


def expanded(value: Any, client: Client | None = None) -> Any:
    """Replace references in every string; raises ValueError naming one that leads nowhere."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _referenced(match, client or _client), value)
    if isinstance(value, Mapping):
        return {key: expanded(item, client) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expanded(item, client) for item in value]
    return value


def _referenced(match: re.Match[str], client: Client) -> str:
    variable, secret, key = match.groups()
    if match[0] == "$${":
        return "${"
    if variable is not None:
        if variable not in os.environ:
            raise ValueError(f"the environment variable {variable} is not set; export it")
        return os.environ[variable]
    found = aws_secret(secret, key, client)
    # In an address, a generated password may have characters that separate its parts.
    return quote(found, safe="") if "://" in match.string[: match.start()] else found


def aws_secret(name: str, key: str | None, client: Client) -> str:
    """The secret of that name or ARN; with ``key``, that member of the secret as a JSON object.

    Raises ValueError, which says what to do.
    """
    text = _text(name, client)
    if key is None:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    member = found.get(key) if isinstance(found, dict) else None
    if member is None:
        raise ValueError(f"the AWS secret {name} has no member {key!r}: correct what follows #")
    return str(member)


def _client(region: str | None) -> Any:
    import boto3  # comes with dagster-aws; it takes half a second
    from botocore.config import Config

    return boto3.client(
        "secretsmanager",
        region_name=region or os.environ.get("AWS_REGION"),
        config=Config(
            connect_timeout=_TIMEOUT_SECONDS,
            read_timeout=_TIMEOUT_SECONDS,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        ),
    )


@lru_cache(maxsize=64)
def _text(name: str, client: Client) -> str:
    from botocore.exceptions import BotoCoreError, ClientError

    parts = name.split(":")
    region = parts[3] if name.startswith("arn:") and len(parts) > 3 else None
    try:
        answer = client(region).get_secret_value(SecretId=name)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "refused")
        raise ValueError(
            f"the AWS secret {name} can't be read ({code}); create it, or allow this process"
            " secretsmanager:GetSecretValue"
        ) from None
    except BotoCoreError as error:
        raise ValueError(
            f"AWS Secrets Manager can't be asked for {name} ({type(error).__name__}); set"
            " AWS_REGION and credentials, or mend the network"
        ) from None
    if "SecretString" not in answer:
        raise ValueError(f"the AWS secret {name} is binary; store it as text")
    return str(answer["SecretString"])


# The one template of Dagster's that stands for a value here. Names of tables are the source's, and
# whoever makes a table there chooses them: nothing in a name is ever evaluated.
_TEMPLATE = re.compile(r"\{\{\s*env\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_LISTS, _NAME = frozenset({"tables", "exclude"}), "name"


def resolved(value: Any, origin: str) -> Any:
    """``value`` with ``{{ env.VAR }}`` replaced, but for the source's names of tables."""
    if isinstance(value, Mapping):
        found = {key: resolved(item, origin) for key, item in value.items() if key not in _LISTS}
        tables = {
            key: [_settings(item, origin) for item in value[key]]
            if isinstance(value[key], list | tuple)
            else value[key]
            for key in _LISTS & value.keys()
        }
        return found | tables
    if isinstance(value, list | tuple):
        return [resolved(item, origin) for item in value]
    if not isinstance(value, str) or "{{" not in value:
        return value
    # What is in the environment is meant as it is, a password's "${" too.
    return _TEMPLATE.sub(lambda found: _variable(found[1], origin).replace("${", "$${"), value)


def _settings(table: Any, origin: str) -> Any:
    """An entry of ``tables``: its settings are resolved, the source's name of it is not."""
    if not isinstance(table, Mapping):
        return table
    return {key: item if key == _NAME else resolved(item, origin) for key, item in table.items()}


def _variable(name: str, origin: str) -> str:
    if name not in os.environ:
        raise ConfigurationError(
            f"{origin}: the environment variable {name} is not set.", "Export it."
        )
    return os.environ[name]
