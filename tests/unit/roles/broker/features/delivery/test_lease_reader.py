"""Batches that stay split for the next receives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from harness.batches import encode_flights, stored_batch

from mqmesh.batch.payload import split_payload
from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    decode_messages,
    read_header,
    read_meta,
    read_payload,
)
from mqmesh.message import Message
from mqmesh.roles.broker.features.delivery.lease_reader import (
    MAX_SPLIT,
    LeaseReader,
    SplitBatch,
    SplitBatches,
)
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.storage.interface import GetResult, GetStatus

QUEUE = ("flights", 3)


def batch_at(base: int, count: int = 10) -> SplitBatch:
    messages = (Message("flights", b"%d" % (base + at)) for at in range(count))
    data = memoryview(stored_batch(encode_flights(*messages), base_queue_offset=base))
    header = read_header(data)
    payload = split_payload(bytes(read_payload(data, header)))
    return SplitBatch(header, read_meta(data, header), payload)


@pytest.fixture
def kept():
    found = SplitBatches()
    for base in (100, 20, 40):
        found.keep(QUEUE, batch_at(base))
    return found


def test_a_batch_is_found_by_each_of_its_messages(kept):
    for base in (20, 40, 100):
        assert {kept.find(QUEUE, base + at).header.base_queue_offset for at in range(10)} == {base}
    assert [kept.find(QUEUE, offset) for offset in (0, 19, 30, 50, 99, 110)] == [None] * 6
    assert kept.find(("flights", 2), 20) is None
    assert kept.find(("others", 3), 20) is None


@pytest.mark.parametrize("mask", [0b1, 0b11110, 0b1001000001])
def test_a_batch_is_cut_down_to_some_messages(mask):
    data = b"".join(batch_at(40).cut(40, mask))
    wanted = [40 + at for at in range(10) if mask >> at & 1]
    found = decode_messages(data, read_header(data))
    assert [one.queue_offset for one in found] == wanted
    assert [int(one.body) for one in found] == wanted


def test_messages_of_a_damaged_sparse_batch_have_no_key():
    data = bytearray(b"".join(batch_at(0, 3).cut(0, 0b101)))
    data[HEADER_SIZE] ^= 0xFF
    found = GetResult(GetStatus.FOUND, 3, 0, 3, [memoryview(data)], 3)
    reader = LeaseReader(SimpleNamespace(get=lambda *_, **options: found), MetaCache())
    without_key = [(0, None), (1, None), (2, None)]
    assert reader.keys_of(QUEUE, range(3)) == without_key
    assert reader.read_keys(QUEUE, 0, 1, None) == (without_key, 3)
    found.data[0] = found.data[0][:HEADER_SIZE]
    assert reader.keys_of(QUEUE, range(3)) == without_key


def test_the_batch_that_is_kept_for_longest_goes_first(kept):
    for number in range(MAX_SPLIT - 2):
        kept.keep(("flights", 4), batch_at(10 * number))
    assert len(kept) == MAX_SPLIT
    assert kept.find(QUEUE, 100) is None
    assert kept.find(QUEUE, 20) is not None


def test_a_topic_that_was_deleted_is_forgotten(kept):
    kept.keep(("others", 3), batch_at(20))
    kept.forget("flights")
    assert len(kept) == 1
    assert kept.find(QUEUE, 20) is None
    assert kept.find(("others", 3), 20) is not None
