"""The recorded state of an embedded Postgres: port, password and, while it runs, its pid."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from cdc_assets.process.home import write_private

# initdb takes 1-3 s and a start 0.2 s; a busy machine with a cold disk takes many times that.
START_SECONDS = 90.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class State:
    """The contents of ``server.json``, which only its owner can read."""

    port: int
    password: str = field(repr=False)
    pid: int | None = None
    """The postmaster's, while it accepts connections."""

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/postgres"


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_state(directory: Path) -> State | None:
    try:
        return State(**json.loads((directory / "server.json").read_text()))
    except FileNotFoundError:
        return None


def write_state(directory: Path, state: State) -> None:
    """Replace the state file in one step; only its owner can read it."""
    write_private(directory / "server.json", json.dumps(asdict(state)))
