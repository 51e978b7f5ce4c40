"""Reads the log record by record and checks everything: for recovery and verification.

A record counts only if it bears the check that the store's key makes, its own
commit-log offset is where it stands, its store id is this store's, its epoch is
that of the record before or somewhat later, and its checksums are right. So
neither zeros, nor what an earlier use of the disk left behind, nor a batch
inside of a message's body, whatever its sender knew, is taken for a record.
"""

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    MAGIC,
    MAX_BATCH_BYTES,
    VERSION,
    BatchHeader,
    check_stored,
)
from mqmesh.batch.store_check import bears_check
from mqmesh.checksum import crc32
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.log.mapped_file import ScannedFile
from mqmesh.storage.log.marker import (
    MARKER_MAGIC,
    MARKER_SIZE,
    MAX_MARKER_DATA,
    NOT_OURS,
    Marker,
    MarkerKind,
    decode_marker,
)
from mqmesh.storage.log.segments import Segment
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import MIB

WINDOW_BYTES: Final = 1 * MIB
ZEROS: Final = bytes(WINDOW_BYTES)
MOST_EPOCHS_AT_ONCE: Final = 1 << 24
"""By so much a record's epoch may exceed that of the one before; every failed write takes one."""
_CRC_POSITION: Final = 48
_VERSION_POSITION: Final = 56
_OFFSET_POSITION: Final = 8

_CRC_AND_SIZE = struct.Struct("<II")


class LogFiles(Protocol):
    """Where the segments of a log are: ``Segments``, or a view of who may only read."""

    def find(self, commitlog_offset: int) -> Segment | None:
        """The segment that an offset lies in, None if there is none."""

    def __iter__(self) -> Iterator[Segment]:
        """All of them, ascending."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A good record of the log; exactly one of ``batch`` and ``marker`` is there.

    Attributes:
        start: Its commit-log offset.
        end: Of the next record, which may stand in the next segment.
        epoch: Its epoch.
        batch: Header of a batch.
        marker: A marker.
        data: All its bytes; good until the scanner reads on.
    """

    start: int
    end: int
    epoch: int
    batch: BatchHeader | None
    marker: Marker | None
    data: memoryview


class LogScanner:
    """Reads records through a window of its own. Only looks, never writes."""

    def __init__(
        self,
        segments: LogFiles,
        *,
        key: StoreKey,
        store_id: int | None,
        on_piece: Callable[[int], None] = lambda offset: None,
    ) -> None:
        """Starts with an empty window.

        Args:
            segments: Files of the log.
            key: Of the store.
            store_id: That records must have; None takes that of the first record read.
            on_piece: Told where each of the ``pieces`` begins; may raise to end the search.
        """
        self._on_piece = on_piece
        self._segments = segments
        self._key = key
        self.store_id = store_id
        self._segment: Segment | None = None
        self._fd = -1
        self._mapped: ScannedFile | None = None
        self._window = memoryview(b"")
        self._window_start = 0

    def close(self) -> None:
        """Closes the file it read last."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._segment = self._mapped = None
            self._window = memoryview(b"")

    def read(self, commitlog_offset: int, *, epoch: int) -> Record:
        """The record at an offset.

        Args:
            commitlog_offset: Where it begins.
            epoch: Of the record before, 0 if that is not known; a lower one is none, nor is one
                that is higher by more than ``MOST_EPOCHS_AT_ONCE``.

        Raises:
            CorruptRecord: No good record begins there.
            StorageError: It is of a version that this program does not know, or the disk
                refuses to read.
        """
        segment = self._segments.find(commitlog_offset)
        if segment is None:
            raise CorruptRecord("no file holds this part of the log")
        view = self._view(segment, commitlog_offset, HEADER_SIZE)
        magic = bytes(view[:4])
        if magic == MAGIC:
            record = self._read_batch(segment, commitlog_offset, view)
        elif magic == MARKER_MAGIC:
            record = self._read_marker(segment, commitlog_offset)
        else:
            raise CorruptRecord(f"no record: it begins with {magic.hex() or 'nothing'}")
        if record.epoch < epoch or (epoch and record.epoch > epoch + MOST_EPOCHS_AT_ONCE):
            raise CorruptRecord(f"epoch {record.epoch} after epoch {epoch}")
        return record

    def _read_batch(self, segment: Segment, start: int, view: memoryview) -> Record:
        # First, since it is cheap: a body may be full of what looks like records.
        if len(view) < HEADER_SIZE or not bears_check(view, self._key.batch_check):
            raise CorruptRecord(NOT_OURS)
        if len(view) == HEADER_SIZE:
            _, size = _CRC_AND_SIZE.unpack_from(view, _CRC_POSITION)
            view = self._view(segment, start, min(size, MAX_BATCH_BYTES))
        try:
            header = check_stored(view)
        except CorruptBatch as error:
            self._refuse_newer(segment, start, view)
            raise CorruptRecord(str(error)) from error
        self._check_place(start, header.commitlog_offset, header.store_id)
        end = start + header.total_size
        return Record(start, end, header.epoch, header, None, view)

    def _refuse_newer(self, segment: Segment, start: int, view: memoryview) -> None:
        """A batch of a later version is good, only not for us: never cut it, never skip it."""
        if len(view) < HEADER_SIZE or view[_VERSION_POSITION] == VERSION:
            return
        # The checksums and the size stand at the same place in every version.
        version, crc, size = (
            view[_VERSION_POSITION],
            *_CRC_AND_SIZE.unpack_from(view, _CRC_POSITION),
        )
        if not HEADER_SIZE <= size <= MAX_BATCH_BYTES:
            return
        view = self._view(segment, start, size)
        if len(view) == size and crc32(view[_CRC_POSITION + 4 :]) == crc:
            raise StorageError(
                f"the record at {start} is of version {version}; this program knows version "
                f"{VERSION} and leaves the store alone"
            )

    def _read_marker(self, segment: Segment, start: int) -> Record:
        view = self._view(segment, start, MARKER_SIZE + MAX_MARKER_DATA)
        marker = decode_marker(view, store_check=self._key.marker_check)
        self._check_place(start, marker.commitlog_offset, marker.store_id)
        end = start + marker.total_size
        if marker.kind is MarkerKind.END:
            end = segment.end
        return Record(start, end, marker.epoch, None, marker, view[: marker.total_size])

    def _check_place(self, start: int, commitlog_offset: int, store_id: int) -> None:
        if commitlog_offset != start:
            raise CorruptRecord(f"the record belongs at {commitlog_offset}")
        if self.store_id is None:
            self.store_id = store_id
        if store_id != self.store_id:
            raise CorruptRecord(f"the record is of store {store_id:#x}, not {self.store_id:#x}")

    def resync(self, start: int, stop: int, *, epoch: int) -> int | None:
        """The first good record behind a bad one.

        Args:
            start: Where the bad one begins.
            stop: Look for records that begin before this.
            epoch: As for ``read``.

        Returns:
            Its commit-log offset, None if there is none.
        """
        for piece_start, piece in self.pieces(start + 1, stop):
            found = self._first_good(piece_start, piece, stop, epoch)
            if found is not None:
                return found
        return None

    def _first_good(self, piece_start: int, piece: bytes, stop: int, epoch: int) -> int | None:
        places = []
        for magic in (MAGIC, MARKER_MAGIC):
            place = piece.find(magic)
            while place >= 0:
                places.append(place)
                place = piece.find(magic, place + 1)
        for place in sorted(places):
            offset = piece_start + place
            # Before the costly checks: does it at least claim to stand here?
            claim = piece[place + _OFFSET_POSITION : place + _OFFSET_POSITION + 8]
            if offset >= stop or int.from_bytes(claim, "little") != offset:
                continue
            try:
                self.read(offset, epoch=epoch)
            except CorruptRecord:
                continue
            return offset
        return None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """What is in the files between two offsets, but for holes that were never written.

        Pieces of one stretch overlap by the bytes that a record's magic and offset take.
        """
        overlap = _OFFSET_POSITION + 8
        for segment in list(self._segments):
            low, high = max(start, segment.start), min(stop + overlap, segment.end)
            if low >= high:
                continue
            try:
                fd = os.open(segment.path, os.O_RDONLY)
            except OSError:
                continue
            try:
                # All of them before the first is read: reading ahead makes data of holes.
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

    def _view(self, segment: Segment, start: int, size: int) -> memoryview:
        """Up to ``size`` bytes from an offset, fewer where the file ends."""
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
        """Moves the window: a view of the map, or where that is not to be had, a copy."""
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


def data_ranges(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Parts of a file that may hold something else than zeros that were never written.

    Args:
        fd: Open for reading.
        start: Position in the file to begin at.
        stop: Position to end at; the parts end with the file.

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
