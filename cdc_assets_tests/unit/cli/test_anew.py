"""A command that goes on for ever, and its file: which change ends it, and when it begins anew."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from cdc_assets.cli import anew, group
from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.operations import merging
from cdc_assets_tests.support.waiting import wait_for

HEAD = "{name: app, spark: {remote: 'sc://h:1'}, postgres: {dsn: 'postgresql://u@h/d'}, "
SECONDS = 10.0
# Longer than a change takes to be seen.
QUIET_SECONDS = 0.3


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """With which arguments the process would have executed itself."""
    calls, before = list[list[str]](), {n: signal.getsignal(n) for n in anew.SIGNALS}
    monkeypatch.setattr(anew, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(os, "execv", lambda _, arguments: calls.append(arguments))
    yield calls
    assert {n: signal.getsignal(n) for n in anew.SIGNALS} == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(HEAD + "tables: [t, u]}")
    return path


@contextmanager
def looking(path: Path) -> Iterator[threading.Event]:
    """The block of a command of that file."""
    config, file = load_config(path), anew.ConfigurationFile(path)
    with file.until_changed(config, lambda: load_config(path)) as stop:
        yield stop


def test_another_configuration_ends_the_command_and_begins_it_anew(
    path: Path, begun: list[list[str]]
) -> None:
    with looking(path) as stop:
        assert not stop.wait(QUIET_SECONDS)
        path.write_text(HEAD + "tables: [t]}")
        assert stop.wait(SECONDS)
        assert begun == []
    assert begun == [[sys.executable, *sys.orig_argv[1:]]]


def test_the_same_configuration_ends_nothing(path: Path, begun: list[list[str]]) -> None:
    with looking(path) as stop:
        path.write_text(HEAD + "tables: [t, u]} # in other words")
        assert not stop.wait(QUIET_SECONDS)
    assert begun == []


def test_an_invalid_one_is_told_once_and_the_next_valid_one_is_taken(
    path: Path, begun: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with looking(path) as stop:
        path.write_text(HEAD + "tables: [")
        wait_for(lambda: "isn't taken" in caplog.text, SECONDS)
        assert not stop.wait(QUIET_SECONDS)
        path.write_text(HEAD + "tables: [t]}")
        assert stop.wait(SECONDS)
    assert caplog.text.count("isn't taken") == 1
    assert len(begun) == 1


def test_a_file_that_is_gone_for_a_moment_ends_nothing(
    path: Path, begun: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    with looking(path) as stop:
        path.rename(path.with_suffix(".old"))
        wait_for(lambda: "can't read the configuration" in caplog.text, SECONDS)
        path.with_suffix(".old").rename(path)
        assert not stop.wait(QUIET_SECONDS)
    assert begun == []


def test_a_file_that_is_being_written_is_waited_for(path: Path) -> None:
    texts = [HEAD + "tables: [t]}" + " " * more for more in (1, 2, 3)]
    known, file, waiting = load_config(path), anew.ConfigurationFile(path), [*texts]
    reads = list[str]()

    class Writes(threading.Event):
        """Somebody writes on between any two looks, until it is all there."""

        def wait(self, _: float | None = None) -> bool:
            if waiting:
                path.write_text(waiting.pop(0))
            return False

    def read() -> SourceConfig:
        reads.append(path.read_text())
        return load_config(path)

    assert anew._Look(file, file.version(), known, read).until(Writes())
    assert reads == [texts[-1]]


def test_a_source_that_is_away_is_asked_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(anew, "AGAIN_SECONDS", 0.05)
    tries, config = list[int](), load_config(path)

    def read() -> SourceConfig:
        tries.append(1)
        if len(tries) < 3:
            raise EnvironmentProblem("the source is away", "Start it.")
        return load_config(path)

    with anew.ConfigurationFile(path).until_changed(config, read) as stop:
        path.write_text(HEAD + "tables: [t]}")
        assert stop.wait(SECONDS)
    assert len(tries) == 3
    assert caplog.text.count("isn't taken") == 1


@pytest.mark.parametrize("number", anew.SIGNALS)
def test_who_is_told_to_end_ends_even_if_the_file_has_changed(
    path: Path, begun: list[list[str]], number: signal.Signals
) -> None:
    told = list[str]()
    with anew.ConfigurationFile(path).until_changed(
        load_config(path), lambda: load_config(path), lambda: told.append("end")
    ) as stop:
        path.write_text(HEAD + "tables: [t]}")
        assert stop.wait(SECONDS)
        os.kill(os.getpid(), number)
    assert (told, begun) == (["end"], [])


def test_a_pipe_is_read_once(tmp_path: Path, path: Path, begun: list[list[str]]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = anew.ConfigurationFile(pipe)
    with file.until_changed(load_config(path), lambda: load_config(pipe)) as stop:
        assert not stop.wait(QUIET_SECONDS)
        assert "file" not in {thread.name for thread in threading.enumerate()}
    assert begun == []


def test_a_follower_begins_anew_unless_its_own_tables_would_be_gone(
    path: Path,
    begun: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group, "log_to_stderr", lambda _: None)  # of this process
    caplog.set_level(logging.WARNING)

    def follow(_config: object, _tables: object, stop: threading.Event, *_: object) -> None:
        path.write_text(HEAD + "tables: [t]}")
        wait_for(lambda: "public.u is not in the configuration" in caplog.text, SECONDS)
        assert not stop.is_set()
        path.write_text(HEAD + "tables: [u]}")
        assert stop.wait(SECONDS)

    monkeypatch.setattr(merging, "follow", follow)
    arguments = ["--config", str(path), "materialize", "--follow", "--table", "public.u"]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    assert len(begun) == 1
