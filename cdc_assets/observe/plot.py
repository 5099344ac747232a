"""A small line chart as SVG, in a data URI that Markdown can show as a picture.

A picture of some hundred bytes needs no plotting library, and an image can run no script.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import datetime
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 520, 130, 70, 26, 20
# More points than this can't be distinguished at that width.
_POINTS = 120


def line_chart(
    title: str, points: Sequence[tuple[datetime, float | None]], show: Callable[[float], str]
) -> str:
    """An SVG document; where a value is None the line has a gap. ``show`` formats a value."""
    drawn = thinned(points)
    known = [value for _, value in drawn if value is not None]
    top = max(known, default=0.0) or 1.0
    right, bottom = _WIDTH - 10, _HEIGHT - _BOTTOM
    begin, end = (drawn[0][0], drawn[-1][0]) if drawn else (None, None)
    span = (end - begin).total_seconds() if begin is not None and end is not None else 0.0

    def place(at: datetime, value: float) -> str:
        along = (at - begin).total_seconds() / span if begin is not None and span else 0.0
        x = _LEFT + (right - _LEFT) * along
        y = bottom - (bottom - _TOP) * value / top
        return f"{x:.0f},{y:.0f}"

    lines: list[list[str]] = [[]]
    for at, value in drawn:
        if value is None:
            lines.append([])
        else:
            lines[-1].append(place(at, value))
    paths = "".join(
        f'<polyline points="{" ".join(line if len(line) > 1 else line * 2)}"/>'
        for line in lines
        if line
    )
    times = ""
    if begin is not None and end is not None:
        times = _text(_LEFT, _HEIGHT - 6, f"{begin:%H:%M} UTC") + _text(
            right, _HEIGHT - 6, f"{end:%H:%M} UTC", "end"
        )
    nothing = "" if known else _text((_LEFT + right) / 2, _HEIGHT / 2, "nothing yet", "middle")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="sans-serif" font-size="11" fill="#444">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f"{_text(_LEFT, 15, title)}"
        f"{_text(_LEFT - 6, _TOP + 8, show(top), 'end')}{_text(_LEFT - 6, bottom, show(0), 'end')}"
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#bbb"/>'
        '<g fill="none" stroke="#3a66db" stroke-width="1.5" stroke-linejoin="round"'
        f' stroke-linecap="round">{paths}</g>{nothing}{times}</svg>'
    )


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(said)}</text>'


def thinned(
    points: Sequence[tuple[datetime, float | None]],
) -> list[tuple[datetime, float | None]]:
    """At most some hundred points: of neighbours the greatest, so that no peak is lost."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-len(points) // _POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (group[-1][0], max((v for _, v in group if v is not None), default=None))
        for group in groups
    ]


def picture(alt: str, svg: str) -> str:
    """The SVG as a Markdown image."""
    return f"![{alt}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
