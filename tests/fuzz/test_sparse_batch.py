"""Cut batches from strangers raise CorruptBatch and nothing else, whatever their bytes say."""

import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch.record_batch import HEADER_SIZE, check_stored, decode_messages
from mqmesh.errors import CorruptBatch

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "record-batch-v1-sparse.bin"


def sealed(batch: bytes) -> bytes:
    """The batch with sizes and checksums that are right."""
    body = bytearray(batch)
    if len(body) >= HEADER_SIZE:
        body[52:56] = len(body).to_bytes(4, "little")
        body[48:52] = zlib.crc32(body[52:]).to_bytes(4, "little")
        body[4:8] = zlib.crc32(body[8:52]).to_bytes(4, "little")
    return bytes(body)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
    st.binary(max_size=8),
)
def test_changed_bytes_are_refused_or_read(changes, at, inserted):
    batch = bytearray(GOLDEN.read_bytes())
    for position, value in changes:
        batch[position % len(batch)] = value
    at %= len(batch)
    batch[at : at + len(inserted)] = inserted
    data = sealed(bytes(batch))
    try:
        header = check_stored(data)
        messages = decode_messages(data, header)
    except CorruptBatch:
        return
    offsets = [message.queue_offset for message in messages]
    assert offsets == sorted(set(offsets))
    assert all(header.base_queue_offset <= o < header.next_queue_offset for o in offsets)
