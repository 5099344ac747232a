"""An upgrade from when sessions found names elsewhere, too: the texts of some keys are others."""

from __future__ import annotations

from pathlib import Path

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.store import LogStore
from cdc_assets_tests.support.flusher import bench

SETUP = """
create table relations (k regclass, id int, v text, primary key (id, k));
create domain known as regtype[];
create table lists (k known primary key);
create table marked (k regproc primary key);
create table history (k regclass primary key);
create table roles (k regrole primary key, v regclass);
create table plain (id int primary key, v regclass);
create table later (k regclass primary key);
"""
BEFORE = ("relations", "lists", "marked", "history", "roles", "plain")
MODES = {"marked": "soft_delete", "history": "append"}


def test_tables_that_were_copied_before_keys_had_other_texts_are_parked_and_no_others(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    with bench(postgres.start(), "key_texts", tmp_path) as made:
        made.execute(SETUP)

        def configured(*names: str) -> SourceConfig:
            tables = [{"name": n, "mode": MODES.get(n, "mirror")} for n in names]
            return parse_config({**made.settings(), "tables": tables}, "test")

        def upgraded() -> set[str]:
            made.execute("delete from _pg2iceberg.schema_version where version >= 23")
            made.execute(
                "alter table _pg2iceberg.claims drop column problem, drop column problem_since;"
                " alter table _pg2iceberg.mat_cursor drop column copy, drop column snapshot_id;"
                " alter table _pg2iceberg.tables"
                " drop column masks, drop column mask_numbers, drop column mask_wish,"
                " drop column filter_wanted, drop column row_filter, drop column filter_wish,"
                " drop column log_from, drop column copied_chunks, drop column copied_rows,"
                " drop column copied_at;"
                " alter table _pg2iceberg.pins drop column held,"
                " drop column server_started, drop column read_lsn;"
                " alter table _pg2iceberg.snapshot_progress"
                " drop column read_lsn, drop column database;"
                " alter table _pg2iceberg.verified_samples drop column round_saw;"
                " alter table _pg2iceberg.query_watermarks drop column epoch, drop column rule,"
                " drop column bound, drop column level, drop column level_at,"
                " add column watermark text;"
                " drop table _pg2iceberg.held_tables, _pg2iceberg.signals,"
                " _pg2iceberg.backfill_chunks,"
                " _pg2iceberg.backfills, _pg2iceberg.marked_tables, _pg2iceberg.marks,"
                " _pg2iceberg.work_done, _pg2iceberg.markers"
            )
            LogStore.open(made.dsn, made.name, "_pg2iceberg").close()
            return {name.removeprefix("public.") for name in made.parked()}

        made.flush(configured(*BEFORE))
        assert upgraded() == set()  # which were copied as they are now
        made.execute("update _pg2iceberg.schema_version set applied_at = now() where version = 20")
        made.flush(configured(*BEFORE, "later"))
        assert upgraded() == {"relations", "lists", "marked"}
        assert "the type regclass" in made.parked()["public.relations"]
        assert "cdc-assets resync public.relations" in made.parked()["public.relations"]
        made.resync(configured(*BEFORE, "later"), "relations")
        assert upgraded() == {"lists", "marked"}
        made.execute("insert into relations values ('plain', 1)")
        made.flush(configured(*BEFORE, "later"))
        assert made.log("public.relations")[-1].data["k"] == "public.plain"
