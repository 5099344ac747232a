"""Merges beside a REST catalog go on where Spark loses its way to the coordination database.

The platform has its own way there.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.lake.catalog import drafts
from cdc_assets.lake.drafts import tables
from cdc_assets.lake.drafts.tables import forget_drafts
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.rest_catalog import rest_catalog

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)


class Line:
    """Listens on loopback for Spark; ``server``: where it leads to, once that is known."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = ("", 0)
        self.silent = False
        self._ends = list[socket.socket]()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self._ends.append(near)
                if not self.silent:
                    far = socket.create_connection(self.server)
                    self._ends.append(far)
                    for ends in (near, far), (far, near):
                        threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while piece := near.recv(65536):
                if not self.silent:
                    far.sendall(piece)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    found, settings = Line(), drafts.draft_settings

    def rerouted(config: Any) -> dict[str, str]:
        at = urlsplit(coordination_dsn(config))
        found.server = at.hostname or "", at.port or 5432
        place = f"{found.server[0]}:{found.server[1]}"
        return {
            k: v.replace(f"//{place}/", f"//{found.place}/") for k, v in settings(config).items()
        }

    monkeypatch.setattr("cdc_assets.lake.spark.session.draft_settings", rerouted)
    monkeypatch.setattr(tables, "_branches_until", {})
    monkeypatch.setattr(drafts, "_WAITS", dict.fromkeys(drafts._WAITS, "2"))
    yield found
    found.close()


@pytest.fixture
def source(copied_lake: NewLake, line: Line, tmp_path: Path) -> Iterator[tuple[Lake, Counter[str]]]:
    """A copied table, and the commits that its catalog was asked for."""
    warehouse, made = f"file://{tmp_path}/warehouse", Counter[str]()

    def at_commit(commit: Any) -> Any:
        made["commits"] += 1
        return commit()

    with rest_catalog(tmp_path, warehouse) as server:
        server.at_commit = at_commit
        catalog: dict[str, Any] = {"type": "rest", "uri": server.uri, "warehouse": warehouse}
        lake = {"catalog": {**catalog, "properties": server.access}, "format_version": 2}
        with copied_lake(SETUP, "t", lake=lake) as opened:
            yield opened, made


def merged(source: tuple[Lake, Counter[str]], value: str) -> int:
    """Merge, and say in how many commits."""
    lake, made = source
    before = made["commits"]
    lake.execute(f"update t set v = '{value}' where id < 50; delete from t where id = {len(value)}")
    lake.flush()
    lake.drain(T)
    assert lake.equal(T)
    return made["commits"] - before


def test_a_way_that_is_lost_later(source: tuple[Lake, Counter[str]], line: Line) -> None:
    """The merge that meets it fails; the next ones are made on branches, until the hour is over."""
    assert merged(source, "a") == 1
    line.close()
    with pytest.raises(PySparkException):
        merged(source, "bb")
    assert merged(source, "ccc") > 1
    assert merged(source, "dddd") > 1


def test_a_way_on_which_nobody_answers(source: tuple[Lake, Counter[str]], line: Line) -> None:
    line.silent = True
    assert merged(source, "a") > 1


def test_a_way_on_which_answers_cease(source: tuple[Lake, Counter[str]], line: Line) -> None:
    assert merged(source, "a") == 1
    line.silent = True
    with pytest.raises(PySparkException):
        merged(source, "bb")
    assert merged(source, "ccc") > 1


REFUSES = """
create function {0}.refuse() returns trigger language plpgsql as
  $$ begin raise insufficient_privilege; end $$;
create trigger refuse before insert or delete on {0}.iceberg_tables
  for each statement execute function {0}.refuse();
"""


def test_nothing_may_be_written_where_drafts_are(source: tuple[Lake, Counter[str]]) -> None:
    """As where an administrator has made the tables, and allowed to read some.

    Care, which is to remove what is there, has nothing to remove.
    """
    lake, made = source
    assert merged(source, "a") == 1
    lake.execute("update t set v = 'bb' where id < 50")
    lake.flush()
    lake.execute(REFUSES.format(lake.config.state.schema_))
    made.clear()
    lake.drain(T)
    assert lake.equal(T)
    assert made["commits"] > 1
    forget_drafts(lake.lake_table(T), lake.lake_table(T).loaded())
