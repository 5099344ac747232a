"""The list of long tests is of tests that exist."""

from __future__ import annotations

from pathlib import Path

from cdc_assets_tests.support.long_tests import is_long, listed

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
