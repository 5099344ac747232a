"""What two sides are compared by: one text for equal values, made differently on each side.

The source's side starts from Postgres's own text form, which neither the copy's native path nor
Arrow ever touched. The lake's side is rendered from the lake's value back to that text. So an error
of the mapping in either direction is seen, not cancelled out. Only where a text form isn't unique
(floats, decimals, arrays of those) both sides are compared as values.

Pure functions to Spark SQL expressions.
"""

from __future__ import annotations

from cdc_assets.spark.tables import LakeColumn, ticked

# Lake types whose text form is Postgres's, or nearly so.
_RENDER = {
    "boolean": "case {x} when true then 't' when false then 'f' end",
    "int": "cast({x} as string)",
    "bigint": "cast({x} as string)",
    "string": "{x}",
    "binary": "concat('\\\\x', lower(hex({x})))",
    "date": "cast({x} as string)",
    "timestamp_ntz": "cast({x} as string)",
    "timestamp": "concat(cast({x} as string), '+00')",
}
_CALENDAR = ("date", "timestamp_ntz", "timestamp")
# As array_out quotes: empty, NULL as a word, or with braces, quotes, backslashes, commas, spaces.
_QUOTED = (
    "if(e = '' or upper(e) = 'NULL' or e rlike '[{{}}\",\\\\\\\\\\\\s]',"
    " concat('\"', regexp_replace(e, '([\"\\\\\\\\])', '\\\\\\\\$1'), '\"'), e)"
)


def source_expression(column: LakeColumn, text: str) -> str:
    """The comparable text of the source's value, from its text form (a Spark SQL expression)."""
    lake = column.mapping.lake
    if _rendered(lake) is None or column.policy != "null":
        return f"cast({column.mapping.cast(text, column.policy)} as string)"
    if lake in _CALENDAR:
        return f"if(substring({text}, 5, 1) = '-' and right({text}, 2) != 'BC', {text}, null)"
    if lake.startswith("array<"):
        return f"if(startswith({text}, '{{') and not startswith({text}, '{{{{'), {text}, null)"
    return text


def lake_expression(column: LakeColumn) -> str:
    """The comparable text of the lake's value."""
    value = ticked(column.name)
    render = _rendered(column.mapping.lake)
    if render is None or column.policy != "null":
        return f"cast({value} as string)"
    return f"if({value} is null, null, {render.format(x=value)})"


def _rendered(lake: str) -> str | None:
    """A template from the lake's value to Postgres's text; None where text isn't unique."""
    if lake.startswith("array<"):
        element = lake.removeprefix("array<").removesuffix(">")
        inner = _RENDER.get(element)
        if inner is None or element in _CALENDAR:
            return None
        rendered = inner.format(x="e")
        quoted = _QUOTED.format() if element != "boolean" else "e"
        return (
            "concat('{{', array_join(transform(transform({x}, e -> "
            + rendered
            + "), e -> if(e is null, 'NULL', "
            + quoted.replace("{", "{{").replace("}", "}}")
            + ")), ','), '}}')"
        )
    return _RENDER.get(lake)
