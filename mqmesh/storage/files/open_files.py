"""A bounded number of open files, for stores of any number of them."""

import os

from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import NO_DESCRIPTORS


class OpenFiles:
    """Descriptors by path; the one unused for longest is closed when there are too many."""

    def __init__(self, most: int) -> None:
        """Starts without any descriptor.

        Args:
            most: Descriptors to hold at once.
        """
        assert most > 0
        self._most = most
        self._fds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._fds)

    def get(self, path: str, *, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor for a file; valid until the next call of any method.

        Args:
            path: The file; requested with the same flags each time.
            flags: Flags for ``os.open`` when the file is not open yet.

        Raises:
            OSError: The file cannot be opened.
        """
        fds = self._fds
        fd = fds.pop(path, None)
        if fd is None:
            if len(fds) >= self._most:
                self._close_oldest()
            fd = self._open(path, flags)
        fds[path] = fd
        return fd

    def _open(self, path: str, flags: int) -> int:
        while True:
            try:
                return os.open(path, flags, FILE_MODE)
            except OSError as error:
                # Connections, for example, have taken all descriptors; a descriptor held here is
                # closed.
                if error.errno not in NO_DESCRIPTORS or not self._fds:
                    raise
            self._close_oldest()

    def _close_oldest(self) -> None:
        os.close(self._fds.pop(next(iter(self._fds))))

    def close_path(self, path: str) -> None:
        """Closes a file if it is open, before it is removed."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close_under(self, directory: str) -> None:
        """Closes the files of a directory, before it is removed or renamed."""
        prefix = directory.rstrip("/") + "/"
        for path in [path for path in self._fds if path.startswith(prefix)]:
            os.close(self._fds.pop(path))

    def close(self) -> None:
        """Closes all descriptors."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
