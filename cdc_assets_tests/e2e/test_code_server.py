"""A code server of Dagster's, told to end while a run is under way, or to load code anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import psutil
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget
from dagster._grpc.client import DagsterGrpcClient
from dagster._serdes import deserialize_value

from cdc_assets_tests.support.waiting import wait_for

Launch = Callable[[str], Callable[[], dg.DagsterRun]]
DEFINITIONS = """
import os
import subprocess
import time
from pathlib import Path
import dagster as dg
from cdc_assets.dagster.resources.code_server import tend_runs
from cdc_assets.dagster.resources.owner import end_with_owner

tend_runs()

@dg.op
def goes_on():
    end_with_owner()
    # What is left where Dagster is interrupted while it starts the tail of a step's output.
    home = Path(__file__).parent
    tail = f"tail -F -c +0 {home}/compute_logs/left.err & echo $! > {home}/left"
    subprocess.run(["sh", "-c", tail])
    (home / "begun").write_text(str(os.getpid()))
    try:
        for _ in range(3000):
            time.sleep(0.1)
    finally:
        (home / "ended in order").touch()

@dg.job(executor_def=dg.in_process_executor)
def long():
    goes_on()

@dg.op
def tells():
    Path(__file__).with_name("parent").write_text(str(os.getppid()))

@dg.job(executor_def=dg.in_process_executor)
def short():
    tells()

defs = dg.Definitions(jobs=[long, short])
"""
# Starts what its standard input says.
OWNER = "import subprocess, sys; subprocess.run(sys.stdin.read().splitlines())"
COMPONENT = """
import json
from dataclasses import dataclass
from pathlib import Path
import dagster as dg
from dagster.components.utils.defs_state import DefsStateConfig, DefsStateConfigArgs

@dataclass
class Named(dg.StateBackedComponent, dg.Resolvable):
    names: str

    @property
    def defs_state_config(self):
        kept = DefsStateConfigArgs.versioned_state_storage()
        return DefsStateConfig.from_args(kept, default_key="names")

    def write_state_to_path(self, state_path):
        state_path.write_text(Path(self.names).read_text())

    def build_defs_from_state(self, context, state_path):
        names = json.loads(state_path.read_text()) if state_path else []
        return dg.Definitions(assets=[dg.AssetSpec(name) for name in names])
"""
LOADED = """
from pathlib import Path
import dagster as dg

@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


def _wait_for(path: Path) -> None:
    wait_for(path.exists)


@contextmanager
def _served(
    folder: Path, owner: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Launch]]:
    """A code server of the folder's ``definitions.py``, and what launches a run of a job there.

    Or, instead of the server, the ``owner`` that has started it, as its command line says.
    """
    (folder / "definitions.py").write_text(DEFINITIONS)
    socket = folder / "socket"
    arguments = ["api", "grpc", "-f", str(folder / "definitions.py"), "--socket", str(socket)]
    command = [sys.executable, "-m", "dagster", *arguments]
    if owner:
        begun = [sys.executable, "-c", OWNER, *owner]
        server = subprocess.Popen(begun, stdin=subprocess.PIPE)
        assert server.stdin is not None
        with server.stdin as told:
            told.write("\n".join(command).encode())
    else:
        server = subprocess.Popen(command)
    below = list[psutil.Process]()
    try:
        _wait_for(socket)
        target = GrpcServerTarget("localhost", socket=str(socket), port=None, location_name="x")
        with (
            dg.DagsterInstance.local_temp(str(folder)) as instance,
            WorkspaceProcessContext(instance, target) as workspace,
        ):
            request = workspace.create_request_context()
            [repository] = request.get_code_location("x").get_repositories().values()

            def launch(name: str) -> Callable[[], dg.DagsterRun]:
                job = repository.get_full_job(name)
                run = create_run_for_test(
                    instance,
                    job_name=name,
                    remote_job_origin=job.get_remote_origin(),
                    job_code_origin=job.get_python_origin(),
                )
                instance.launch_run(run.run_id, request)

                def now() -> dg.DagsterRun:
                    found = instance.get_run_by_id(run.run_id)
                    assert found is not None
                    return found

                return now

            below += psutil.Process(server.pid).children()
            yield server, launch
    finally:
        server.kill()
        server.wait()
        pids = [each.pid for each in below]
        if (left := folder / "left").exists():  # a tail, where no code server has ended in order
            pids.append(int(left.read_text()))
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def test_sigterm_ends_its_runs_first_and_then_itself(tmp_path: Path) -> None:
    tail = ["tail", "-F", "-c", "+0", str(tmp_path / "compute_logs" / "others.err")]
    running = f"import subprocess; subprocess.run({tail!r})"
    other = subprocess.Popen([sys.executable, "-c", running])
    try:
        with _served(tmp_path) as (server, launch):
            run = launch("long")
            _wait_for(tmp_path / "begun")
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int((tmp_path / "left").read_text())).wait(10)
            others = psutil.Process(other.pid).children()
            assert [found.cmdline() for found in others] == [tail], "another run's goes on"
            assert (tmp_path / "ended in order").exists()
            assert run().is_finished
    finally:
        for found in psutil.Process(other.pid).children():
            found.terminate()
        other.wait()


def test_a_run_ends_with_dagster_dev(tmp_path: Path) -> None:
    with _served(tmp_path, owner=["dagster", "dev"]) as (owner, launch):
        launch("long")
        _wait_for(tmp_path / "begun")
        owner.kill()
        _wait_for(tmp_path / "ended in order")


def _ended(run: Callable[[], dg.DagsterRun]) -> dg.DagsterRun:
    wait_for(lambda: run().is_finished)
    return run()


def test_its_runs_are_forked_or_else_begin_with_a_new_interpreter(tmp_path: Path) -> None:

    def parent() -> psutil.Process:
        return psutil.Process(int((tmp_path / "parent").read_text()))

    with _served(tmp_path) as (server, launch):
        origins = []
        for _ in range(2):
            assert _ended(launch("short")).is_success
            origins.append(parent())
        assert origins[0] == origins[1]
        assert "multiprocessing.forkserver" in " ".join(origins[0].cmdline())
        assert origins[0].parent() == psutil.Process(server.pid)

        origins[0].kill()  # as one who needs memory would
        wait_for(lambda: origins[0].status() == psutil.STATUS_ZOMBIE)
        assert _ended(launch("short")).is_success
        assert parent() != origins[0]
        assert "multiprocessing.forkserver" in " ".join(parent().cmdline())

        [listening] = {str(c.laddr) for c in parent().net_connections("unix")} - {""}
        Path(listening).unlink()  # as one who cleans up what is old would
        assert _ended(launch("short")).is_success
        assert parent() == psutil.Process(server.pid)


def test_a_run_that_is_killed_has_failed(tmp_path: Path) -> None:
    with _served(tmp_path) as (_, launch):
        run = launch("long")
        _wait_for(tmp_path / "begun")
        psutil.Process(int((tmp_path / "begun").read_text())).kill()
        assert _ended(run).status == dg.DagsterRunStatus.FAILURE


def _project(folder: Path, names: Path) -> None:
    """A project with one component, whose assets are named by its state, once a copy of a file."""
    package = folder / "named"
    (package / "defs" / "all").mkdir(parents=True)
    for path, text in {
        "pyproject.toml": '[tool.dg]\ndirectory_type = "project"\nproject.root_module = "named"\n',
        "dagster.yaml": "instance_class: {module: cdc_assets.dagster.instance, class: Instance}\n",
        "named/__init__.py": "",
        "named/component.py": COMPONENT,
        "named/definitions.py": LOADED,
        "named/defs/__init__.py": "",
        "named/defs/all/defs.yaml": f"type: named.component.Named\nattributes: {{names: {names}}}",
    }.items():
        (folder / path).write_text(text)


def _listed(client: DagsterGrpcClient, socket: Path) -> set[str]:
    where = GrpcServerCodeLocationOrigin("localhost", socket=str(socket), location_name="x")
    said = client.external_repository(RemoteRepositoryOrigin(where, "__repository__"))
    snap = deserialize_value(said, RepositorySnap)
    return {node.asset_key.to_user_string() for node in snap.asset_nodes}


def test_components_that_are_loaded_anew_are_listed_anew(tmp_path: Path) -> None:
    """A Dagster+ agent may have a server do that; the process stays."""
    names, socket = tmp_path / "names.json", tmp_path / "socket"
    _project(tmp_path, names)
    arguments = ["api", "grpc", "-m", "named.definitions", "-d", str(tmp_path)]
    server = subprocess.Popen(
        [sys.executable, "-m", "dagster", *arguments, "--socket", str(socket)],
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
    )
    try:
        _wait_for(socket)
        client = DagsterGrpcClient(socket=str(socket))
        assert _listed(client, socket) == set()
        for wanted in ("one", "two"), ("three",):
            names.write_text(json.dumps(wanted))
            refreshed = client.refresh_component_state(["names"])
            assert not refreshed.serialized_error
            told = client.reload_code_with_state(refreshed.serialized_defs_state_info)
            assert not told.serialized_error
            assert _listed(client, socket) == _listed(client, socket) == {*wanted}
    finally:
        server.terminate()
        server.wait()
