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


def instances(server: SparkServer, name: str) -> int:
    """How many objects of a class the server's JVM has after a full collection.

    Skips the test where Java came without its tools.
    """
    home = os.environ.get("JAVA_HOME")
    tool = shutil.which("jcmd", path=f"{Path(home) / 'bin'}" if home else None)
    if tool is None:
        pytest.skip("there is no jcmd")
    starter = psutil.Process(json.loads(server.state_path.read_text())["pid"])
    jvm = next(child for child in starter.children(recursive=True) if child.name() == "java")
    # The histogram is of live objects: it begins with a collection.
    command = [tool, str(jvm.pid), "GC.class_histogram"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    row = re.search(rf"^ *\d+: +(\d+) +\d+ +{re.escape(name)}\b", found.stdout, re.MULTILINE)
    return int(row[1]) if row is not None else 0
