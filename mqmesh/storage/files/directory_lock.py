"""A lock on a directory itself: it needs no file in it, so no removed file undoes it."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

_NOT_FOR_DIRECTORIES: Final = frozenset(
    {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
)
"""Errors of network file systems for a lock of a file that cannot be open for writing."""


class DirectoryLock:
    """Holds a directory for this process; the system lets go of it when the process dies.

    Attributes:
        is_held: False where the file system does not lock directories.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Takes the lock.

        Args:
            directory: It exists.
            shared: Let others in that want it shared, too.

        Raises:
            BlockingIOError: Another process has it.
            OSError: The directory cannot be opened.
        """
        self._directory = directory
        # Not inherited (PEP 446), so a child process does not keep the lock.
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.is_held = True
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NOT_FOR_DIRECTORIES:
                os.close(self._fd)
                raise
            self.is_held = False

    def is_in_place(self) -> bool:
        """Returns True if the directory's path still leads to the locked directory."""
        return is_same(self._fd, self._directory)

    def release(self) -> None:
        """Lets go; at most once."""
        os.close(self._fd)


def is_same(fd: int, path: Path) -> bool:
    """Returns True if a path leads to the file that a descriptor has open."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))
