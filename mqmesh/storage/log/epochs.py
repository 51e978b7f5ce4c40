"""The epochs of a log: the number and the start of each.

An epoch begins when a writer begins: a leader, or a store whose log may have lost its end, since
other records will take the place of the lost ones. The table is on the disk before the first record
of an epoch is, and is kept as long as the log. So a consumer that had read beyond such a place, and
knows the epoch in which it did, can be sent to the offset where it has to go on. Two logs with a
common beginning find the offset at which they differ by comparing their tables.

The file is a document, a JSON array of arrays ``[epoch, start_offset]``, both ascending. Every
record has its epoch, too: a lost table is made again from the log.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.log_identity import EpochStart
from mqmesh.storage.files.atomic_file import load_document, save_document, take_room
from mqmesh.units import KIB

log = logging.getLogger(__name__)

NAME: Final = "epochs"
MOST_EPOCHS: Final = 10_000
"""Limit beyond which the two oldest epochs become one: older readers repeat more than they must."""

RETRY_MS: Final = 1_000
"""Interval of looks whether there is room again."""
_ROOM_BYTES: Final = 4 * KIB
"""Room for further epochs, allocated ahead, since an epoch may begin when the disk is full."""


def decode_epochs(document: bytes) -> list[EpochStart]:
    """Reads the document.

    Raises:
        CorruptRecord: The bytes are no such document.
    """
    try:
        return msgspec.json.decode(document, type=list[EpochStart])
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"the epochs cannot be decoded: {error}") from error


def encode_epochs(starts: Sequence[EpochStart]) -> bytes:
    """Makes the document."""
    return msgspec.json.encode(starts)


Submit = Callable[[Callable[[], bool]], "Future[bool]"]
"""Runs a function in a helper thread."""


class EpochTable:
    """The epochs of a store's log.

    Attributes:
        is_known: False until the epochs of the log's records are known: the document is lost, or
            there was none.
        settled: The epochs are on the disk, with room for a further one.
    """

    def __init__(self, path: Path) -> None:
        """Reads the document.

        Args:
            path: File of the document.

        Raises:
            StorageError: The file cannot be read.
        """
        self._path = path
        self._starts: list[EpochStart] = []
        self._is_saved = True
        self._retry: Future[bool] | None = None
        self._next_ms = 0
        document = None
        try:
            document = load_document(path)
            if document is not None:
                self._starts = decode_epochs(document)
        except CorruptRecord as error:
            log.error("the epochs of the log are looked for in the log itself: %s", error)
        self.is_known = bool(self._starts)
        self.settled = take_room(path, len(document or b"") + _ROOM_BYTES)

    @property
    def starts(self) -> Sequence[EpochStart]:
        """All epochs, ascending; do not change the sequence."""
        return self._starts

    @property
    def newest(self) -> int:
        """The newest epoch that has begun, 0 if none has."""
        return self._starts[-1].epoch if self._starts else 0

    def begin(self, epoch: int, start_offset: int) -> None:
        """Notes, durably, that an epoch begins, before a record of it is written.

        Older records at or behind its start are lost, or void. On a disk without any room the
        epoch is only in memory until ``tick`` finds room; its records name it, too.

        Args:
            epoch: An epoch higher than all before, or the newest once more.
            start_offset: Commit-log offset of its first record.

        Raises:
            StorageError: The table cannot be saved for another reason than room.
        """
        if self.learn(epoch, start_offset):
            self.save()

    def learn(self, epoch: int, start_offset: int) -> bool:
        """Notes an epoch, for ``save``; True if it was not known."""
        start = EpochStart(epoch, start_offset)
        if self._starts and self._starts[-1] == start:
            return False
        # The log has no records any more of epochs that begin there or behind, or that would
        # follow.
        kept = [s for s in self._starts if s.epoch < epoch and s.start_offset < start_offset]
        self._starts = [*kept, start]
        while len(self._starts) > MOST_EPOCHS:
            oldest, second = self._starts[:2]
            self._starts[:2] = [EpochStart(second.epoch, oldest.start_offset)]
        self._is_saved = False
        return True

    def cut(self, end_offset: int) -> None:
        """Forgets, durably, epochs that begin at or behind a commit-log offset: the log ends there.

        Raises:
            DiskFull: No room.
            StorageError: The table cannot be saved.
        """
        kept = [start for start in self._starts if start.start_offset < end_offset]
        if len(kept) < len(self._starts):
            self._starts, self._is_saved = kept, False
            self._save()

    def save(self) -> None:
        """Makes learned epochs durable; without room they stay in memory, as with ``begin``.

        Raises:
            StorageError: The table cannot be saved for another reason than room.
        """
        if self._is_saved:
            return
        try:
            self.settled = self._save()
        except DiskFull as error:
            self.settled = False
            log.error("an epoch of the log is not known to the next start yet: %s", error)

    def tick(self, now_ms: int, submit: Submit) -> None:
        """Saves epochs, or allocates room for the next, as soon as the disk has room.

        Args:
            now_ms: Monotonic time.
            submit: Runs a function in a helper thread; nothing waits for it.
        """
        if self.settled or now_ms < self._next_ms:
            return
        if self._retry is None:
            self._retry = submit(self._settle)
        elif self._retry.done():
            error = self._retry.exception()
            if error is not None and not isinstance(error, DiskFull):
                log.warning("%s", error)
            self.settled = error is None and self._retry.result()
            self._retry, self._next_ms = None, now_ms + RETRY_MS

    def _settle(self) -> bool:
        if self._is_saved:
            return take_room(self._path, len(encode_epochs(self._starts)) + _ROOM_BYTES)
        return self._save()

    def _save(self) -> bool:
        starts = self._starts
        settled = save_document(self._path, encode_epochs(starts), room_bytes=_ROOM_BYTES)
        self._is_saved = starts is self._starts
        return settled

    def lost_since(self, epoch: int) -> int | None:
        """Return where records of later epochs begin; older epochs' records there are lost.

        Args:
            epoch: Newest epoch that the reader knows.

        Returns:
            Commit-log offset; None if there is no later epoch.
        """
        return next((start.start_offset for start in self._starts if start.epoch > epoch), None)
