"""Brings the pages in the page cache behind the synced mark to the disk, before recovery reads
them.

After a crash, pages that are read may be in the page cache only, see ``disk_check.py``. A segment
that is the same on the disk stays as it is. All of any other is copied into a new file. Writing
into the same file again is not enough, since the system may also hold newer states of its blocks
than the disk. The new file is synced and takes the name of the old one. A crash leaves one of the
two, and ``Segments`` removes an unfinished new one. If the disk has no room for the copy, pages are
dropped and written anew one by one, and the file is compared with the disk once more; if it still
differs, this is logged, since a full disk must not keep the store from being read.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mqmesh.private_files import FILE_MODE
from mqmesh.storage.files.atomic_file import NO_ROOM, storage_error, sync_directory
from mqmesh.storage.log.disk_check import DiskCheck
from mqmesh.storage.log.scan import data_ranges
from mqmesh.storage.log.segments import Segment, Segments
from mqmesh.units import MIB

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 2 * MIB
"""Pages come and go in groups of at most so many bytes."""
SECTOR_BYTES: Final = 4096
"""Size of the parts in which a piece is read that cannot be read at once."""


def rewrite(segments: Segments, since: int, on_piece: Callable[[int], None]) -> None:
    """Makes sure that the disk has the same bytes as the log's files. No file may be mapped.

    Args:
        segments: Files of the log.
        since: Commit-log offset before which the log was synced without an error.
        on_piece: Called with the commit-log offset of each compared or copied piece; may raise.

    Raises:
        StorageError: The disk reports an error; of each file the old or the new one is there.
    """
    for segment in list(segments):
        if segment.end <= since:
            continue
        with _errors_of(segment):
            start = max(0, since - segment.start)
            if _is_on_disk(segment, start, on_piece):
                continue
            with contextlib.closing(_Copy(segment, on_piece)) as copy:
                if copy.make(segments.directory):
                    continue
                copy.write_in_place(start)
            if not _is_on_disk(segment, start, on_piece):
                _report_in_place(segment)


def _is_on_disk(segment: Segment, start: int, on_piece: Callable[[int], None]) -> bool:
    check = DiskCheck(segment.path, start, lambda position: on_piece(segment.start + position))
    with contextlib.closing(check):
        return check.is_on_disk()


class _Copy:
    """One segment, and the file that is to replace it."""

    def __init__(self, segment: Segment, on_piece: Callable[[int], None]) -> None:
        self._segment = segment
        self._on_piece = on_piece
        self._old = os.open(segment.path, os.O_RDWR)
        self._new = -1
        self._unreadable_bytes = 0

    def close(self) -> None:
        """Closes the files; an unfinished copy is removed."""
        for fd in (self._old, self._new):
            if fd >= 0:
                os.close(fd)
        self._old = self._new = -1

    def make(self, directory: Path) -> bool:
        """Copies the segment and puts the copy in its place, durably; False if there is no room."""
        segment = self._segment
        log.info("%s is copied: not all of it is known to be on the disk", segment.path)
        self._new = os.open(_new_path(segment), os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        if not self._has_room():
            return False
        for position, piece in self._pieces(0):
            _write(self._new, piece, position)
            self._on_piece(segment.start + position)
        os.fdatasync(self._new)
        if self._unreadable_bytes:
            self._keep_old()
        os.rename(_new_path(segment), segment.path)
        sync_directory(directory)
        segment.note_blocks(os.fstat(self._new))
        return True

    def write_in_place(self, start: int) -> None:
        """Writes all bytes behind a position over themselves, with new pages in the page cache."""
        for position, piece in self._pieces(start - start % PIECE_BYTES):
            # A kill between these two calls loses a piece that the disk may not have had anyway.
            os.posix_fadvise(self._old, position, len(piece), os.POSIX_FADV_DONTNEED)
            _write(self._old, piece, position)
            self._on_piece(self._segment.start + position)

    def _has_room(self) -> bool:
        """Allocates the blocks that the new file will need."""
        segment = self._segment
        try:
            os.ftruncate(self._new, os.fstat(self._old).st_size)
            for low, high in list(data_ranges(self._old, 0, segment.size)):
                os.posix_fallocate(self._new, low, high - low)
        except OSError as error:
            os.unlink(_new_path(segment))
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def _pieces(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the file's data from a position on, except for holes and unreadable bytes.

        It reads and writes: a copy that the file system makes may share blocks of the disk.
        """
        for low, high in list(data_ranges(self._old, start, self._segment.size)):
            position, size = low, PIECE_BYTES
            while position < high:
                # Groups of pages do not reach over multiples of a piece.
                wanted = min(size, high - position, PIECE_BYTES - position % PIECE_BYTES)
                try:
                    piece = os.pread(self._old, wanted, position)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    if size > SECTOR_BYTES:
                        size = SECTOR_BYTES
                        continue
                    self._unreadable_bytes += wanted
                    position += wanted
                    continue
                if not piece:
                    break
                yield position, piece
                position += len(piece)

    def _keep_old(self) -> None:
        """Gives the old file a second name, since the new one lacks unreadable bytes."""
        number = 1
        while Path(aside := f"{self._segment.path}.damaged-{number}").exists():
            number += 1
        os.link(self._segment.path, aside)
        log.error(
            "%d bytes of %s could not be read and are missing in its copy; the old file is kept as "
            "%s",
            self._unreadable_bytes,
            self._segment.path,
            aside,
        )


def _report_in_place(segment: Segment) -> None:
    log.error(
        "%s cannot be copied, it was written again in its place: there is no room for %d bytes "
        "more on its disk (store_path_root_dir; a smaller mapped_file_size_commit_log needs less "
        "the next time). If a sync failed before, a power cut may still take what was written "
        "since",
        segment.path,
        segment.disk_bytes,
    )


@contextlib.contextmanager
def _errors_of(segment: Segment) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, f"{segment.path} cannot be written again") from error


def _new_path(segment: Segment) -> str:
    return segment.path + ".new"


def _write(fd: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, position)
        view, position = view[count:], position + count
