"""What the lock files and the list of Spark's jars pin, for the scripts beside this one."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ROOT / "requirements.lock"
LOCKS = (PRODUCTION, ROOT / "requirements-build.lock", ROOT / "requirements-dev.lock")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)


def pins(lock):
    """(name, version, its SHA-256s) of every package in a lock file."""
    for name, version, rest in _PIN.findall(lock.read_text()):
        yield name, version, re.findall(r"--hash=sha256:([0-9a-f]{64})", rest)
