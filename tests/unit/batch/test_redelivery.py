"""Stored messages under their old ids for another queue."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import (
    Attributes,
    check_batch,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
)
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import InvalidArgument
from mqmesh.message import Message
from mqmesh.units import MIB

MESSAGES = [
    Message("orders", b"0", "A", ["k0"]),
    Message("orders", b"1", None, [], {"p": "1"}, 5, "s"),
    Message("orders", b"2", "B"),
]


def stored(messages=MESSAGES, **options):
    return encode_batch(
        messages,
        topic="orders",
        queue_id=3,
        producer_id=77,
        first_sequence=100,
        born_timestamp=1_000,
        born_host="here:1",
        **options,
    )


def redelivered(data, **options):
    copy = redeliver(data, read_header(data), topic="%RETRY%g", queue_id=0, **options)
    header = check_batch(copy)
    return header, decode_messages(copy, header), read_meta(copy, header)


@pytest.mark.parametrize("packed", [None, 1])
def test_a_whole_batch_keeps_everything_but_its_place(packed):
    header, messages, meta = redelivered(stored(compress_over_bytes=packed))
    assert (meta.topic, header.queue_id) == ("%RETRY%g", 0)
    assert [m.to_message() for m in messages] == [
        Message(m.topic, m.body, m.tag, tuple(m.keys), m.properties, m.flag, m.sharding_key)
        for m in MESSAGES
    ]
    assert [m.message_id for m in messages] == [f"{77:016X}{n:016X}" for n in (100, 101, 102)]
    assert header.born_timestamp == 1_000
    assert meta.born_host == "here:1"
    assert header.attributes == Attributes.REDELIVERED | Attributes.HAS_KEYS | Attributes.HAS_TAGS
    assert meta.tag_hashes == read_meta(stored(), read_header(stored())).tag_hashes


def test_a_part_is_a_batch_of_its_own():
    header, messages, meta = redelivered(stored(), first=1, count=1)
    assert [m.body for m in messages] == [b"1"]
    assert messages[0].message_id == f"{77:016X}{101:016X}"
    assert meta.tag_hashes == b""
    assert header.attributes == Attributes.REDELIVERED


def test_a_part_of_what_was_compressed_is_compressed_too():
    # As it is it would be over the limit.
    messages = [Message("orders", bytes(1_000), tag=str(number)) for number in range(16_200)]
    data = stored(messages, compress_over_bytes=1)
    header, part, _ = redelivered(data, first=1)
    assert (len(part), part[0].tag) == (16_199, "1")
    assert header.total_size < MIB


def test_the_rest_begins_at_first():
    _, messages, _ = redelivered(stored(), first=1)
    assert [m.body for m in messages] == [b"1", b"2"]


def test_attributes_are_added():
    header, _, _ = redelivered(stored(), attributes=64)
    assert header.attributes & Attributes.HAS_DELAY


@pytest.mark.parametrize(("first", "count"), [(0, 4), (3, None), (-1, 1), (0, 0), (2, 2)])
def test_messages_that_are_not_there_are_refused(first, count):
    with pytest.raises(InvalidArgument, match="of a batch of 3"):
        redelivered(stored(), first=first, count=count)


def test_the_batch_may_stand_anywhere_in_a_buffer():
    data = b"before" + stored() + b"behind"
    header = read_header(data, 6)
    copy = redeliver(memoryview(data), header, position=6, topic="t", queue_id=1)
    assert check_batch(copy).queue_id == 1
