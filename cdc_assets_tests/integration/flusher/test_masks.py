"""Masked columns are staged masked, whatever they are called by then, and parked if in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.masks import Mask
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for

SALT = "a salt of the tests"


def _masking(source: Bench, salt: str = SALT, **masks: str) -> SourceConfig:
    settings: dict[str, Any] = source.settings("public.t", flush_interval="20ms")
    settings["tables"] = [{"name": "public.t", "columns": {"mask": masks}}]
    return parse_config({**settings, "mask_salt": salt}, "test")


def _hashed(text: str) -> str | None:
    return Mask("sha256", SALT.encode()).text(text)


def _catch_up(source: Bench) -> None:
    written = current_lsn(source.connection)
    wait_for(lambda: source.flushed() >= written)


def test_a_masked_column_is_staged_masked_under_any_name(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, v text, later int)")
    config = _masking(source, secret="sha256", later="redact")
    source.flush(config)
    source.execute("alter table t drop later")
    source.execute("insert into t values (1, 'S3CRET', 'a')")
    rows = ["(2, 'S3CRET', 'b', 'new')", "(3, null, 'c', 'w', 'S3CRET')"]
    rows += ["(4, 'S3CRET', 'd', 'w', 'S3CRET')"]
    with flushing(config):  # one session sees it all, never far behind the catalog
        for statement in (
            "rename secret to open; alter table t add w text",
            "add later text",
            "rename later to soon",
        ):
            source.execute(f"alter table t {statement}")
            source.execute(f"insert into t values {rows.pop(0)}")
            _catch_up(source)
    hashed = _hashed("S3CRET")
    assert [row.data for row in source.log("public.t")] == [
        {"id": "1", "secret": hashed, "v": "a"},
        {"id": "2", "open": hashed, "v": "b", "w": "new"},
        {"id": "3", "open": None, "v": "c", "w": "w", "later": "***"},
        {"id": "4", "open": hashed, "v": "d", "w": "w", "soon": "***"},
    ]
    assert source.parked() == {}


def test_old_rows_and_old_keys_are_masked(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text, big text)")
    source.execute("alter table t alter big set storage external, replica identity full")
    config = _masking(source, secret="last4", big="redact")
    source.flush(config)
    source.execute("insert into t values (1, 'S3CRET-1234', repeat('S3CRET', 1000))")
    source.execute("update t set secret = 'S3CRET-5678'; update t set id = 2; delete from t")
    source.flush(config)
    assert [(row.op, dict(row.data)) for row in source.log("public.t")] == [
        ("I", {"id": "1", "secret": "****1234", "big": "***"}),
        ("U", {"id": "1", "secret": "****5678", "big": "***"}),
        ("D", {"id": "1"}),
        ("U", {"id": "2", "secret": "****5678", "big": "***"}),
        ("D", {"id": "2"}),
    ]


@pytest.mark.parametrize(
    ("salt", "masks", "said"),
    [
        (SALT, {"secret": "redact"}, "columns.mask isn't what it was"),
        (SALT, {}, "columns.mask isn't what it was"),
        (SALT, {"secret": "sha256", "v": "redact"}, "columns.mask isn't what it was"),
        ("another salt of the tests", {"secret": "sha256"}, "mask_salt is another one"),
    ],
)
def test_what_is_masked_otherwise_is_parked_before_anything_is_staged(
    source: Bench, salt: str, masks: dict[str, str], said: str
) -> None:
    source.execute("create table t (id int primary key, secret text, v text)")
    source.flush(_masking(source, secret="sha256"))
    source.execute("insert into t values (1, 'S3CRET', 'S3CRET')")
    source.flush(_masking(source, salt, **masks))
    assert said in source.parked()["public.t"]
    assert "resync public.t" in source.parked()["public.t"]
    assert source.log("public.t") == []
    source.resync(_masking(source, salt, **masks), "public.t")
    source.flush(_masking(source, salt, **masks))
    assert source.parked() == {}


def test_what_the_configuration_masks_is_masked_whatever_the_log_says(source: Bench) -> None:
    source.execute("create table t (id int primary key, secret text)")
    config = _masking(source, secret="sha256")
    source.flush(config)
    source.execute("insert into t values (1, 'S3CRET')")
    with flushing(config):
        wait_for(lambda: len(source.log("public.t")) == 1)
        source.ask_log(
            "update _pg2iceberg.tables set masks = '{}', mask_numbers = '{}', updated_at = now()"
        )
        wait_for(lambda: "masked_otherwise" in source.parked().get("public.t", ""), 30)
        source.execute("insert into t values (2, 'S3CRET')")
    assert "S3CRET" not in str(source.log("public.t"))


@pytest.mark.parametrize(
    ("mask", "said"),
    [({"id": "sha256"}, "a column of its key"), ({"email": "redact"}, "has no such column")],
)
def test_a_mask_that_cannot_be_is_refused_by_name(
    source: Bench, mask: dict[str, str], said: str
) -> None:
    source.execute("create table t (id int primary key, secret text)")
    source.flush(_masking(source, **mask))
    assert said in source.parked()["public.t"]
    assert min(mask) in source.parked()["public.t"]


def test_one_that_was_taken_out_with_the_salt_is_given_up_by_a_command(source: Bench) -> None:
    """No command but that one takes a table that isn't configured."""
    source.execute("create table t (id int primary key, secret text)")
    source.execute("create table u (id int primary key)")
    source.flush(_masking(source, secret="sha256"))
    with Pipeline.open(source.config("public.u")) as pipeline:

        def remedies() -> dict[str, str]:
            found = preflight(source.connection, pipeline.config, pipeline.store, source.dsn)
            return {f.code: f.remedy for f in found if f.table == "public.t"}

        said = remedies()["masked_otherwise"]
        assert said.endswith("cdc-assets drop-table public.t")
        assert "resync" not in said
        drop_table(pipeline, TableId("public", "t"))
        assert remedies() == {}
