"""Addresses where processes listen, and their memory, by ``/proc``. Linux."""

import os
import re
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ANON = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)
_TCP_LISTEN: Final = "0A"
_UNIX_LISTEN: Final = "00010000"


def family(pid: int) -> list[int]:
    """Returns a process and all that it has started, directly or not."""
    parents = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            text = _read(entry / "stat")
            if text:
                parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def listening(pid: int) -> list[str]:
    """Returns the addresses where a process listens: ``tcp://host:port`` and ``ipc://path``.

    They come in the order in which the process has bound them, whatever their ports.
    """
    inodes = set()
    for entry in (PROC / str(pid) / "fd").iterdir():
        try:
            match = _SOCKET.fullmatch(os.readlink(entry))
        except OSError:
            continue  # it was closed meanwhile
        if match:
            inodes.add(match[1])
    found = {int(inode): place for inode, place in _all_listening() if inode in inodes}
    return [found[inode] for inode in sorted(found)]


def private_bytes(pid: int) -> int:
    """Returns the memory that is a process's own and no file's; 0 if the process is gone."""
    match = _ANON.search(_read(PROC / str(pid) / "status"))
    return int(match[1]) * 1024 if match else 0


def _all_listening() -> list[tuple[str, str]]:
    found = []
    for line in _read(PROC / "net" / "tcp").splitlines()[1:]:
        words = line.split()
        if words[3] == _TCP_LISTEN:
            address, _, port = words[1].partition(":")
            host = ".".join(map(str, bytes.fromhex(address)[::-1]))
            found.append((words[9], f"tcp://{host}:{int(port, 16)}"))
    for line in _read(PROC / "net" / "unix").splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[3] == _UNIX_LISTEN:
            found.append((words[6], f"ipc://{words[7]}"))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the process has ended
