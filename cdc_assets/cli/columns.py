"""Tables in a terminal: how wide each column is, so that nothing is cut and short values are whole.

What has no room is wrapped at its words, the widest column first and names last. Only where words
themselves have no room are they folded, names first: the others' values are short. Remarks, which
are sentences, leave a narrow table and are said below it, a line each: a terminal wraps them, and a
command in them can be copied as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdc_assets.cli.pasted import told

_NUMBERS = ("rows", "size")
_WORD = re.compile(r"\s+")
_PART = re.compile(r"(?<!\d)\s+")  # what lies between is whole: a word, or a number with its unit
# Cells of a line that no terminal shows; of a column of remarks, or they are said below the table;
# of a name and of another column before words are folded further.
_WIDE, _REMARK, _NAME, _OTHER = 1_000, 40, 16, 6


def show(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    remarks: bool = False,
    title: str = "",
    stderr: bool = False,
    wide: bool = False,
) -> list[str]:
    """Print a table whose first column has names.

    ``remarks``: the last column has sentences, if there are any. Where it has no room, they are
    returned, each with its row's name, to be said. ``wide``, or where a file or a program reads it:
    lines are as long as they need to be.
    """
    console = Console(stderr=stderr, highlight=False)
    if wide or not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _WIDE
    below = []
    cells = [[told(cell) for cell in row] for row in rows]
    room = console.width - _beside(headings)
    if remarks and (not any(row[-1] for row in cells) or _left(headings, cells, room) < 0):
        # A problem that was told of a table has its name already.
        below = [f"{n}: {remark.removeprefix(f'{n}: ')}" for n, *_, remark in cells if remark]
        headings, cells = headings[:-1], [row[:-1] for row in cells]
        room = console.width - _beside(headings)
    table = Table(title=title or None)
    for name, width in zip(headings, widths(headings, cells, room), strict=True):
        side: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, overflow="fold", justify=side, width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)
    return below


def widths(headings: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """How many of ``room`` cells each column gets."""
    found = _longest(headings, rows)
    least = _least(_PART, headings, rows)
    words = _least(_WORD, headings, rows)
    if sum(least) > room >= sum(words):
        least = words  # then names are whole
    others = range(1, len(headings))
    _narrow(found, others, least, room)
    _narrow(found, [0], least, room)
    _narrow(found, [0], [_NAME], room)
    _narrow(found, others, [_OTHER] * len(headings), room)
    _narrow(found, range(len(headings)), [1] * len(headings), room)
    return found


def _narrow(found: list[int], places: Sequence[int], least: Sequence[int], room: int) -> None:
    """Take cells of the widest of these columns until all have room, or these have the least."""
    while sum(found) > room:
        wide = [place for place in places if found[place] > least[place]]
        if not wide:
            return
        found[max(wide, key=lambda place: found[place])] -= 1


def _least(
    apart: re.Pattern[str], headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[int]:
    """How wide each column is if its cells are wrapped there, and its heading isn't."""
    return [
        max(cell_len(name), *(cell_len(part) for row in rows for part in apart.split(row[n])), 1)
        for n, name in enumerate(headings)
    ]


def _longest(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]


def _left(headings: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> int:
    """How many cells the others leave the last column beyond those that it needs."""
    *others, last = _longest(headings, rows)
    return room - sum(others) - min(last, _REMARK)


def _beside(headings: Sequence[str]) -> int:
    """The cells of a line that its borders take."""
    return 3 * len(headings) + 1
