"""Supervised children against real processes: nothing outlives its parent, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cdc_assets.process import children as process
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.children import Child, ChildSpec
from cdc_assets_tests.support.waiting import wait_for

# Prints its settings, says when it is told to stop; "stubborn" ignores everything but SIGKILL.
CHILD = """
import signal, sys, time
from cdc_assets.process.lifeline import die_with_parent, read_settings
settings = read_settings()
print("settings", settings, flush=True)
if settings == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
stopping = die_with_parent(grace_seconds=0.5 if settings == "slow" else 20)
print("ready", flush=True)
stopping.wait()
if settings == "slow":
    time.sleep(600)
print("stopped in order", flush=True)
"""

PARENT = """
import sys, time
from pathlib import Path
from cdc_assets.process.children import Child, ChildSpec
spec = ChildSpec("a_child", log=Path(sys.argv[1]), environment={"PYTHONPATH": sys.argv[2]})
child, other = Child.start(spec), Child.start(spec)
print(child.pid, other.pid, flush=True)
time.sleep(600)
"""

# The command that streams for ever, where a database doesn't answer: SIGTERM doesn't get through.
HANGING_FLUSH = """
import functools, sys, time
from cdc_assets.cli import commands, main
from cdc_assets.flusher import flusher
def hang(config, stop):
    print("ready", flush=True)
    time.sleep(600)
flusher.run, commands.end_within = hang, functools.partial(commands.end_within, 0.2)
main.cli(["--config", sys.argv[1], "flush"])
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def spec(tmp_path: Path) -> ChildSpec:
    (tmp_path / "a_child.py").write_text(textwrap.dedent(CHILD))
    environment = {"PYTHONPATH": str(tmp_path)}
    return ChildSpec("a_child", log=tmp_path / "child.log", environment=environment)


def with_settings(spec: ChildSpec, settings: str) -> ChildSpec:
    return ChildSpec(spec.module, (), spec.log, settings, spec.environment)


def ready(spec: ChildSpec, times: int = 1) -> None:
    wait_for(lambda: spec.log.exists() and spec.log.read_text().count("ready") == times)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for name in list(process._registry):
        process.stop(name, 1.0)


def test_settings_arrive_by_the_pipe_alone(spec: ChildSpec) -> None:
    child = Child.start(with_settings(spec, "s3cret"))
    ready(spec)
    known = psutil.Process(child.pid)
    assert "s3cret" not in " ".join([*known.cmdline(), *known.environ().values()])
    assert "s3cret" not in repr(child.spec)
    assert child.stop() == 0
    assert "settings s3cret" in spec.log.read_text()
    assert spec.log.stat().st_mode & 0o777 == 0o600


def test_settings_of_any_size_arrive(spec: ChildSpec) -> None:
    large = "x" * (3 * 2**20)  # the kernel's pipes take 64 kB
    child = Child.start(with_settings(spec, large))
    child.close_stdin()  # asked to stop meanwhile: it hears of it after the settings
    assert child.wait(20.0) == 0
    assert f"settings {large}\n" in spec.log.read_text()


def test_nobody_waits_for_a_child_to_read_its_settings(spec: ChildSpec, tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    child = Child.start(ChildSpec("deaf", (), spec.log, "x" * 2**20, spec.environment))
    ready(spec)
    assert child.stop(timeout_seconds=0.2) == -signal.SIGTERM


def test_stop_is_orderly_and_says_so(spec: ChildSpec) -> None:
    child = Child.start(spec)
    ready(spec)
    assert child.alive
    assert child.returncode is None
    assert child.stop() == 0
    assert not child.alive
    assert spec.log.read_text().endswith("stopped in order\n")


def test_a_stubborn_child_is_killed(spec: ChildSpec) -> None:
    child = Child.start(with_settings(spec, "stubborn"))
    ready(spec)
    assert child.stop(timeout_seconds=0.2) == -signal.SIGKILL


def test_a_child_that_cannot_finish_exits_after_its_grace(spec: ChildSpec) -> None:
    child = Child.start(with_settings(spec, "slow"))
    ready(spec)
    child.close_stdin()
    assert child.wait(5.0) == 70


def test_flush_ends_soon_whatever_it_waits_for(tmp_path: Path) -> None:
    config = tmp_path / "source.json"
    settings = {"name": "s", "postgres": {"dsn": "host=nowhere"}, "tables": [{"name": "a.b"}]}
    config.write_text(json.dumps(settings))
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_FLUSH, str(config)], stdout=subprocess.PIPE
    ) as flush:
        assert flush.stdout is not None
        assert flush.stdout.readline() == b"ready\n"
        flush.terminate()
        assert flush.wait(30) == 70


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_children_die_with_their_parent(
    spec: ChildSpec, tmp_path: Path, number: signal.Signals
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(spec.log), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    ready(spec, times=2)
    parent.send_signal(number)
    parent.wait()
    # the pipe of the one must not be held open by the other
    wait_for(lambda: not any(running(pid) for pid in pids))
    assert spec.log.read_text().count("stopped in order") == 2
    parent.stdout.close()


def test_a_forked_copy_of_the_parent_keeps_nobody_alive(spec: ChildSpec) -> None:
    child = Child.start(spec)
    ready(spec)
    copy = os.fork()
    if copy == 0:
        time.sleep(30)
        os._exit(0)
    try:
        child.close_stdin()
        assert child.wait(5.0) == 0
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)


def test_a_terminal_interrupt_does_not_reach_the_child(spec: ChildSpec) -> None:
    child = Child.start(spec)
    assert os.getsid(child.pid) == child.pid
    assert child.stop() == 0


def killed(name: str) -> None:
    child = process.child_of(name)
    assert child is not None
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(5.0)


def test_a_child_whose_log_is_dated_by_another_clock_is_not_silent(spec: ChildSpec) -> None:
    child = Child.start(spec)
    ready(spec)
    for behind in (301, 300):  # it writes, and the server of a volume dates what it writes
        time.sleep(1.0)
        os.utime(spec.log, (at := time.time() - behind, at))
        assert child.silent_seconds < 0.5
    time.sleep(0.5)
    assert child.silent_seconds >= 0.5
    assert child.stop() == 0


def test_the_registry_restarts_what_died_and_waits_longer_each_time(spec: ChildSpec) -> None:
    backoff = Backoff(first_seconds=0.2, cap_seconds=10.0)
    first = process.supervise("it", spec, backoff)
    assert first.running
    assert process.supervise("it", spec, backoff).pid == first.pid, "a tick starts no second one"
    killed("it")
    second = process.supervise("it", spec, backoff)
    assert second.running, "the tick that notices the first end starts it again"
    assert second.pid != first.pid
    assert (second.ended, second.failures, second.last_returncode) == (True, 1, -signal.SIGKILL)
    assert second.again == f"It runs again (pid {second.pid})"
    assert not process.supervise("it", spec, backoff).ended
    killed("it")
    down = process.supervise("it", spec, backoff)
    assert (down.running, down.ended, down.failures) == (False, True, 2)
    assert 0.0 < down.next_start_in_seconds <= 0.4
    assert down.again.startswith("It is started again in")
    wait_for(lambda: process.supervise("it", spec, backoff).running)
    assert process.supervise("it", spec, backoff).pid != second.pid
    process.stop("it")
    assert process.child_of("it") is None


def test_an_end_is_told_even_if_the_next_start_fails(
    spec: ChildSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.supervise("it", spec)
    ready(spec)
    killed("it")

    def fail(_: ChildSpec) -> Child:
        raise OSError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(Child, "start", fail)
        with pytest.raises(OSError, match="temporarily"):
            process.supervise("it", spec)
    told = process.supervise("it", spec)
    assert (told.running, told.ended, told.failures) == (True, True, 1)
    assert told.last_words
    assert not process.supervise("it", spec).ended


def test_a_changed_spec_replaces_the_child(spec: ChildSpec) -> None:
    first = process.supervise("it", spec).pid
    ready(spec)
    second = process.supervise("it", with_settings(spec, "other")).pid
    assert first is not None
    assert second != first
    assert not running(first)


def test_the_log_is_cut_to_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    code = """
from cdc_assets.process import lifeline
for n in range(1000):
    print("line", n, flush=True)
lifeline._bound_log(limit_bytes=5000, kept_bytes=500)
print("after", flush=True)
"""
    with log.open("ab+") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    lines = log.read_text().splitlines()
    assert lines[0] == "(older lines were cut off)"
    assert lines[1].startswith("line 9")
    assert lines[-2:] == ["line 999", "after"]
    assert log.stat().st_size < 600
