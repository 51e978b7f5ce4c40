"""One process per store: the lock file."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from mqmesh.errors import StorageError, StoreLocked

_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class StoreLock:
    """Holds a store for this process. The system lets go of it when the process dies."""

    def __init__(self, directory: Path, *, to_write: bool = True) -> None:
        """Takes the lock.

        Args:
            directory: The store's; it exists.
            to_write: False for who only reads, and gets the lock where nothing can be
                written, too: there it keeps writers out and lets other readers in. Where no
                lock file is then, nobody writes, and nothing is held.

        Raises:
            StoreLocked: Another process, or another store of this one, has it.
            StorageError: The lock file cannot be opened.
        """
        path = directory / "lock"
        self._fd, self._writable = _open(path, to_write=to_write)
        if self._fd is None:
            return
        # Some file systems give the exclusive lock to nobody who may not write.
        wanted = fcntl.LOCK_EX if self._writable else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, wanted | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreLocked(
                f"the store {directory} is open in another process (pid {holder})"
            ) from error
        if self._writable:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets go of the store; at most once. The file stays: removing it would race."""
        if self._fd is None:
            return
        if self._writable:
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _open(path: Path, *, to_write: bool) -> tuple[int | None, bool]:
    """A descriptor and whether it can be written; None if there is no file and cannot be."""
    try:
        try:
            # The file is not inherited (PEP 446), so a child process does not keep the lock.
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644), True
        except OSError as error:
            if to_write or error.errno not in _NOT_WRITABLE:
                raise
        try:
            return os.open(path, os.O_RDONLY), False
        except FileNotFoundError:
            return None, False
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
