"""What pydantic finds wrong with a value, as a sentence for somebody who writes YAML.

Who writes it has neither tuples nor models, and is told what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, get_args

from pydantic import BaseModel

from cdc_assets.config.base import spelt
from cdc_assets.messages.texts import meant

_LIST = "write a list, in brackets or with a dash before each"
_MAPPING = "write a mapping, like {a: b}"
_TEXT = "write text; a number is text in quotes"
_WORDS = {
    "extra_forbidden": "unknown key; remove it or correct its spelling",
    "missing": "missing; it is required",
    "tuple_type": _LIST,
    "list_type": _LIST,
    "model_type": "write a mapping of its keys to values",
    "dict_type": _MAPPING,
    "mapping_type": _MAPPING,
    "string_type": _TEXT,
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "int_type": "write a whole number",
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
    "float_type": "write a number",
    "float_parsing": "write a number",
}
_SUBJECT = re.compile(r"\A(?:Value error, |\w+(?= should ))")

# As pydantic has a bound of a duration.
_DURATION = re.compile(r"datetime\.timedelta\((days|seconds|microseconds)=(\d+)\)")


def explained(item: Any, model: type[BaseModel], data: object) -> str:
    """One of ``ValidationError.errors()`` of ``model``: the place, and what is to be there.

    ``data``: what was read.
    """
    place = _place(item["loc"], data)
    where = f"{place}: " if place else ""
    if item["type"] == "model_type" and item["loc"][:-1] == ("tables",):
        return f"{where}write a table's name, or a mapping with its name."
    if item["type"] == "literal_error":
        return f"{where}write {item['ctx']['expected']}."
    if (words := _WORDS.get(item["type"])) is None:
        words = _SUBJECT.sub(lambda found: "" if "," in found[0] else "it", item["msg"])
        words = _DURATION.sub(lambda found: spelt(timedelta(**{found[1]: float(found[2])})), words)
    if item["type"] == "extra_forbidden":
        *place, key = item["loc"]
        if (known := meant(str(key), _keys(model, place))) is not None:
            return f"{where}{words}: {known}?"
    return f"{where}{words}."


def _place(loc: Sequence[int | str], data: Any) -> str:
    """The keys that lead to a value, with a table's name for its number."""
    place = ""
    for part in loc:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            data = None
        if isinstance(part, int):
            name = data.get("name") if isinstance(data, Mapping) else None
            of_table = place == "tables" and isinstance(name, str) and name
            place += f"[{name}]" if of_table else f"[entry {part + 1}]"
        else:
            place += f".{part}" if place else part
    return place


def _keys(model: type[BaseModel], place: Sequence[int | str]) -> Iterator[str]:
    """The keys of the mapping at ``place``; a list's numbers, and the names of kinds, lead on."""
    here = {model}
    for part in place:
        fields = [f for m in here for n, f in m.model_fields.items() if (f.alias or n) == part]
        here = {found for field in fields for found in _models(field.annotation)} or here
    for found in here:
        yield from (field.alias or name for name, field in found.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
