"""Machines that share nothing with each other: Linux namespaces, made and left without a name.

A machine has a network, processes and a host name of its own, and, where it is given a root, a file
system, of which only what is shown to it is this system's, to be read. It lives by its first
process, which ends with its standard input. So with the process that made it go its processes,
files and network, however that ends. A machine may be handed to other processes of this system.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cdc_assets_tests.support.waiting import wait_for

NOBODY = 65534
_TOOLS = ("unshare", "nsenter", "setpriv", "ip")
_KINDS = ("--net", "--pid", "--mount", "--uts", "--ipc", "--fork")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h

# The first process makes the machine, and waits.
_BARE = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
printf '127.0.0.1 localhost %s\\n%s\\n' "$1" "$2" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
hostname $1
exec cat > /dev/null
"""
# The last arguments: paths here and there.
_ROOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs /mnt
cd /mnt
mkdir -p etc proc dev/shm tmp home/spark run var old
for path in /bin /sbin /lib /lib32 /lib64; do
    if [ -h $path ]; then cp -P $path .; elif [ -d $path ]; then set -- "$@" $path $path; fi
done
name=$1 user=$2 hosts=$3
shift 3
while [ $# -gt 0 ]; do
    mkdir -p "./$2"
    mount --bind "$1" "./$2"
    mount -o remount,bind,ro "./$2"
    shift 2
done
for path in /etc/ld.so.cache /etc/nsswitch.conf /etc/alternatives /etc/java* /etc/ssl; do
    if [ -e $path ]; then cp -a $path etc/; fi
done
printf 'root:x:0:0::/:/bin/sh\\nspark:x:%s:%s::/home/spark:/bin/sh\\n' $user $user > etc/passwd
printf '%s\\n' "$hosts" > etc/hosts
for path in null zero random urandom; do : > dev/$path; mount --bind /dev/$path dev/$path; done
ln -s /proc/self/fd dev/fd
chmod 1777 tmp dev/shm
chown $user home/spark
mount -t proc proc proc
hostname $name
pivot_root . old
cd /
umount -l /old
exec cat > /dev/null
"""


def why_none() -> str | None:
    """Why no machines can be made here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces are made by root only"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {missing[0]} (util-linux, iproute2)"
    made = ["unshare", *_KINDS, "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    tried = subprocess.run(made, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces can't be made: {tried.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine by its first process, as this system numbers it."""

    name: str
    pid: int

    def inside(self, *command: str) -> list[str]:
        kinds = ["--net", "--pid", "--mount", "--uts", "--ipc", "--root", "--wd"]
        return ["nsenter", "-t", str(self.pid), *kinds, *command]

    def do(self, *command: str) -> None:
        """Run a program of this system in the machine's network."""
        entered = ["nsenter", "-t", str(self.pid), "--net", *command]
        subprocess.run(entered, check=True, stdin=subprocess.DEVNULL)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, uid: int
    ) -> None:
        """Start a process as that user, with this environment alone."""
        given = [f"{key}={value}" for key, value in environment.items()]
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        with log.open("ab") as out:
            subprocess.Popen(
                self.inside(*user, "env", "-i", *given, *command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """Its living processes but the first."""
        ours, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), []
        for process in psutil.process_iter():
            try:
                there = Path(f"/proc/{process.pid}/ns/pid").readlink()
                if there == ours and process.pid != self.pid and process.status() != "zombie":
                    found.append(process)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def stop(self, seconds: float = 40) -> None:
        """Ask what was started there to end in order; its children are its own to end."""
        processes = self.processes()
        inside = {self.pid, *(process.pid for process in processes)}
        with suppress(psutil.NoSuchProcess):
            for process in [each for each in processes if each.ppid() not in inside]:
                process.terminate()
        wait_for(lambda: not self.processes(), seconds)

    def kill(self) -> None:
        """Kill all of its processes at once; the machine stays."""
        # Not stopped first: nsenter would stop, too, and never collect its child.
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: not self.processes())

    def enter_network(self) -> None:
        """Have this process in the machine's network; it ends with the one that started it."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with Path(f"/proc/{self.pid}/ns/net").open() as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"the network of {self.name} can't be entered")


@contextmanager
def machine(
    name: str, shown: Mapping[str, str] | None = None, hosts: str = ""
) -> Iterator[Machine]:
    """A running machine.

    ``shown``: folders of this system, and where they are in the machine's own root; without, the
    machine has this system's files. ``hosts``: its /etc/hosts.
    """
    command = [_BARE, "machine", name, hosts]
    if shown is not None:
        paths = [path for pair in shown.items() for path in pair]
        command = [_ROOT, "root", name, str(NOBODY), hosts, *paths]
    with subprocess.Popen(  # its standard input ends with the block
        ["unshare", *_KINDS, "--kill-child", "sh", "-c", *command], stdin=subprocess.PIPE
    ) as outer:

        def first() -> list[psutil.Process]:
            assert outer.poll() is None, f"the machine {name} can't be made"
            return [c for c in psutil.Process(outer.pid).children() if c.name() == "cat"]

        made = Machine(name, wait_for(first)[0].pid)
        made.do("ip", "link", "set", "lo", "up")
        try:
            yield made
        finally:
            assert outer.stdin is not None
            outer.stdin.close()


def connect(one: Machine, end: str, other: Machine, other_end: str) -> None:
    """A line between two machines, by the names of its ends."""
    peer = ("peer", "name", other_end, "netns", str(other.pid))
    one.do("ip", "link", "add", end, "type", "veth", *peer)
    one.do("ip", "link", "set", end, "up")
    other.do("ip", "link", "set", other_end, "up")
