"""What pydantic finds wrong with a value, as a sentence for somebody who writes YAML.

Who writes it has neither tuples nor models, and is told what to write instead.
"""

from __future__ import annotations

import re
from typing import Any

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


def explained(item: Any) -> str:
    """One of ``ValidationError.errors()``: the place, and what is to be there."""
    where = ".".join(str(part) for part in item["loc"]) or "the whole file"
    if item["type"] == "model_type" and item["loc"][:-1] == ("tables",):
        return f"{where}: write a table's name, or a mapping with its name."
    if item["type"] == "literal_error":
        return f"{where}: write {item['ctx']['expected']}."
    if (words := _WORDS.get(item["type"])) is None:
        words = _SUBJECT.sub(lambda found: "" if "," in found[0] else "it", item["msg"])
    return f"{where}: {words}."
