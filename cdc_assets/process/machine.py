"""Is this machine fit to run the platform: Python, Java, a free port. It repairs nothing.

Each check raises EnvironmentProblem with one sentence that says what to do. The module runs before
anything heavy is imported, so that the answer comes at once: ``python -m
cdc_assets.process.machine``.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdc_assets.errors import EnvironmentProblem

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)  # as requires-python in pyproject.toml says
# Spark 4 is compiled for the oldest; from 23 on Java lacks what its Hadoop asks for at the first
# file (Subject.getSubject).
OLDEST_JAVA, NEWEST_JAVA = 17, 22
_HOST = "127.0.0.1"  # where the ports are

# '"17.0.15"' in most builds, '"1.8.0_402"' up to Java 8, '"25-ea"' in previews.
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_INSTALL_JAVA = (
    f"install Java {OLDEST_JAVA} or 21 (on Debian: apt-get install openjdk-17-jre-headless)"
    " or set JAVA_HOME to one"
)


def check_python(version: Sequence[int] = sys.version_info[:2]) -> None:
    """Raise EnvironmentProblem unless this Python is one the dependencies support."""
    if not OLDEST_PYTHON <= tuple(version[:2]) <= NEWEST_PYTHON:
        raise EnvironmentProblem(
            f"Python {version[0]}.{version[1]} is not supported:"
            " install Python 3.11, 3.12 or 3.13 and make the environment with it"
            " (make install PYTHON=python3.12)."
        )


def java_command(environment: Mapping[str, str]) -> str | None:
    """The java that Spark would start: ``$JAVA_HOME/bin/java``, else the first one on PATH."""
    if java_home := environment.get("JAVA_HOME"):
        candidate = Path(java_home, "bin", "java")
        return str(candidate) if candidate.exists() else None
    return shutil.which("java", path=environment.get("PATH"))


def check_java(environment: Mapping[str, str] = os.environ) -> int:
    """The major version of the Java that Spark would start; raises EnvironmentProblem."""
    command = java_command(environment)
    if command is None:
        java_home = environment.get("JAVA_HOME")
        where = f"at JAVA_HOME={java_home}" if java_home else "on the PATH"
        raise EnvironmentProblem(f"Spark needs Java and there is none {where}: {_INSTALL_JAVA}.")
    try:
        # A JVM that has to page in from a cold disk may take seconds; a minute means it hangs.
        asked = subprocess.run(
            [command, "-version"],
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(
            f"Spark needs Java and {command} can't be run: {_INSTALL_JAVA}."
        ) from error
    found = _JAVA_VERSION.search(asked.stderr + asked.stdout)
    if asked.returncode != 0 or found is None:
        raise EnvironmentProblem(f"Spark needs Java and {command} doesn't work: {_INSTALL_JAVA}.")
    version = int(found[1])
    if version < OLDEST_JAVA:
        raise EnvironmentProblem(
            f"{command} is Java {version}, too old for Spark 4: {_INSTALL_JAVA}."
        )
    if version > NEWEST_JAVA:
        raise EnvironmentProblem(
            f"{command} is Java {version}, too new for Spark 4.1: {_INSTALL_JAVA}."
        )
    return version


def check_port(port: int) -> None:
    """Raise EnvironmentProblem if nothing could listen on that port now."""
    if not 1 <= port <= 65535:
        raise EnvironmentProblem(
            f"{port} is no port: choose one from 1024 to 65535, as in PORT=3001."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As every server does: connections of a server that just ended don't count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except PermissionError as error:
            raise EnvironmentProblem(
                f"port {port} is for privileged users: choose one from 1024 up, as in PORT=3001."
            ) from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EnvironmentProblem(
                    f"can't listen on {_HOST}:{port}: {error.strerror}."
                ) from error
            other = port + 1 if port < 65535 else 3001
            raise EnvironmentProblem(
                f"port {port} is taken: stop what listens there, or choose another: PORT={other}."
            ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what is asked for; returns 0, or 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--port", type=int, help="a port that has to be free, too")
    options = parser.parse_args(arguments)
    try:
        check_python()
        check_java()
        if options.port is not None:
            check_port(options.port)
    except EnvironmentProblem as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
