"""The list of long tests is of tests that exist."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cdc_assets_tests.support.long_tests import UNTIL, at_most, is_long, is_too_late, listed, place

_TESTS = Path(__file__).parents[1]


def test_each_listed_test_exists() -> None:
    for name in listed():
        file, _, function = name.partition("::")
        assert f"def {function}" in (_TESTS / file).read_text(), name


def test_a_test_is_known_with_its_parameters_and_by_its_file() -> None:
    long = {"unit/test_a.py::test_b", "e2e/test_c.py"}
    assert is_long("cdc_assets_tests/unit/test_a.py::test_b[x::y/z]", long)
    assert is_long("cdc_assets_tests/e2e/test_c.py::test_d", long)
    assert not is_long("cdc_assets_tests/unit/test_a.py::test_bc", long)


def test_after_the_time_that_is_set_no_test_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    found = set[tuple[int, bool, bool]]()
    for minutes in (20, 5, -1):
        monkeypatch.setenv(UNTIL, str(now + 60 * minutes))
        found.add((minutes, is_too_late(long=True), is_too_late(long=False)))
    assert found == {(20, False, False), (5, True, False), (-1, True, True)}


def test_a_long_test_that_begins_too_late_is_skipped_and_another_runs() -> None:
    tests = "e2e/test_dev.py", "unit/test_long_tests.py::test_each_listed_test_exists"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not soak", *(str(_TESTS / t) for t in tests)],
        env={**os.environ, UNTIL: str(time.time() + 300)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert "not reached in the time that CI has" in ran.stdout
    assert "1 passed" in ran.stdout


def test_whoever_hangs_is_ended_before_ci_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTIL, str(time.time() + 60))
    assert at_most(90) == 90
    assert 299 < at_most(1_800) <= 300
    monkeypatch.delenv(UNTIL)
    assert at_most(1_800) == 1_800


def test_a_test_that_hangs_tells_where_and_the_others_go_on(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import time\ndef test_a():\n    time.sleep(60)\ndef test_b(): pass\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "cdc_assets_tests.conftest",
            "-n",
            "1",
            "--timeout",
            "2",
            file,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert f'"{file}", line 3 in test_a' in ran.stderr, ran.stderr


def test_files_have_another_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTIL, raising=False)
    names = [f"cdc_assets_tests/unit/test_{name}.py::test_{name}" for name in "abcdefgh"]
    assert sorted(names, key=place) == names
    orders = set[tuple[str, ...]]()
    for until in range(5):
        monkeypatch.setenv(UNTIL, str(until))
        assert place("a.py::test_b") == place("a.py::test_c[1]")
        orders.add(tuple(sorted(names, key=place)))
    assert len(orders) == 5
