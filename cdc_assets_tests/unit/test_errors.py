"""Errors as a person reads them: what is wrong, a full stop, and what to do."""

from __future__ import annotations

import pytest

from cdc_assets.errors import CdcError, EnvironmentProblem, TableProblem, TablesFailed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("the source can't be reached: refused", "the source can't be reached: refused. Do it."),
        ("it is so.", "it is so. Do it."),
        ("is it so?", "is it so? Do it."),
        ("--config FILE is missing:", "--config FILE is missing: Do it."),
        ("an owner runs: drop table a;", "an owner runs: drop table a; Do it."),
    ],
)
def test_a_full_stop_is_between_cause_and_remedy(what: str, said: str) -> None:
    problem = EnvironmentProblem(what, "Do it.")
    assert (str(problem), problem.what) == (said, what)
    assert str(CdcError(what)) == what
    assert str(TableProblem("t", what, "Do it.")) == f"t: {said}"


def test_tables_that_failed_are_told_with_one_mark_between_them() -> None:
    problems = [
        TableProblem("a", "it may not be read", 'grant select on a to "cdc_app";'),
        TableProblem("b", "it is gone", "Create it."),
        TableProblem("c", "it is so"),
    ]
    assert str(TablesFailed(problems)) == (
        'a: it may not be read. grant select on a to "cdc_app"; b: it is gone. Create it; '
        "c: it is so"
    )
    assert str(TablesFailed(problems[:1])) == str(problems[0])
