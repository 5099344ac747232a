"""Keeps the traces of errors in a file, and logs a line of each instead.

A trace is for developers: it is in a file of its own in the runtime home, without the values that
errors quote (``messages.foreign_words``). A log is given no ``exc_info``: the handler that prints
it isn't known, and Dagster's prints every word of it. :func:`noted` returns the line for a log.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cdc_assets.errors import ConfigurationError, EnvironmentProblem, first_line
from cdc_assets.messages.foreign_words import without_stack
from cdc_assets.messages.texts import bounded, one_line, plain
from cdc_assets.process.home import home

# The newest traces are enough.
_TRACES_BYTES = 4 * 2**20
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FRAME = re.compile(r"\s+at [\w.$/<>]+\([\w.$ <>]*(?::-?\d+)?\)")
_CAUSE = re.compile(r"Caused by: [\w.$]+(?:Exception|Error)(?![\w.$])")
_WORKERS_FRAME = re.compile(r'\s+File "[^"\n]*\.pyx?", line \d+, in [\w<>.]+')


def traces_path() -> Path:
    """Where the traces are."""
    return home() / "traces.log"


def keep_trace(error: BaseException) -> Path | None:
    """Append the trace to the file of traces; None where that can't be written."""
    head = f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, process {os.getpid()}\n"
    try:
        path = traces_path()
        if path.exists() and path.stat().st_size > _TRACES_BYTES:
            path.replace(path.with_suffix(".old"))
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(head + trace(error))
    except (OSError, EnvironmentProblem):
        return None
    return path


def noted(error: BaseException) -> str:
    """An error for a log: what it is, and where its trace was put."""
    where = keep_trace(error)
    told = f"{type(error).__name__}: {first_line(error)}"
    return told if where is None else f"{told} (see {where})"


class PlainFormatter(logging.Formatter):
    """For a person: no control characters and, unless ``stacks``, no stack traces."""

    def __init__(self, form: str = _FORM, *, stacks: bool = False) -> None:
        super().__init__(form)
        self._stacks = stacks

    def format(self, record: logging.LogRecord) -> str:
        line = logging.makeLogRecord(record.__dict__)
        said = record.message = record.getMessage()  # as any formatter leaves it
        line.msg, line.args = plain(said if self._stacks else without_stack(said)), None
        line.exc_info = line.exc_text = line.stack_info = None
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line.msg += f": {plain(noted(error))}"
        return super().format(line)


def log_level() -> str:
    """The level in ``CDC_ASSETS_LOG_LEVEL``; raises ConfigurationError if that is no level."""
    level = os.environ.get("CDC_ASSETS_LOG_LEVEL", "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ConfigurationError(
            f"CDC_ASSETS_LOG_LEVEL is {bounded(one_line(level), 40)}, which is no level of a log.",
            "Set it to DEBUG, INFO, WARNING, ERROR or CRITICAL.",
        )
    return level.upper()


def log_to_stderr(level: int | str, *, stacks: bool = False) -> None:
    """Make this process log to stderr, in the form of :class:`PlainFormatter`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(stacks=stacks))
    logging.basicConfig(level=level, handlers=[handler])


def trace(error: BaseException) -> str:
    """The stack of ``error`` and of what led to it: frames and sentences, and no value."""
    return "\n\n".join("\n".join(_stack(each)) for each in reversed(list(_chain(error)))) + "\n"


def _stack(error: BaseException) -> Iterator[str]:
    kind = type(error)
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield f"{kind.__module__}.{kind.__qualname__}: {first_line(error)}"
    theirs = getattr(error, "getStackTrace", None)
    java = (theirs() if theirs is not None else None) or str(error)
    for line in java.splitlines():
        if _FRAME.fullmatch(line) or _WORKERS_FRAME.match(line):
            yield line
        elif (cause := _CAUSE.match(line)) is not None:
            yield cause[0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
