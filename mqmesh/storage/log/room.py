"""Room on the disk for the log, allocated before anything is written there.

The file of a segment has its full size from the beginning, but no blocks: a log with few bytes
takes little of the disk. Blocks are allocated ahead of the log's end, as many bytes as the log
holds already, but at least ``allocate_ahead_bytes``, at most a segment, and never more than a
quarter of the room that is left. A record is placed only where its blocks are allocated, so no
write and no store into a map ever meets a disk without room.

Not thread-safe: helper threads only allocate blocks, and the log's thread notes that they did.
"""

import errno
import logging
import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from mqmesh.errors import StorageError
from mqmesh.storage.files.atomic_file import NO_ROOM, storage_error
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import SpaceOf
from mqmesh.storage.log.segments import Segment

log = logging.getLogger(__name__)

PART_OF_ROOM: Final = 4
"""Divisor of the room that is left: at most this part of it is allocated ahead."""


class LogRoom:
    """Takes blocks for the segments of one log.

    Attributes:
        refusal: Reason why the last attempt to allocate room failed; None if it succeeded.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ahead_bytes: int,
        keep_free_bytes: int,
        chores: Chores,
        space_of: SpaceOf,
    ) -> None:
        """Takes nothing yet.

        Args:
            directory: Directory of the segments.
            ahead_bytes: Smallest number of bytes to allocate at a time.
            keep_free_bytes: Room that stays on the disk for everything else.
            chores: Thread that allocates blocks for which no writer waits.
            space_of: Measures the free space of the disk.
        """
        self.refusal: str | None = None
        self._directory = directory
        self._ahead_bytes = ahead_bytes
        self._keep_free_bytes = keep_free_bytes
        self._chores = chores
        self._space_of = space_of
        self._requested: tuple[Segment, int, Future[None]] | None = None

    def bytes_ahead(self, held_bytes: int, segment_size: int) -> int:
        """Return the number of bytes to allocate ahead of the log's end.

        Args:
            held_bytes: Bytes that the log holds.
            segment_size: Size of a new segment.
        """
        return min(max(held_bytes, self._ahead_bytes), segment_size)

    def take(self, segment: Segment, needed: int) -> None:
        """Allocates blocks of a segment and waits: the needed ones, and a step more if possible.

        Args:
            segment: The segment that needs them.
            needed: Commit-log offset up to which blocks are needed, at most the segment's end.

        Raises:
            DiskFull: The disk has fewer free blocks than are needed.
            StorageError: The system reports another error.
        """
        assert needed <= segment.end
        start = segment.allocated_through
        if needed <= start:
            return
        try:
            through = self._through(segment, start + self._ahead_bytes, least=needed)
            try:
                _allocate(segment, start, through)
            except OSError as error:
                # Another process was quicker, or a quota is smaller than the disk.
                if error.errno not in NO_ROOM or through == needed:
                    raise
                through = needed
                _allocate(segment, start, through)
        except OSError as error:
            refused = storage_error(
                error,
                f"no room for {needed - start} bytes of the log in {self._directory}, where "
                f"{self._keep_free_bytes} bytes stay free (disk_reserve_bytes)",
            )
            self._refuse(refused)
            raise refused from error
        self._note(segment, through)

    def ask(self, segment: Segment, wanted: int) -> None:
        """Makes a helper thread allocate blocks of a segment, as many as fit; returns at once.

        Args:
            segment: The segment that gets the blocks.
            wanted: Commit-log offset up to which blocks are wanted.
        """
        if self._requested is not None:
            return
        start = segment.allocated_through
        try:
            through = self._through(segment, wanted, least=start)
        except OSError:
            return  # A writer that needs the room will try again, and gets the error.
        if through - start >= min(self._ahead_bytes, segment.end - start):
            future = self._chores.submit(partial(_allocate, segment, start, through))
            self._requested = segment, through, future

    def poll(self) -> None:
        """Notes the blocks that the helper thread has allocated meanwhile."""
        if self._requested is None or not self._requested[2].done():
            return
        segment, through, future = self._requested
        self._requested = None
        # After a failure, a writer that needs the room will try again, and gets the error.
        if future.exception() is None:
            self._note(segment, through)

    def _through(self, segment: Segment, wanted: int, *, least: int) -> int:
        start = segment.allocated_through
        room = max(self._space_of(self._directory).available - self._keep_free_bytes, 0)
        # Blocks that an earlier run has allocated are there on a full disk, too.
        room += segment.spare_bytes
        if least - start > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = max(room // PART_OF_ROOM, min(room, self._ahead_bytes))
        return max(least, min(wanted, segment.end, start + part))

    def _note(self, segment: Segment, through: int) -> None:
        segment.allocated_through = max(segment.allocated_through, through)
        if self.refusal is not None:
            log.warning("there is room for the log again, writing goes on")
            self.refusal = None

    def _refuse(self, error: StorageError) -> None:
        if self.refusal is None:
            log.error("writes are refused: %s", error)
        self.refusal = str(error)


def _allocate(segment: Segment, start: int, through: int) -> None:
    # It uses a descriptor of its own: the segment's may be closed meanwhile.
    fd = os.open(segment.path, os.O_RDWR)
    try:
        os.posix_fallocate(fd, start - segment.start, through - start)
    finally:
        os.close(fd)
