"""One process per store: the lock file."""

import fcntl
import os
from pathlib import Path

from mqmesh.errors import StorageError, StoreLocked


class StoreLock:
    """Holds a store for this process. The system lets go of it when the process dies."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock.

        Args:
            directory: The store's; it exists.

        Raises:
            StoreLocked: Another process, or another store of this one, has it.
            StorageError: The lock file cannot be opened.
        """
        path = directory / "lock"
        try:
            # The file is not inherited (PEP 446), so a child process does not keep the lock.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreLocked(
                f"the store {directory} is open in another process (pid {holder})"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets go of the store; at most once. The file stays: removing it would race."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
