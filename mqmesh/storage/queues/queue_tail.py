"""The tail of a consume queue: entries that are not written yet, as one row for each batch.

Files have one entry for each message, so that a multiplication turns a queue offset into a
position. In memory one row for each batch is enough. It takes 32 bytes instead of 20 for each
message, so tails can wait long enough to make writing thousands of queues cheap, and a batch is
found in them without a search for its end.
"""

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from mqmesh.batch.payload import Buffer

_ROW = struct.Struct("<QIQ")
ROW_BYTES: Final = _ROW.size + 8
"""Memory of a row: offset, size and tag hash of the batch, and the queue offset behind it."""

NO_HASHES: Final = b""


class QueueTail:
    """Rows of batches, from one queue offset on.

    Attributes:
        start: Queue offset of the first message.
        ends: Queue offsets behind each batch, ascending.
        bytes: Memory that the rows take.
    """

    __slots__ = ("_hashes", "_rows", "bytes", "ends", "start")

    def __init__(self, start: int) -> None:
        """Starts empty.

        Args:
            start: Queue offset of the next message.
        """
        self.start = start
        self.bytes = 0
        self.ends = array("q")
        self._rows = bytearray()
        # Only for batches whose messages differ in their tags; by number of the row.
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def end(self) -> int:
        """Queue offset of the next message."""
        return self.ends[-1] if self.ends else self.start

    def append(
        self, commitlog_offset: int, size: int, message_count: int, tag_hashes: bytes
    ) -> int:
        """Adds a batch.

        Args:
            commitlog_offset: Commit-log offset of the batch.
            size: Size in bytes.
            message_count: Messages in it.
            tag_hashes: Tag hashes as in the batch's meta: 0, 8 or 8 bytes a message.

        Returns:
            Memory that the row takes, in bytes.
        """
        ends = self.ends
        added = ROW_BYTES
        shared = 0
        if tag_hashes:
            if len(tag_hashes) == 8:
                shared = int.from_bytes(tag_hashes, "little")
            else:
                self._hashes[len(ends)] = tag_hashes
                added += len(tag_hashes)
        self._rows += _ROW.pack(commitlog_offset, size, shared)
        ends.append((ends[-1] if ends else self.start) + message_count)
        self.bytes += added
        return added

    def index(self, queue_offset: int) -> int:
        """Return the number of the row with a message."""
        assert self.start <= queue_offset < self.end
        return bisect_right(self.ends, queue_offset)

    def row(self, number: int) -> tuple[int, int, int]:
        """Return offset in the log, size and shared tag hash of a batch."""
        offset, size, shared = _ROW.unpack_from(self._rows, number * _ROW.size)
        return offset, size, shared

    def base(self, number: int) -> int:
        """Return the queue offset of a batch's first message."""
        return self.ends[number - 1] if number else self.start

    def hashes(self, number: int) -> Buffer | None:
        """Return one u64 a message, little endian, if a batch's messages differ in their tags."""
        return self._hashes.get(number)

    def batches(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield all rows, as ``append`` got them."""
        base = self.start
        for number, end in enumerate(self.ends):
            offset, size, shared = self.row(number)
            hashes = self._hashes.get(number)
            if hashes is None:
                hashes = shared.to_bytes(8, "little") if shared else NO_HASHES
            yield offset, size, end - base, hashes
            base = end
