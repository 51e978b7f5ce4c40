"""Keeps the note about half messages on disk; see ``transaction_snapshot``."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from mqmesh.errors import StorageError
from mqmesh.roles.broker.transaction_desk import TransactionDesk
from mqmesh.roles.document_saver import DocumentSaver
from mqmesh.storage.atomic_file import load_document

TRANSACTIONS_FILE: Final = "transactions.json"

_log = logging.getLogger(__name__)


class TransactionNote:
    """The note of one broker.

    Args:
        desk: Its half messages.
        directory: Where the note is kept.
        executor: Where it is written.
        call_soon: The loop's way to be called from another thread.
    """

    def __init__(
        self,
        desk: TransactionDesk,
        directory: Path,
        executor: Executor,
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._desk = desk
        self._path = directory / TRANSACTIONS_FILE
        self._saver = DocumentSaver(self._path, desk.dump, executor, call_soon)

    def load(self) -> bytes | None:
        """The note; None if there is none, or none that can be read."""
        try:
            return load_document(self._path)
        except StorageError as error:
            # The half topic and the op topic say the same, in more words.
            _log.error("%s", error)
            return None

    def save(self) -> None:
        """Saves the note if it has changed."""
        self._saver.save_if_failed()
        if self._desk.is_changed:
            self._saver.save()

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self._saver.close()
        except StorageError as error:
            # As above: the next start reads more of the log, and that is all.
            _log.error("%s", error)
