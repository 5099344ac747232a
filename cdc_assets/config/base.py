"""Building blocks of the configuration's sections: durations, daily windows, places, addresses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    WithJsonSchema,
)

from cdc_assets.postgres.names import TableId

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_WINDOW = re.compile(
    r"\A\s*(\d\d:\d\d)\s*-\s*(\d\d:\d\d)(?:\s+([A-Za-z][\w+-]*(?:/[\w+-]+)*))?\s*\Z"
)
_QUANTITY = re.compile(r"\A\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*\Z")


def _quantity(value: object, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _QUANTITY.match(str(value))
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{value!r} has no known unit; write it like {example}")
    return float(match[1]) * units[match[2].lower()]


def spelt(value: timedelta) -> str:
    """A duration in its largest unit that leaves no rest."""
    seconds = value.total_seconds()
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"


def _duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    seconds = _quantity(value, _SECONDS, "1s, 500ms, 5m or 2h")
    try:
        return timedelta(seconds=seconds)
    except (OverflowError, ValueError) as error:  # of infinity, and of what is no number
        raise ValueError(f"{value!r} is too long") from error


def _size(value: object) -> int:
    size = _quantity(value, _BYTES, "64MB or 16MiB")
    if not math.isfinite(size):
        raise ValueError(f"{value!r} is no size; write it like 64MB")
    return int(size)


def _spelt(units: Mapping[str, float], *examples: str) -> WithJsonSchema:
    """The JSON schema of a quantity, as :func:`_quantity` reads it."""
    spellings = "|".join("".join(f"[{c}{c.upper()}]" for c in unit) for unit in units)
    pattern = rf"^\s*[0-9]+(\.[0-9]+)?\s*({spellings})\s*$"
    return WithJsonSchema(
        {
            "anyOf": [{"type": "string", "pattern": pattern}, {"type": "number"}],
            "examples": list(examples),
        }
    )


def _namespace(value: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", value):
        raise ValueError("write one plain lower-case word")
    return value


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A part of each day, in a time zone; one that ends before it begins goes over midnight."""

    begin: time
    end: time
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str) -> Self:
        """``08:00-18:00``, ``22:00-06:00 Europe/Berlin``. Raises ValueError."""
        if (match := _WINDOW.match(text)) is None:
            raise ValueError(f"{text!r}: write 22:00-06:00, or 22:00-06:00 Europe/Berlin")
        try:
            begin, end = time.fromisoformat(match[1]), time.fromisoformat(match[2])
            zone = ZoneInfo(match[3] or "UTC")
        except (ValueError, ZoneInfoNotFoundError, OSError) as error:
            raise ValueError(f"{text!r}: no such time of day, or no such time zone") from error
        if begin == end:
            raise ValueError(f"{text!r}: it begins when it ends")
        return cls(begin, end, zone)

    def _around(self, at: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Begin and end of the windows of that day and of the two before."""
        today = at.astimezone(self.zone).date()
        for back in range(3):
            day = today - timedelta(days=back)
            later = timedelta(days=self.end < self.begin)
            begin = datetime.combine(day, self.begin, self.zone)
            end = datetime.combine(day + later, self.end, self.zone)
            yield begin.astimezone(UTC), end.astimezone(UTC)

    def end_after(self, at: datetime) -> datetime | None:
        """When the window that ``at`` is in ends; None: it is in none."""
        return next((end for begin, end in self._around(at) if begin <= at < end), None)

    def end_before(self, at: datetime) -> datetime:
        """When the last window ended."""
        return max(end for _, end in self._around(at) if end <= at)


@cache
def days_that_differ(zone: ZoneInfo) -> tuple[date, ...]:
    """Some days of a year of which each other one is like: with and about the changes of clocks."""
    days = [date(2026, 1, 1) + timedelta(days=n) for n in range(365)]
    noons = [datetime.combine(day, time(12), zone).utcoffset() for day in days]
    changes = [n for n in range(1, 365) if noons[n] != noons[n - 1]]
    near = {n + off for n in changes for off in (-2, -1, 0)}
    return tuple(days[n % 365] for n in sorted({13, 194, *near}))


def longest_seconds(windows: Sequence[DailyWindow]) -> float:
    """How long one window or another lasts at most, on whatever day; at most a day."""
    days = {day for window in windows for day in days_that_differ(window.zone)}
    begins = (datetime.combine(day, w.begin, w.zone) for w in windows for day in days)
    return max((seconds_left(windows, begin) for begin in begins), default=0.0)


def seconds_left(windows: Sequence[DailyWindow], at: datetime) -> float:
    """How long, from ``at`` on, one window or another lasts; at most a day."""
    now, most = at, at + timedelta(days=1)
    while now < most and (ends := [end for w in windows if (end := w.end_after(now)) is not None]):
        now = max(ends)
    return (min(now, most) - at).total_seconds()


Duration = Annotated[
    timedelta, BeforeValidator(_duration), _spelt(_SECONDS, "500ms", "5s", "15m", "2h", "7d")
]
Size = Annotated[int, BeforeValidator(_size), _spelt(_BYTES, "64MB", "16MiB")]
Namespace = Annotated[str, AfterValidator(_namespace)]


# A name may neither be nor have anything that pyiceberg, Hadoop and S3 would read differently.
_NAME = r"(?!\.{1,2}(?:/|\Z))[^/?#\x00-\x1f\x7f]+"
_PLACE = re.compile(rf"\A(?:file:(?://)?(?:/{_NAME})+|s3://{_NAME}(?:/{_NAME})*)/*\Z")
_PLAIN = "without #, ?, control characters, empty names, . and .."


def plain_place(uri: str) -> str:
    """A folder's URI, if pyiceberg, Hadoop and S3 read it alike; raises ValueError."""
    if not _PLACE.match(uri):
        raise ValueError(f"write file:///absolute/path or s3://bucket/prefix, {_PLAIN}")
    return uri


def place_uri(uri: str) -> str:
    """A folder's URI as we write it, without slashes at its end; raises ValueError."""
    return plain_place(uri if uri.startswith(("file:///", "s3://")) else "").rstrip("/")


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys, without values in messages."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's copy, without the original's cached properties: those are of other values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def readable_address(value: SecretStr | None) -> SecretStr | None:
    """Refuse an address that libpq's error would quote, password and all."""
    if value is not None:
        dsn = value.get_secret_value()
        try:
            given = conninfo_to_dict(dsn)
            port = str(given.get("port") or "")
            if "@" in str(given.get("host") or "").lstrip("@"):
                port = "unreadable"
        except psycopg.Error:
            port = "unreadable"
        # After a second @ there is a part of a password, which libpq takes for the host's name.
        second = "://" in dsn and dsn.partition("?")[0].count("@") > 1
        if second or not re.fullmatch(r"[0-9,]*", port):
            raise ValueError(
                "not an address that libpq reads; in postgresql://… the special characters of a"
                " password are written as %40 and so on"
            )
    return value


Dsn = Annotated[SecretStr, AfterValidator(readable_address)]

# A table of the source, as SQL spells it.
TableText = Annotated[str, AfterValidator(lambda text: str(TableId.parse(text)))]


def _plain(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", value.get_secret_value()):
        raise ValueError("it is empty, or has spaces, an end of line, or other than ASCII")
    return value


PlainSecret = Annotated[SecretStr, AfterValidator(_plain)]
"""A secret that goes as a header."""


def _http(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().startswith(("https://", "http://")):
        raise ValueError("write https://…")
    return value


HttpAddress = Annotated[SecretStr, AfterValidator(_http)]
"""Of a service; it may have a token in it."""


def revealed(value: Any) -> Any:
    """A configuration's value as it may be written for a child: secrets in plain text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [revealed(item) for item in value]
    return value
