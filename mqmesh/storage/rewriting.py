"""Takes records that recovery has read to the disk: in a new file, which replaces their segment.

What is read after a crash may be in the page cache only. A sync that failed has told so once;
since then the system counts the pages as clean, every later sync succeeds, and the next power cut
shows what the disk has. To write into the same file again is not enough: of its blocks, too, the
system may know more than the disk, and then what was written and synced again is lost all the
same. So all that the segment holds goes into a new file. That is synced and takes the name of the
old one; a crash leaves the one or the other, and ``Segments`` removes a new one that was not
finished. Where the disk has no room for that, records are written over themselves after all, and
the log says so: a full disk must not keep the store from being read.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mqmesh.payload import Buffer
from mqmesh.private_files import FILE_MODE
from mqmesh.storage.atomic_file import NO_ROOM, storage_error, sync_directory
from mqmesh.storage.log_scan import data_ranges
from mqmesh.storage.segments import Segment, Segments
from mqmesh.units import MIB

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 * MIB
SECTOR_BYTES: Final = 4096
"""Where a piece cannot be read, it is read in parts of this size."""


class Rewriting:
    """Copies one segment at a time, with the records as they were read and checked."""

    def __init__(self, segments: Segments, since: int, on_piece: Callable[[int], None]) -> None:
        """Opens nothing yet.

        Args:
            segments: Files of the log.
            since: Commit-log offset before which all was synced without an error.
            on_piece: Told the commit-log offset of each piece that is copied; may raise.
        """
        self._segments = segments
        self._since = since
        self._on_piece = on_piece
        self._segment: Segment | None = None
        self._old = self._new = -1
        self._done = 0
        self._unreadable_bytes = 0

    def is_settled(self, commitlog_offset: int) -> bool:
        """Finishes the segment that is at work, if it ends before an offset.

        Args:
            commitlog_offset: Behind the record that was written last.

        Returns:
            False while a segment is copied: what is before the offset is not all in its place.

        Raises:
            StorageError: As ``finish``.
        """
        if self._segment is not None and commitlog_offset >= self._segment.end:
            self.finish()
        return self._segment is None

    def write(self, start: int, data: Buffer) -> None:
        """Writes a record, and what stands before it in its segment, unless it was synced before.

        Args:
            start: Its commit-log offset; higher than that of the record before.
            data: All its bytes, as they were read and checked.

        Raises:
            StorageError: The disk refuses; the old file is as it was.
        """
        if start + len(data) <= self._since:
            return
        self._begin(start)
        assert self._segment is not None
        position = start - self._segment.start
        with _errors_of(self._segment):
            if self._new >= 0:
                self._copy(position)
                self._done = position + len(data)
            _write(self._old if self._new < 0 else self._new, data, position)

    def replace(self, commitlog_offset: int) -> None:
        """Copies the segment of an offset although it has no good record there, and finishes.

        Raises:
            StorageError: The disk refuses; the old file is as it was.
        """
        if commitlog_offset >= self._since:
            self._begin(commitlog_offset)
        self.finish()

    def finish(self) -> None:
        """Copies what is left of the segment, if one is at work, and puts it in its place, durably.

        Raises:
            StorageError: The disk refuses; one of the two files is there.
        """
        segment = self._segment
        if segment is None:
            return
        if self._new < 0:
            self.close()  # who asked for all this syncs it
            return
        with _errors_of(segment):
            self._copy(segment.size)
            os.fdatasync(self._new)
            if self._unreadable_bytes:
                self._keep_old(segment)
            os.rename(_new_path(segment), segment.path)
            sync_directory(self._segments.directory)
            segment.note_blocks(os.fstat(self._new))
        self.close()

    def close(self) -> None:
        """Closes the files; what is not finished is given up."""
        for fd in (self._old, self._new):
            if fd >= 0:
                os.close(fd)
        self._old = self._new = -1
        self._segment = None

    def _begin(self, start: int) -> None:
        segment = self._segments.find(start)
        assert segment is not None
        if segment is self._segment:
            return
        self.finish()
        log.info("%s is copied: not all of it is known to be on the disk", segment.path)
        with _errors_of(segment):
            self._old = os.open(segment.path, os.O_RDWR)
            self._new = self._make(segment)
        self._segment = segment
        self._done = self._unreadable_bytes = 0

    def _make(self, segment: Segment) -> int:
        """The new file, with the blocks that it will need; -1 if there are not as many."""
        new = os.open(_new_path(segment), os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            os.ftruncate(new, os.fstat(self._old).st_size)
            for low, high in list(data_ranges(self._old, 0, segment.size)):
                os.posix_fallocate(new, low, high - low)
        except OSError as error:
            os.close(new)
            os.unlink(_new_path(segment))
            if error.errno not in NO_ROOM:
                raise
            log.error(
                "%s cannot be copied, it is written again in its place: there is no room for %d "
                "bytes more on its disk (store_path_root_dir; a smaller "
                "mapped_file_size_commit_log needs less the next time). If a sync failed before, "
                "a power cut may still take what was written since",
                segment.path,
                segment.disk_bytes,
            )
            return -1
        return new

    def _copy(self, stop: int) -> None:
        """Copies from where it is to a position, but for holes.

        By reading and writing: a copy that the file system makes may share what the disk has.
        """
        assert self._segment is not None
        for low, high in list(data_ranges(self._old, self._done, stop)):
            position, size = low, PIECE_BYTES
            while position < high:
                try:
                    piece = os.pread(self._old, min(size, high - position), position)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    if size > SECTOR_BYTES:
                        size = SECTOR_BYTES
                        continue
                    piece = b""
                    self._unreadable_bytes += min(size, high - position)
                    position += min(size, high - position)
                    continue
                if not piece:
                    break
                _write(self._new, piece, position)
                position += len(piece)
                self._on_piece(self._segment.start + position)
        self._done = stop

    def _keep_old(self, segment: Segment) -> None:
        """Gives the old file a second name, since the new one lacks what could not be read."""
        number = 1
        while Path(aside := f"{segment.path}.damaged-{number}").exists():
            number += 1
        os.link(segment.path, aside)
        log.error(
            "%d bytes of %s could not be read and are missing in its copy; the old file is kept as "
            "%s",
            self._unreadable_bytes,
            segment.path,
            aside,
        )


@contextlib.contextmanager
def _errors_of(segment: Segment) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, f"{segment.path} cannot be written again") from error


def _new_path(segment: Segment) -> str:
    return segment.path + ".new"


def _write(fd: int, data: Buffer, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, position)
        view, position = view[count:], position + count
