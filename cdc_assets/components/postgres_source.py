"""The Dagster component whose ``attributes`` are exactly the plain configuration file.

There is one model (``config.SourceConfig``) and one set of messages: the component hands its
attributes to the same validation that the command line uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import process_defs


class _Attributes(BaseModel):
    """What stands in the YAML, untouched until :func:`parse_config` validates it."""

    model_config = ConfigDict(extra="allow")


class PostgresSource(dg.Component):
    """A Postgres database replicated into Iceberg tables: snapshot, change log and merge.

    Attributes: name, postgres and tables are required; see docs or ``cdc_assets.config.source``.
    """

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        return _Attributes

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="A Postgres database replicated into Iceberg tables.",
            tags=["postgres", "iceberg", "cdc"],
        )

    @classmethod
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> Self:
        """Raises ConfigurationError naming the file, the key and the remedy."""
        data = attributes.model_dump() if attributes is not None else {}
        return cls(parse_config(data, str(context.path / "defs.yaml")))

    @classmethod
    def get_code_references_for_yaml(
        cls,
        yaml_path: Path,  # noqa: ARG003
        source_position: object,  # noqa: ARG003
        context: dg.ComponentLoadContext,  # noqa: ARG003
    ) -> Sequence[dg.LocalFileCodeReference]:
        """None for all: each asset has its own, of its table's line (:meth:`build_defs`)."""
        return ()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return process_defs(self.config, context.path / "defs.yaml")
