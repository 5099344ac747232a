"""The user's resources of dagster-aws, as a component is given them: by its template variables.

A component is loaded before any definitions are: what stands in ``Definitions(resources=…)`` isn't
known then. A ``template_vars_module`` is, and a variable may be the very object that stands there.

- ``SecretsManagerResource``: ``${aws-secret:…}`` is read by it.
- ``S3Resource``: what ``s3:`` doesn't say is taken from it. The files are read and written by
  pyarrow and by Spark, in processes of their own: they get its settings, not the object. Raises
  ConfigurationError for a setting that they can't have.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from cdc_assets.config.reading.expansion import Client
from cdc_assets.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_aws.s3 import S3Resource

_KEY = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, slots=True)
class Given:
    """How secrets are read, and settings of S3; None and nothing by default."""

    secrets: Client | None
    s3: Mapping[str, str] = field(repr=False)


def given(scope: Mapping[str, Any], origin: str) -> Given:
    """What the template variables of a component have of dagster-aws."""
    manager = _only(scope, "dagster_aws.secretsmanager", "SecretsManagerResource", origin)
    store = _only(scope, "dagster_aws.s3", "S3Resource", origin)

    def client(region: str | None) -> Any:
        there = manager.model_copy(update={"region_name": region}) if region else manager
        return there.get_client()

    return Given(
        client if manager is not None else None,
        _settings(store, origin) if store is not None else {},
    )


def _only(scope: Mapping[str, Any], module: str, kind: str, origin: str) -> Any:
    """The one variable of that kind, its ``EnvVar`` replaced; None if there is none."""
    loaded = sys.modules.get(module)  # it is, where somebody has made one
    wanted = getattr(loaded, kind, ())
    names = [name for name, value in scope.items() if isinstance(value, wanted)]
    if len(names) > 1:
        raise ConfigurationError(
            f"{origin}: the template variables {' and '.join(names)} are both {kind}.",
            "Give the source one.",
        )
    resource: dg.ConfigurableResource[Any] | None = scope[names[0]] if names else None
    if resource is None:
        return None
    with warnings.catch_warnings():  # its maker was told that it is a beta
        warnings.simplefilter("ignore", dg.BetaWarning)
        return resource.process_config_and_initialize()


def _settings(store: S3Resource, origin: str) -> dict[str, str]:
    plain = (store.endpoint_url or "").startswith("http://")
    refused = {
        "profile_name": store.profile_name is not None,
        "use_unsigned_session": store.use_unsigned_session,
        "use_ssl": not store.use_ssl and not plain,
        "verify": store.verify is False,
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise ConfigurationError(
            f"{origin}: S3Resource has {found[0]}, which neither pyarrow nor Spark has, who read"
            " and write the files.",
            "Set AWS_PROFILE for the whole process."
            if found[0] == "profile_name"
            else "Leave it out.",
        )
    settings = {
        "endpoint": store.endpoint_url,
        "region": store.region_name,
        "access_key_id": store.aws_access_key_id,
        "secret_access_key": store.aws_secret_access_key,
        "session_token": store.aws_session_token,
    }
    return {name: value for name, value in settings.items() if value is not None}


def with_s3(data: Any, given: Given) -> Any:
    """``data`` with the settings of the resource where ``s3:`` has none of its own."""
    if not given.s3 or not isinstance(data, Mapping):
        return data
    own = data.get("s3") or {}
    if not isinstance(own, Mapping):
        return data
    left_out = _KEY if any(name in own for name in _KEY) else ()
    theirs = {
        name: value.replace("${", "$${")  # a value, and no reference
        for name, value in given.s3.items()
        if name not in left_out
    }
    return {**data, "s3": {**theirs, **own}}
