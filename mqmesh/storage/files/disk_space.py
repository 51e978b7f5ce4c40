"""Disk space: use of a file system, as ``df`` reports it."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec


class Space(msgspec.Struct, frozen=True, gc=False):
    """Room on a file system.

    Attributes:
        used: Bytes that all users take.
        available: Bytes that this process may still take.
    """

    used: int
    available: int

    @property
    def used_percent(self) -> float:
        """Used part of the space that this process could ever use, 0 to 100."""
        return 100 * self.used / max(self.used + self.available, 1)


SpaceOf = Callable[[Path], Space]
"""Measures the file system of a directory; raises OSError. Tests pass one of their own."""


def system_space(directory: Path) -> Space:
    """Return the room on a directory's file system.

    Raises:
        OSError: The system does not report it.
    """
    found = os.statvfs(directory)
    return Space((found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize)
