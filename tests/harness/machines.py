"""Machines of a test: network namespaces on a bridge, whose links go down and lose one direction.

All of it is inside namespaces of one process (``enter``): when that process ends, however it does,
the kernel ends all that ran there and takes the networks down. Nothing of it is seen outside.

The program's own place is the bridge, at ``HERE``, with a loopback of its own.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

HERE: Final = "192.0.2.254"
"""Address of the program itself, from the block for examples, which no router forwards."""
TOOLS: Final = ("ip", "mount", "unshare")
NEW: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
MARK: Final = "MQMESH_TEST_MACHINES"
"""Set in the environment of what is inside already."""
NOBODY: Final = "02:00:00:00:00:00"
"""Address that no card has: the bridge drops frames to it, and the sender gets no error."""
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG
_SIGKILL: Final = 9


def enter(module: str, arguments: Sequence[str]) -> None:
    """Goes on in namespaces of its own: runs the program anew there, and ends with its exit code.

    Returns at once where this was done.

    Args:
        module: The program's, as after ``python -m``.
        arguments: Arguments of the program.
    """
    if MARK in os.environ:
        # Without this a killed parent would leave the namespaces, and us, behind.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, _SIGKILL)
        return
    if problem := _why_not():
        sys.exit(f"error: no network namespaces can be made here: {problem}")
    command = [*NEW, sys.executable, "-P", "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, MARK: "1"})


class Machines:
    """Makes machines, and cuts their network. Only after ``enter``; all are on one bridge."""

    def __init__(self) -> None:
        # The names of namespaces stand there; what other programs have there is not ours.
        _run("mount", "-t", "tmpfs", "none", "/run")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "address", "add", f"{HERE}/24", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")
        self._addresses: dict[str, str] = {}

    def add(self, name: str) -> str:
        """Makes a machine.

        Args:
            name: Name of at most 10 letters and digits.

        Returns:
            Its address.
        """
        address = f"192.0.2.{len(self._addresses) + 1}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "eth0", "netns", name)
        _run("ip", "link", "set", f"v-{name}", "master", "br0", "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", link, "up")
        self._addresses[name] = address
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """Returns the prefix of a command that runs on a machine; the process id stays its own."""
        return ("ip", "netns", "exec", name)

    def gone(self, name: str) -> None:
        """Takes its link down: as if the machine had lost its power, for all others."""
        _run("ip", "link", "set", f"v-{name}", "down")

    def back(self, name: str) -> None:
        """Ends ``gone``."""
        _run("ip", "link", "set", f"v-{name}", "up")

    def cut(self, sender: str, receiver: str) -> None:
        """Drops all that one machine sends to another one; the other way is open.

        Args:
            sender: Name of the machine; "" for the program's own.
            receiver: The same.
        """
        _run(*self._neighbour(sender, receiver, "replace"), "lladdr", NOBODY, "nud", "permanent")

    def heal(self, sender: str, receiver: str) -> None:
        """Ends ``cut``."""
        _run(*self._neighbour(sender, receiver, "del"))

    def _neighbour(self, sender: str, receiver: str, verb: str) -> list[str]:
        place, link = (["-n", sender], "eth0") if sender else ([], "br0")
        address = self._addresses[receiver] if receiver else HERE
        return ["ip", *place, "neighbour", verb, address, "dev", link]


def _why_not() -> str:
    """Returns why no machines can be made here; "" if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    links = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    tried = subprocess.run([*NEW, "sh", "-c", links], capture_output=True, text=True, timeout=20)
    return tried.stderr.strip() if tried.returncode else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
