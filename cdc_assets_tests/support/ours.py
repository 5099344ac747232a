"""Machines of ours, on one switch: flushers, a follower, an office for commands; and databases.

The hub has the switch. A process of ours lives there, which looks on and has an object store. Each
of the others has a home, a folder for temporary files and a name of its own, and this system's
files, to which a test's configuration belongs.

What one machine sends another one can be lost on the way, so that neither is told: it goes to a
network card that nobody has. A machine's processes, Java's too, may have a clock that is apart:
they are loaded with a library that reads it so (``apart.c``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cdc_assets.lake.spark.jars import cache_folder
from cdc_assets.process.machine import java_command
from cdc_assets_tests.support.jvm import QUICK_JVM
from cdc_assets_tests.support.machines import Machine, connect, machine
from cdc_assets_tests.support.on_machines import Inside, await_postgres, inside, start_postgres
from cdc_assets_tests.support.s3 import KEYS

_ROOT = Path(__file__).parents[2]
_PYTHON = (sys.executable, "-m")
_NOWHERE = "02:00:00:00:00:ff"
ADDRESSES = {
    "hub": "10.78.1.1",
    "database": "10.78.1.2",
    "alpha": "10.78.1.3",
    "beta": "10.78.1.4",
    "follower": "10.78.1.5",
    "office": "10.78.1.6",
    "state": "10.78.1.7",
}
OURS = ("alpha", "beta", "follower", "office")


@dataclass
class Site:
    """The machines; ``folder`` has a folder and a log of each. ``apart``: seconds of its clock."""

    folder: Path
    machines: Mapping[str, Machine]
    password: str = field(default_factory=lambda: secrets.token_hex(16))
    apart: dict[str, int] = field(default_factory=dict)

    @property
    def dsn(self) -> str:
        return self._dsn("database")

    @property
    def state_dsn(self) -> str:
        """Of another server, for a log that isn't in its source."""
        return self._dsn("state")

    def _dsn(self, name: str) -> str:
        return f"postgresql://postgres:{self.password}@{ADDRESSES[name]}:5432/postgres"

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, name: str, *command: str) -> None:
        """Start ``python -m command`` there, which goes on; its words go to the machine's log."""
        log = self.folder / f"{name}.log"
        environment = self._environment(name)
        self.machines[name].start((*_PYTHON, *command), environment, log, os.geteuid())

    def run(
        self, name: str, *command: str, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -m command`` there to its end."""
        environment = [f"{key}={value}" for key, value in self._environment(name).items()]
        return subprocess.run(
            self.machines[name].inside("env", "-i", *environment, *_PYTHON, *command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def _environment(self, name: str) -> dict[str, str]:
        own = self.folder / name
        for folder in (own / "home", own / "tmp", own / "dagster"):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / "dagster.yaml", own / "dagster")
        found = {
            "PATH": os.environ["PATH"],
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": str(_ROOT),
            "HOME": str(own),
            "TMPDIR": str(own / "tmp"),
            "CDC_ASSETS_HOME": str(own / "home"),
            "DAGSTER_HOME": str(own / "dagster"),
            "XDG_CACHE_HOME": str(cache_folder().parents[1]),
            "JAVA_HOME": str(Path(java_command(os.environ) or "java").resolve().parents[1]),
            **QUICK_JVM,
            **KEYS,
        }
        if seconds := self.apart.get(name):
            found |= {
                "LD_PRELOAD": str(self.folder / "apart.so"),
                "APART": str(seconds),
            }
        return found

    def set_clocks(self, **apart: int) -> None:
        """So many seconds ahead, of what is started from now on."""
        source, made = Path(__file__).with_name("apart.c"), self.folder / "apart.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", made, source], check=True)
        self.apart.update(apart)

    def lose(self, one: str, other: str) -> None:
        """From now on nothing that one sends the other arrives."""
        self._neighbour(one, "replace", ADDRESSES[other], "lladdr", _NOWHERE, "nud", "permanent")

    def cut(self, one: str, other: str) -> None:
        """The same, both ways."""
        self.lose(one, other)
        self.lose(other, one)

    def mend(self) -> None:
        """From now on everything arrives."""
        for name in self.machines:
            self._neighbour(name, "flush", "nud", "permanent")

    def _neighbour(self, name: str, *what: str) -> None:
        device = "switch" if name == "hub" else "net"
        self.machines[name].do("ip", "neigh", *what, "dev", device)

    def end(self) -> None:
        """End all that was started on machines of ours, at once; everything arrives again."""
        self.mend()
        for name in OURS:
            self.machines[name].kill()
        self.apart.clear()


@dataclass
class Open:
    """A site, and the process of ours on its hub."""

    site: Site
    hub: Inside


@contextmanager
def open_site(folder: Path) -> Iterator[Open]:
    """A site, running; ``folder`` is empty, and Postgres's user may look into it."""
    with ExitStack() as cleanup:
        machines = {name: cleanup.enter_context(machine(name)) for name in ADDRESSES}
        _wire(machines)
        site = Site(folder, machines)
        home = {"CDC_ASSETS_HOME": str(folder / "hub")}
        hub = cleanup.enter_context(inside(machines["hub"], home))
        for name in ("database", "state"):
            (own := folder / name).mkdir()
            start_postgres(machines[name], own, site.password, "10.78.1.0/24")
        for dsn in (site.dsn, site.state_dsn):
            hub.run(await_postgres, dsn)
        yield Open(site, hub)


def _wire(machines: Mapping[str, Machine]) -> None:
    hub = machines["hub"]
    hub.do("ip", "link", "add", "switch", "type", "bridge")
    hub.do("ip", "addr", "add", f"{ADDRESSES['hub']}/24", "dev", "switch")
    hub.do("ip", "link", "set", "switch", "up")
    for name, address in ADDRESSES.items():
        if name != "hub":
            connect(hub, f"to-{name}", machines[name], "net")
            hub.do("ip", "link", "set", f"to-{name}", "master", "switch")
            machines[name].do("ip", "addr", "add", f"{address}/24", "dev", "net")
