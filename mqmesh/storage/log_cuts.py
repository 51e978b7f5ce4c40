"""Where the log lost its end: from which commit-log offset on each later epoch has other records.

When the system dies, what was not synced is gone, and the log goes on in its place under a higher
epoch. Consumers and committed offsets may stand behind that place; by the epoch in which they
came there they can be told where to go on. A document, a JSON array of arrays
``[epoch, commitlog_offset]``, ascending: before that epoch, what stood behind the offset is lost.
"""

import logging
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.storage.atomic_file import load_document, save_document, take_room
from mqmesh.units import KIB, MAX_OFFSET

log = logging.getLogger(__name__)

NAME: Final = "log-cuts"
MOST_CUTS: Final = 10_000
"""Of more, the oldest ones become one: who is older than that repeats more than he must."""

_ROOM_BYTES: Final = 4 * KIB
"""For further cuts; taken while there is some, since a cut may come when the disk is full."""

_Cut = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)],
    Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)],
]


class LogCuts:
    """The cuts of a store's log."""

    def __init__(self, path: Path) -> None:
        """Reads the document.

        Args:
            path: Its file.

        Raises:
            StorageError: It cannot be read.
        """
        self._path = path
        self._cuts: list[_Cut] = []
        document = None
        try:
            document = load_document(path)
            if document is not None:
                self._cuts = msgspec.json.decode(document, type=list[_Cut])
        except (CorruptRecord, msgspec.MsgspecError) as error:
            # Markers in the log tell of most; what was committed is bounded by its end as ever.
            log.error("where the log was cut before is not known any more: %s", error)
        take_room(path, len(document or b"") + _ROOM_BYTES)

    def add(self, epoch: int, commitlog_offset: int) -> None:
        """Notes, durably, that an epoch begins at an offset and what stood behind it is lost.

        Without any room it is known in this life only; the marker in the log tells of it, too.

        Raises:
            StorageError: It cannot be saved for another reason.
        """
        self._cuts = [cut for cut in self._cuts if cut[0] < epoch]
        self._cuts.append((epoch, commitlog_offset))
        while len(self._cuts) > MOST_CUTS:
            (_, first), (later, second) = self._cuts[:2]
            self._cuts[:2] = [(later, min(first, second))]
        document = msgspec.json.encode(self._cuts)
        try:
            save_document(self._path, document, room_bytes=_ROOM_BYTES)
        except DiskFull as error:
            log.error("where the log was cut will not be known after the next start: %s", error)

    def since(self, epoch: int) -> int | None:
        """What epochs up to this one had at or behind a commit-log offset is lost; None if nothing.

        Args:
            epoch: Newest that somebody knows.
        """
        return min((at for later, at in self._cuts if later > epoch), default=None)
