"""Values of every type: random ones in Postgres's text form, and what the lake has to show of them.

The second half is written from ``docs/types.md``, not from the product's code.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

Literal = str | None
_Make = Callable[[random.Random], str]

TEXTS = ("", "a", "NULL", "null", "{}", "'", '"', "\\", "x,y", "é ü", "\t\n", "${x}", "%s", "😀")


def _of(*texts: str) -> _Make:
    return lambda rnd: rnd.choice(texts)


def _text(rnd: random.Random) -> str:
    if rnd.random() < 0.4:
        return rnd.choice(TEXTS)
    return "".join(rnd.choices("abcdefgh ", k=rnd.choice((1, 3, 20, 120))))


def _whole(bits: int) -> _Make:
    edge = 2 ** (bits - 1)
    return lambda rnd: str(rnd.choice((rnd.randrange(-99, 99), rnd.randrange(-edge, edge))))


def _digits(whole: int, scale: int) -> _Make:
    def make(rnd: random.Random) -> str:
        value = Decimal(rnd.randrange(-(10 ** rnd.randrange(1, whole + scale + 1)), 10**3))
        return str(value.scaleb(-scale))

    return make


def _floating(rnd: random.Random) -> str:
    return rnd.choice((repr(rnd.uniform(-1e6, 1e6)), "0", "-1.5", "1e-30", "3.4e37", "0.1"))


def _day(rnd: random.Random) -> str:
    return f"{rnd.choice((1, 1582, 1969, 2000, 2024, 9999)):04}-{rnd.randrange(1, 13):02}-28"


def _moment(rnd: random.Random) -> str:
    return f"{_day(rnd)} {rnd.randrange(24):02}:{rnd.randrange(60):02}:07.{rnd.randrange(10**6):06}"


def _list(element: _Make) -> _Make:
    def make(rnd: random.Random) -> str:
        found = []
        for _ in range(rnd.choice((0, 1, 3, 9))):
            text = "".join("\\" + c if c in '"\\' else c for c in element(rnd))
            found.append(rnd.choice((f'"{text}"', f'"{text}"', f'"{text}"', "NULL")))
        return "{" + ",".join(found) + "}"

    return make


def _document(rnd: random.Random) -> str:
    return rnd.choice(('{"a": [1, 2.50, null]}', '"x"', "null", "[]", '{"k": "é\\n"}', "1e3"))


# What the lake can hold, by the type's spelling in DDL.
PLAIN: dict[str, _Make] = {
    "smallint": _whole(16),
    "integer": _whole(32),
    "bigint": _whole(64),
    "boolean": _of("t", "f"),
    "real": _floating,
    "double precision": _floating,
    "numeric(10,2)": _digits(8, 2),
    "numeric(12,2)": _digits(10, 2),
    "numeric(38,10)": _digits(28, 10),
    "numeric": _of("1", "1.0", "1.00", "-0.000", "1e40", "NaN", "123456789012345678901234567890.5"),
    "text": _text,
    "varchar(200)": _text,
    "char(7)": lambda rnd: _text(rnd)[:7],
    "bytea": lambda rnd: "\\x" + rnd.randbytes(rnd.choice((0, 1, 9))).hex(),
    "date": _day,
    "timestamp": _moment,
    "timestamptz": lambda rnd: _moment(rnd) + "+00",
    "time": _of("00:00:00", "23:59:59.999999", "12:00:00"),
    "timetz": _of("00:00:00+00", "12:30:00+05:30"),
    "interval": _of("1 day", "24:00:00", "-1 mon 3 days 00:00:01.5", "1 year", "0"),
    "uuid": lambda rnd: f"{rnd.randrange(16**32):032x}",
    "json": _document,
    "jsonb": _document,
    "inet": _of("10.0.0.1", "10.0.0.0/8", "::1"),
    "cidr": _of("10.0.0.0/8", "fe80::/10"),
    "macaddr": _of("08:00:2b:01:02:03"),
    "int4range": _of("[1,5)", "empty", "(,)", "[3,]"),
    "tstzrange": _of('["2024-01-01 00:00:00+00","2024-02-01 00:00:00+00")', "empty"),
    "bit(5)": _of("10101", "00000"),
    "varbit": _of("1", "0101", ""),
    "point": _of("(1,2.5)", "(-0.1,1e300)"),
    "money": _of("12.34", "-5"),
    "tsvector": _of("'a':1 'b':2", ""),
    "oracle.mood": _of("low", "high", "it''s".replace("''", "'")),
    "oracle.pair": _of("(1,x)", '(,"a b")', "(1,)", "(,)"),
    "oracle.positive": lambda rnd: str(rnd.randrange(1, 99)),
    "integer[]": _list(_whole(32)),
    "text[]": _list(_text),
    "double precision[]": _list(_floating),
    "numeric(10,2)[]": _list(_digits(8, 2)),
    "timestamptz[]": _list(lambda rnd: _moment(rnd) + "+00"),
    "boolean[]": _list(_of("t", "f")),
    "bytea[]": _list(lambda rnd: "\\x" + rnd.randbytes(2).hex()),
    "uuid[]": _list(lambda rnd: f"{rnd.randrange(16**32):032x}"),
}
# What it can't: the column's policy says what is there instead.
ODD: dict[str, _Make] = {
    "real": _of("NaN", "Infinity", "-Infinity", "-0"),
    "double precision": _of("NaN", "Infinity", "-Infinity", "-0"),
    "numeric(10,2)": _of("NaN"),
    "numeric": _of("Infinity", "-Infinity"),
    "date": _of("infinity", "-infinity", "0044-03-15 BC", "10000-01-01"),
    "timestamp": _of("infinity", "-infinity", "0044-03-15 12:00:00 BC", "99999-01-01 00:00:00"),
    "timestamptz": _of("infinity", "-infinity", "0044-03-15 12:00:00+00 BC"),
    "integer[]": _of("{{1,2},{3,4}}", "[0:1]={1,NULL}", "[0:0][2:3]={{1,2}}"),
    "text[]": _of('{{a,"b c"}}', '[-1:0]={"=",b}'),
    "double precision[]": _of("{NaN,Infinity,-0}"),
    "numeric(10,2)[]": _of("{NaN,1.5}"),
    "timestamptz[]": _of('{infinity,"2024-01-01 00:00:00+00"}'),
}
KEYS = (
    *("smallint", "integer", "bigint", "boolean", "numeric(10,2)", "numeric", "text"),
    *("varchar(200)", "char(7)", "bytea", "date", "timestamp", "timestamptz", "time", "interval"),
    *("uuid", "inet", "int4range", "oracle.mood", "oracle.pair", "oracle.positive", "integer[]"),
    *("text[]", "double precision", "jsonb", "bit(5)"),
)
NAMES = (
    *(
        "v",
        "Id",
        "select",
        "a b",
        'q"q',
        "ümlaut",
        "a.b",
        "x`y",
        "%s {0}",
        "CamelCase",
        "back\\slash",
    ),
    *("n'n", "$$", "value", "x" * 63, "count", "NULL", "-", " ", "${HOME}"),
)
# Names that the product has for columns of its own.
INNER_NAMES = (
    *("key", "op", "lsn", "data", "off", "row", "gone", "unknown", "source", "net", "k0", "s0"),
    *("t0", "old_0", "of", "ts", "xid", "unchanged", "left", "copy", "t", "s"),
)


def literal(rnd: random.Random, kind: str, odd: float, nulls: float = 0.1) -> Literal:
    """A value of the type; with the chance ``odd`` one that the lake can't hold."""
    if rnd.random() < nulls:
        return None
    if kind in ODD and rnd.random() < odd:
        return ODD[kind](rnd)
    return PLAIN[kind](rnd)


# --- what the lake has to show ---

_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")


def in_lake(kind: str, text: Literal, policy: str) -> Any:
    """What a lake column shows of Postgres's text form; ``kind`` as format_type spells it."""
    if text is None:
        return None
    if kind.endswith("[]"):
        return _array(kind[:-2], text, policy)
    plain = re.sub(r"\(\d+\)", "", kind)
    if plain in ("smallint", "integer", "bigint"):
        return int(text)
    if plain == "boolean":
        return text == "t"
    if plain == "double precision":
        return _float(text)
    if plain == "real":
        return struct.unpack("f", struct.pack("f", _float(text)))[0]
    if plain == "bytea":
        return bytes.fromhex(text[2:])
    if match := _NUMERIC.fullmatch(kind):
        return _decimal(int(match[1]), int(match[2]), text, policy)
    if plain == "date":
        found = _calendar(text, policy)
        return found.date() if found is not None else None
    if plain == "timestamp without time zone":
        return _calendar(text, policy)
    if plain == "timestamp with time zone":
        found = _calendar(text, policy)
        return found.replace(tzinfo=UTC) if found is not None else None
    return text


def is_text(kind: str) -> bool:
    """Whether the lake has every value of the type as text."""
    if kind.endswith("[]"):
        return not _native_element(kind[:-2])
    return not _native_element(kind) or kind.startswith(("text", "character"))


def _float(text: str) -> float:
    return float(text.replace("Infinity", "inf"))


def _decimal(precision: int, scale: int, text: str, policy: str) -> Decimal | None:
    if text == "NaN":
        return Decimal("9" * precision).scaleb(-scale) if policy == "clamp" else None
    return Decimal(text)


def _calendar(text: str, policy: str) -> datetime | None:
    if text[4:5] == "-" and not text.endswith("BC"):
        return datetime.fromisoformat(text)
    if policy != "clamp":
        return None
    early = text.startswith("-") or text.endswith("BC")
    return datetime.min if early else datetime.max  # noqa: DTZ901 - as the source has it


def _array(element: str, text: str, policy: str) -> Any:
    if not _native_element(element):
        return text
    if text.startswith("["):  # the bounds are lost, and the elements stay
        text = text.partition("=")[2]
    if text.startswith("{{"):
        return None
    return [in_lake(element, item, policy) for item in _items(text)]


def _native_element(kind: str) -> bool:
    plain = re.sub(r"\(\d+\)", "", kind)
    return bool(_NUMERIC.fullmatch(kind)) or plain in (
        *("smallint", "integer", "bigint", "boolean", "real", "double precision", "bytea", "date"),
        *("text", "character varying", "character"),
        *("timestamp without time zone", "timestamp with time zone"),
    )


def _items(text: str) -> Iterator[Literal]:
    """The elements of a one-dimensional array's text form."""
    at = 1
    while text[at] != "}":
        if text[at] == '"':
            found, at = "", at + 1
            while text[at] != '"':
                at += text[at] == "\\"
                found += text[at]
                at += 1
            yield found
            at += 1
        else:
            end = min(i for i in (text.find(",", at), text.find("}", at)) if i >= 0)
            yield None if text[at:end] == "NULL" else text[at:end]
            at = end
        at += text[at] == ","


def shown(value: Any) -> str:
    """A value as one text: equal texts are equal values, NaN and the sign of zero included."""
    if isinstance(value, list):
        return "[" + ", ".join(shown(item) for item in value) + "]"
    if isinstance(value, datetime):
        return value.isoformat(" ", "microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}" if value else f"{abs(value):f}"
    return repr(value)


def record_items(text: str) -> list[Literal]:
    """The fields of a composite value's text form, as record_out writes it."""
    found: list[Literal] = []
    at = 1
    while True:
        item: str | None = None
        while text[at] not in ",)":
            item = item or ""
            if text[at] == '"':
                at += 1
                while text[at] != '"' or text[at + 1] == '"':
                    at += text[at] in '\\"'
                    item += text[at]
                    at += 1
                at += 1
            else:
                item += text[at]
                at += 1
        found.append(item)
        if text[at] == ")":
            return found
        at += 1
