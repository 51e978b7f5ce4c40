"""Batches of half messages, as bytes."""

from __future__ import annotations

import pytest

from mqmesh.batch.half_batch import half_parts, have_immunity, immunity_ms, is_half, read_half_meta
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import (
    BatchMeta,
    batch_parts,
    check_batch,
    decode_messages,
    encode_batch,
)
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import CorruptBatch
from mqmesh.message import TRANS_HALF_TOPIC, Message

MESSAGES = [Message("orders", b"one", tag="a", keys=("k",)), Message("orders", b"two", tag="b")]


def batch(**changes) -> bytes:
    options = {
        "producer_group": "pg",
        "real_topic": "orders",
        "real_queue_id": 3,
        "has_immunity": False,
        "producer_id": 7,
        "first_sequence": 9,
        "born_timestamp": 1,
        "born_host": "vm:1",
    }
    return b"".join(half_parts(encode_payload(MESSAGES), **(options | changes)))


def test_who_decides_and_where_it_goes_come_back():
    data = batch()
    header = check_batch(data)
    assert is_half(header)
    meta = read_half_meta(data, header)
    assert (meta.topic, meta.producer_group) == (TRANS_HALF_TOPIC, "pg")
    assert (meta.real_topic, meta.real_queue_id, meta.has_immunity) == ("orders", 3, False)
    assert [one.body for one in decode_messages(data, header)] == [b"one", b"two"]


def test_a_commit_is_never_larger_than_its_half():
    data = batch()
    copy = redeliver(data, check_batch(data), topic="orders", queue_id=3)
    assert len(copy) <= len(data)
    assert not is_half(check_batch(copy))


@pytest.mark.parametrize(
    "changes",
    [{"real_topic": ""}, {"real_topic": "a b"}, {"producer_group": ""}, {"producer_group": "ü"}],
)
def test_a_meta_that_cannot_be_is_refused(changes):
    data = batch(**changes)
    with pytest.raises(CorruptBatch):
        read_half_meta(data, check_batch(data))


def test_other_batches_are_no_halves():
    plain = encode_batch(
        MESSAGES, topic="orders", queue_id=0, producer_id=1, first_sequence=0, born_timestamp=1
    )
    assert not is_half(check_batch(plain))
    with pytest.raises(CorruptBatch):
        read_half_meta(plain, check_batch(plain))
    odd = b"".join(
        batch_parts(
            encode_payload(MESSAGES),
            topic="x",
            queue_id=0,
            producer_id=1,
            first_sequence=0,
            born_timestamp=1,
            attributes=4,
            meta=BatchMeta("x"),
        )
    )
    with pytest.raises(CorruptBatch):
        read_half_meta(odd, check_batch(odd))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("60", 60_000),
        ("604800", 604_800_000),
        ("604801", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("٣", None),
        ("9" * 5_000, None),
    ],
)
def test_how_long_a_sender_has(text, expected):
    message = Message("t", b"x", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": text})
    assert immunity_ms(message) == expected
    assert have_immunity([Message("t", b"y"), message]) is (expected is not None)
