"""How large a record is, told by its first bytes; what makes it one is tested with the scanner."""

import pytest

from mqmesh.batch.record_batch import HEADER_SIZE, MAX_BATCH_BYTES
from mqmesh.errors import CorruptRecord
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    MAX_CONTROL_DATA,
    ControlKind,
    encode_control_record,
)
from mqmesh.storage.log.record import record_size
from mqmesh.testing.store_contract import make_batch

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
