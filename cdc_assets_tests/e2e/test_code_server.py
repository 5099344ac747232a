"""A code server that is told to end while a run of it is under way."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import psutil
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget

DEFINITIONS = """
import subprocess
import time
from pathlib import Path
import dagster as dg
from cdc_assets.dagster.resources.owner import end_runs_with_code_server

end_runs_with_code_server()

@dg.op
def goes_on():
    # What is left where Dagster is interrupted while it starts the tail of a step's output.
    home = Path(__file__).parent
    tail = f"tail -F -c +0 {home}/compute_logs/left.err & echo $! > {home}/left"
    subprocess.run(["sh", "-c", tail])
    (home / "begun").touch()
    try:
        for _ in range(3000):
            time.sleep(0.1)
    finally:
        (home / "ended in order").touch()

@dg.job(executor_def=dg.in_process_executor)
def long():
    goes_on()
"""


def _wait_for(path: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def test_sigterm_ends_its_runs_first_and_then_itself(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text(DEFINITIONS)
    socket = tmp_path / "socket"
    arguments = ["api", "grpc", "-f", str(tmp_path / "definitions.py"), "--socket", str(socket)]
    server = subprocess.Popen([sys.executable, "-m", "dagster", *arguments])
    tail = ["tail", "-F", "-c", "+0", str(tmp_path / "compute_logs" / "others.err")]
    running = f"import subprocess; subprocess.run({tail!r})"
    other = subprocess.Popen([sys.executable, "-c", running])
    try:
        _wait_for(socket)
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            target = GrpcServerTarget("localhost", socket=str(socket), port=None, location_name="x")
            with WorkspaceProcessContext(instance, target) as workspace:
                request = workspace.create_request_context()
                [repository] = request.get_code_location("x").get_repositories().values()
                job = repository.get_full_job("long")
                run = create_run_for_test(
                    instance,
                    job_name="long",
                    remote_job_origin=job.get_remote_origin(),
                    job_code_origin=job.get_python_origin(),
                )
                instance.launch_run(run.run_id, request)
                _wait_for(tmp_path / "begun")
                server.send_signal(signal.SIGTERM)
                server.wait(60)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int((tmp_path / "left").read_text())).wait(10)
            others = psutil.Process(other.pid).children()
            assert [found.cmdline() for found in others] == [tail], "another run's goes on"
            assert (tmp_path / "ended in order").exists()
            ended = instance.get_run_by_id(run.run_id)
            assert ended is not None
            assert ended.is_finished
    finally:
        for found in psutil.Process(other.pid).children():
            found.terminate()
        other.wait()
        server.kill()
        server.wait()
