"""A program of a consumer group that keeps rows in SQLite, each change exactly once.

``python -m cdc_assets_tests.support.follower_process CONFIG GROUP FILE [SIGKILL N]``: it gets the
signal after it has applied its N-th event that has rows, before it commits that.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys

from cdc_assets.consumers import Begin, Changes, SnapshotRows, follow

SCHEMA = """
create table if not exists token (name text primary key, token text);
create table if not exists rows (name text, id int, v text, primary key (name, id));
create table if not exists applied (name text, "offset" int, primary key (name, "offset"));
"""


def main(config: str, group: str, file: str, sign: str, at: int) -> None:
    database = sqlite3.connect(file)
    database.executescript(SCHEMA)

    def token(table: str) -> str | None:
        row = database.execute("select token from token where name = ?", (table,)).fetchone()
        return row[0] if row else None

    with follow(config, group, token=token, wait=False) as stream:
        number = 0
        for event in stream:
            with database:  # a transaction
                if isinstance(event, Begin):
                    database.execute("delete from rows where name = ?", (event.table,))
                if isinstance(event, Changes | SnapshotRows):
                    number += 1
                    for row in event.rows.to_pylist():
                        which = (event.table, row["id"])
                        if row["_op"] != "R":  # it would fail if a change came twice
                            done = (event.table, row["_offset"])
                            database.execute("insert into applied values (?, ?)", done)
                        database.execute("delete from rows where name = ? and id = ?", which)
                        if row["_op"] != "D":
                            database.execute(
                                "insert into rows values (?, ?, ?)", (*which, row["v"])
                            )
                database.execute("replace into token values (?, ?)", (event.table, event.token))
            if number == at and isinstance(event, Changes | SnapshotRows):
                os.kill(os.getpid(), signal.Signals[sign])
            event.commit()


if __name__ == "__main__":
    _, given_config, given_group, given_file, *more = sys.argv
    sent, number_of = more or ("SIGKILL", "-1")
    main(given_config, given_group, given_file, sent, int(number_of))
