"""Keeps the half checkpoint on disk; see ``half_checkpoint``."""

import logging
from typing import Final

from mqmesh.errors import StorageError
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages
from mqmesh.roles.document_saver import MakeSaver, Read

TRANSACTIONS_FILE: Final = "transactions.json"

_log = logging.getLogger(__name__)


class HalfCheckpointFile:
    """The half checkpoint of one broker.

    Args:
        half_messages: Half messages of the broker.
        read: Reads a document by its name, None if there is none.
        make_saver: Makes what saves a document: of its name, and what makes its text.
    """

    def __init__(
        self, half_messages: PendingHalfMessages, read: Read, make_saver: MakeSaver
    ) -> None:
        self._half_messages = half_messages
        self._read = read
        self._saver = make_saver(TRANSACTIONS_FILE, half_messages.dump)

    def load(self) -> bytes | None:
        """The checkpoint; None if there is none, or none that can be read."""
        try:
            return self._read(TRANSACTIONS_FILE)
        except StorageError as error:
            # The half topic and the op topic say the same, in more words.
            _log.error("%s", error)
            return None

    def save(self) -> None:
        """Saves the checkpoint if it has changed."""
        self._saver.save_if_failed()
        if self._half_messages.is_changed:
            self._saver.save()

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self._saver.close()
        except StorageError as error:
            # As above: the next start reads more of the log, and that is all.
            _log.error("%s", error)
