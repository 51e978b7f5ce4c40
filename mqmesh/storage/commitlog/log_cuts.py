"""Where the log lost its end: from which commit-log offset on each later epoch has other records.

When the system dies, what was not synced is gone, and the log goes on in its place under a higher
epoch. Consumers and committed offsets may stand behind that place; by the epoch in which they
came there they can be told where to go on. A document, a JSON array of arrays
``[epoch, commitlog_offset]``, ascending: before that epoch, what stood behind the offset is lost.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.storage.files.atomic_file import load_document, save_document, take_room
from mqmesh.units import KIB, MAX_OFFSET

log = logging.getLogger(__name__)

NAME: Final = "log-cuts"
MOST_CUTS: Final = 10_000
"""Of more, the oldest ones become one: who is older than that repeats more than he must."""

RETRY_MS: Final = 1_000
"""How often is looked whether there is room again."""
_ROOM_BYTES: Final = 4 * KIB
"""For further cuts; taken while there is some, since a cut may come when the disk is full."""

_Cut = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)],
    Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)],
]


Submit = Callable[[Callable[[], bool]], "Future[bool]"]
"""Has a helper thread do something."""


class LogCuts:
    """The cuts of a store's log.

    Attributes:
        settled: They are on the disk, with room for a further one.
    """

    def __init__(self, path: Path) -> None:
        """Reads the document.

        Args:
            path: Its file.

        Raises:
            StorageError: It cannot be read.
        """
        self._path = path
        self._cuts: list[_Cut] = []
        self._is_saved = True
        self._retry: Future[bool] | None = None
        self._next_ms = 0
        document = None
        try:
            document = load_document(path)
            if document is not None:
                self._cuts = msgspec.json.decode(document, type=list[_Cut])
        except (CorruptRecord, msgspec.MsgspecError) as error:
            # Markers in the log tell of most; what was committed is bounded by its end as ever.
            log.error("where the log was cut before is not known any more: %s", error)
        self.settled = take_room(path, len(document or b"") + _ROOM_BYTES)

    def add(self, epoch: int, commitlog_offset: int) -> None:
        """Notes, durably, that an epoch begins at an offset and what stood behind it is lost.

        Without any room it is known in this life only, until there is some (``tick``); the marker
        in the log tells of it, too.

        Raises:
            StorageError: It cannot be saved for another reason.
        """
        self._cuts = [cut for cut in self._cuts if cut[0] < epoch]
        self._cuts.append((epoch, commitlog_offset))
        while len(self._cuts) > MOST_CUTS:
            (_, first), (later, second) = self._cuts[:2]
            self._cuts[:2] = [(later, min(first, second))]
        try:
            self.settled = self._save()
        except DiskFull as error:
            self.settled = self._is_saved = False
            log.error("where the log was cut is not known to the next start yet: %s", error)

    def tick(self, now_ms: int, submit: Submit) -> None:
        """Saves cuts, or takes the room for the next, if there is room for that at last.

        Args:
            now_ms: Monotonic time.
            submit: Has a helper thread do it; nothing waits for that.
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
            return take_room(self._path, len(msgspec.json.encode(self._cuts)) + _ROOM_BYTES)
        settled = self._save()
        self._is_saved = True
        return settled

    def _save(self) -> bool:
        return save_document(self._path, msgspec.json.encode(self._cuts), room_bytes=_ROOM_BYTES)

    def since(self, epoch: int) -> int | None:
        """What epochs up to this one had at or behind a commit-log offset is lost; None if nothing.

        Args:
            epoch: Newest that somebody knows.
        """
        return min((at for later, at in self._cuts if later > epoch), default=None)
