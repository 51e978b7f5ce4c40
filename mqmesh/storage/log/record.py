"""Checks of a log record: the proof that bytes are one.

A record counts only if all of this is true: it has the check that the store's key makes, its own
commit-log offset is its place in the log, its store id is this store's, its epoch is that of the
record before or somewhat later, and its checksums are right. So neither zeros, nor leftovers of an
earlier use of the disk, nor a batch inside of a message's body, whatever its sender knew, are taken
for a record.

Every reader of the log checks bytes here: recovery, repair, look-ups by offset, the index, the
tools, and a replica that receives them. Pure.
"""

import struct
from typing import Final

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    HEADER_SIZE,
    MAGIC,
    MAX_BATCH_BYTES,
    VERSION,
    BatchHeader,
    check_stored,
    read_header,
)
from mqmesh.batch.store_check import bears_check
from mqmesh.checksum import crc32
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_MAGIC,
    CONTROL_RECORD_SIZE,
    GROUP_DATA,
    MAX_CONTROL_DATA,
    NOT_OURS,
    ControlKind,
    ControlRecord,
    decode_control_record,
)
from mqmesh.storage.log.store_key import StoreKey

MOST_EPOCHS_AT_ONCE: Final = 1 << 24
"""Limit of the difference between the epochs of two neighbours; every failed write takes one."""
MARK_SIZE: Final = 8
"""Bytes of a record's magic and checksum: enough to recognise the record."""
OFFSET_POSITION: Final = 8
"""Position of a record's own commit-log offset, in batches and control records."""

_CRC_POSITION: Final = 48
_VERSION_POSITION: Final = 56
_MARKER_SIZE_POSITION: Final = 16
_CRC_AND_SIZE = struct.Struct("<II")
_SIZE = struct.Struct("<I")


class Record(msgspec.Struct, frozen=True, gc=False):
    """A good record of the log; exactly one of ``batch`` and ``marker`` is there.

    Attributes:
        start: Commit-log offset of the record.
        end: Commit-log offset of the next record, which may be in the next segment.
        epoch: Epoch of the record.
        batch: Header of a batch.
        marker: A marker.
        data: All bytes of the record; valid as long as the bytes that it was read from.
    """

    start: int
    end: int
    epoch: int
    batch: BatchHeader | None
    marker: ControlRecord | None
    data: memoryview


class RecordGroup:
    """A group of records, read one by one: they count when all of them were read.

    Attributes:
        records: Its marker, and the batches that were read.
        start: Commit-log offset of the marker.
        end: Commit-log offset behind the last batch.
        is_whole: All of them were read.
    """

    def __init__(self, marker: Record) -> None:
        """Begins with the marker, of the kind ``GROUP``."""
        assert marker.marker is not None
        size, self._left = GROUP_DATA.unpack(marker.marker.data)
        self.records = [marker]
        self.start = marker.start
        self.end = marker.end + size
        self.is_whole = False

    def take(self, record: Record) -> None:
        """Takes the next record.

        Raises:
            CorruptRecord: It does not belong to the group.
        """
        self._left -= 1
        self.is_whole = self._left == 0
        if (
            record.batch is None
            or record.end > self.end
            or self.is_whole != (record.end == self.end)
        ):
            raise CorruptRecord("the record does not belong to the group that it stands in")
        self.records.append(record)


def begins_group(record: Record) -> bool:
    """Return whether a record is the marker of a group."""
    return record.marker is not None and record.marker.kind is ControlKind.GROUP


def record_size(head: Buffer) -> int:
    """Return the size of the record that some bytes begin with, as far as they show it.

    Args:
        head: First bytes of the record; ``HEADER_SIZE`` of them are enough.

    Returns:
        Size in bytes; for too few bytes, the number that is needed to know more.

    Raises:
        CorruptRecord: The bytes do not begin a record.
    """
    magic = bytes(head[:4])
    if magic == MAGIC:
        if len(head) < HEADER_SIZE:
            return HEADER_SIZE
        _, size = _CRC_AND_SIZE.unpack_from(head, _CRC_POSITION)
        if HEADER_SIZE <= size <= MAX_BATCH_BYTES:
            return int(size)
        raise CorruptRecord(f"batch of impossible size {size}")
    if magic == CONTROL_RECORD_MAGIC:
        if len(head) < CONTROL_RECORD_SIZE:
            return CONTROL_RECORD_SIZE
        (size,) = _SIZE.unpack_from(head, _MARKER_SIZE_POSITION)
        if CONTROL_RECORD_SIZE <= size <= CONTROL_RECORD_SIZE + MAX_CONTROL_DATA:
            return int(size)
        raise CorruptRecord(f"marker of impossible size {size}")
    if 0 < len(head) < 4:
        return CONTROL_RECORD_SIZE
    raise CorruptRecord(f"no record: it begins with {magic.hex() or 'nothing'}")


class RecordCheck:
    """Check that accepts records of one log and nothing else.

    Attributes:
        store_id: Store id that records must have; None until the first record has set it.
    """

    def __init__(self, key: StoreKey, store_id: int | None) -> None:
        """Takes the key and the store id that records must fit.

        Args:
            key: Key of the store.
            store_id: Store id that records must have; None takes that of the first one checked.
        """
        self._key = key
        self.store_id = store_id

    def record(self, view: memoryview, start: int, *, epoch: int, segment_end: int) -> Record:
        """Checks the bytes of a record.

        Args:
            view: Bytes of the record, ``record_size`` of them.
            start: Commit-log offset of the first byte.
            epoch: Epoch of the record before, 0 if that is not known. A record with a lower epoch
                is not good, nor is one that exceeds it by more than ``MOST_EPOCHS_AT_ONCE``.
            segment_end: Commit-log offset at which the segment ends.

        Raises:
            CorruptRecord: The bytes are no good record.
            StorageError: The record is good, but this program does not know its version or kind.
        """
        if bytes(view[:4]) == MAGIC:
            header = self.batch(view, start)
            record = Record(start, start + header.total_size, header.epoch, header, None, view)
        else:
            marker = decode_control_record(view, store_check=self._key.marker_check)
            self._check_place(start, marker.commitlog_offset, marker.store_id)
            is_end = marker.kind is ControlKind.END
            end = segment_end if is_end else start + marker.total_size
            record = Record(start, end, marker.epoch, None, marker, view[: marker.total_size])
        self.epoch(record.epoch, epoch)
        return record

    def batch(self, data: Buffer, start: int) -> BatchHeader:
        """Checks a whole stored batch; arguments and errors as for ``record``."""
        self.ours(data)
        try:
            header = check_stored(data)
        except CorruptBatch as error:
            _refuse_newer(data, start)
            raise CorruptRecord(str(error)) from error
        self._check_place(start, header.commitlog_offset, header.store_id)
        return header

    def head(self, head: bytes, start: int, *, epoch: int) -> BatchHeader:
        """Checks only the header of a batch; arguments and errors else as for ``record``."""
        try:
            header = read_header(head)
        except CorruptBatch as error:
            raise CorruptRecord(str(error)) from error
        crc = crc32(head[MARK_SIZE : BROKER_PART_SIZE + 4])
        if crc != header.header_crc:
            raise CorruptRecord(f"header checksum is {crc:#010x}, not {header.header_crc:#010x}")
        self.ours(head)
        self._check_place(start, header.commitlog_offset, header.store_id)
        self.epoch(header.epoch, epoch)
        return header

    def ours(self, head: Buffer) -> None:
        """Checks that a batch has the store's check. This is cheap, and comes first, since a body
        may be full of bytes that look like records.

        Args:
            head: First bytes of the batch, or all of it.

        Raises:
            CorruptRecord: The batch does not have it.
        """
        if len(head) < HEADER_SIZE or not bears_check(head, self._key.batch_check):
            raise CorruptRecord(NOT_OURS)

    def epoch(self, epoch: int, before: int) -> None:
        """Compares the epochs of two neighbours; ``before`` is 0 if it is not known.

        Raises:
            CorruptRecord: ``epoch`` cannot follow ``before``.
        """
        if epoch < before or (before and epoch > before + MOST_EPOCHS_AT_ONCE):
            raise CorruptRecord(f"epoch {epoch} after epoch {before}")

    def _check_place(self, start: int, commitlog_offset: int, store_id: int) -> None:
        if commitlog_offset != start:
            raise CorruptRecord(f"the record belongs at {commitlog_offset}")
        if self.store_id is None:
            self.store_id = store_id
        if store_id != self.store_id:
            raise CorruptRecord(f"the record is of store {store_id:#x}, not {self.store_id:#x}")


def _refuse_newer(data: Buffer, start: int) -> None:
    """Refuse a batch of a later version: it is good, so it is never cut and never skipped."""
    view = memoryview(data)
    version = view[_VERSION_POSITION]
    if version == VERSION:
        return
    # The checksums and the size stand at the same place in every version.
    crc, size = _CRC_AND_SIZE.unpack_from(view, _CRC_POSITION)
    if len(view) == size and crc32(view[_CRC_POSITION + 4 :]) == crc:
        raise StorageError(
            f"the record at {start} is of version {version}; this program knows version "
            f"{VERSION} and leaves the store alone"
        )
