"""What may be a row filter, and which are the same."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cdc_assets.config.tables import TableConfig
from cdc_assets.postgres.publication.row_filters import refuse_text, same_text


@pytest.mark.parametrize(
    "text", ["a = 1", "a = ')' or \"(\" = ';--'", "(a) and (b)", "a ~ 'it''s' and b % 2 = 1"]
)
def test_one_condition_is_taken(text: str) -> None:
    refuse_text(text)
    assert TableConfig.model_validate({"name": "t", "where": f" {text} "}).where == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = 1) or (b = 2", "no other half"),
        ("(a = 1", "no other half"),
        ("a = 'x", "no other half"),
        ('"a = 1', "no other half"),
        ("a = 1; drop table t", "one condition"),
        ("a = 1 -- and b", "one condition"),
        ("a = 1 /* and b", "one condition"),
        ("", "leave it out"),
    ],
)
def test_what_would_not_stay_one_condition_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TableConfig.model_validate({"name": "t", "where": text})


def test_a_pattern_has_no_filter() -> None:
    with pytest.raises(ValidationError, match="where is for a table that is named"):
        TableConfig.model_validate({"name": "public.*", "where": "a = 1"})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a = 1", " ( (a=1) ) ", True),
        ("(a) or (b)", "((a) or (b))", True),
        ("(a) or (b)", "a) or (b", False),
        ("a = 'x y'", "a = 'xy'", False),
        ("a = 'X'", "a = 'x'", False),
        ("not a", "nota", False),
        (None, None, True),
        (None, "a", False),
    ],
)
def test_filters_are_the_same_but_for_spaces_and_parentheses(
    one: str | None, other: str | None, same: bool
) -> None:
    assert same_text(one, other) is same
