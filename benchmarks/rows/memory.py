"""Memory that the machine really has, before a measurement begins."""

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from mqmesh.units import KIB, MIB

LEVEL_BYTES: Final = 1_024 * MIB
"""More than any row's run takes, but those that are run only by name."""
WRITE_BYTES: Final = 512 * KIB
"""Written at once: as much as a broker under load writes, for as large pieces of memory."""


def level_memory(scale: float, folder: Path) -> None:
    """Takes as much memory as a run may need, and gives it back at once.

    Under a hypervisor, memory that was free for some seconds may belong to the host again, and
    a page of it costs 12 µs instead of 2.5 where this was measured: up to half a processor, for
    both sides of a row, and by chance for one more than for the other. Recently used
    pages are there. They are taken twice, as a process's own and as a file's, because these come
    in small and in large pieces from different ends: with the first alone, some runs of a broker
    took up to twice the processor time.

    Args:
        scale: Of the row; half of what is free, of memory or disk, is taken at most.
        folder: Where the run will write.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = os.statvfs(folder)
    size = min(int(LEVEL_BYTES * scale), free // 2)
    # Not zeros: those would be promised only, not written.
    taken = bytearray(b"\1") * size
    del taken
    block = b"\1" * WRITE_BYTES
    with TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(min(size, disk.f_bavail * disk.f_frsize // 2) // WRITE_BYTES):
            file.write(block)
