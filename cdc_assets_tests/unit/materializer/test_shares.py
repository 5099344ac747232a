"""Fair shares without a leader: whoever decides when, it comes to rest, and all have enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.materializer.workers.shares import Moves, Peer, moves
from cdc_assets.postgres.names import TableId

TABLES = [TableId("public", f"t{i}") for i in range(12)]
Sets = st.frozensets(st.sampled_from(TABLES))


def rounds(
    wants: list[frozenset[TableId]],
    has: list[set[TableId]],
    heavy: frozenset[TableId],
    *,
    at_once: bool,
    number: int = 60,
) -> int:
    """Let every worker decide in turn, or all from one view; the rounds until it is at rest."""
    for done in range(number):
        moved = False
        views = [Peer(w, frozenset(h)) for w, h in zip(wants, has, strict=True)]
        for i in range(len(wants)):
            if not at_once:
                views = [Peer(w, frozenset(h)) for w, h in zip(wants, has, strict=True)]
            due = moves(views[i], views[:i] + views[i + 1 :], heavy)
            has[i] -= set(due.give)
            # As the database has it: the first one to take a table gets it.
            got = {t for t in due.take if not any(t in h for h in has)}
            has[i] |= got
            moved |= bool(due.give) or bool(got)
        if not moved:
            return done
    raise AssertionError("it doesn't come to rest")


@given(
    st.integers(1, 4),
    st.lists(st.sampled_from([0, 1, 2, 3, None]), min_size=12, max_size=12),
    Sets,
    st.booleans(),
)
def test_shares_of_workers_that_want_everything_differ_by_one_at_most(
    workers: int, owners: list[int | None], heavy: frozenset[TableId], at_once: bool
) -> None:
    everything = frozenset(TABLES)
    has: list[set[TableId]] = [set() for _ in range(workers)]
    for table, owner in zip(TABLES, owners, strict=True):
        if owner is not None and owner < workers:
            has[owner].add(table)
    rounds([everything] * workers, has, heavy, at_once=at_once)
    assert sorted(t for h in has for t in h) == sorted(TABLES)
    for counted in (has, [h & heavy for h in has]):
        sizes = [len(h) for h in counted]
        assert max(sizes) - min(sizes) <= 1, sizes


@given(st.lists(Sets, min_size=1, max_size=4), Sets, st.booleans())
def test_whatever_each_wants_every_table_that_is_wanted_is_looked_after_by_one(
    wants: list[frozenset[TableId]], heavy: frozenset[TableId], at_once: bool
) -> None:
    has: list[set[TableId]] = [set() for _ in wants]
    has[0] |= set(TABLES)  # it wants some of them no longer
    rounds(wants, has, heavy, at_once=at_once)
    assert sorted(t for h in has for t in h) == sorted(frozenset[TableId]().union(*wants))
    assert all(h <= w for h, w in zip(has, wants, strict=True))


def test_a_new_worker_gets_its_share_in_two_looks_of_each() -> None:
    everything = frozenset(TABLES)
    has: list[set[TableId]] = [set(TABLES[:6]), set(TABLES[6:]), set()]
    assert rounds([everything] * 3, has, frozenset(), at_once=False) <= 2
    assert [len(h) for h in has] == [4, 4, 4]


def test_what_nobody_takes_for_long_is_anyones() -> None:
    mine, other = (
        Peer(frozenset(TABLES), frozenset(TABLES[:5])),
        Peer(frozenset(TABLES), frozenset()),
    )
    assert moves(mine, [other]).take == ()
    assert moves(mine, [other], stray={TABLES[7]}).take == (TABLES[7],)


def test_alone_a_worker_takes_all_and_gives_what_it_wants_no_more() -> None:
    wanted = frozenset(TABLES[:3])
    assert moves(Peer(wanted, frozenset(TABLES[2:4])), []) == Moves((TABLES[3],), tuple(TABLES[:2]))
