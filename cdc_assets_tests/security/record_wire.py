"""Records ``recorded_wire.json``: what a real server sends, which is then damaged by the fuzzer.

``python -m cdc_assets_tests.security.record_wire``: every message that is sent without being asked
for, of tables with each replica identity, from an embedded Postgres 18.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.postgres.catalog import attributes
from cdc_assets_tests.support import pgoutput as beside
from cdc_assets_tests.support.flusher import Bench, bench

RECORDED = Path(__file__).with_name("recorded_wire.json")
KEYS = {"public.keyed": ["id"], "public.twin": ["id"], "public.whole": ["id"], "public.loose": []}
STATEMENTS = (
    "insert into keyed values (1, 'glad', 'a', E'q\"\\\\ \\n é'), (2, null, '', null)",
    "update keyed set v = 'x' where id = 1; update keyed set id = 3 where id = 2",
    "update keyed set big = repeat('toast', 600) where id = 1; update keyed set v = 'y'",
    "update keyed set id = 4 where id = 1; delete from keyed where id = 3",
    "insert into whole values (1, null), (2, repeat('toast', 600)); update whole set id = id + 10",
    "delete from whole where id = 11; insert into loose values (1, 'x'), (null, null)",
    "update loose set b = 'y'; delete from loose where a is null; insert into other values (1)",
    "begin; truncate whole, loose, other; insert into whole values (7, 'z'); commit",
    "select pg_replication_origin_session_setup('elsewhere')",
    (
        "begin; select pg_replication_origin_xact_setup('0/ABCDEF', now());"
        " insert into keyed values (50, 'glad'); commit"
    ),
    "select pg_replication_origin_session_reset()",
    "alter table keyed add column more text default 'd'; insert into keyed values (8)",
    (
        "begin; insert into twin select * from keyed; update twin set v = 'z';"
        " insert into keyed values (9); update twin set id = id + 100 where id = 4;"
        " delete from twin where id = 8; commit"
    ),
    "insert into loose select g, 'row ' || g from generate_series(1, 40) g",
)


def record(source: Bench) -> dict[str, object]:
    source.execute("""
        create type mood as enum ('glad', 'sad');
        create table keyed (id int primary key, m mood, v text, big text);
        alter table keyed alter big set storage external;
        create table twin (like keyed including all, more text default 'd');
        create table whole (id int primary key, v text);
        alter table whole replica identity full, alter v set storage external;
        create table loose (a int, b text);
        alter table loose replica identity full;
        create table other (id int);
    """)
    config = source.config(*KEYS)
    source.flush(config)
    source.execute(f"alter publication {config.publication} add table other")
    beside.open_beside(source)
    known = {
        beside.oid(source, table): [
            (a.number, a.name, a.type_oid, a.modifier)
            for a in attributes(source.connection, beside.oid(source, table))
        ]
        for table in KEYS
    }
    source.execute("select pg_replication_origin_create('elsewhere')")
    for statement in STATEMENTS:
        source.execute(statement)
    source.execute("select pg_replication_origin_drop('elsewhere')")
    sent = beside.frames(source)
    assert beside.kinds(sent) == set("BCORYIUDT")
    tables = [
        {"oid": oid, "name": name, "key": KEYS[name], "columns": columns}
        for (oid, columns), name in zip(known.items(), KEYS, strict=True)
    ]
    return {"tables": tables, "frames": [frame.hex() for frame in sent]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = EmbeddedPostgres(Path(folder) / "pg", 18, None, {"fsync": "off"})
        dsn = server.start()
        try:
            with bench(dsn, "recorded", Path(folder)) as source:
                found = record(source)
        finally:
            server.stop()
    RECORDED.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
