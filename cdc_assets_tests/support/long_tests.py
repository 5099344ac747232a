"""Tests that take longer than others: ``make test`` leaves them out, ``make test-long`` runs them.

``python -m cdc_assets_tests.support.long_tests junit.xml …`` makes their list anew, from what
``pytest --junitxml=junit.xml`` wrote of all tests.

CI is ended from outside after a while, and some machines are four times slower than others. So it
sets a time after which no test begins, and the files have another order each time: what one run
doesn't come to, another one does. What wasn't reached is skipped, and counted as that.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Container, Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

LIST = Path(__file__).with_suffix(".txt")
# A test's, with that of the fixtures that it is the first to use.
_SECONDS = 8.0
# In ``make test`` however long they take: each invariant, each promise, and what the README says.
_ALWAYS = ("invariant", "promise", "test_readme")
# Whose tests follow each other.
_WHOLE = "e2e/test_dev.py"
_PACKAGE = "cdc_assets_tests."
# Names the variable of that time, in seconds since 1970; long tests begin earlier by so much.
UNTIL = "CDC_ASSETS_TESTS_UNTIL"
_EARLIER_SECONDS = 600.0
# A test that has begun may go on for so long after that time.
_GRACE_SECONDS = 240.0


def listed() -> list[str]:
    """Names of functions, each with its file, or of files: ``unit/test_house.py::test_layers``."""
    return LIST.read_text().split()


def is_long(nodeid: str, long: Container[str]) -> bool:
    """Whether pytest's name of a test, with its parameters, is of one in ``long``."""
    name = nodeid.partition("[")[0].partition("cdc_assets_tests/")[2]
    return name in long or name.partition("::")[0] in long


def place(nodeid: str) -> str:
    """By what tests are sorted: nothing, unless there is a time; then by file, as it says."""
    if (until := os.environ.get(UNTIL)) is None:
        return ""
    return hashlib.sha256(f"{until} {nodeid.partition('::')[0]}".encode()).hexdigest()


def is_too_late(*, long: bool) -> bool:
    """Whether no test, or no long one, begins any more."""
    if (until := os.environ.get(UNTIL)) is None:
        return False
    return time.time() > float(until) - (_EARLIER_SECONDS if long else 0.0)


def at_most(seconds: float) -> float:
    """For how long a test may run that begins now and has ``seconds``."""
    if (until := os.environ.get(UNTIL)) is None:
        return seconds
    return min(seconds, max(1.0, float(until) + _GRACE_SECONDS - time.time()))


def measured(reports: Iterable[Path]) -> list[str]:
    """The long ones of what was run."""
    found = set[str]()
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            module = case.attrib["classname"].removeprefix(_PACKAGE).replace(".", "/")
            name = f"{module}.py::{case.attrib['name'].partition('[')[0]}"
            if float(case.attrib["time"]) > _SECONDS and not any(map(name.__contains__, _ALWAYS)):
                found.add(_WHOLE if name.startswith(_WHOLE) else name)
    return sorted(found)


if __name__ == "__main__":
    LIST.write_text("\n".join(measured(map(Path, sys.argv[1:]))) + "\n")
