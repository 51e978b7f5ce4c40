"""Files of a store before each system call, and each store to memory, that changes one."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from harness.store_files import StoreFiles
from mqmesh.batch.payload import Buffer
from mqmesh.storage.log.mapped_file import MappedFile

CHANGING_CALLS: Final = (
    "pwrite",
    "pwritev",
    "write",
    "rename",
    "replace",
    "link",
    "unlink",
    "rmdir",
    "truncate",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "mkdir",
)


class KillPoints:
    """Keeps a copy of the files as they are before each changing call, of whatever thread.

    Attributes:
        stores: Pieces that were stored into maps.
    """

    def __init__(self, replace: Callable[[object, str, object], None]) -> None:
        """Wraps all calls that change a file.

        Args:
            replace: Sets an attribute of an object, for as long as the test lasts.
        """
        self._lock = threading.RLock()
        self._files: StoreFiles | None = None
        self._facts: Callable[[], Any] = tuple
        self._copies: list[tuple[StoreFiles, Any]] = []
        self.stores = 0
        for name in CHANGING_CALLS:
            replace(os, name, self._wrap(getattr(os, name)))
        replace(MappedFile, "store", self._wrap_store(MappedFile.store))

    def start(self, files: StoreFiles, facts: Callable[[], Any]) -> None:
        """Copies from now on; each copy is kept with what ``facts`` returns then."""
        with self._lock:
            self._files, self._facts = files, facts

    def stop(self) -> Iterator[tuple[StoreFiles, Any]]:
        """Ends the copying; gives the copies and removes each after it was looked at."""
        with self._lock:
            self._files = None
        assert len(self._copies) > 10
        for copy, facts in self._copies:
            yield copy, facts
            copy.close()
            shutil.rmtree(copy.directory)

    def _wrap_store(self, store: Callable[..., None]) -> Callable[..., None]:
        """A store has no order: the process may die before it and in its middle, and whichever
        half is there first."""

        def before(mapped: MappedFile, position: int, piece: Buffer) -> None:
            self.stores += 1
            store(mapped, position, [piece])

        killed_before = self._wrap(before)

        def wrapped(mapped: MappedFile, position: int, pieces: Sequence[Buffer]) -> None:
            for number, piece in enumerate(pieces):
                view, middle = memoryview(piece), len(piece) // 2
                halves = [(position, view[:middle]), (position + middle, view[middle:])]
                for place, half in reversed(halves) if number % 2 else halves:
                    killed_before(mapped, place, half)
                position += len(piece)

        return wrapped

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                files, self._files = self._files, None
                if files is not None:
                    self._copies.append((files.copy(at_rest=False), self._facts()))
                    self._files = files
                return call(*arguments, **keywords)

        return wrapped
