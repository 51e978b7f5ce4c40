"""Writes records again that recovery has read, so that the next sync takes them to the disk.

What is read after a crash may be in the page cache only. A sync that failed has told so once; since
then the system counts the pages as clean, every later sync succeeds, and the next power cut shows
what the disk has. Only bytes that are written anew are synced anew.
"""

import os

from mqmesh.payload import Buffer
from mqmesh.storage.atomic_file import storage_error
from mqmesh.storage.segments import Segment, Segments


class Rewriting:
    """Writes records over themselves; keeps the segment open that it wrote to last."""

    def __init__(self, segments: Segments, since: int) -> None:
        """Opens nothing yet.

        Args:
            segments: Files of the log.
            since: Commit-log offset before which all was synced without an error.
        """
        self._segments = segments
        self._since = since
        self._segment: Segment | None = None
        self._fd = -1

    def write(self, start: int, data: Buffer) -> None:
        """Writes a record again, unless it was synced before.

        Args:
            start: Its commit-log offset.
            data: All its bytes, as they were read and checked.

        Raises:
            StorageError: The disk refuses.
        """
        if start + len(data) <= self._since:
            return
        segment = self._segments.find(start)
        assert segment is not None
        try:
            if segment is not self._segment:
                self.close()
                self._fd = os.open(segment.path, os.O_RDWR)
                self._segment = segment
            position = start - segment.start
            view = memoryview(data)
            while view:
                count = os.pwrite(self._fd, view, position)
                view, position = view[count:], position + count
        except OSError as error:
            raise storage_error(error, f"{segment.path} cannot be written again") from error

    def close(self) -> None:
        """Closes the file; nothing is synced by that."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._segment = None
