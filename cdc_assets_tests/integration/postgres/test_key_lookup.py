"""Rows of the source that are read again by their keys, whatever type these have."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.tables import LakeTable
from cdc_assets.materializer import reread as module
from cdc_assets.materializer.reread import Piece, rereader
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench, bench
from cdc_assets_tests.support.waiting import wait_for

SETUP = """
create type mood as enum ('sad', 'glad');
create table "per%cent" ("k0" int primary key, n text);
insert into "per%cent" select g, g from generate_series(1, 2000) g;
create table enums (kind mood, id int, n int, primary key (kind, id));
insert into enums select 'glad', g, g from generate_series(1, 2000) g;
create table scanned (like enums including all);
insert into scanned table enums;
create table sizes (id int primary key, v text);
insert into sizes select g, repeat('x', case when g % 50 = 37 then 3000 else 10 end)
  from generate_series(1, 800) g where g % 10 <> 0;
create table relations (k regclass primary key, n int);
create table gone (id int);
insert into relations values ('relations', 1), ('gone', 2), ('pg_class', 3);
drop table gone;
create table lengths (a varchar(3), b char(3), c bit(3), d bytea, e int[], n int,
                      primary key (a, b, c, d, e));
insert into lengths values ('abc', 'x', b'101', '\\x00ff', '{1,2}', 1);
"""


@pytest.fixture(scope="module")
def source(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Bench, SourceConfig]]:
    with bench(postgres.start(), "lookup", tmp_path_factory.mktemp("lookup")) as made:
        made.execute(SETUP)
        config = made.config(
            'public."per%cent"', "enums", "scanned", "sizes", "relations", "lengths"
        )
        made.flush(config)
        yield made, config


def pieces(config: SourceConfig, name: str, *keys: Key) -> list[Piece]:
    with Pipeline.open(config) as pipeline:
        row = pipeline.store.table(TableId("public", name))
        assert row is not None
        reread = rereader(pipeline, LakeTable(config, config.table(str(row.table)), row), frozenset)
        return list(reread(keys))


def read_again(config: SourceConfig, name: str, *keys: Key) -> list[str]:
    """What the rows of these keys have in column n."""
    found = [row for piece in pieces(config, name, *keys) for _, row in piece.found]
    return sorted(json.loads(row)["n"] for row in found)


@pytest.mark.parametrize(
    ("name", "keys", "found"),
    [
        ("per%cent", [("7",), ("8",), ("9999",)], ["7", "8"]),
        ("enums", [("glad", "7"), ("sad", "8"), ("nothing", "9"), (None, "1")], ["7"]),
        ("relations", [("public.relations",), ("pg_class",), ("public.gone",)], ["1", "3"]),
        (
            "lengths",
            [("abc", "x  ", "101", "\\x00ff", "{1,2}"), ("abc", "x", "111", "\\x", "{}")],
            ["1"],
        ),
    ],
)
def test_rows_are_found_by_the_texts_of_their_keys(
    source: tuple[Bench, SourceConfig], name: str, keys: list[Key], found: list[str]
) -> None:
    assert read_again(source[1], name, *keys) == found


def test_keys_that_no_index_finds_are_found_by_one_scan(
    source: tuple[Bench, SourceConfig],
) -> None:
    made, config = source

    def scans() -> int:
        return int(
            made.execute("select seq_scan from pg_stat_user_tables where relname = 'scanned'")[0][0]
        )

    made.execute("select pg_stat_force_next_flush()")  # what made the table's index
    before = scans()
    keys = [("glad", str(n)) for n in range(1, 1001)]
    assert len(read_again(config, "scanned", *keys)) == 1000
    wait_for(lambda: scans() > before)
    assert scans() == before + 1


@pytest.mark.parametrize("name", ["sizes", "scanned"])
def test_a_piece_is_bounded_whatever_is_found(
    source: tuple[Bench, SourceConfig], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of ``sizes``, one row is far larger than those before it, and some keys have none."""
    for constant, size in (
        ("PIECE_BYTES", 4000),
        ("_STATEMENT_BYTES", 1000),
        ("_MOST_BYTES", 2000),
    ):
        monkeypatch.setattr(module, constant, size)
    texts = [str(n) for n in range(1, 801)]
    keys: list[Key] = [(n,) if name == "sizes" else ("glad", n) for n in texts]
    found = pieces(source[1], name, *keys)
    rows = {place: row for piece in found for place, row in piece.found}
    gone = [place for piece in found for place in piece.gone]
    assert len(rows) == sum(len(piece.found) for piece in found)
    assert sorted([*rows, *gone]) == list(range(800))
    assert all(json.loads(row)["id"] == texts[place] for place, row in rows.items())
    assert gone == ([place for place in range(800) if place % 10 == 9] if name == "sizes" else [])
    largest = max(map(len, rows.values()))
    assert all(sum(len(row) for _, row in piece.found) <= 6000 + largest for piece in found)
