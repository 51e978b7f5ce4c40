"""Batches one behind the other are told apart, and damage is not passed over."""

from __future__ import annotations

import pytest

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_batch, decode_messages, encode_batch, read_header
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message


def batch(*bodies):
    messages = [Message("orders", body) for body in bodies]
    return encode_batch(
        messages, topic="orders", queue_id=0, producer_id=7, first_sequence=0, born_timestamp=1
    )


def test_each_batch_comes_with_its_header_and_no_byte_of_others():
    batches = [batch(b"one"), batch(b"two", b"three"), batch(b"four" * 100)]
    found = list(iter_batches(b"".join(batches)))
    assert [bytes(data) for _, data in found] == batches
    assert [header for header, _ in found] == [read_header(one) for one in batches]
    bodies = [message.body for header, data in found for message in decode_messages(data, header)]
    assert bodies == [b"one", b"two", b"three", b"four" * 100]


def test_nothing_has_no_batches():
    assert list(iter_batches(b"")) == []


def test_nothing_is_copied():
    data = batch(b"one")
    ((_, view),) = iter_batches(data)
    assert view.obj is data


@pytest.mark.parametrize("rest", [b"x", b"\0" * 200])
def test_what_stands_before_damage_comes_first(rest):
    whole = batch(b"one")
    walk = iter_batches(whole + rest)
    assert bytes(next(walk)[1]) == whole
    with pytest.raises(CorruptBatch):
        next(walk)


def test_checksums_are_looked_at_where_that_is_asked_for():
    assert len(list(iter_batches(batch(b"one"), check_batch))) == 1
    damaged = bytearray(batch(b"one"))
    damaged[-1] ^= 1
    assert len(list(iter_batches(damaged))) == 1
    with pytest.raises(CorruptBatch):
        list(iter_batches(damaged, check_batch))
