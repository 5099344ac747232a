"""Nothing that is masked is found outside the source, on whatever way its rows took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import ColumnsConfig, TableConfig
from cdc_assets.errors import CopyRestarted, TableProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.verify.sample import sample
from cdc_assets_tests.integration.snapshot.sources import chunk_keys
from cdc_assets_tests.security.planted import NUMBER, WORD, leaks
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

T, LOOSE, HISTORY = (TableId("public", name) for name in ("t", "loose", "history"))
SALT = "a salt of the tests"
SETUP = f"""
create table t (id int primary key, email text, card text, code int, big text, v text);
alter table t alter big set storage external;
insert into t select i, '{WORD}' || i, '{WORD}-1234', {NUMBER}, repeat('{WORD}', 1000), 'v'
  from generate_series(1, 300) i;
insert into t (id, v) values (0, 'nothing');
create table loose (email text, n numeric(12,2), v text);
alter table loose replica identity full;
insert into loose values ('{WORD}', {NUMBER}, 'a'), ('{WORD}', {NUMBER}, 'a'), (null, null, 'b');
create table history (id int primary key, email varchar(40), tags text[], v text);
insert into history values (1, '{WORD}', '{{{WORD},x}}', 'v');
"""
TABLES: tuple[Any, ...] = (
    {
        "name": "t",
        "chunk_pages": 4,
        "columns": {
            "mask": {"email": "sha256", "card": "last4", "code": "redact", "big": "sha256"}
        },
    },
    {"name": "loose", "mode": "mirror", "columns": {"mask": {"email": "sha256", "n": "redact"}}},
    {
        "name": "history",
        "mode": "append",
        "columns": {"mask": {"email": "last4", "tags": "sha256"}},
    },
)
MASKED = {"mask_salt": SALT}


def hashed(text: str) -> str:
    return sha256((SALT + text).encode()).hexdigest()


def everything(source: Lake) -> Iterator[str]:
    """All that was written of the source's rows: files, what the log says, and the lake."""
    for uri in (source.config.staging_uri, source.config.warehouse):
        for file in Path(urlparse(uri).path).rglob("*"):
            if file.suffix == ".parquet":
                yield str(pq.read_table(file).to_pylist())
            elif file.is_file():
                yield file.read_bytes().decode("latin-1")
    for (name,) in source.execute(
        "select c.relname from pg_class c where relnamespace = '_pg2iceberg'::regnamespace"
        " and relkind = 'r'"
    ):
        yield str(source.execute(f'select t::text from _pg2iceberg."{name}" t'))


def assert_masked(source: Lake) -> None:
    texts = list(everything(source))
    assert any("****" in text for text in texts), "it looks where rows are"
    assert not any(map(leaks, texts))


def test_nothing_masked_leaves_the_source(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, *TABLES, **MASKED) as source:
        assert source.rows(T)[1] == (1, hashed(f"{WORD}1"), "****1234", "***", _big(), "v")
        assert source.rows(T)[0] == (0, None, None, None, None, "nothing")
        assert source.rows(LOOSE).count((hashed(WORD), "***", "a")) == 2
        source.execute(
            f"update t set v = 'w' where id = 1; update t set id = 1000 where id = 2;"
            f" update t set email = '{WORD}', card = '{WORD}' where id = 3;"
            f" insert into t values (1001, '{WORD}', 'short', {NUMBER}, '{WORD}', 'x');"
            f" update loose set v = 'c' where v = 'b'; update loose set email = null where ctid ="
            f" (select min(ctid) from loose where email = '{WORD}');"
            f" delete from t where id = 5; update history set v = 'w'; delete from history"
        )
        source.catch_up()
        rows = {row[0]: row[1:] for row in source.rows(T)}
        assert rows[1000] == (hashed(f"{WORD}2"), "****1234", "***", _big(), "v")
        assert rows[3][:2] == (hashed(WORD), "****"), "too short to show its end"
        assert [c.differing for c in source.verify()] == [0, 0, 0]
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming")
            for table in (T, LOOSE):
                found = sample(source.pipeline, source.session, table, 1000)
                assert (found.skipped, found.differing) == (None, 0)
        assert_masked(source)


def _big() -> str:
    return hashed(WORD * 1000)


def test_columns_that_come_later_are_masked_too(copied_lake: NewLake) -> None:
    later = {"name": "t", "columns": {"mask": {"email": "sha256"}}}
    setup = f"create table t (id int primary key, email text); insert into t values (1, '{WORD}')"
    with copied_lake(setup, later, **MASKED) as source:
        source.execute("alter table t drop email")
        source.execute("insert into t values (2)")
        source.catch_up()
        source.execute(f"alter table t add email text default '{WORD}'")
        source.execute("insert into t (id) values (3)")
        source.catch_up()
        assert [row[-1] for row in source.rows(T)] == [hashed(WORD)] * 3
        source.execute("alter table t drop email")
        source.execute("insert into t values (5)")
        source.execute(f"alter table t add email text default '{WORD}' || random()")
        source.execute("insert into t values (4)")
        source.catch_up()
        there = source.execute("select id, email from t order by id")
        found = [(row[0], row[-1]) for row in source.rows(T)]
        assert found == [(id_, hashed(email)) for id_, email in there]
        assert [c.equal for c in source.verify()] == [True]
        assert not any(map(leaks, everything(source)))


def test_a_masked_column_that_is_renamed_parks_its_table(copied_lake: NewLake) -> None:
    """A copy by the same configuration would have its values as they are."""
    with copied_lake(SETUP, *TABLES[:1], **MASKED) as source:
        source.execute("alter table t rename email to mail; update t set v = 'w' where id = 1")
        source.flush()
        with pytest.raises(TableProblem, match=r"email is called mail now, and columns\.mask"):
            source.drain(T)
        mark_for_copy(source.pipeline, [T])
        source.pin()
        assert "columns.mask names email" in str(source.row(T).reason)
        assert_masked(source)


UNIQUE = "create unique index once on t (email)"


@pytest.mark.parametrize(
    "change",
    [
        "alter table t drop constraint t_pkey; alter table t add primary key (email)",
        f"{UNIQUE}; alter table t alter email set not null, replica identity using index once",
    ],
)
def test_a_masked_column_that_comes_into_the_key_parks_its_table(
    copied_lake: NewLake, change: str
) -> None:
    """By their masks rows can't be told apart: a merge would delete others."""
    with copied_lake(SETUP, *TABLES[:1], **MASKED) as source:
        source.execute("delete from t where id = 0")
        source.execute(change)
        source.execute("update t set v = 'w' where id = 1; delete from t where id = 2")
        source.flush()
        with pytest.raises(TableProblem, match="names, belongs to its key now"):
            source.drain(T)
        assert source.row(T).state == TableState.PARKED
        assert len(source.rows(T)) == 300
        mark_for_copy(source.pipeline, [T])
        source.pin()
        assert "names a column of its key (email)" in str(source.row(T).reason)


PLAIN = f"create table t (id int primary key, email text); insert into t values (1, '{WORD}')"
WITH = {"name": "t", "columns": {"mask": {"email": "redact"}}}


def masking(source: Lake) -> SourceConfig:
    """The same source, whose configuration masks the column by now."""
    table = source.config.tables[0].model_copy(
        update={"columns": ColumnsConfig(mask={"email": "redact"})}
    )
    return source.config.model_copy(update={"tables": (table,)})


def test_a_copy_of_before_the_mask_is_parked_by_whoever_comes_first(new_lake: NewLake) -> None:
    with new_lake(PLAIN, "t") as source:
        source.pin()
        with (
            Pipeline.open(masking(source)) as pipeline,
            pytest.raises(TableProblem, match="masked_otherwise"),
        ):
            copy_table(pipeline, source.session, T)
        assert "resync public.t" in str(source.row(T).reason)
        with Pipeline.open(masking(source)) as pipeline:
            mark_for_copy(pipeline, [T])
        other = Pins(Pipeline.open(masking(source)))
        other.prepare()
        other.tick()
        with Pipeline.open(masking(source)) as pipeline:
            copy_table(pipeline, source.session, T)
        assert source.rows(T) == [(1, "***")]
        other.close()
        assert not any(map(leaks, everything(source)))


def test_a_merge_of_before_the_mask_is_parked(copied_lake: NewLake) -> None:
    with copied_lake(PLAIN, "t") as source:
        source.execute("insert into t values (2, 'later')")
        source.flush()
        with (
            Pipeline.open(masking(source)) as pipeline,
            pytest.raises(TableProblem, match="masked_otherwise"),
        ):
            drain(pipeline, source.session, T)
        assert source.row(T).state == TableState.PARKED
        assert len(source.rows(T)) == 1


def test_a_table_that_is_copied_alone_is_told_to_be_as_it_was(copied_lake: NewLake) -> None:
    with copied_lake(PLAIN, "t", snapshot={"mode": "snapshot_only"}) as source:
        assert source.row(T).state == TableState.COPIED
        config = masking(source)
        found = {finding.code: finding for finding in review(config)}
        assert found["masked_otherwise"].severity == "error"
        with Pipeline.open(config) as pipeline:
            pins = Pins(pipeline)
            pins.prepare()
            pins.close()
        assert source.row(T).state == TableState.PARKED
        assert "masked_otherwise" in str(source.row(T).reason)


@pytest.mark.parametrize("made", ["email || 'x'", "case when email is null then 'a' else 'b' end"])
def test_a_generated_column_does_not_show_what_is_masked(new_lake: NewLake, made: str) -> None:
    setup = f"{PLAIN}; alter table t add g text generated always as ({made}) stored"
    with new_lake(setup, WITH, snapshot={"mode": "snapshot_only"}) as source:
        source.pin()
        assert "generated column g is made from email" in str(source.row(T).reason)
        assert "mask_refused" in {finding.code for finding in review(source.config)}
    both = {"name": "t", "columns": {"mask": {"email": "redact", "g": "redact"}}}
    with new_lake(setup, both, snapshot={"mode": "snapshot_only"}) as source:
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "***", "***")]


def test_a_masked_table_that_is_renamed_is_known_again(copied_lake: NewLake) -> None:
    """A pattern finds it under its new name, where no mask is configured."""
    with copied_lake(PLAIN, WITH) as source:
        source.execute("alter table t rename to t_old; create table t (like t_old including all)")
        found = source.config.tables[0].model_copy(
            update={"name": "public.t_old", "columns": ColumnsConfig(), "found": True}
        )
        config = source.config.model_copy(update={"tables": (*source.config.tables, found)})
        with Pipeline.open(config) as pipeline:
            pins = Pins(pipeline)
            pins.prepare()
            pins.tick()
            row = pipeline.store.table(TableId("public", "t_old"))
            pins.close()
        assert row is not None
        assert (row.state, row.oid) == (TableState.PARKED, 0)
        assert "it was called public.t, of which columns are masked" in str(row.reason)


def test_a_row_that_is_read_again_is_masked(new_lake: NewLake) -> None:
    """As in ``test_two_pins``: its update left TOAST out, and it moved between two pins."""
    with new_lake(SETUP, *TABLES[:1], **MASKED) as source:
        source.execute(
            f"insert into t select i, '{WORD}', '{WORD}', {NUMBER}, repeat('{WORD}', 1000), 'v'"
            " from generate_series(301, 2000) i"
        )
        source.pin()
        first, *_ = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=[first])
        source.execute("update t set id = 5000 where id = 1000")
        source.pins.close()
        source.pins = Pins(source.pipeline)
        source.pin()
        source.copy()
        source.flush()
        assert source.drain(T).repaired == 1
        source.catch_up()
        assert [c.equal for c in source.verify()] == [True]
        assert_masked(source)


def test_a_copy_that_was_asked_for_with_a_mask_is_made_by_nobody_without(
    copied_lake: NewLake,
) -> None:
    """A flusher of before the mask goes on, and pins: it would describe the table without."""
    with copied_lake(PLAIN, "t") as source:
        with Pipeline.open(masking(source)) as pipeline:
            mark_for_copy(pipeline, [T])
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming")
            source.execute(f"insert into t values (2, '{WORD}')")
            wait_for(lambda: "restart the flusher" in str(source.row(T).reason), 30)
            time.sleep(3)
        assert (source.row(T).state, source.row(T).snapshot_lsn) == (TableState.WAITING, None)
        with flushing(masking(source)):
            wait_for(lambda: source.row(T).state == TableState.COPYING, 60)
            with Pipeline.open(masking(source)) as pipeline:
                copy_table(pipeline, source.session, T)
        with Pipeline.open(masking(source)) as pipeline:
            drain(pipeline, source.session, T)
        assert source.rows(T) == [(1, "***"), (2, "***")]


def test_a_flusher_of_another_salt_has_nothing_pinned(new_lake: NewLake) -> None:
    with new_lake(f"{PLAIN}; create table u (id int primary key)", "u") as source:
        source.pin()
        hashing = ColumnsConfig(mask={"email": "sha256"})
        both = [*source.config.tables, TableConfig(name="t", columns=hashing)]
        config = source.config.model_copy(
            update={"tables": tuple(both), "mask_salt": SecretStr(SALT)}
        )
        with flushing(source.config) as progress, Pipeline.open(config) as pipeline:
            wait_for(lambda: progress.state == "streaming")
            pins = Pins(pipeline)
            pins.prepare(patient=False)
            time.sleep(5)
            pins.tick()
            row = pipeline.store.table(T)
            pins.close()
        assert row is not None
        assert (row.state, row.followed) == (TableState.WAITING, False)


SWAP = ";".join(
    f"alter table t rename {old} to {new}"
    for old, new in (("email", "x"), ("v", "email"), ("x", "v"))
)


def test_columns_that_swap_names_while_they_are_copied_are_not_taken_for_each_other(
    new_lake: NewLake,
) -> None:
    """The statement of a copy names columns, and both are of one type."""
    setup = f"{PLAIN}; alter table t add v text; update t set v = 'v'"
    with new_lake(setup, WITH, snapshot={"mode": "snapshot_only"}) as source:
        source.pin()
        source.execute(SWAP)
        with pytest.raises(CopyRestarted, match="email has another name now"):
            source.copy()
        source.pin()
        assert "its column email, which is masked, is called v now" in str(source.row(T).reason)
        assert not any(map(leaks, everything(source)))
    with new_lake(setup, "t", snapshot={"mode": "snapshot_only"}) as source:  # without masks, too
        source.pin()
        source.execute(SWAP)
        with pytest.raises(CopyRestarted):
            source.copy()
        source.pin()
        source.copy()
        assert source.equal(T)


def test_a_mask_may_come_before_its_column_and_go_after_it(copied_lake: NewLake) -> None:
    with copied_lake(
        "create table t (id int primary key); insert into t values (1)", "t"
    ) as source:
        config = masking(source)
        with flushing(config) as progress:
            wait_for(lambda: progress.state == "streaming")
            wait_for(lambda: source.row(T).masks == {"email": "redact"}, 30)
            source.execute(f"alter table t add email int; insert into t values (2, {NUMBER})")
            written = source.execute("select pg_current_wal_lsn()::text")[0][0]
            wait_for(lambda: str(source.pipeline.store.flushed_lsn() or "") >= written, 30)
        with Pipeline.open(config) as pipeline:
            drain(pipeline, source.session, T)
        assert source.rows(T) == [(1, None), (2, "***")]
        source.execute("alter table t drop email; insert into t values (3)")
        run(config, until=current_lsn(source.source))
        with Pipeline.open(config) as pipeline:
            drain(pipeline, source.session, T)
        source.execute("insert into t values (4)")
        source.catch_up()  # by a configuration without the mask
        assert len(source.rows(T)) == 4
        assert source.row(T).state == TableState.STREAMING
        assert not any(map(leaks, everything(source)))
