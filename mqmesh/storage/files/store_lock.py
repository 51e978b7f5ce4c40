"""One process per store: its directory is locked, and a file in it that names the holder.

The lock of the directory counts, since no program removes the directory of a store that is in use
and goes on. Some file systems, such as network ones, do not lock directories. There the lock of the
file alone counts, and it must be the file that the directory has.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from mqmesh.errors import StorageError, StoreLocked
from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.directory_lock import DirectoryLock, is_same

_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class StoreLock:
    """Lock of a store by this process. The system releases it when the process dies."""

    def __init__(self, directory: Path, *, to_write: bool = True) -> None:
        """Takes the lock.

        Args:
            directory: Directory of the store; it exists.
            to_write: False for a reader, which gets the lock on a read-only file system, too:
                there it keeps writers out and lets other readers in.

        Raises:
            StoreLocked: Another process, or another store of this process, has the lock.
            StorageError: The directory or the lock file cannot be opened.
        """
        self._path = directory / "lock"
        self._fd, self._writable = _open(self._path, to_write=to_write)
        try:
            self._directory = DirectoryLock(directory, shared=not self._writable)
        except BlockingIOError as error:
            raise self._locked(directory) from error
        except OSError as error:
            self._close()
            raise StorageError(f"{directory} cannot be locked: {error.strerror}") from error
        if self._fd is None:
            return
        # Some file systems give the exclusive lock only to processes that may write.
        wanted = fcntl.LOCK_EX if self._writable else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, wanted | fcntl.LOCK_NB)
        except OSError as error:
            self._directory.release()
            raise self._locked(directory) from error
        if self._writable:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def check(self) -> None:
        """Makes sure that the store's path still leads to the store; to be called now and then.

        Raises:
            StoreLocked: The store was moved, removed or replaced, and new files would go elsewhere.
        """
        if not self._directory.is_in_place():
            reason = "its folder was moved, removed or replaced"
        elif (
            not self._directory.is_held
            and self._fd is not None
            and not is_same(self._fd, self._path)
        ):
            reason = "its lock file was removed or replaced"
        else:
            return
        raise StoreLocked(f"the store {self._path.parent} is not this process's any more: {reason}")

    def release(self) -> None:
        """Releases the store; at most once. The file stays: removing it would race."""
        if self._fd is not None and self._writable:
            os.ftruncate(self._fd, 0)
        self._close()
        self._directory.release()

    def _locked(self, directory: Path) -> StoreLocked:
        holder = b"" if self._fd is None else os.pread(self._fd, 32, 0)
        self._close()
        pid = holder.decode("ascii", "replace").strip() or "unknown"
        return StoreLocked(f"the store {directory} is open in another process (pid {pid})")

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _open(path: Path, *, to_write: bool) -> tuple[int | None, bool]:
    """Return a descriptor, None if there is no file and none can be made; and if it is writable."""
    try:
        try:
            # The file is not inherited (PEP 446), so a child process does not keep the lock.
            return os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE), True
        except OSError as error:
            if to_write or error.errno not in _NOT_WRITABLE:
                raise
        try:
            return os.open(path, os.O_RDONLY), False
        except FileNotFoundError:
            return None, False
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
