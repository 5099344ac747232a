"""Tests that take longer than others: ``make test`` leaves them out, ``make test-long`` runs them.

``python -m cdc_assets_tests.support.long_tests junit.xml …`` makes their list anew, from what
``pytest --junitxml=junit.xml`` wrote of all tests.
"""

from __future__ import annotations

import sys
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


def listed() -> list[str]:
    """Names of functions, each with its file, or of files: ``unit/test_house.py::test_layers``."""
    return LIST.read_text().split()


def is_long(nodeid: str, long: Container[str]) -> bool:
    """Whether pytest's name of a test, with its parameters, is of one in ``long``."""
    name = nodeid.partition("[")[0].partition("cdc_assets_tests/")[2]
    return name in long or name.partition("::")[0] in long


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
