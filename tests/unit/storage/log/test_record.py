"""How large a record is, by its first bytes; what makes it one is tested with the scanner."""

import runpy
from pathlib import Path

import msgspec
import pytest

from mqmesh.batch.record_batch import HEADER_SIZE, MAX_BATCH_BYTES
from mqmesh.errors import CorruptRecord
from mqmesh.storage.interface import LogChunk
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    MAX_CONTROL_DATA,
    ControlKind,
    encode_control_record,
    group_markers,
)
from mqmesh.storage.log.raw import chunk_of, records_of
from mqmesh.storage.log.record import RecordCheck, record_size
from mqmesh.testing.store_contract import make_batch
from mqmesh.units import CommitLogOffset

MARKER = encode_control_record(
    ControlKind.EPOCH, commitlog_offset=0, epoch=1, store_id=2, store_timestamp=3, data=b"note"
)


@pytest.mark.parametrize(
    ("record", "head_size"),
    [(bytes(make_batch().data), HEADER_SIZE), (MARKER, CONTROL_RECORD_SIZE)],
)
def test_the_head_tells_the_size_and_less_tells_how_much_is_needed(
    record: bytes, head_size: int
) -> None:
    for known in range(1, head_size):
        assert known < record_size(record[:known]) <= head_size
    for known in (head_size, len(record)):
        assert record_size(record[:known]) == len(record)


def test_sizes_that_no_record_has_are_refused() -> None:
    batch = bytearray(make_batch().data)
    for size in (0, HEADER_SIZE - 1, MAX_BATCH_BYTES + 1):
        batch[52:56] = size.to_bytes(4, "little")
        with pytest.raises(CorruptRecord, match=f"impossible size {size}"):
            record_size(batch)
    marker = bytearray(MARKER)
    for size in (0, CONTROL_RECORD_SIZE - 1, CONTROL_RECORD_SIZE + MAX_CONTROL_DATA + 1):
        marker[16:20] = size.to_bytes(4, "little")
        with pytest.raises(CorruptRecord, match=f"impossible size {size}"):
            record_size(marker)


@pytest.mark.parametrize("data", [b"", bytes(HEADER_SIZE), b"MQX1" + bytes(100)])
def test_other_bytes_begin_no_record(data: bytes) -> None:
    with pytest.raises(CorruptRecord, match="no record"):
        record_size(data)


def test_a_log_is_read_and_written_as_it_once_was_written() -> None:
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    data, start = golden["LOG_FILE"].read_bytes(), golden["LOG_START"]
    assert golden["encode_log"]() == data, "a new form needs a new version and a new file"
    check = RecordCheck(golden["LOG_KEY"], None)
    chunk = chunk_of(data, start, segment_end=2 * start, check=check)
    assert isinstance(chunk, LogChunk)
    records = records_of(chunk, check, epoch=0)
    kinds = [None if one.marker is None else one.marker.kind for one in records]
    deleted = ControlKind.TOPIC_DELETED
    assert kinds == [ControlKind.EPOCH, None, ControlKind.GROUP, None, None, deleted]
    assert (records[0].start, records[-1].end) == (start, start + len(data))
    for short in (records[2].end, records[3].end):
        part = msgspec.structs.replace(
            chunk, end=CommitLogOffset(short), data=data[: short - start]
        )
        with pytest.raises(CorruptRecord, match="inside of a group"):
            records_of(part, check, epoch=0)


def test_a_chunk_ends_before_a_damaged_group() -> None:
    golden = runpy.run_path(str(Path(__file__).parents[3] / "data" / "make_golden.py"))
    data, start = bytearray(golden["LOG_FILE"].read_bytes()), golden["LOG_START"]
    check = RecordCheck(golden["LOG_KEY"], None)
    (place,) = group_markers(data, start)
    data[place + 40] ^= 1
    chunk = chunk_of(data, start, segment_end=2 * start, check=check)
    assert isinstance(chunk, LogChunk)
    assert chunk.end == start + place
    with pytest.raises(CorruptRecord):
        chunk_of(data[place:], chunk.end, segment_end=2 * start, check=check)
