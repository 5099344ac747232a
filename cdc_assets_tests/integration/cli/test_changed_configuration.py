"""A flusher that was started by hand, or by systemd, takes up what its file says now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.waiting import wait_for


@contextmanager
def running_flush(path: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "cdc_assets", "--config", str(path), "flush"]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def followed(source: Bench) -> set[str]:
    if not source.execute("select 1 where to_regclass('_pg2iceberg.tables') is not null"):
        return set()
    rows = source.execute("select table_name from _pg2iceberg.tables where state = 'streaming'")
    return {str(name) for (name,) in rows}


def test_a_flusher_takes_up_a_table_that_its_file_has_since(source: Bench, tmp_path: Path) -> None:
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    path, log = source.config_file("public.t"), tmp_path / "flush.log"
    with running_flush(path, log) as process:
        wait_for(lambda: followed(source) == {"public.t"})
        source.execute("insert into t values (1)")
        wait_for(lambda: source.ids() == ["1"])

        whole = path.read_text()
        path.write_text(whole[:-2])  # an editor that saves what is half written
        wait_for(lambda: "isn't taken" in log.read_text())
        source.execute("insert into t values (2)")
        wait_for(lambda: source.ids() == ["1", "2"])

        source.config_file("public.t", "public.u")
        wait_for(lambda: followed(source) == {"public.t", "public.u"})
        source.execute("insert into t values (3); insert into u values (4)")
        wait_for(lambda: (source.ids(), source.ids("public.u")) == (["1", "2", "3"], ["4"]))
        said = log.read_text()
        assert said.count("isn't taken") == 1, said
        assert said.count("begin anew") == 1, said
        assert process.poll() is None
        # Those of its life before are gone.
        children = psutil.Process(process.pid).children()
        assert len(children) <= 1, children

        process.terminate()
        assert process.wait(30) == 0, log.read_text()
