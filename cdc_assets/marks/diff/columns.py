"""Which columns of two lake tables are one column of the source, and how both are compared.

A column is known by its attribute number, so one that is called otherwise on a side is compared all
the same, and told. Types that differ are compared as texts, by the rules of ``verify.canonical``.
What differs in the columns makes the tables differ, but for a type: that is a setting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql import types as T

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.verify.canonical import comparable_text, lake_text
from cdc_assets.verify.rows import Beside


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are compared: ``lake`` has those, ``blue`` and ``green`` each one's text.

    ``different``: a sentence for each difference of the columns themselves; ``remarks``: what is as
    configured.
    """

    lake: LakeTable
    blue: tuple[str, ...]
    green: tuple[str, ...]
    different: tuple[str, ...]
    remarks: tuple[str, ...]


def columns_of(blue: Beside, green: Beside) -> Columns:
    """Raises TableProblem if no row can be told from another by what both have."""
    theirs = {column.source.number: (column, kind) for column, kind in green.columns}
    different, remarks = list[str](), list[str]()
    shared = list[tuple[LakeColumn, str, str]]()
    for column, kind in blue.columns:
        other, other_kind = theirs.pop(column.source.number, (None, None))
        if other is None or other_kind is None:
            different.append(_alone(column, "blue", green.lake))
            continue
        if column.name != other.name:
            different.append(f"{column.name} is called {other.name} in green")
        masks = [_rule(side, one) for side, one in ((blue.lake, column), (green.lake, other))]
        if masks[0] != masks[1]:
            kinds = [(rule or "none").partition(":")[0] for rule in masks]
            said = (
                "masked with another mask_salt"
                if kinds[0] == kinds[1]
                else (f"masked otherwise (blue {kinds[0]}, green {kinds[1]})")
            )
            different.append(f"{column.name} is {said}: its values aren't compared")
            continue
        if kind != other_kind:
            types = f"{kind.simpleString()} in blue and {other_kind.simpleString()} in green"
            remarks.append(f"{column.name} is {types}: compared as text")
        texts = _texts((column.name, kind), (other.name, other_kind))
        shared.append((column, *texts))
    different += [_alone(column, "green", blue.lake) for column, _ in theirs.values()]
    different += [f"{name} is in blue only" for name in sorted({*blue.others} - {*green.others})]
    different += [f"{name} is in green only" for name in sorted({*green.others} - {*blue.others})]
    different += _keys(blue.lake, green.lake)
    remarks += _modes(blue.lake, green.lake)
    names = {column.source.name for column, _, _ in shared}
    lost = [column.name for column in blue.lake.key if column.source.name not in names]
    if lost or not shared:
        what = f"its key ({', '.join(lost)})" if lost else "all it has"
        said = f"no row is compared: {what} can't be, as {'; '.join(different)}"
        raise TableProblem(blue.lake.row.table, said)
    row = replace(blue.lake.row, columns=tuple(column.source for column, _, _ in shared))
    return Columns(
        replace(blue.lake, row=row),
        tuple(text for _, text, _ in shared),
        tuple(text for _, _, text in shared),
        tuple(different),
        tuple(remarks),
    )


def _alone(column: LakeColumn, side: str, other: LakeTable) -> str:
    excluded = column.source.name in other.table.columns.exclude
    return f"{column.name} is in {side} only" + (" (columns.exclude)" if excluded else "")


def _rule(lake: LakeTable, column: LakeColumn) -> str | None:
    return lake.row.mask_rule(column.source)


def _texts(blue: tuple[str, T.DataType], green: tuple[str, T.DataType]) -> tuple[str, str]:
    """The texts of one column on both sides, as Spark SQL."""
    texts = [lake_text(ticked(name), kind) for name, kind in (blue, green)]
    kinds = blue[1], green[1]
    for mine, other in ((0, 1), (1, 0)):
        if isinstance(kinds[mine], T.StringType) and not isinstance(kinds[other], T.StringType):
            texts[mine] = comparable_text(texts[mine], kinds[other])  # it is Postgres's own text
    return texts[0], texts[1]


def _keys(blue: LakeTable, green: LakeTable) -> list[str]:
    one, other = blue.row.key_columns, green.row.key_columns
    if {*one} == {*other}:
        return []
    keys = [", ".join(key) or "none" for key in (one, other)]
    return [f"the key is {keys[0]} in blue and {keys[1]} in green"]


def _modes(blue: LakeTable, green: LakeTable) -> list[str]:
    found, modes = list[str](), (blue.row.mode, green.row.mode)
    if modes[0] != modes[1]:
        found.append(f"mode is {modes[0]} in blue and {modes[1]} in green")
    if {*modes} != {"mirror"}:  # the history of each begins with its copy
        found.append("the rows that are there at the mark are compared, and no history of them")
    if blue.table.where != green.table.where:
        found.append("where: differs")
    return found
