"""A table that is taken out of the configuration is given up, with its staged files."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.errors import ConfigurationError, PreflightError, TableProblem
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.log.states import TableState
from cdc_assets.maintenance.staged import remove_given_up
from cdc_assets.materializer.drain import drain
from cdc_assets.operations import drop_table as module
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.changing import Publishing
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.server import preflight
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.integration.operations.test_operations import SETUP, A, B
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake, copied
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "a", "b") as opened:
        opened.execute("update a set v = 'y'; update b set v = 'y'")
        opened.flush()
        yield opened


def without(config: SourceConfig, *tables: TableId) -> SourceConfig:
    left = tuple(table for table in config.tables if table.id not in tables)
    return config.model_copy(update={"tables": left})


def published(source: Lake) -> set[str]:
    return {name for (name,) in source.execute("select tablename from pg_publication_tables")}


def staged(source: Lake) -> dict[str, int]:
    """Entries of the log by table."""
    rows = "select table_name, count(*) from _pg2iceberg.log_index group by 1"
    return dict(source.execute(rows))


def test_it_is_withdrawn_and_its_staged_files_go(source: Lake, tmp_path: Path) -> None:
    fewer = without(source.config, B)
    files = len(list(tmp_path.glob("**/*.parquet")))
    with Pipeline.open(fewer) as pipeline:
        left = {f.code: f.remedy for f in preflight(source.source, fewer, pipeline.store)}
        assert "cdc-assets drop-table public.b;" in left["table_left"]
        done = drop_table(pipeline, B)
        assert done.publications == ("cdc_src",)
        assert done.purged == ()
        assert published(source) == {"a"}
        assert "table_left" not in {f.code for f in preflight(source.source, fewer, pipeline.store)}
        assert staged(source).keys() == {"public.a", "public.b"}
        remove_given_up(pipeline, timedelta(days=1), None)
        assert staged(source).keys() == {"public.a", "public.b"}  # they die last
        remove_given_up(pipeline, timedelta(0), None)
        assert staged(source).keys() == {"public.a"}
        assert drop_table(pipeline, B).publications == ()  # again is no error
    assert len(list(tmp_path.glob("**/*.parquet"))) <= files
    assert len(source.rows(B)) == 20  # readers keep what they have
    source.execute("update a set v = 'z'; update b set v = 'z'")
    flush(fewer, until=current_lsn(source.source))
    assert staged(source).keys() == {"public.a"}
    source.drain(A)
    assert source.equal(A)


def test_a_flusher_that_runs_stages_nothing_more_of_it(source: Lake) -> None:
    fewer = without(source.config, B)
    with flushing(fewer), Pipeline.open(fewer) as pipeline:
        wait_for(lambda: source.execute("select 1 from pg_replication_slots where active"), 60)
        drop_table(pipeline, B)
        before = staged(source)["public.b"]
        source.execute("update b set v = 'late'; update a set v = 'late'")
        wait_for(lambda: staged(source)["public.a"] > 1, 60)
        assert staged(source)["public.b"] == before
    source.drain(A)
    assert source.equal(A)


def test_a_table_that_comes_back_is_copied_anew(source: Lake) -> None:
    with Pipeline.open(without(source.config, B)) as pipeline:
        drop_table(pipeline, B)
    source.execute("update b set v = 'meanwhile'; delete from b where id > 10")
    source.pins.close()
    dsn = source.config.postgres.dsn
    assert dsn is not None
    tables = dsn.get_secret_value(), source.config.spark.remote or "", "select 1", "a", "b"
    with copied(*tables) as again:
        again.execute("insert into b values (99, 'after')")
        again.catch_up()
        assert again.row(B).state == TableState.STREAMING
        assert [one.equal for one in again.verify()] == [True, True]


def test_purged_its_lake_table_goes_too(source: Lake, tmp_path: Path) -> None:
    fewer = without(source.config, B)
    location = Path(open_catalog(fewer).load_table(("src", "b")).location().removeprefix("file:"))
    assert list(location.rglob("*.parquet"))
    with Pipeline.open(fewer) as pipeline:
        done = drop_table(pipeline, B, purge=True)
        assert done.purged == ("lake.`src`.`b`",)
        assert done.files > 0
        assert not list(location.rglob("*.parquet"))
        assert open_catalog(fewer).list_tables("src") == [("src", "a")]
        assert drop_table(pipeline, B, purge=True).purged == ()


def test_a_lake_table_of_somebody_else_is_not_purged(source: Lake) -> None:
    source.session.sql("alter table lake.src.b set tblproperties ('cdc.table' = 'public.other')")
    fewer = without(source.config, B)
    with Pipeline.open(fewer) as pipeline:
        assert drop_table(pipeline, B, purge=True).purged == ()
        assert ("src", "b") in open_catalog(fewer).list_tables("src")


def test_a_table_of_another_name_in_the_lake_is_found(copied_lake: NewLake) -> None:
    """Its name stood in the configuration, where nobody knows it any more."""
    with copied_lake(SETUP, "a", {"name": "b", "as": "Things"}) as source:
        source.flush()
        source.execute("update b set v = 'y'; delete from b where id = 1")
        source.catch_up()
        assert open_catalog(source.config).table_exists(("src", "Things"))
        assert [one.equal for one in source.verify()] == [True, True]
        with Pipeline.open(without(source.config, B)) as pipeline:
            assert drop_table(pipeline, B, purge=True).purged == ("lake.`src`.`Things`",)


def test_a_table_whose_name_in_the_lake_is_changed_is_told(source: Lake) -> None:
    """By ``as:``, or by a pattern of a second schema: its rows are under the former one."""
    called = source.config.table("b").model_copy(update={"as_": "renamed"})
    other = source.config.model_copy(update={"tables": (source.config.tables[0], called)})
    with Pipeline.open(other) as pipeline:
        with pytest.raises(TableProblem, match=r"lake table is called src\.b, and the") as it:
            drain(pipeline, source.session, B)
        assert "calls it renamed now" in str(it.value)
        assert "Give it its name back (as: " in str(it.value)
        assert drain(pipeline, source.session, A) is not None
        told = {f.code: f for f in review(other)}["lake_table_gone"]
        assert told.severity == "error"
        assert "called src.b, and the configuration calls it renamed now" in told.message
    source.session.sql("create table lake.src.renamed using iceberg as select * from lake.src.b")
    source.session.sql(
        "alter table lake.src.renamed set tblproperties"
        " ('cdc.table' = 'public.b', 'cdc.source' = 'src')"
    )
    with Pipeline.open(without(source.config, B)) as pipeline:
        done = drop_table(pipeline, B, purge=True)
        assert set(done.purged) == {"lake.`src`.`b`", "lake.`src`.`renamed`"}


def test_files_of_a_table_that_was_renamed_in_the_lake_stay(source: Lake) -> None:
    catalog = open_catalog(source.config)
    catalog.rename_table(("src", "b"), ("src", "b_old"))
    kept = catalog.load_table(("src", "b_old"))
    made = catalog.create_table(("src", "b"), kept.schema(), location=kept.location())
    with made.transaction() as change:
        change.set_properties({"cdc.source": "src", "cdc.table": "public.b"})
    with (
        Pipeline.open(without(source.config, B)) as pipeline,
        pytest.raises(TableProblem, match="b_old has its files in the folder of b"),
    ):
        drop_table(pipeline, B, purge=True)
    assert catalog.load_table(("src", "b_old")).scan().to_arrow().num_rows == 20
    assert published(source) == {"a"}


def test_a_lake_table_that_another_one_has_is_not_purged(source: Lake) -> None:
    """As ``as:`` says, say of the table's new name; its copy comes."""
    other = source.config.table("a").model_copy(update={"as_": "b"})
    renamed = source.config.model_copy(update={"tables": (other,)})
    with Pipeline.open(renamed) as pipeline:
        assert drop_table(pipeline, B, purge=True).purged == ()
    assert ("src", "b") in open_catalog(source.config).list_tables("src")


def test_before_anything_is_copied_nothing_is_purged(new_lake: NewLake) -> None:
    with new_lake(SETUP, "a", "b") as source:
        source.pin()
        with Pipeline.open(without(source.config, B)) as pipeline:
            assert drop_table(pipeline, B, purge=True).purged == ()
        assert published(source) == {"a"}


def test_what_a_copy_has_left_half_done_goes_in_any_case(source: Lake) -> None:
    source.session.sql("create table lake.src.b__copy_2 using iceberg as select * from lake.src.b")
    for name, value in (("source", "src"), ("table", "public.b"), ("copying", "src 2")):
        source.session.sql(
            f"alter table lake.src.b__copy_2 set tblproperties ('cdc.{name}' = '{value}')"
        )
    with Pipeline.open(without(source.config, B)) as pipeline:
        assert drop_table(pipeline, B).purged == ()
    assert sorted(open_catalog(source.config).list_tables("src")) == [("src", "a"), ("src", "b")]


def test_what_is_configured_or_unknown_is_refused(source: Lake, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is in the configuration"):
        drop_table(source.pipeline, B)
    with pytest.raises(ConfigurationError, match=r"has no table public\.nobody"):
        drop_table(source.pipeline, TableId("public", "nobody"))
    assert source.row(B).state == TableState.STREAMING
    file = tmp_path / "src.json"
    file.write_text(without(source.config, B).dump())

    def command(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["--config", str(file), "drop-table", *arguments])
        return done.exit_code, done.output

    code, said = command("public.a")
    assert (code, "is in the configuration" in said) == (2, True)
    code, said = command("a.b.c")
    assert (code, "is not a table name" in said) == (2, True)
    code, said = command("public.b", "--purge")
    assert code == 0, said
    assert said.splitlines()[0] == "publication cdc_src: public.b is taken out"


def test_a_publication_of_all_tables_goes_on_and_nobody_stages_it(source: Lake) -> None:
    source.execute("drop publication cdc_src; create publication cdc_src for all tables")
    fewer = without(source.config, B)
    with Pipeline.open(fewer) as pipeline:
        done = drop_table(pipeline, B)
        assert (done.publications, done.still_in) == ((), ("cdc_src",))
        found = {f.code for f in preflight(source.source, fewer, pipeline.store)}
        assert "table_left" not in found
    assert source.row(B).oid == 0


def test_a_publication_of_somebody_else_is_named_with_its_sql(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(connection: object, name: str, tables: list[TableId]) -> Publishing:
        return Publishing({tables[0]: f"An owner runs: alter publication {name};"}, frozenset())

    monkeypatch.setattr(module, "withdraw", refused)
    with Pipeline.open(without(source.config, B)) as pipeline:
        done = drop_table(pipeline, B, purge=True)
    assert (done.publications, done.still_in) == ((), ("cdc_src",))
    assert done.refused == ("An owner runs: alter publication cdc_src;",)
    assert done.purged == ("lake.`src`.`b`",)
    assert source.row(B).oid == 0


def test_while_a_lock_is_in_the_way_nothing_is_done(source: Lake) -> None:
    with Pipeline.open(without(source.config, B)) as pipeline:
        with source.source.transaction():
            source.execute("lock table b in share update exclusive mode")  # as VACUUM does
            with pytest.raises(PreflightError, match="a lock is in the way"):
                drop_table(pipeline, B, purge=True)
        assert source.row(B).state == TableState.STREAMING
        assert drop_table(pipeline, B).publications == ("cdc_src",)


def test_a_table_that_was_renamed_since_is_withdrawn_by_its_new_name(source: Lake) -> None:
    """Else nobody would guard the source's own statements on it."""
    source.execute("alter table b rename to c")
    with Pipeline.open(without(source.config, B)) as pipeline:
        assert drop_table(pipeline, B).publications == ("cdc_src",)
    assert published(source) == {"a"}
    source.execute("alter table c drop constraint b_pkey; update c set v = 'free'")


def test_the_job_does_the_same(source: Lake) -> None:
    defs = build_defs(without(source.config, B))
    with dg.DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def("remove_src")
        config = {"ops": {"remove": {"config": {"table": "b", "purge": True}}}}
        assert job.execute_in_process(config, instance=instance).success
    assert published(source) == {"a"}
    assert ("src", "b") not in open_catalog(source.config).list_tables("src")
