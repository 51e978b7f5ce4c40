"""Memory of this process: its size, and the return of freed memory to the system."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def resident_bytes() -> int:
    """Return this process's memory, in bytes; 0 where the system does not report it."""
    return _pages()[0] * _PAGE


def anonymous_bytes() -> int:
    """Return the process's memory that belongs to no file, in bytes; 0 if it is not reported."""
    resident, shared = _pages()
    return (resident - shared) * _PAGE


def _pages() -> tuple[int, int]:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            fields = file.read(256).split()
        return int(fields[1]), int(fields[2])
    except (OSError, ValueError, IndexError):
        return 0, 0  # not Linux


def give_back() -> None:
    """Gives freed memory back to the system; takes some ms for each 100 MiB.

    Otherwise freed blocks behind a used one stay with the allocator.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_blocks(block_bytes: int, most_bytes: int) -> None:
    """Makes the allocator keep freed blocks up to a size.

    Args:
        block_bytes: Largest kept block, up to 32 MiB; larger ones are given back when freed.
        most_bytes: Limit of all kept memory, at the end of the process's heap.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, block_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, most_bytes)


@cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None


class MemoryWatch:
    """Watches the growth of the process's memory since the last ``settle``.

    Args:
        read: Returns the present size of the process, in bytes.
    """

    def __init__(self, read: Callable[[], int] = anonymous_bytes) -> None:
        self._read = read
        self._floor = read()

    @property
    def growth(self) -> int:
        """Growth in bytes."""
        now = self._read()
        self._floor = min(self._floor, now)
        return now - self._floor

    def settle(self) -> None:
        """Takes the memory that the process has now as the base of ``growth``."""
        self._floor = self._read()
