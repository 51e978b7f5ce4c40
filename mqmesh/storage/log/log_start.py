"""The beginning of the log that retention allows, noted before retention removes anything.

The note tells lost segments at the beginning from those that retention removed. Layout of the file,
little endian:

======== ===== ===== =========================================================
position bytes type  meaning
======== ===== ===== =========================================================
0        4     bytes magic, ``MQL1``
4        4     u32   crc: CRC-32 of bytes 8 to 15
8        8     u64   log_start: no segment before this commit-log offset is kept
======== ===== ===== =========================================================

The file is written in place, with one write that no sector border divides, so it needs no room on a
full disk. If the file is missing or damaged, the beginning is unknown, as in older stores.
"""

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

from mqmesh.checksum import crc32
from mqmesh.private_files import FILE_MODE

MAGIC: Final = b"MQL1"
NAME: Final = "log-beginning"
LOST: Final = "segments are missing that retention did not remove"
"""Reason given for the missing bytes between the noted beginning of the log and the real one."""

_LAYOUT = struct.Struct("<4sIQ")


def read_log_start(path: Path) -> int | None:
    """Return where the log begins at the latest; None if that is not known.

    Args:
        path: The file.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _LAYOUT.size:
        return None
    magic, crc, log_start = _LAYOUT.unpack(data)
    if magic != MAGIC or crc != crc32(data[8:]):
        return None
    return int(log_start)


def write_log_start(path: Path, log_start: int) -> None:
    """Notes, durably, where the log is to begin; if that fails, marks the beginning as unknown.

    Args:
        path: The file; its directory must be synced after the first time.
        log_start: Commit-log offset.

    Raises:
        OSError: Neither was possible.
    """
    number = log_start.to_bytes(8, "little")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            os.pwrite(fd, MAGIC + crc32(number).to_bytes(4, "little") + number, 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    except OSError:
        # A full disk must not keep retention from making room.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
