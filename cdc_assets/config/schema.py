"""The JSON schema of the configuration: what editors complete, and ``dg check yaml`` checks.

It is made from the models, and their docstrings. A reference (``${VAR}``, or Dagster's
``{{ env.VAR }}``) may stand for any value that isn't a mapping or a list.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from cdc_assets.config.base import Section, spelt
from cdc_assets.config.source import SourceConfig

COMPONENT = "cdc_assets.PostgresSource"
FORMER_COMPONENT = "cdc_assets.components.PostgresSource"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}|\{\{.+\}\}"}
_STRUCTURES = ("object", "array")


class _Spelt(GenerateJsonSchema):
    """Defaults as the YAML spells them: 5s, not PT5S."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, BaseModel):
            return {name: self.encode_default(value) for name, value in dft}
        return spelt(dft) if isinstance(dft, timedelta) else super().encode_default(dft)


def attributes_schema() -> dict[str, Any]:
    """Of a plain file, or of a component's attributes."""
    schema = SourceConfig.model_json_schema(schema_generator=_Spelt)
    documented = {model.__name__: model for model in _models(SourceConfig)}
    for name, described in {SourceConfig.__name__: schema, **schema["$defs"]}.items():
        _describe(described, documented[name])
    table = schema["$defs"]["TableConfig"]
    # Not anyOf: of a table with a wrong key it would be said that it fits neither.
    either = {
        "if": {"type": "string"},
        "then": table["properties"]["name"],
        "else": {"$ref": "#/$defs/TableConfig"},
    }
    schema["properties"]["tables"] |= {"items": either, "minItems": 1}
    del schema["properties"]["patterns"], table["properties"]["found"]  # nobody writes them
    return schema


def file_schema() -> dict[str, Any]:
    """Of a file that ``--config`` takes: a plain one, or a component's ``defs.yaml``."""
    plain = attributes_schema()
    definitions = plain.pop("$defs")
    component = {
        "type": "object",
        "properties": {
            "type": {"enum": [COMPONENT, FORMER_COMPONENT]},
            "attributes": {"$ref": "#/$defs/SourceConfig"},
        },
        "required": ["type", "attributes"],
    }
    return {
        "$schema": _DIALECT,
        "title": "cdc_assets: a source",
        "if": {"required": ["attributes"]},
        "then": component,
        "else": {"$ref": "#/$defs/SourceConfig"},
        "$defs": {**definitions, "SourceConfig": plain},
    }


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model, and all that its fields have."""
    yield model
    for field in model.model_fields.values():
        due = [field.annotation]
        while due:
            kind = due.pop()
            due += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _models(kind)


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say what each key is, and let references stand for values."""
    said = documentation(model)
    for name, field in model.model_fields.items():
        key = field.alias or name
        found = schema["properties"][key]
        found.pop("title", None)
        if name in said:
            found["description"] = said[name]
        schema["properties"][key] = _or_reference(found)


def documentation(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings below the fields of a model and of what it extends, each as one line."""
    found = dict[str, str]()
    for kind in reversed(model.__mro__):
        if issubclass(kind, Section) and kind is not Section:
            found |= _documented(kind)
    return found


def _documented(model: type[BaseModel]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    (described,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for field, below in zip(described.body, described.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("anyOf", [schema])
    free = schema.get("type") == "string" and not {"pattern", "format", "enum"} & schema.keys()
    if free or any("$ref" in kind or kind.get("type") in _STRUCTURES for kind in kinds):
        return schema
    shown = schema.keys() & {"description", "default", "examples"}
    about = {key: schema.pop(key) for key in sorted(shown)}
    return {**about, "anyOf": [*schema.get("anyOf", [schema]), _REFERENCE]}
