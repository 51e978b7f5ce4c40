"""Keeps a document on disk up to date without making an event loop wait for the disk."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

from mqmesh.storage.files.atomic_file import save_document

Read = Callable[[str], bytes | None]
"""Reads a document by its name, None if there is none."""
MakeSaver = Callable[[str, Callable[[], bytes]], "DocumentSaver"]
"""Makes the saver of a document, of its name and the function that makes its text."""

_log = logging.getLogger(__name__)


class DocumentSaver:
    """Saver of one document in a helper thread: one write at a time, always the latest form.

    Changes that come while a write is under way share the next one.

    Args:
        path: The document's file; its directory exists.
        dump: Makes the document; called in the loop's thread.
        executor: Executor for the write, which waits for the disk.
        call_soon: The loop's way to be called from another thread.
    """

    def __init__(
        self,
        path: Path,
        dump: Callable[[], bytes],
        executor: Executor,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._path = path
        self._dump = dump
        self._executor = executor
        self._call_soon = call_soon
        self._dirty = False
        self._closing = False
        self._writing: Future[bool] | None = None

    def save(self) -> None:
        """Saves the document as it is now; while a write is under way, once that has ended."""
        self._dirty = True
        self.save_if_failed()

    def save_if_failed(self) -> None:
        """Saves the document again if the last write failed."""
        if self._dirty and self._writing is None:
            self._dirty = False
            writing = self._executor.submit(save_document, self._path, self._dump())
            self._writing = writing
            writing.add_done_callback(lambda future: self._call_soon(partial(self._done, future)))

    def close(self) -> None:
        """Saves an unsaved document, and waits for the disk.

        Raises:
            StorageError: The document could not be saved.
        """
        self._closing = True
        if self._writing is not None:
            self._done(self._writing)
        if self._dirty:
            self._dirty = False
            save_document(self._path, self._dump())

    def _done(self, writing: Future[bool]) -> None:
        if self._writing is not writing:
            return  # close() waited for it already
        error = writing.exception()
        self._writing = None
        if error is not None:
            _log.error("%s could not be saved: %s", self._path, error)
            self._dirty = True
        elif self._dirty and not self._closing:
            self.save_if_failed()
