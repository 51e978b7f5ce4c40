"""Keeps a document on disk up to date without making an event loop wait for the disk."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Final

from mqmesh.errors import DiskFull, StorageError
from mqmesh.storage.files.atomic_file import save_document, take_room
from mqmesh.units import KIB

ROOM_BYTES: Final = 64 * KIB
"""By so much a document may grow from one save to the next, and be saved on a full disk."""

OnSaved = Callable[[StorageError | None], None]
"""Told when what was to be saved is on disk, or why it is not."""

_log = logging.getLogger(__name__)


class DocumentSaver:
    """Saves one document in a helper thread: one write at a time, always the latest form.

    Changes that come while a write is under way share the next one.

    Args:
        path: The document's file; its directory exists.
        dump: Makes the document; called in the loop's thread.
        executor: Where the write, which waits for the disk, is done.
        call_soon: The loop's way to be called from another thread.

    Attributes:
        failure: Why the last write failed, or the next one may; None if neither. While it is a
            want of room, ``look_for_room`` is to be called now and then.
    """

    def __init__(
        self,
        path: Path,
        dump: Callable[[], bytes],
        executor: Executor,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self.failure: StorageError | None = None
        self._path = path
        self._dump = dump
        self._executor = executor
        self._call_soon = call_soon
        self._waiting: list[OnSaved] = []
        self._told: list[OnSaved] = []
        self._dirty = False
        self._planned = False
        self._closing = False
        self._writing: Future[bool] | None = None
        self._looking: Future[bool] | None = None
        self._size = 0

    def take_room(self) -> None:
        """Takes room for the first save of this life, waiting for the disk; at the start."""
        try:
            self._size = self._path.stat().st_size
        except FileNotFoundError:
            pass  # nothing was ever saved: it begins small
        try:
            if not take_room(self._path, self._size + ROOM_BYTES):
                self._note_no_room()
        except StorageError as error:
            _log.error("%s", error)
            self.failure = error

    def look_for_room(self) -> None:
        """Where room was missing, looks in the helper thread whether there is some again.

        Without it, what was to be saved is not even written in vain: that may be much, and this is
        one call of the system.
        """
        if isinstance(self.failure, DiskFull) and self._writing is None and self._looking is None:
            looking = self._executor.submit(take_room, self._path, self._size + ROOM_BYTES)
            self._looking = looking
            looking.add_done_callback(lambda future: self._call_soon(self._looked))

    def save(self, on_saved: OnSaved | None = None) -> None:
        """Saves the document as it is now or becomes before the write begins.

        Args:
            on_saved: Called in the loop's thread, never before this returns.
        """
        self._dirty = True
        if on_saved is not None:
            self._waiting.append(on_saved)
        if self._writing is None and not self._planned:
            self._planned = True
            self._call_soon(self._begin)

    def save_if_failed(self) -> None:
        """Tries again what could not be saved before."""
        if self._dirty and self._writing is None:
            self._begin()

    def close(self) -> None:
        """Saves what is not saved yet, waiting for the disk.

        Raises:
            StorageError: It could not be saved.
        """
        self._closing = True
        if self._looking is not None:
            self._looking.exception()  # no two threads write into one file
        if self._writing is not None:
            self._done(self._writing, self._told)
        if self._dirty:
            waiting, self._waiting, self._dirty = self._waiting, [], False
            save_document(self._path, self._dump(), room_bytes=ROOM_BYTES)
            for on_saved in waiting:
                on_saved(None)

    def _begin(self) -> None:
        self._planned = False
        if self._writing is not None or not self._dirty:
            return
        self._dirty = False
        self._told, self._waiting = self._waiting, []
        save = partial(save_document, room_bytes=ROOM_BYTES)
        document = self._dump()
        self._size = len(document)
        writing = self._executor.submit(save, self._path, document)
        self._writing = writing
        writing.add_done_callback(
            lambda future: self._call_soon(partial(self._done, future, self._told))
        )

    def _done(self, writing: Future[bool], told: list[OnSaved]) -> None:
        if self._writing is not writing:
            return  # close() waited for it already
        error = writing.exception()
        self._writing = None
        if error is not None:
            _log.error("%s could not be saved: %s", self._path, error)
            self._dirty = True
            if not isinstance(error, StorageError):
                error = StorageError(f"{self._path} could not be saved: {error!r}")
        self.failure = error
        if error is None and not writing.result():
            self._note_no_room()
        for on_saved in told:
            on_saved(error)
        if not self._closing and (self._waiting or (self._dirty and error is None)):
            self._begin()

    def _looked(self) -> None:
        looking, self._looking = self._looking, None
        if looking is None or self._closing or self._writing is not None or self._planned:
            return  # a save will tell
        if looking.exception() is None and looking.result():
            self.failure = None
            self._begin()

    def _note_no_room(self) -> None:
        self.failure = DiskFull(f"there is no room for the next save of {self._path}")
        _log.error("%s", self.failure)
