"""How the JVMs of tests are started, and what is in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from cdc_assets.lake.spark.server import SparkServer

# Each test's data are tiny: most of a JVM's time would go into optimizing code that is run once or
# twice. Tests need less than half of the CPU with the first compiler alone; by default it would
# get too small a code cache, and spend its time emptying it.
# A column of a batch overflows at so many bytes in tests; at 2 GB elsewhere.
ARROW_BYTES = 128 * 2**20
QUICK_JVM = {
    "JAVA_TOOL_OPTIONS": (
        "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC"
        f" -Darrow.vector.max_allocation_bytes={ARROW_BYTES}"
    )
}


def histogram(jvm: int) -> dict[str, tuple[int, int]]:
    """The live objects of a JVM, by class: how many, and their bytes. Begins with a collection.

    Raises FileNotFoundError where Java came without its tools.
    """
    command = [_jcmd() or "jcmd", str(jvm), "GC.class_histogram"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^ *\d+: +(\d+) +(\d+) +(\S+)", told, re.MULTILINE)
    return {name: (int(number), int(size)) for number, size, name in rows}


def _jcmd() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("jcmd", path=f"{Path(home) / 'bin'}" if home else None)


def instances(server: SparkServer, name: str) -> int:
    """How many objects of a class the server's JVM has; see :func:`histogram`.

    Skips the test where Java came without its tools.
    """
    if _jcmd() is None:
        pytest.skip("there is no jcmd")
    starter = psutil.Process(json.loads(server.state_path.read_text())["pid"])
    jvm = next(child for child in starter.children(recursive=True) if child.name() == "java")
    return histogram(jvm.pid).get(name, (0, 0))[0]
