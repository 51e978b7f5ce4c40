"""Stretches of the log as they are: read from one store's log, and added to another's.

A chunk consists of whole records of one segment and one epoch. It holds whole groups of them,
unless it is for a repair. Its receiver checks every record before it writes the bytes, so the log
of a replica is byte for byte that of its leader. Pure.
"""

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import HEADER_SIZE, MAGIC
from mqmesh.errors import CorruptRecord
from mqmesh.storage.interface import LogChunk
from mqmesh.storage.log.control_record import CONTROL_RECORD_SIZE, ControlKind
from mqmesh.storage.log.record import (
    OFFSET_POSITION,
    Record,
    RecordCheck,
    RecordGroup,
    begins_group,
    record_size,
)
from mqmesh.units import CommitLogOffset

_EPOCH_OF_BATCH = slice(32, 36)
_EPOCH_OF_MARKER = slice(24, 28)
_KIND_OF_MARKER = slice(20, 22)


def chunk_of(
    data: Buffer, start: int, *, segment_end: int, check: RecordCheck, whole_groups: bool = True
) -> LogChunk | int:
    """Return the chunk that some bytes of the log begin with.

    Args:
        data: The bytes.
        start: Commit-log offset of the first byte.
        segment_end: Commit-log offset at which its segment ends.
        check: Check of the log. The first record must have its mark. Of the others only places and
            sizes are compared, since the receiver of the chunk checks them.
        whole_groups: False for a chunk that may end inside of a group.

    Returns:
        The chunk, or the size of its first record, or group, if ``data`` has fewer bytes.

    Raises:
        CorruptRecord: No record of the log begins at ``start``, or one of them is damaged.
    """
    view = memoryview(data)
    position, end, epoch = 0, start, None
    while position < len(view):
        head = view[position : position + HEADER_SIZE]
        size = record_size(head)
        is_batch = bytes(head[:4]) == MAGIC
        if position == 0 and is_batch and len(head) == HEADER_SIZE:
            check.ours(head)
        kind = 0 if is_batch else _number(head[_KIND_OF_MARKER])
        is_group = whole_groups and kind == ControlKind.GROUP
        if position + size <= len(view) and (is_group or (position == 0 and not is_batch)):
            piece = view[position : position + size]
            try:
                marker = check.record(piece, start + position, epoch=0, segment_end=segment_end)
            except CorruptRecord:
                if position:
                    break  # it is the first one of the next chunk
                raise
            if is_group:
                size = RecordGroup(marker).end - start - position
        if position + size > len(view):
            if position:
                break
            return size
        if _number(head[OFFSET_POSITION : OFFSET_POSITION + 8]) != start + position:
            raise CorruptRecord(f"the record at {start + position} belongs somewhere else")
        its_epoch = _number(head[_EPOCH_OF_BATCH if is_batch else _EPOCH_OF_MARKER])
        if epoch not in (None, its_epoch):
            break
        epoch = its_epoch
        position += size
        end = start + position
        if kind == ControlKind.END:
            end = segment_end
            break
    return LogChunk(
        CommitLogOffset(start), CommitLogOffset(end), segment_end, epoch or 0, view[:position]
    )


def records_of(
    chunk: LogChunk, check: RecordCheck, *, epoch: int, whole_groups: bool = True
) -> list[Record]:
    """Checks every record of a chunk.

    Args:
        chunk: A chunk from any source.
        check: Check of the log to which the records are added.
        epoch: Epoch of the newest record there, 0 if that is not known.
        whole_groups: False for a chunk that may end inside of a group.

    Returns:
        The records; their bytes are those of the chunk.

    Raises:
        CorruptRecord: A record is not good, a group is not whole, or the chunk's fields do not fit
            its records.
        StorageError: A record is of a version or kind that this program does not know.
    """
    view = memoryview(chunk.data)
    records: list[Record] = []
    group: RecordGroup | None = None
    position, end = 0, chunk.start
    while position < len(view):
        start = chunk.start + position
        if start != end:
            raise CorruptRecord(f"behind the end of its segment, at {start}, stands something")
        size = record_size(view[position : position + HEADER_SIZE])
        piece = view[position : position + size]
        if len(piece) < size:
            raise CorruptRecord(f"the record at {start} has {len(piece)} bytes instead of {size}")
        record = check.record(piece, start, epoch=epoch, segment_end=chunk.segment_end)
        if record.epoch != chunk.epoch:
            raise CorruptRecord(f"the record at {start} is of epoch {record.epoch}")
        is_end = record.marker is not None and record.marker.kind is ControlKind.END
        if start + size + CONTROL_RECORD_SIZE * (not is_end) > chunk.segment_end:
            raise CorruptRecord(f"the record at {start} leaves no room for the end of its segment")
        records.append(record)
        if group is not None and not group.is_whole:
            group.take(record)
        elif begins_group(record):
            group = RecordGroup(record)
        epoch, position, end = record.epoch, position + size, CommitLogOffset(record.end)
    if whole_groups and group is not None and not group.is_whole:
        raise CorruptRecord(f"the chunk ends at {end}, inside of a group that ends at {group.end}")
    if end != chunk.end:
        raise CorruptRecord(f"the chunk at {chunk.start} ends at {end}, not at {chunk.end}")
    return records


def _number(data: memoryview) -> int:
    return int.from_bytes(data, "little")
