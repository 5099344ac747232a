"""Excluded columns stay in the source through every history of adding, dropping and renaming."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cdc_assets.flusher.decode.excluded import hidden
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.postgres.catalog import Attribute
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation, RelationColumn

TABLE = TableId("public", "t")


@dataclass(frozen=True)
class Catalog:
    """A table whose columns are all of one type; None: dropped."""

    names: tuple[str | None, ...]

    def relation(self) -> Relation:
        columns = tuple(RelationColumn(n, 25, -1, False) for n in self.names if n is not None)
        return Relation(1, "public", "t", "d", columns)

    def numbers(self) -> list[int]:
        return [i for i, name in enumerate(self.names, 1) if name is not None]

    def attributes(self) -> list[Attribute]:
        return [
            Attribute(i, name or "........", name is None, 25 if name else 0, -1, "", False, None)
            for i, name in enumerate(self.names, 1)
        ]

    def spec(self, *excluded: str) -> DecodeSpec:
        columns = [(i, name, 25, -1) for i, name in enumerate(self.names, 1) if name is not None]
        numbers = {i for i, name, *_ in columns if name in excluded}
        return DecodeSpec(TABLE, (), frozenset(excluded), frozenset(numbers), tuple(columns))


REGISTERED = Catalog(("id", "secret", "v"))
SPEC = REGISTERED.spec("secret")


@pytest.mark.parametrize(
    ("then", "now", "names"),
    [
        (("id", "secret", "v"), None, {"secret"}),
        (("id", "open", "v"), None, {"open"}),
        (("id", "open", "v"), ("id", "other", "v"), {"open"}),  # renamed again meanwhile
        (("id", "v", "secret"), None, {"v", "secret"}),  # they swapped their names
        (("id", None, "v", "w"), None, set[str]()),  # dropped, another one added
        (("id", None, "v", "secret"), None, {"secret"}),  # dropped and added again
        (("id", "open", "v", "secret"), None, {"open", "secret"}),
        (("id", "secret", "v"), ("id", None, "v", "w"), {"secret"}),  # the catalog is ahead
        (("id", "open", "v"), ("id", None, "v"), {"open"}),
    ],
)
def test_what_is_hidden(
    then: tuple[str | None, ...], now: tuple[str | None, ...] | None, names: set[str]
) -> None:
    found = hidden(SPEC, Catalog(then).relation(), Catalog(now or then).attributes(), listed=False)
    told = {name for name in then if name is not None}
    assert found.names & told == names
    assert not found.doubtful


def test_what_may_be_either_is_hidden_and_told() -> None:
    """``v`` alone is left, and the catalog has moved on: it may have been called ``secret``."""
    then, now = Catalog(("id", None, "v")), Catalog(("id", None, "w", "x"))
    found = hidden(SPEC, then.relation(), now.attributes(), listed=False)
    assert found.doubtful == ("v",)
    assert "v" in found.names
    # What the lake has followed already is known.
    known = replace(SPEC, columns=((1, "id", 25, -1), (3, "v", 25, -1)))
    found = hidden(known, then.relation(), now.attributes(), listed=False)
    assert not found.names & {"id", "v"}
    assert not found.doubtful


def test_a_table_that_is_gone_hides_everything_unknown() -> None:
    assert hidden(SPEC, REGISTERED.relation(), [], listed=False).doubtful == ()
    other = Catalog(("id", "open"))
    assert hidden(SPEC, other.relation(), [], listed=False).doubtful == ("id", "open")


@pytest.mark.parametrize("listed", [False, True])
def test_only_a_column_list_leaves_out_what_is_excluded(listed: bool) -> None:
    """Column 2 came as ``v``, is ``secret`` now, and 3 is another ``v``; or 2 was never sent."""
    spec = replace(Catalog(("id",)).spec("secret"), excluded_numbers=frozenset({2}))
    sent, now = Catalog(("id", "v")), Catalog(("id", "secret", "v"))
    found = hidden(spec, sent.relation(), now.attributes(), listed=listed)
    assert ("v" in found.names) is not listed
    assert not found.doubtful


def test_a_column_that_comes_later_is_remembered_by_its_number() -> None:
    spec = Catalog(("id",)).spec("secret")
    added = Catalog(("id", "secret"))
    assert hidden(spec, added.relation(), added.attributes(), listed=False).numbers == {2}


@st.composite
def histories(draw: st.DrawFn) -> list[Catalog]:
    states = [REGISTERED]
    for _ in range(draw(st.integers(0, 6))):
        names = list(states[-1].names)
        live = [i for i, name in enumerate(names) if name is not None]
        free = [name for name in ("secret", "v", "a", "b", "c") if name not in names]
        what = draw(st.sampled_from(("add", "drop", "rename")))
        if what == "drop" and len(live) > 1:
            names[draw(st.sampled_from(live[1:]))] = None
        elif what == "rename" and len(live) > 1 and free:
            names[draw(st.sampled_from(live[1:]))] = draw(st.sampled_from(free))
        elif free:
            names.append(draw(st.sampled_from(free)))
        states.append(Catalog(tuple(names)))
    return states


def a_moment(states: list[Catalog], data: st.DataObject) -> tuple[Catalog, set[str]]:
    """The table at some time of its history, and what was ``secret`` then, or column 2."""
    then, now = states[data.draw(st.integers(0, len(states) - 1))], states[-1]
    told = [name for name in then.names if name is not None]
    for other in (REGISTERED, now):  # looks the same, and is another: nobody can tell
        same = [name for name in other.names if name is not None] == told
        assume(not same or other.numbers() == then.numbers())
    numbered = zip(told, then.numbers(), strict=True)
    return then, {name for name, number in numbered if number == 2 or name == "secret"}


@settings(max_examples=1000)
@given(histories(), st.data())
def test_whatever_the_history(states: list[Catalog], data: st.DataObject) -> None:
    then, secret = a_moment(states, data)
    found = hidden(SPEC, then.relation(), states[-1].attributes(), listed=False)
    wrongly = (found.names & set(then.names)) - secret
    assert secret <= found.names
    assert wrongly <= set(found.doubtful)
    if then is states[-1]:
        assert not wrongly
        assert not found.doubtful
