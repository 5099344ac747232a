"""What an adversary does to a second lake: it goes on, or says why not, and no row is wrong."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from psycopg import sql

from cdc_assets.log.states import TableState
from cdc_assets.maintenance.run import maintain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.relay.passing import let_go
from cdc_assets_tests.integration.materializer.schema_kinds import KINDS
from cdc_assets_tests.support.backfills import SETUP, T, backfilled, damage, lose
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.second import GROUP, begin, second_lake

pytestmark = pytest.mark.spark


EVIL = TableId('S "1"%s.x', "Ta\\b\"le%s.ü'")


def catch_up(first: Lake, second: Lake) -> None:
    first.catch_up()
    second.catch_up()


def test_a_backfill_undoes_no_commit_that_hangs_while_its_row_is_read(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is of commits, as the first one's, and its horizons are."""
    with copied_lake(SETUP, "t") as first, second_lake(first) as second:
        catch_up(first, second)
        lose(monkeypatch, second, second.pipeline.source_dsn)
        assert second.equal(T)


def test_a_backfill_heals_the_second_alone(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t") as first, second_lake(first) as second:
        first.execute("update t set v = 'mine' where id < 20")
        catch_up(first, second)
        there = second.lake_table(T).sql_name
        damage(
            second,
            f"update {there} set v = 'wrong' where id in (3, 4)",
            f"delete from {there} where id > 290",
            f"insert into {there} select 1000, 'only here', ''",
        )
        before = first.snapshots(T)
        done = backfilled(second, replaces=True)
        assert (done.state, done.removed) == ("done", 1)
        assert second.equal(T)
        assert first.snapshots(T) == before


@pytest.mark.parametrize("when", ["both stream", "the second is copied", "the second is pinned"])
def test_another_primary_key(copied_lake: NewLake, when: str) -> None:
    (kind,) = (kind for kind in KINDS if kind.name == "rekeyed")
    table = TableId("public", kind.name)
    setup = f"{kind.sql(kind.create)}; {kind.sql(kind.rows)}"
    with copied_lake(setup, kind.name) as first, second_lake(first, pinned=False) as second:
        second.pin()
        if when != "the second is pinned":
            second.copy()
        if when == "both stream":
            catch_up(first, second)
        kind.run(first)
        first.catch_up()
        for _ in range(3):
            begin(second)
            second.catch_up()
        first.execute(f"update {table} set id = -id; delete from {table} where v = 'v1'")
        catch_up(first, second)
        assert first.equal(table)
        assert second.equal(table)
        assert first.row(table).key_columns == second.row(table).key_columns == ("v",)


def test_hostile_names(copied_lake: NewLake) -> None:
    """Of a schema, a table and its columns: each is data, in every statement."""
    schema, name = (sql.Identifier(part).as_string(None) for part in (EVIL.schema, EVIL.name))
    key, value = ('"K ey%s"', '"V.ä""\'\\%(v)s"')
    setup = f"create schema {schema}; create table {schema}.{name} ({key} int primary key, {value}"
    setup += f" text, \"Plain\" int); insert into {EVIL} select i, 'v', i"
    setup += " from generate_series(1, 9) i"
    entry = {"name": str(EVIL), "columns": {"exclude": ["Plain"]}, "where": f"{key} > 3"}
    with copied_lake(setup, entry) as first, second_lake(first) as second:
        first.execute(f"update {EVIL} set {value} = 'it''s' where {key} in (2, 5)")
        first.execute(
            f"delete from {EVIL} where {key} = 6; insert into {EVIL} values (100, 'n', 1)"
        )
        catch_up(first, second)
        assert len(second.rows(EVIL)) == 6
        assert first.rows(EVIL) == second.rows(EVIL)
        assert [compared.outcome for compared in second.verify()] == ["equal"]
        first.execute(f'alter table {EVIL} rename column {value} to "w\'%s"')
        first.execute(f"update {EVIL} set \"w'%s\" = 'after'")
        catch_up(first, second)
        assert first.rows(EVIL) == second.rows(EVIL)
        mark_for_copy(first.pipeline, [EVIL])
        first.pin()
        first.copy()
        first.flush()
        second.flush()
        assert second.row(EVIL).state == TableState.WAITING
        begin(second)
        catch_up(first, second)
        assert first.rows(EVIL) == second.rows(EVIL)
        without = second.config.model_copy(update={"tables": ()})
        with Pipeline.open(without) as pipeline:
            drop_table(pipeline, EVIL)
        held = "select table_name from _pg2iceberg.mat_cursor where consumer_group = %s"
        assert first.source.execute(held, (GROUP,)).fetchall() == []


def test_what_is_rolled_back_is_held_again(copied_lake: NewLake) -> None:
    """The first lake's maintenance can't look at it: the group goes back, and so does the grace."""

    def held() -> int:
        let_go(second.config, second.pipeline.store, first.pipeline.store)
        ((offset,),) = first.execute(
            f"select \"offset\" from _pg2iceberg.mat_cursor where consumer_group = '{GROUP}'"
        )
        return int(offset)

    with copied_lake(SETUP, "t") as first, second_lake(first) as second:
        first.execute("update t set v = 'x' where id < 5")
        catch_up(first, second)
        loaded, before = second.lake_table(T).load(), held()
        assert loaded is not None
        first.execute("update t set v = 'y' where id < 9")
        catch_up(first, second)
        after = held()
        assert after > before
        name = second.lake_table(T).sql_name.removeprefix("lake.")
        back = loaded.metadata.current_snapshot_id
        second.session.sql(f"call lake.system.rollback_to_snapshot('{name}', {back})")
        assert held() == after
        for lake in (second, first):
            done = list(maintain(lake.pipeline, partial(getattr, lake, "session"), [T]))
            assert [one.problem for one in done] == [None]
            assert held() == before
        passed = f"select count(*) from _pg2iceberg.log_index where end_offset > {before}"
        assert first.execute(f"{passed} and passed_at is not null") == [(0,)]
        second.drain(T)
        assert held() == after
        assert second.equal(T)


def test_what_is_rolled_back_and_not_noticed_yet_is_there(copied_lake: NewLake) -> None:
    """The first one's maintenance is before the second one's, and its grace is over."""
    with copied_lake(SETUP, "t") as first, second_lake(first) as second:
        first.execute("update t set v = 'x' where id < 5")
        catch_up(first, second)
        loaded = second.lake_table(T).load()
        assert loaded is not None
        first.execute("update t set v = 'y' where id < 9")
        catch_up(first, second)
        let_go(second.config, second.pipeline.store, first.pipeline.store)
        name = second.lake_table(T).sql_name.removeprefix("lake.")
        back = loaded.metadata.current_snapshot_id
        second.session.sql(f"call lake.system.rollback_to_snapshot('{name}', {back})")
        care = first.config.maintenance.model_copy(update={"staged_grace": timedelta(0)})
        with Pipeline.open(first.config.model_copy(update={"maintenance": care})) as pipeline:
            (done,) = maintain(pipeline, lambda: first.session, [T])
        assert (done.problem, done.staged.files) == (None, 0)
        (done,) = maintain(second.pipeline, lambda: second.session, [T])
        assert done.problem is None
        second.drain(T)
        assert second.row(T).state == TableState.STREAMING
        assert second.equal(T)
