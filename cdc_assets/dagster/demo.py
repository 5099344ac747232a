"""The demo, which `make demo` and CI run: replication from end to end, finite, without the UI.

The shipped definitions are run by Dagster's own daemon, as `dagster dev` runs them: its sensors
start an embedded Postgres with live traffic, Spark and the flusher, and launch the snapshot and
materializer runs. This script only watches, kills a snapshot run and the flusher on the way, and
compares every row of every table at the end, while the traffic goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import dagster as dg
import psutil
import psycopg
from rich.console import Console

from cdc_assets.config.addresses import embedded_postgres
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.dagster.internals import DAEMON
from cdc_assets.dagster.names import TABLE_TAG
from cdc_assets.dagster.resources.owner import is_run_process
from cdc_assets.demo.schema import run_pgbench
from cdc_assets.demo.workload import PGBENCH_CHANGES
from cdc_assets.errors import CdcError, EnvironmentProblem, TableProblem
from cdc_assets.log.states import TableState
from cdc_assets.observe.status import SourceStatus, collect
from cdc_assets.operations.whole import verify_tables
from cdc_assets.pipeline import Pipeline

T = TypeVar("T")
_PACKAGE = Path(__file__).parents[1]
# Nothing that is waited for takes a minute on two cores; ten mean that something is wrong.
_PATIENCE_SECONDS = 600
_LOOK_SECONDS = 0.5
# A run that merges ends in order within this; nothing else takes as long.
_STOP_SECONDS, _AGAIN_SECONDS = 15, 2
_PID = re.compile(r"Started process for run \(pid: (\d+)\)")


class _Phases:
    """Says what is going on, and in the end how long each part took."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._at = time.monotonic()
        self._taken: list[tuple[str, float]] = []

    def done(self, phase: str, detail: str = "") -> None:
        now = time.monotonic()
        self._taken.append((phase, now - self._at))
        self._console.print(f"{phase}: {now - self._at:.1f} s {detail}", markup=False)
        self._at = now

    def summary(self) -> None:
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._taken)
        self._console.print(
            f"phases: {parts}; total {time.monotonic() - self._began:.1f} s", markup=False
        )


def run_demo(changes: int, console: Console) -> bool:
    """Run it; True if at least ``changes`` live changes arrived and every row is equal."""
    home = Path(tempfile.mkdtemp(prefix="cdc_assets-demo-"))
    dagster_home = home / "dagster"
    dagster_home.mkdir()
    settings = Path("dagster.yaml")
    if settings.exists():
        shutil.copy(settings, dagster_home)
    # Not one's own sources: this home is gone in the end, and with it what was staged there.
    places = {"CDC_ASSETS_HOME": str(home), "DAGSTER_HOME": str(dagster_home)}
    os.environ |= {**places, "CDC_ASSETS_DEMO": "only"}
    config = load_config(_PACKAGE / "defs" / "shop" / "defs.yaml")
    phases = _Phases(console)
    equal = False
    try:
        with _dagster(home) as server:
            equal = _story(config, changes, server, phases, console)
        deadline = time.monotonic() + 3 * _STOP_SECONDS
        while (left := _family(home)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        phases.done("stop")
        if left:
            console.print(f"left behind: {left}", markup=False)
        return equal and not left
    except CdcError as error:
        console.print(f"error: {error}", markup=False)
        return False
    finally:
        phases.summary()
        if equal:
            embedded_postgres(config).remove()
            shutil.rmtree(home, ignore_errors=True)
        else:
            console.print(f"what it left for a look: {home}", markup=False)


def _story(
    config: SourceConfig,
    changes: int,
    server: subprocess.Popen[bytes],
    phases: _Phases,
    console: Console,
) -> bool:
    watch, total = _Watch(config, server), len(config.tables)
    watch.status("the tables to be pinned", lambda s: _count(s, "waiting", "new") == 0)
    phases.done("start and pin", f"({total} tables)")
    run, pid = watch("a snapshot run under way", _killed_snapshot_run)
    console.print(f"killed snapshot run {run[:8]} (pid {pid}) with SIGKILL", markup=False)
    with ThreadPoolExecutor(1) as pool:
        burst = pool.submit(_hurry, config, changes)  # while the tables are copied
        found = watch.status("the copy", lambda s: _count(s, "streaming") == total)
        chunks = sum(t.chunks_total for t in found.tables)
        rows = sum(t.rows_copied for t in found.tables)
        phases.done("copy", f"({rows:,} rows in {chunks} chunks)")
        seen = watch("live changes", lambda p: _at_least(_registered(p), changes // 4))
        flusher = _flusher(server)
        flusher.kill()
        console.print(
            f"killed the flusher (pid {flusher.pid}) with SIGKILL at {seen:,} changes", markup=False
        )
        burst.result()
    seen = watch("live changes", lambda p: _at_least(_registered(p), max(changes, seen + 1000)))
    phases.done("live changes", f"({seen:,} registered)")
    watch("the changes to be merged", lambda p: _at_least(_applied(p), changes // 2))
    phases.done("merges")
    with Pipeline.open(config) as pipeline:
        compared = verify_tables(
            pipeline,
            [table.id for table in config.tables],
            lambda text: console.print(text, markup=False),
        )
        replicated = _applied(pipeline)
    for c in compared:
        outcome = "equal" if c.equal else f"{c.differing} DIFFER {c.keys} {c.problem or ''}"
        console.print(f"  {c.table}: {c.source_rows:,} rows, {outcome}", markup=False)
    phases.done("verify", f"({replicated:,} live changes applied)")
    return all(c.equal for c in compared) and replicated >= changes


@contextlib.contextmanager
def _dagster(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A code server with the shipped definitions, and Dagster's daemon; yields the code server.

    The daemon could start a code server itself, but gives it up when a busy machine keeps it from
    answering for 20 s; this one stays.
    """
    # A socket in a private folder, not a port: a code server runs code for anybody who reaches it.
    address = home / "code-server.sock"
    definitions = ["-m", "cdc_assets.definitions"]
    commands = {
        "code-server": ["dagster", "api", "grpc", *definitions, "--socket", str(address)],
        "daemon": [DAEMON, "run", "--grpc-socket", str(address)],
    }
    started: list[subprocess.Popen[bytes]] = []
    # A SIGTERM (by a CI's time limit) has to end them too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for name, command in commands.items():
            with (home / f"{name}.log").open("wb") as output:
                started.append(
                    subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output)
                )
            if name == "code-server":
                _listens(started[0], address)
        yield started[0]
    finally:
        _interrupt_runs(started)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            deadline = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_AGAIN_SECONDS)
                    break
                _interrupt_runs(started)  # one that was just beginning may have missed it
            else:
                process.kill()  # its children see that their stdin ends


def _interrupt_runs(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the runs as Ctrl-C in a terminal does; else the code server waits for them."""
    for child in _below(started[0].pid) if started else []:
        with contextlib.suppress(psutil.Error):
            if is_run_process(child.cmdline()):
                child.send_signal(signal.SIGINT)


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _listens(server: subprocess.Popen[bytes], address: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(address))
            return
        time.sleep(_LOOK_SECONDS)
    log = address.with_name("code-server.log")
    raise EnvironmentProblem("Dagster's code server didn't start.", f"See {log}.")


class _Watch:
    """Looks at the source until a condition holds, or raises with the name of what never came."""

    def __init__(self, config: SourceConfig, server: subprocess.Popen[bytes]) -> None:
        self._config = config
        self._server = server

    def __call__(self, what: str, look: Callable[[Pipeline], T | None]) -> T:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                raise EnvironmentProblem(f"the code server ended with {self._server.returncode}.")
            # The source may not be up yet, or be restarted: that is what is watched here.
            with (
                contextlib.suppress(EnvironmentProblem, psycopg.OperationalError),
                Pipeline.open(self._config) as pipeline,
            ):
                if (found := look(pipeline)) is not None:
                    return found
            time.sleep(_LOOK_SECONDS)
        raise EnvironmentProblem(f"waited {_PATIENCE_SECONDS} s for {what} in vain.")

    def status(self, what: str, condition: Callable[[SourceStatus], bool]) -> SourceStatus:
        def look(pipeline: Pipeline) -> SourceStatus | None:
            found = collect(pipeline)
            if parked := [table for table in found.tables if table.state == TableState.PARKED]:
                raise TableProblem(parked[0].name, parked[0].reason or "it is parked")
            return found if condition(found) else None

        return self(what, look)


def _hurry(config: SourceConfig, changes: int) -> None:
    """Make what is missing of ``changes`` beside the live traffic, which takes a minute for it."""
    with Pipeline.open(config) as pipeline:
        missing = changes - _registered(pipeline)
        if missing > 0:
            transactions = str(-(-missing // PGBENCH_CHANGES))
            run_pgbench(pipeline.source_dsn, ["-n", "-t", transactions])


def _at_least(found: int, wanted: int) -> int | None:
    return found if found >= wanted else None


def _count(status: SourceStatus, *states: str) -> int:
    return sum(table.state in states for table in status.tables)


def _registered(pipeline: Pipeline) -> int:
    row = pipeline.store.connection.execute(
        "select coalesce(sum(next_offset), 0) from log_seq where source = %s",
        (pipeline.config.name,),
    ).fetchone()
    return int(row[0]) if row else 0


def _applied(pipeline: Pipeline) -> int:
    cursors = [pipeline.store.cursor(table.id) for table in pipeline.config.tables]
    return sum(cursor.offset for cursor in cursors if cursor is not None)


def _killed_snapshot_run(pipeline: Pipeline) -> tuple[str, int] | None:
    """Kill a snapshot run whose table isn't complete yet; returns its id and pid.

    Not before its output is captured: a run that is killed while that begins leaves a process of
    Dagster's behind, for ever.
    """
    instance = dg.DagsterInstance.get()
    copying = {str(row.table) for row in pipeline.store.tables() if row.state == TableState.COPYING}
    for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]), limit=10):
        is_snapshot = any("snapshot" in key.path[:-3] for key in run.asset_selection or ())
        if is_snapshot and run.tags.get(TABLE_TAG) in copying:
            log = instance.all_logs(run.run_id)
            events = {entry.dagster_event_type for entry in log if entry.is_dagster_event}
            pids = [int(found[1]) for entry in log if (found := _PID.search(entry.message))]
            if pids and dg.DagsterEventType.LOGS_CAPTURED in events:
                with contextlib.suppress(psutil.NoSuchProcess):  # it was quicker
                    psutil.Process(pids[0]).kill()
                    return run.run_id, pids[0]
    return None


def _flusher(server: subprocess.Popen[bytes]) -> psutil.Process:
    for child in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "cdc_assets.flusher.flusher" in child.cmdline():
                return child
    raise EnvironmentProblem("no flusher runs below the code server.")


def _family(home: Path) -> list[str]:
    """The processes that were started for this demo and still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            same = process.environ().get("CDC_ASSETS_HOME") == str(home)
            if same and process.pid != os.getpid():
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found
