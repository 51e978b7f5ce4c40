"""Batches that a filter cut down: what remains keeps its place, its id and its facts."""

from __future__ import annotations

import runpy
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    Attributes,
    SparseMeta,
    check_stored,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
    read_payload,
    read_sparse_meta,
    stamp,
)
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message


def whole_batch(count=10, *, compress=None, body=b"body %d", tags="AB"):
    messages = [
        Message("topic", body % number, tags[number % len(tags)], properties={"n": str(number)})
        for number in range(count)
    ]
    batch = encode_batch(
        messages,
        topic="%RETRY%g",
        queue_id=3,
        producer_id=7,
        first_sequence=100,
        born_timestamp=1_700_000_000_000,
        born_host="host:1",
        attributes=Attributes.REDELIVERED,
        compress_over_bytes=compress,
    )
    part = stamp(
        read_header(batch),
        commitlog_offset=5_000,
        base_queue_offset=40,
        store_timestamp=1_700_000_000_009,
        epoch=4,
        store_id=9,
    )
    return part + batch[len(part) :]


def cut(whole, selected):
    header = check_stored(whole)
    pieces = cut_batch(header, read_meta(whole, header), read_payload(whole, header), selected)
    return b"".join(pieces)


def decode(batch):
    return decode_messages(
        batch, check_stored(batch), broker_name="broker-a", store_host="host:10911"
    )


@given(st.lists(st.booleans(), min_size=1, max_size=60).filter(any), st.booleans())
def test_what_remains_is_what_it_was(wanted, compressed):
    count = len(wanted)
    whole = whole_batch(count, compress=0 if compressed else None)
    part = cut(whole, bytes(wanted))
    messages = decode(whole)
    expected = [message for message, keep in zip(messages, wanted, strict=True) if keep]
    found = decode(part)
    assert found == expected
    for one, twin in zip(found, expected, strict=True):
        assert one.queue_offset == twin.queue_offset
        assert one.info == twin.info  # store size and checksum are those of the stored batch
        assert one.message_id == twin.message_id
        assert one.offset_message_id == twin.offset_message_id
    assert len(part) <= len(whole) + 20 + 2 * len(found)


def test_the_header_stands_for_the_whole_batch():
    whole = whole_batch()
    before, after = check_stored(whole), check_stored(cut(whole, bytes([0, 1] * 5)))
    for field in msgspec.structs.fields(type(before)):
        same = getattr(before, field.name) == getattr(after, field.name)
        changed = ("header_crc", "producer_crc", "total_size", "meta_size", "payload_size")
        assert same is (field.name not in (*changed, "attributes", "raw_size"))
    assert after.attributes == before.attributes | Attributes.SPARSE
    assert after.next_queue_offset == before.next_queue_offset


def test_a_cut_batch_may_end_before_the_whole_one():
    part = cut(whole_batch(10), bytes([0, 1, 1, 0]))
    header = check_stored(part)
    assert (header.base_queue_offset, header.next_queue_offset) == (40, 44)
    assert [message.queue_offset for message in decode(part)] == [41, 42]


def test_a_few_of_very_many_messages():
    whole = whole_batch(65_536, body=b"%d")
    selected = bytearray(65_536)
    selected[0] = selected[65_535] = 1
    part = cut(whole, bytes(selected))
    assert len(part) < 300
    assert [message.queue_offset for message in decode(part)] == [40, 40 + 65_535]


def test_a_compressed_batch_stays_compressed_if_that_helps():
    whole = whole_batch(100, compress=0, body=b"x" * 100 + b"%d")
    part = cut(whole, bytes([1, 0] * 50))
    header = check_stored(part)
    assert header.codec == 1
    assert len(part) < len(whole)
    assert check_stored(cut(whole_batch(100, compress=0), bytes([1] + [0] * 99))).codec in (0, 1)


def test_messages_that_are_none_are_told():
    whole = whole_batch()
    header = check_stored(whole)
    for payload in (b"", b"\xc1", b"\x92\x01"):
        with pytest.raises(CorruptBatch):
            cut_batch(header, read_meta(whole, header), payload, bytes([1] * 10))


def forged(whole, **changes):
    """A cut batch with other facts in its meta, and checksums that are right."""
    part = cut(whole, bytes([0, 1] * 5))
    header = check_stored(part)
    meta = msgspec.structs.replace(read_sparse_meta(part, header)[0], **changes)
    data = msgspec.msgpack.encode(meta)
    body = bytearray(part[:HEADER_SIZE] + data + part[HEADER_SIZE + header.meta_size :])
    body[52:56] = len(body).to_bytes(4, "little")
    body[68:72] = len(data).to_bytes(4, "little")
    body[48:52] = zlib.crc32(body[52:]).to_bytes(4, "little")
    body[4:8] = zlib.crc32(body[8:52]).to_bytes(4, "little")
    return bytes(body)


@pytest.mark.parametrize(
    "ordinals",
    [
        b"",
        b"\x01",
        b"\x01\x00\x03\x00\x05\x00\x07\x00\x09",  # half of one
        b"\x01\x00\x03\x00\x05\x00\x07\x00\x0a\x00",  # behind the batch
        b"\x01\x00\x03\x00\x05\x00\x05\x00\x09\x00",  # twice
        b"\x01\x00\x05\x00\x03\x00\x07\x00\x09\x00",  # out of order
        b"\x01\x00\x03\x00\x05\x00\x07\x00",  # one too few
        b"\x00\x00\x01\x00\x03\x00\x05\x00\x07\x00\x09\x00",  # one too many
    ],
)
def test_positions_that_make_no_sense_are_refused(ordinals):
    batch = forged(whole_batch(), ordinals=ordinals)
    with pytest.raises(CorruptBatch):
        decode(batch)


def test_other_facts_that_make_no_sense_are_refused():
    with pytest.raises(CorruptBatch):
        decode(forged(whole_batch(), topic="../x"))
    with pytest.raises(CorruptBatch):
        decode(forged(whole_batch(), stored_size=2**40))


def test_a_plain_batch_has_no_positions():
    whole = whole_batch()
    with pytest.raises(CorruptBatch):
        read_sparse_meta(whole, check_stored(whole))


# --- the format stays what it was


def test_the_golden_cut_batch_is_read_and_made_as_ever():
    folder = Path(__file__).resolve().parents[2] / "data"
    golden = runpy.run_path(str(folder / "make_golden.py"))
    batch = golden["path_of"]("sparse").read_bytes()
    assert golden["encode_case"]("sparse") == batch
    header = check_stored(batch)
    meta, ordinals = read_sparse_meta(batch, header)
    stored = golden["path_of"]("stored").read_bytes()
    assert (ordinals, meta.tag_hashes) == ((1,), b"")
    assert isinstance(meta, SparseMeta)
    assert (meta.stored_size, meta.stored_crc) == (len(stored), check_stored(stored).producer_crc)
    (message,) = decode(batch)
    assert message == decode(stored)[1]
    assert message.info == decode(stored)[1].info
    assert message.queue_offset == golden["STAMP"]["base_queue_offset"] + 1
