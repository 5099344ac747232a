"""The Dagster component whose ``attributes`` are exactly the plain configuration file.

There is one model (``config.SourceConfig``) and one set of messages: the component hands its
attributes to the same validation that the command line uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import dagster as dg
from pydantic import BaseModel, ConfigDict

from cdc_assets.config.reading.documents import refuse_doubles
from cdc_assets.config.reading.expansion import resolved
from cdc_assets.config.schema import attributes_schema
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import loaded, process_defs
from cdc_assets.dagster.resources import aws
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.files import text_of, write


class _Attributes(BaseModel):
    """What stands in the YAML, untouched until :func:`parse_config` validates it.

    Its schema is the configuration's: ``dg check yaml`` and editors know each key.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def model_json_schema(cls, *_: Any, **__: Any) -> dict[str, Any]:
        return attributes_schema()


class SourceScaffolder(dg.Scaffolder):
    """``dg scaffold defs cdc_assets.PostgresSource NAME``: a source of one table, to be edited."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        path = Path(request.target_path)
        word = re.sub(r"[^a-z0-9_]+", "_", path.name.lower()).lstrip("_0123456789")
        name = word[:40] or "app"
        example = text_of(name, [TableId("public", "orders")], component=True, apart=True)
        said = f"# `cdc-assets init {name}` writes such a file from the database itself.\n"
        write(path / "defs.yaml", said + example)


@dg.scaffold_with(SourceScaffolder)
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
        refuse_doubles(context.path / "defs.yaml")  # Dagster, which has read it, takes them
        data = attributes.model_dump() if attributes is not None else {}
        origin = str(context.path / "defs.yaml")
        given = aws.given(context.resolution_context.scope, origin)
        data = aws.with_s3(resolved(data, origin), given)
        return cls(loaded(parse_config(data, origin, secrets=given.secrets)))

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
