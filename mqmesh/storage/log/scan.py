"""Reads the log record by record and checks everything: for recovery, repair, verification.

``record.py`` defines the checks of a record.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from mqmesh.batch.record_batch import HEADER_SIZE, MAGIC, MAX_BATCH_BYTES
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.log.control_record import CONTROL_RECORD_MAGIC
from mqmesh.storage.log.mapped_file import ScannedFile
from mqmesh.storage.log.record import (
    OFFSET_POSITION,
    Record,
    RecordCheck,
    RecordGroup,
    begins_group,
    record_size,
)
from mqmesh.storage.log.segments import Segment, SegmentList
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import MAX_OFFSET, MIB

WINDOW_BYTES: Final = 1 * MIB
EVERYTHING: Final = MAX_OFFSET // 2
"""An offset behind the end of any log."""
_ZEROS: Final = bytes(WINDOW_BYTES)


class Damaged(msgspec.Struct, frozen=True, gc=False):
    """A stretch of the log that holds no good record.

    Attributes:
        start: Commit-log offset of its first byte.
        end: Commit-log offset at which the log goes on.
        reason: Reason why the bytes are not valid.
    """

    start: int
    end: int
    reason: str


class LogScanner:
    """Reads records through a window of its own. It never writes."""

    def __init__(
        self,
        segments: SegmentList,
        *,
        key: StoreKey,
        store_id: int | None,
        on_piece: Callable[[int], None] = lambda offset: None,
    ) -> None:
        """Starts with an empty window.

        Args:
            segments: Files of the log.
            key: Key of the store.
            store_id: Store id that records must have; None takes that of the first record read.
            on_piece: Called with the start of each of the ``pieces``; may raise to end the search.
        """
        self._on_piece = on_piece
        self._segments = segments
        self._check = RecordCheck(key, store_id)
        self._segment: Segment | None = None
        self._fd = -1
        self._mapped: ScannedFile | None = None
        self._window = memoryview(b"")
        self._window_start = 0

    @property
    def store_id(self) -> int | None:
        """Store id that records must have; None until the first one was read."""
        return self._check.store_id

    def close(self) -> None:
        """Closes the file that was read last."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._segment = self._mapped = None
            self._window = memoryview(b"")

    def read(self, commitlog_offset: int, *, epoch: int) -> Record:
        """Read the record at an offset.

        Args:
            commitlog_offset: Start of the record.
            epoch: Epoch of the record before, 0 if that is not known. A record with a lower epoch
                is not good, nor is one that exceeds it by more than ``MOST_EPOCHS_AT_ONCE``.

        Raises:
            CorruptRecord: No good record begins there.
            StorageError: The record is of a version that this program does not know, or the disk
                reports an error.
        """
        segment = self._segments.find(commitlog_offset)
        if segment is None:
            raise CorruptRecord("no file holds this part of the log")
        head = self._view(segment, commitlog_offset, HEADER_SIZE)
        size = record_size(head)
        if bytes(head[:4]) == MAGIC:
            self._check.ours(head)
        view = self._view(segment, commitlog_offset, size)
        return self._check.record(view, commitlog_offset, epoch=epoch, segment_end=segment.end)

    def walk(
        self,
        start: int,
        *,
        epoch: int,
        beyond: Callable[[int, int], int | None],
        stop: int = EVERYTHING,
        is_lost: Callable[[int], bool] = lambda start: False,
    ) -> Iterator[Record | Damaged]:
        """Yield the records of a stretch, in order, and the damaged ranges between them.

        Records of a group are yielded when all of them were read. A group that is not whole ends
        the walk at its marker, unless the log goes on behind the group: then its bad record is
        reported as damaged, or the whole group.

        Args:
            start: Start of the first record.
            epoch: As for ``read``.
            beyond: Finds where the log goes on behind a bad record. It gets the offset of that
                record and the epoch of the one before; None ends the walk.
            stop: Records that begin at this commit-log offset or behind are not yielded.
            is_lost: Judges, by its start, a group that is not whole and behind which the log goes
                on: True if the rest of the group does not count either.

        Raises:
            StorageError: As for ``read``.
        """
        position = start
        group: RecordGroup | None = None
        while position < stop or group is not None:
            try:
                record = self.read(position, epoch=epoch)
                if group is not None:
                    group.take(record)
            except CorruptRecord as error:
                if group is not None:
                    if beyond(group.end - 1, epoch) is None:
                        return
                    if is_lost(group.start):
                        yield Damaged(group.start, group.end, f"a group lacks a record: {error}")
                        position, group = group.end, None
                        continue
                    yield from _before(stop, group.records)
                    group = None
                    if position >= stop:
                        return
                following = beyond(position, epoch)
                if following is None:
                    return
                yield Damaged(position, following, str(error))
                position = following
                continue
            epoch, position = record.epoch, record.end
            if group is not None:
                if group.is_whole:
                    yield from _before(stop, group.records)
                    group = None
            elif begins_group(record):
                group = RecordGroup(record)
            else:
                yield record

    def resync(self, start: int, stop: int, *, epoch: int) -> int | None:
        """Find the first good record behind a bad one.

        Args:
            start: Start of the bad record.
            stop: Commit-log offset before which the good record must begin.
            epoch: As for ``read``.

        Returns:
            Commit-log offset of the good record, None if there is none.
        """
        for piece_start, piece in self.pieces(start + 1, stop):
            found = self._first_good(piece_start, piece, stop, epoch)
            if found is not None:
                return found
        return None

    def _first_good(self, piece_start: int, piece: bytes, stop: int, epoch: int) -> int | None:
        places = []
        for magic in (MAGIC, CONTROL_RECORD_MAGIC):
            place = piece.find(magic)
            while place >= 0:
                places.append(place)
                place = piece.find(magic, place + 1)
        for place in sorted(places):
            offset = piece_start + place
            # Before the costly checks: does the record at least claim to be at this place?
            claim = piece[place + OFFSET_POSITION : place + OFFSET_POSITION + 8]
            if offset >= stop or int.from_bytes(claim, "little") != offset:
                continue
            try:
                self.read(offset, epoch=epoch)
            except CorruptRecord:
                continue
            return offset
        return None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield data of the files between two offsets, without holes that were never written.

        Pieces of one stretch overlap by the bytes of a record's magic and offset.
        """
        overlap = OFFSET_POSITION + 8
        for segment in list(self._segments):
            low, high = max(start, segment.start), min(stop + overlap, segment.end)
            if low >= high:
                continue
            try:
                fd = os.open(segment.path, os.O_RDONLY)
            except OSError:
                continue
            try:
                # All ranges are listed before the first is read: reading ahead turns holes into
                # data.
                ranges = list(data_ranges(fd, low - segment.start, high - segment.start))
                for position, range_end in ranges:
                    while position < range_end:
                        piece = os.pread(fd, min(WINDOW_BYTES, range_end - position), position)
                        self._on_piece(segment.start + position)
                        yield segment.start + position, piece
                        if position + len(piece) >= range_end or len(piece) <= overlap:
                            break
                        position += len(piece) - overlap
            except OSError as error:
                raise storage_error(error, f"{segment.path} cannot be read") from error
            finally:
                os.close(fd)

    def last_byte(self, start: int) -> int:
        """Return the end of the last byte that is not zero; ``start`` if there is none after it."""
        last = start
        for piece_start, piece in self.pieces(start, EVERYTHING):
            if piece != _ZEROS[: len(piece)]:
                last = max(last, piece_start + len(piece.rstrip(b"\0")))
        return last

    def _view(self, segment: Segment, start: int, size: int) -> memoryview:
        """Return up to ``size`` bytes from an offset, fewer where the file ends."""
        size = min(size, segment.end - start)
        if segment is not self._segment:
            self._open(segment)
            self._window_start, self._window = start, memoryview(b"")
        low = start - self._window_start
        if low < 0 or low + size > len(self._window):
            assert size <= MAX_BATCH_BYTES
            self._look(segment, start, min(max(size, WINDOW_BYTES), segment.end - start))
            low = 0
        return self._window[low : low + size]

    def _look(self, segment: Segment, start: int, size: int) -> None:
        """Moves the window: a view of the map, or a copy where no view can be made."""
        position = start - segment.start
        window = None if self._mapped is None else self._mapped.view(position, size)
        if window is None:
            window = memoryview(bytearray(size))
            window = window[: self._fill(segment, window, position)]
        self._window_start, self._window = start, window

    def _fill(self, segment: Segment, view: memoryview, file_position: int) -> int:
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], file_position + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise storage_error(error, f"{segment.path} cannot be read") from error
        return done

    def _open(self, segment: Segment) -> None:
        if segment is self._segment:
            return
        self.close()
        try:
            self._fd = os.open(segment.path, os.O_RDONLY)
        except OSError as error:
            raise CorruptRecord(f"{segment.path} cannot be opened: {error.strerror}") from error
        with contextlib.suppress(OSError):
            self._mapped = ScannedFile(self._fd)  # else it is read by calls
        self._segment = segment


def _before(stop: int, records: list[Record]) -> Iterator[Record]:
    return (record for record in records if record.start < stop)


def data_ranges(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Parts of a file that may hold other bytes than zeros that were never written.

    Args:
        fd: Descriptor, open for reading.
        start: First position in the file.
        stop: Position behind the last; the parts end with the file.

    Returns:
        Pairs of positions, ascending.
    """
    position = start
    while position < stop:
        try:
            low = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            yield position, stop
            return
        if low >= stop:
            return
        high = min(os.lseek(fd, low, os.SEEK_HOLE), stop)
        yield low, high
        position = high
