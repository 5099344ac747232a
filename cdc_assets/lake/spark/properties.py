"""The settings of the local Spark server: those that distinguish servers, and Spark's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

# Clients send a plan in one message; local data in it are up to the client's 128 MB.
_MESSAGE_BYTES = 256 * 2**20
# A merge is planned anew each time, by code that is called some thousand times and no more: as the
# JVM decides, its optimizing compiler takes up to half of a server's CPU for minutes, for nothing.
# So only what runs fifty times as often is optimized. And nobody waits for a short pause, so the
# collector is the one that costs the least.
_COMPILER = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=250000"
    " -XX:Tier4MinInvocationThreshold=30000 -XX:Tier4CompileThreshold=750000"
    " -XX:Tier4BackEdgeThreshold=2000000"
)
# Most of the heap is for what stays: a batch's large arrays. A full one is slow, not an error.
_COLLECTOR = "-XX:+UseParallelGC -XX:NewRatio=4 -XX:-UseGCOverheadLimit"
# Or a file of options, which may name one.
_ANY_COLLECTOR = re.compile(r"-XX:\+Use\w*GC\b|@")
_JAVA_SETTINGS = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")
_JAVA_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
TOKEN = "spark.connect.authenticate.token"  # noqa: S105 - the setting's name


@dataclass(frozen=True, slots=True)
class SparkServerSettings:
    """The settings that distinguish one server from another."""

    cores: int = 2
    memory: str = "3g"
    """The JVM's heap, as Java spells it."""
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More Spark settings; they win over ours, except for the address and access."""

    def to_json(self) -> str:
        """One line, the same for equal settings."""
        return json.dumps(
            {"cores": self.cores, "memory": self.memory, "conf": dict(self.conf)}, sort_keys=True
        )

    @classmethod
    def from_json(cls, text: str) -> SparkServerSettings:
        return cls(**json.loads(text))

    @property
    def key(self) -> str:
        """A short name for these settings that reveals nothing about them."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]


def spark_properties(
    settings: SparkServerSettings,
    scratch: Path,
    token: str,
    jars: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """All of the server's Spark settings, secrets too; ``scratch`` is emptied at every start.

    ``jars``: the settings of ``jars.provided`` for the user's settings.
    """
    log4j = resources.files("cdc_assets.lake.spark") / "log4j2.properties"
    turns = Path(str(resources.files("cdc_assets.lake.spark") / "fairscheduler.xml"))
    ours = {
        "spark.app.name": "cdc_assets",
        "spark.master": f"local[{settings.cores}]",
        "spark.driver.memory": settings.memory,
        # A user's own options come after these. Temporary files are rows, models and libraries.
        "spark.driver.defaultJavaOptions": (
            f'"-Dlog4j2.configurationFile={log4j}" "-Dderby.system.home={scratch / "derby"}"'
            f' "-Djava.io.tmpdir={temporary(scratch)}" {_compiled_and_collected(settings.conf)}'
        ),
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": turns.as_uri(),
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.maxInboundMessageSize": str(_MESSAGE_BYTES),
        # Nothing here goes over a network; and to see how long a plan is, it is written twice.
        "spark.connect.session.planCompression.threshold": "-1",
        "spark.sql.extensions": (
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
        ),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": (scratch / "warehouse").as_uri(),
        "spark.sql.session.timeZone": "UTC",
        "spark.python.daemon.module": "cdc_assets.snapshot.python_daemon",
        # Nobody uploads code: sessions may share Python workers.
        "spark.sql.artifact.isolation.enabled": "false",
        # Else each call of a DataFrame's method looks for a notebook, all over the search path.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    address = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",  # the kernel's choice: nobody can be quicker
    }
    # RPC and blocks of a local master require a secret that Spark generates by itself.
    access = {TOKEN: token, "spark.authenticate": "true"}
    return {**ours, **settings.conf, **(jars or {}), **address, **access}


def _compiled_and_collected(conf: Mapping[str, str]) -> str:
    """A JVM that is told of two collectors doesn't start: somebody else's is the one."""
    if any(_ANY_COLLECTOR.search(text) for text in java_told(conf)):
        return _COMPILER
    return f"{_COMPILER} {_COLLECTOR}"


def java_told(conf: Mapping[str, str]) -> list[str]:
    """What a JVM of ours is told by the configuration and by this process's environment."""
    told = [conf.get(name, "") for name in _JAVA_SETTINGS]
    return told + [os.environ.get(name, "") for name in _JAVA_VARIABLES]


def temporary(scratch: Path) -> Path:
    return scratch / "tmp"


def properties_text(properties: Mapping[str, str]) -> str:
    """A Java properties file, in ASCII, with special characters escaped."""
    lines = []
    for key, value in properties.items():
        escaped = ["".join(_escaped(character) for character in text) for text in (key, value)]
        lines.append("=".join(escaped))
    return "\n".join(lines) + "\n"


def _escaped(character: str) -> str:
    if character in "=:#!\\ ":
        return "\\" + character
    if " " < character <= "~":
        return character
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
