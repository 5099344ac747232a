"""The configuration as a page of Markdown: each section's keys, what they take, their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from cdc_assets.config.schema import attributes_schema

_HEAD = """# Configuration

A source is one mapping in YAML (or JSON): a file for `cdc-assets --config`, or the `attributes` of
a component `cdc_assets.PostgresSource`. `${VAR}` in a value is taken from the environment, and
`${aws-secret:NAME#KEY}` from AWS Secrets Manager; `$${` is `${` itself. In a component Dagster's
`{{ env.VAR }}` works, too. An unknown key is refused.

Durations are numbers of seconds, or `500ms`, `5s`, `15m`, `2h`, `7d`; sizes are bytes, or `64MB`,
`16MiB`. `cdc-assets config schema` prints the same as a JSON schema, for editors;
`cdc-assets config reference` prints this page.
"""
_UNSAID = "required"
_SELF_EVIDENT = {"type": "Which kind it is."}


def page() -> str:
    """The whole page."""
    schema = attributes_schema()
    parts = [_HEAD, "## The source\n", _table(schema)]
    for path, section in _sections(schema, schema["$defs"], ""):
        about = f"{section['description']}\n\n" if "description" in section else ""
        parts += [f"## `{path}`\n", about + _table(section)]
    return "\n".join(parts)


def _sections(
    schema: Mapping[str, Any], known: Mapping[str, Any], path: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in schema["properties"].items():
        for name, kind in _references(value):
            of_kind = f" (type: {kind})" if kind else ""
            here = f"{path}{key}{'[]' if _is_list(value) else ''}{of_kind}"
            yield here, known[name]
            yield from _sections(known[name], known, f"{here}.")


def _references(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The sections that a key has, and the ``type`` that chooses one of several."""
    of = value.get("items", value)
    kinds = {ref: name for name, ref in of.get("discriminator", {}).get("mapping", {}).items()}
    for each in [of, *_alternatives(of)]:
        if (ref := each.get("$ref")) is not None:
            yield ref.rpartition("/")[2], kinds.get(ref, "")


def _alternatives(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What it may be; nothing if it is one thing."""
    if "if" in value:
        return [value["then"], value["else"]]
    return [*value.get("anyOf", ()), *value.get("oneOf", ())]


def _is_list(value: Mapping[str, Any]) -> bool:
    return value.get("type") == "array"


def _table(section: Mapping[str, Any]) -> str:
    required = section.get("required", ())
    rows = ["| key | takes | default | what it is |", "|---|---|---|---|"]
    for key, value in section["properties"].items():
        default = _UNSAID if key in required else _spelt(value)
        said = value.get("description", _SELF_EVIDENT.get(key, ""))
        said = said.replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{key}` | {_takes(value)} | {default} | {said} |")
    return "\n".join(rows) + "\n"


def _spelt(value: Mapping[str, Any]) -> str:
    if "default" not in value:
        return ""
    if next(_references(value), None) and not _is_list(value):
        return "as below"
    return f"`{json.dumps(value['default'], ensure_ascii=False)}`"


def _takes(value: Mapping[str, Any]) -> str:
    if _is_list(value):
        return f"a list of: {_takes(value['items'])}"
    found = dict.fromkeys(kind for each in _alternatives(value) or [value] for kind in _kinds(each))
    if "a duration" in found or "a size" in found:
        found.pop("a number", None)
    return ", ".join(found)


def _kinds(each: Mapping[str, Any]) -> Iterator[str]:
    """In words; a reference may stand for all, so it isn't one of them."""
    if "$ref" in each:
        yield "a mapping"
    elif "anyOf" in each:
        for inner in each["anyOf"]:
            yield from _kinds(inner)
    elif "enum" in each or "const" in each:
        values = each.get("enum", [each.get("const")])
        yield from (f"`{'null' if v is None else v}`" for v in values if v is not None)
    elif (pattern := each.get("pattern", "")).startswith(r"^\s*[0-9]+"):
        yield "a duration" if "[hH]" in pattern else "a size"
    elif r"\{\{" not in pattern:
        bounds = [f"at least {each[k]}" for k in ("minimum",) if k in each]
        bounds += [f"at most {each[k]}" for k in ("maximum",) if k in each]
        kind = _WORDS[each["type"]]
        yield f"{kind} ({', '.join(bounds)})" if bounds else kind


_WORDS = {
    "string": "text",
    "integer": "a number",
    "number": "a number",
    "boolean": "`true`, `false`",
    "object": "a mapping",
    "null": "`null`",
    "array": "a list",
}
