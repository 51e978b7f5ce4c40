"""The queue table as a document."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.producer_states import StoredBatch
from mqmesh.storage.queues.queue_table import (
    ROWS_PER_FRAME,
    QueueRow,
    QueueTableHead,
    decode_table,
    encode_table,
)
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

BATCH = StoredBatch(1, 2, QueueOffset(3), CommitLogOffset(4), CommitLogOffset(5), TimestampMs(6), 7)


def queue(number: int) -> ConsumeQueue:
    topic = f"topic {number % 7}"
    return ConsumeQueue(topic, number, "", first=number, end=2 * number + 1, file_entries=16)


@pytest.mark.parametrize("count", [0, 1, ROWS_PER_FRAME, ROWS_PER_FRAME + 1, 3000])
def test_a_table_comes_back(count: int) -> None:
    producers = [(("topic", number, 1 << 63), [BATCH] * (number % 6)) for number in range(count)]
    deletions = [(f"gone {number}", 100 + number) for number in range(count)]
    queues = [queue(number) for number in range(count)]
    frames = list(encode_table(QueueTableHead(77, 3), queues, producers, deletions))
    assert len(frames) == 1 + 3 * -(-count // ROWS_PER_FRAME)
    table = decode_table(b"".join(frames))
    assert table.head == QueueTableHead(77, 3)
    assert table.queues == [
        QueueRow(f"topic {number % 7}", number, number, 2 * number + 1) for number in range(count)
    ]
    assert table.producers == producers
    assert table.deletions == dict(deletions)


def test_a_table_from_before_deletions_has_none() -> None:
    frames = [msgspec.msgpack.encode(frame) for frame in ([77, 3], [[["topic", 0, 1, 2]], []])]
    table = decode_table(b"".join(len(data).to_bytes(4, "little") + data for data in frames))
    assert table.queues == [QueueRow("topic", 0, 1, 2)]
    assert table.deletions == {}


def test_queues_that_were_never_written_have_no_row() -> None:
    empty = ConsumeQueue("topic", 0, "", first=0, end=0, file_entries=16)
    assert decode_table(b"".join(encode_table(QueueTableHead(0, 1), [empty], []))).queues == []


@given(st.binary(max_size=60), st.sampled_from([lambda b: b, lambda b: b"\x05\0\0\0" + b]))
def test_other_bytes_are_no_table(data: bytes, shape: Callable[[bytes], bytes]) -> None:
    try:
        decode_table(shape(data))
    except CorruptRecord:
        return
    # By chance a head and no rows.
    assert shape(data)


def test_a_cut_table_is_noticed() -> None:
    whole = b"".join(encode_table(QueueTableHead(77, 3), [queue(1)], [(("t", 0, 1), [BATCH])]))
    for size in range(len(whole)):
        frames_end = size in _frame_ends(whole)
        if not frames_end:
            with pytest.raises(CorruptRecord):
                decode_table(whole[:size])


def _frame_ends(data: bytes) -> set[int]:
    ends, position = set(), 0
    while position < len(data):
        position += 4 + int.from_bytes(data[position : position + 4], "little")
        ends.add(position)
    return ends
