"""Locks between processes: on a directory itself, which no removed file undoes, and on a file."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mqmesh.errors import StoreLocked
from mqmesh.private_files import open_private
from mqmesh.storage.files.atomic_file import storage_error

_NOT_FOR_DIRECTORIES: Final = frozenset(
    {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
)
"""Errors of network file systems for a lock of a file that cannot be open for writing."""


class DirectoryLock:
    """Lock of a directory by this process; the system releases it when the process dies.

    Attributes:
        is_held: False where the file system does not lock directories.
    """

    def __init__(self, directory: Path, *, shared: bool = False) -> None:
        """Takes the lock.

        Args:
            directory: An existing directory.
            shared: True to share the lock with other processes that share it.

        Raises:
            BlockingIOError: Another process has the lock.
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
        """Releases the lock; at most once."""
        os.close(self._fd)


def is_same(fd: int, path: Path) -> bool:
    """Returns True if a path leads to the file that a descriptor has open."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(fd))


@contextmanager
def hold_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a file that no other process holds; for moments only.

    Args:
        path: The file, which is made if it is missing.
        wait: True to wait for a process that holds it; not in a loop that serves others.

    Raises:
        StoreLocked: Another process holds it, and ``wait`` is False.
        StorageError: The file cannot be opened or locked.
    """
    try:
        descriptor = open_private(str(path), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise storage_error(error, f"{path} cannot be opened") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(f"another process holds {path}") from error
        except OSError as error:
            raise storage_error(error, f"{path} cannot be locked") from error
        yield
    finally:
        os.close(descriptor)
