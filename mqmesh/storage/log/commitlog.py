"""The commit log: all batches of a broker, one behind the other.

The commit log is the only source of truth of the store; everything else is derived from it. Its
segments are mapped, and written where their blocks were taken before (``room.py``). A small write
is a store into pages that were brought in ahead. Every other write is one gathered ``os.pwritev``,
and the map shows its bytes as well. Large reads are views of pages that are in memory. All other
reads use ``os.pread``, which reports trouble with the disk by an exception instead of a signal.

Not thread-safe, except ``Segment.fd``, which the flush thread syncs.
"""

import errno
import logging
import os
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import HEADER_SIZE
from mqmesh.errors import CorruptRecord, OffsetOutOfRange, StorageError
from mqmesh.log_identity import MAX_EPOCH
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.interface import MAX_GROUP_BYTES, LogChunk
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    GROUP_DATA,
    GROUP_MARKER_SIZE,
    ControlKind,
    encode_control_record,
    group_markers,
)
from mqmesh.storage.log.epochs import EpochTable
from mqmesh.storage.log.maps import LogMaps
from mqmesh.storage.log.page_window import PageWindow
from mqmesh.storage.log.raw import chunk_of, records_of
from mqmesh.storage.log.record import Record, RecordCheck, RecordGroup
from mqmesh.storage.log.room import LogRoom
from mqmesh.storage.log.segments import Segment, Segments
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import KIB, MAX_OFFSET, CommitLogOffset

log = logging.getLogger(__name__)

MOST_PIECES: Final = 1024
"""Linux takes no more buffers in one call."""
JOIN_BELOW_BYTES: Final = 1024
"""Smaller pieces are copied together first: that costs less than handing them over."""
VIEW_BYTES: Final = 16 * KIB
"""Reads from this size on are views; a copy of fewer bytes costs no more, and keeps no map."""
MOST_STORED_BYTES: Final = 32 * KIB
"""Writes up to this size are stores, where pages are ready. Larger ones fill whole pages, which
a call need not zero before: they cost the machine more as stores."""
CHECK_MS: Final = 1_000
"""Interval of looks whether a mapped segment was cut or removed from outside."""

_Written = tuple[int, int, bytes]
"""Commit-log offset of a write, the end of its segment, and its bytes."""
_NOTHING: Final[_Written] = (-1, -1, b"")


class CommitLog:
    """Appends records and reads ranges of bytes.

    Attributes:
        key: Key that makes the checks of records.
        check: Check that only records of this log pass.
        end: Commit-log offset of the next record.
        epoch: Epoch of records that this process writes.
        store_id: Store id in every record.
        maps: Maps of the log's segments.
        unsynced_fds: Descriptors of segments with bytes that may not be durable.
        retire_at: Durable offset from which on ``retire`` has something to do.
    """

    def __init__(
        self,
        segments: Segments,
        files: OpenFiles,
        room: LogRoom,
        window: PageWindow,
        *,
        key: StoreKey,
        epochs: EpochTable,
        end: int,
        epoch: int,
        recorded_epoch: int,
        store_id: int,
    ) -> None:
        """Takes over a log whose end is known.

        A log without room for a further record can only be read, until there is room.

        Args:
            segments: Segments of the log.
            files: Descriptors for reading.
            room: Allocates blocks for the segments.
            key: Key of the store.
            window: Pages that are ready for stores; the log closes it.
            end: Commit-log offset of the next record.
            epochs: Epochs of the records; if they lack ``epoch``, it begins with the next record.
            epoch: Epoch of new records.
            recorded_epoch: Epoch of the newest record in the log, 0 if that is not known.
            store_id: Store id of new records.

        Raises:
            DiskFull: There is no segment to go on in, and none can be made.
        """
        self._segments = segments
        self._files = files
        self._room = room
        self.key = key
        self.check = RecordCheck(key, store_id)
        self._window = window
        self.maps = LogMaps()
        self.end = end
        self.epoch = epoch
        self.store_id = store_id
        self._epochs = epochs
        # The next record of our own begins an epoch.
        self._begins = epoch > epochs.newest
        self._recorded_epoch = recorded_epoch
        self._epoch_data = b""
        self._writing: list[Segment] = []
        self._retired: list[tuple[int, Segment]] = []
        self.retire_at = 0
        self.unsynced_fds: list[int] = []
        self._check_at_ms = 0
        self._stored_to = end
        # The last write of this epoch, for followers that have all bytes before it: no read is
        # needed.
        self._written = _NOTHING
        self._is_followed = False
        self._current = self._open(segments.find(end) or segments.get_or_make(end))
        self._current.allocated_through = end
        self._ask_from = end
        try:
            room.take(self._current, min(end + CONTROL_RECORD_SIZE, self._current.end))
        except StorageError:
            pass  # It is in the log, and every write will say it again.

    @property
    def start(self) -> int:
        """Commit-log offset of the oldest byte."""
        return self._segments.first.start

    @property
    def segments(self) -> Segments:
        """Segments of the log."""
        return self._segments

    @property
    def refusal(self) -> str | None:
        """Reason why there is no room to write; None while there is."""
        return self._room.refusal

    @property
    def recorded_epoch(self) -> int:
        """Epoch of the newest record in the log; 0 if that is not known."""
        return self._recorded_epoch if self._begins else self.epoch

    @property
    def fd(self) -> int:
        """Descriptor of the segment that the log is writing."""
        return self._current.fd

    def begin(self, store_timestamp: int) -> "Append":
        """Starts a gathered write.

        Args:
            store_timestamp: Time for markers that the write may need, ms.
        """
        segment, position, pieces = self._current, self.end, list[Buffer]()
        limit = segment.allocated_through - CONTROL_RECORD_SIZE
        groups = [(segment, position, pieces)]
        append = Append(self, segment, position, store_timestamp, limit, pieces, groups)
        if self._begins:
            self.epoch = max(self.epoch, self._epochs.newest + (self.recorded_epoch == self.epoch))
            self._epochs.begin(self.epoch, self.end)
            append.mark_epoch(self._epoch_data)
        return append

    def begin_epoch(self, epoch: int, data: bytes) -> None:
        """Makes the next record of this process begin an epoch.

        Args:
            epoch: Number of the epoch.
            data: Data of the epoch's marker; up to ``MAX_CONTROL_DATA`` bytes.

        Raises:
            StorageError: The number is not higher than all before.
        """
        newest = max(self.recorded_epoch, self._epochs.newest)
        if not newest < epoch <= MAX_EPOCH:
            raise StorageError(f"epoch {epoch} cannot follow epoch {newest}, the log's newest")
        self._recorded_epoch = self.recorded_epoch
        self.epoch, self._begins, self._epoch_data = epoch, True, data
        self._written = _NOTHING

    def view(self, start: int, size: int) -> bytes | memoryview:
        """Return bytes that lie in one segment; many bytes that are in memory are not copied.

        A view keeps a segment's map, and its room on the disk, when retention removes the file.
        So a caller releases the view as soon as it has handed the bytes on.

        Raises:
            CorruptRecord: The file is not there or too short.
            StorageError: The disk refuses to read them.
        """
        view = self.view_in_memory(start, size)
        return self.read(start, size) if view is None else view

    def view_in_memory(self, start: int, size: int) -> memoryview | None:
        """Return bytes of one segment if they are many and in memory, else None; see ``view``."""
        if size < VIEW_BYTES:
            return None
        segment = self._segments.find(start)
        if segment is None or start + size > min(self.end, segment.end):
            return None
        mapped = self.maps.get(segment)
        if mapped is None:
            return None
        stop = min(self.end, segment.end) - segment.start
        return mapped.view(start - segment.start, size, stop=stop)

    def read(self, start: int, size: int) -> bytes:
        """Reads bytes that lie in one segment.

        Raises:
            CorruptRecord: The file is not there or too short.
            StorageError: The disk refuses to read them.
        """
        segment = self._segments.find(start)
        if segment is None or start + size > segment.end:
            raise CorruptRecord(f"no segment holds bytes {start} to {start + size} of the log")
        try:
            fd = segment.fd if segment.fd >= 0 else self._files.get(segment.path)
            data = os.pread(fd, size, start - segment.start)
            while len(data) < size:
                more = os.pread(fd, size - len(data), start - segment.start + len(data))
                if not more:
                    raise CorruptRecord(f"{segment.path} ends before byte {start + size}")
                data += more
        except FileNotFoundError as error:
            raise CorruptRecord(f"{segment.path} is gone") from error
        except OSError as error:
            raise storage_error(error, f"byte {start} of the log cannot be read") from error
        return data

    def read_some(self, start: int, size: int) -> bytes:
        """Read like ``read``, but at most to the end of the segment."""
        return self.read(start, min(size, self.segment_end(start) - start))

    def segment_end(self, commitlog_offset: int) -> int:
        """Return the end of the segment of an offset; the offset itself if there is none."""
        segment = self._segments.find(commitlog_offset)
        return commitlog_offset if segment is None else segment.end

    def retire(self, durable_offset: int) -> None:
        """Retire the segments before an offset, from ``retire_at`` on.

        The flush thread may still be using an earlier list of descriptors, for bytes that are
        written by now. So a descriptor is closed only when all of these bytes are durable, too.
        """
        writing, retired = self._writing, self._retired
        while writing and writing[0].end <= durable_offset:
            retired.append((self.end, writing.pop(0)))
        while retired and retired[0][0] <= durable_offset:
            _close(retired.pop(0)[1])
        self._note_writing()

    def _note_writing(self) -> None:
        ends = [segment.end for segment in self._writing] + [end for end, _ in self._retired]
        self.retire_at = min(ends, default=MAX_OFFSET)
        # A new list each time: the flush thread uses the one before.
        self.unsynced_fds = [segment.fd for segment in self._writing]

    def write(self, segment: Segment, file_position: int, pieces: Sequence[Buffer]) -> None:
        """Writes buffers one behind the other: by stores, if they are small and pages ready.

        Raises:
            OSError: Some or all of it could not be written.
        """
        size = sum(map(len, pieces))
        stop = file_position + size
        self._written = _NOTHING
        if size > MOST_STORED_BYTES:
            write_pieces(segment.fd, pieces, file_position)
            return
        mapped = self.maps.get(segment)
        if mapped is None:
            write_pieces(segment.fd, pieces, file_position)
            return
        room_end = segment.allocated_through - segment.start
        if not self._window.store(mapped, file_position, pieces, stop, room_end):
            write_pieces(segment.fd, pieces, file_position)
            self._window.follow(mapped, stop, room_end)
        if self._is_followed:
            self._written = segment.start + file_position, segment.end, b"".join(pieces)

    def check_files(self, now_ms: int) -> None:
        """Looks each second for files cut or removed from outside; lets go of unused pages.

        Args:
            now_ms: Monotonic time.

        Raises:
            StorageError: The segment that is being written was cut or removed.
        """
        if now_ms < self._check_at_ms:
            return
        self._check_at_ms = now_ms + CHECK_MS
        self.maps.check(self._current)
        if self._stored_to == self.end:
            self._window.give_back()
        self._stored_to = self.end

    def prepare_ahead(self) -> None:
        """Has room taken, and segments made, before they are needed; to be called often."""
        segments, segment = self._segments, self._current
        segments.take_up()
        self._room.poll()
        ahead = self._room.bytes_ahead(self.end - self.start, segments.segment_size)
        while segment.allocated_through == segment.end:
            following = segments.find(segment.end)
            if following is None:
                if self.end + ahead // 2 > segment.end:
                    segments.prepare(segment.end)
                break
            segment = following
        else:
            if segment.allocated_through - self.end <= ahead // 2:
                self._room.ask(segment, min(self.end + ahead, segment.end))
        self._ask_from = segment.allocated_through - ahead // 2

    def next_segment(self, segment: Segment) -> Segment:
        """Return the segment behind, open for writing.

        Raises:
            DiskFull: No room for it.
        """
        return self._open(self._segments.get_or_make(segment.end))

    def take_room(self, segment: Segment, needed: int) -> None:
        """Allocates missing blocks of a segment.

        Args:
            segment: A segment that is open for writing.
            needed: Commit-log offset up to which blocks are needed.

        Raises:
            DiskFull: The disk has too few free blocks.
        """
        self._room.take(segment, needed)

    def adopt(self, segment: Segment, end: int) -> None:
        """Notes that a gathered write has succeeded.

        Args:
            segment: Segment in which the write ended.
            end: The log's new end.
        """
        self._current = segment
        self.end = end
        self._begins = False
        if end > self._ask_from:
            self.prepare_ahead()

    def read_raw(
        self, start: int, max_bytes: int, stop: int, *, whole_groups: bool = True
    ) -> LogChunk:
        """Reads whole records; as ``ReplicableLog.read_raw``."""
        if not self.start <= start <= stop <= self.end:
            raise OffsetOutOfRange(f"{start} to {stop} is not between {self.start} and {self.end}")
        self._is_followed = True
        written_at, segment_end, last = self._written
        if start == written_at and len(last) <= max_bytes and start + len(last) == stop == self.end:
            begin, end = CommitLogOffset(start), CommitLogOffset(stop)
            return LogChunk(begin, end, segment_end, self.epoch, last)
        segment_end = self.segment_end(start)
        most = min(stop, segment_end) - start
        wanted = min(max(max_bytes, HEADER_SIZE), most)
        while True:
            data = self.view(start, wanted) if wanted else b""
            found = chunk_of(
                data,
                start,
                segment_end=segment_end,
                check=self.check,
                whole_groups=whole_groups,
            )
            if isinstance(found, LogChunk):
                return found
            if found > min(self.end, segment_end) - start:
                raise CorruptRecord(f"the record at {start} ends behind the log")
            wanted = found if found <= most else 0

    def group_start(self, commitlog_offset: int) -> int:
        """Return the start of the group that an offset is inside of; the offset if there is none.

        The nearest marker in front of it decides, since groups do not overlap.

        Args:
            commitlog_offset: Start of a record of the log.

        Raises:
            StorageError: The disk refuses to read.
        """
        segment = self._segments.find(commitlog_offset)
        assert segment is not None
        start = max(segment.start, commitlog_offset - MAX_GROUP_BYTES - GROUP_MARKER_SIZE)
        data = self.read(start, commitlog_offset - start)
        # A body may be full of bytes that look like markers, but few of them name their own place.
        for place in reversed(group_markers(data, start)):
            piece = memoryview(data)[place : place + GROUP_MARKER_SIZE]
            try:
                found = self.check.record(piece, start + place, epoch=0, segment_end=segment.end)
            except CorruptRecord:
                continue
            return found.start if commitlog_offset < RecordGroup(found).end else commitlog_offset
        return commitlog_offset

    def check_chunk(self, chunk: LogChunk) -> list[Record]:
        """Checks whether a chunk can be added; arguments and errors as ``append_raw``'s.

        Returns:
            The chunk's records.
        """
        if chunk.start != self.end:
            raise OffsetOutOfRange(f"records from {chunk.start} on, and the log ends at {self.end}")
        if chunk.segment_end != self._current.end:
            raise StorageError(
                f"the segment of offset {chunk.start} ends at {chunk.segment_end} there, and at "
                f"{self._current.end} here: both need the same mapped_file_size_commit_log"
            )
        return records_of(chunk, self.check, epoch=self.recorded_epoch)

    def append_raw(self, chunk: LogChunk) -> None:
        """Writes records that were checked.

        Args:
            chunk: Chunk of these records; it begins at the log's end.

        Raises:
            DiskFull: No room; nothing was written.
            StorageError: The disk reported an error; bytes that were written do not count.
        """
        segment, size = self._current, len(chunk.data)
        self.take_room(segment, min(chunk.start + size + CONTROL_RECORD_SIZE, segment.end))
        following = self.next_segment(segment) if chunk.end == segment.end else segment
        if chunk.epoch < self._epochs.newest:
            self._epochs.cut(chunk.start)  # an epoch whose first record was lost, or never written
        if chunk.epoch != self._epochs.newest:
            self._epochs.begin(chunk.epoch, chunk.start)
        try:
            self.write(segment, chunk.start - segment.start, [chunk.data])
        except OSError as error:
            raise storage_error(error, "the commit log cannot be written") from error
        self.adopt(following, chunk.end)
        # The chunk's epoch is another writer's: a record of this process begins an epoch of its
        # own.
        self.epoch = self._recorded_epoch = chunk.epoch
        self._begins = True
        self._written = _NOTHING

    def note_failed_write(self) -> None:
        """Makes sure that the bytes of a failed write never count as records.

        The next record is the marker of a higher epoch; records of a lower epoch behind it mark
        the end of the log.
        """
        self._recorded_epoch = self.recorded_epoch
        self._epoch_data = b""
        self.epoch += 1
        self._begins = True
        self._written = _NOTHING

    def write_epoch(self, store_timestamp: int) -> None:
        """Begins the epoch at once; if that fails too, the next write will do it."""
        try:
            self.begin(store_timestamp).write()
        except StorageError as error:
            log.error("the end of the log could not be marked yet: %s", error)

    def close(self) -> None:
        """Closes the files, after the flush thread has ended; syncs nothing."""
        self._window.close()
        self.maps.close()
        for segment in self._segments:
            if segment.fd >= 0:
                _close(segment)
        self._writing.clear()
        self._retired.clear()

    def _open(self, segment: Segment) -> Segment:
        if segment.fd < 0:
            try:
                segment.fd = os.open(segment.path, os.O_RDWR)
                if os.fstat(segment.fd).st_size < segment.size:
                    # The file was cut from outside, or was made when a smaller size was configured.
                    os.ftruncate(segment.fd, segment.size)
                    os.fsync(segment.fd)
            except OSError as error:
                raise storage_error(error, f"{segment.path} cannot be opened") from error
            self._writing.append(segment)
            self._note_writing()
        return segment


class Append(msgspec.Struct, eq=False):
    """One gathered write in the making: place records, add their pieces, write.

    ``CommitLog.begin`` makes one at the log's end. It is a struct: making one needs no call of
    an ``__init__``.

    Attributes:
        pieces: Buffers that stand one behind the other; the caller that placed a record adds
            its bytes here before the next record is placed.
    """

    _log: CommitLog
    _segment: Segment
    _position: int
    _timestamp: int
    _limit: int
    pieces: list[Buffer]
    _groups: list[tuple[Segment, int, list[Buffer]]]
    _marks_epoch: bool = False

    def place(self, size: int) -> int:
        """Return the offset of the next record; it may be in the next segment.

        Args:
            size: Size of the record, at most a segment less two markers.

        Raises:
            DiskFull: No room for it; nothing was written.
        """
        if self._position + size > self._limit:
            self._make_room(size)
        position = self._position
        self._position = position + size
        return position

    def _make_room(self, size: int) -> None:
        """Makes sure that the blocks of a record and of the marker behind it are allocated."""
        commitlog, segment, needed = self._log, self._segment, size + CONTROL_RECORD_SIZE
        if self._position + needed <= segment.end:
            commitlog.take_room(segment, self._position + needed)
            self._limit = segment.allocated_through - CONTROL_RECORD_SIZE
            return
        commitlog.take_room(segment, self._position + CONTROL_RECORD_SIZE)
        following = commitlog.next_segment(segment)
        assert needed <= following.size
        commitlog.take_room(following, following.start + needed)
        self.pieces.append(self._marker(ControlKind.END, self._position, b""))
        self._segment = following
        self._position = following.start
        self._limit = following.allocated_through - CONTROL_RECORD_SIZE
        self.pieces = []
        self._groups.append((following, following.start, self.pieces))

    def begin_group(self, size: int, count: int) -> None:
        """Places the marker of a group, in front of its batches, and takes room for all of it.

        Args:
            size: Size of the batches, at most ``StoreConfig.max_group_bytes``.
            count: Number of batches that are placed next.

        Raises:
            DiskFull: No room for it; nothing was written.
        """
        start = self.place(GROUP_MARKER_SIZE + size)
        self._position = start + GROUP_MARKER_SIZE
        self.pieces.append(self._marker(ControlKind.GROUP, start, GROUP_DATA.pack(size, count)))

    def mark(self, kind: ControlKind, data: bytes = b"") -> int:
        """Places a marker; returns its commit-log offset."""
        position = self.place(CONTROL_RECORD_SIZE + len(data))
        self.pieces.append(self._marker(kind, position, data))
        return position

    def mark_epoch(self, data: bytes) -> None:
        """Places the marker that makes void the bytes of an earlier failed write."""
        self.mark(ControlKind.EPOCH, data)
        self._marks_epoch = True

    def write(self) -> None:
        """Writes everything, or notes that bytes which were written do not count.

        Raises:
            DiskFull: No room; may be tried again.
            StorageError: The disk reported an error; may be tried again.
        """
        try:
            for segment, position, pieces in self._groups:
                if pieces:
                    self._log.write(segment, position - segment.start, pieces)
        except OSError as error:
            self._log.note_failed_write()
            if not self._marks_epoch:
                self._log.write_epoch(self._timestamp)
            raise storage_error(error, "the commit log cannot be written") from error
        self._log.adopt(self._segment, self._position)

    def _marker(self, kind: ControlKind, position: int, data: bytes) -> bytes:
        return encode_control_record(
            kind,
            commitlog_offset=position,
            epoch=self._log.epoch,
            store_id=self._log.store_id,
            store_timestamp=self._timestamp,
            data=data,
            store_check=self._log.key.marker_check,
        )


def _close(segment: Segment) -> None:
    os.close(segment.fd)
    segment.fd = -1


def write_pieces(fd: int, pieces: Sequence[Buffer], file_position: int) -> None:
    """Writes buffers one behind the other, all of them, in as few calls as possible.

    Raises:
        OSError: Some or all of it could not be written.
    """
    size = sum(map(len, pieces))
    if len(pieces) > MOST_PIECES or size < JOIN_BELOW_BYTES * len(pieces):
        pieces = [b"".join(pieces)]
    done = os.pwritev(fd, pieces, file_position)
    if done == size:
        return
    # Rare: a signal, or the disk is nearly full, which the next call then reports.
    rest = memoryview(b"".join(pieces))
    while done < size:
        count = os.pwrite(fd, rest[done:], file_position + done)
        if count == 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        done += count
