"""How delayed messages leave a producer."""

from __future__ import annotations

import time

import pytest
from harness.batches import PRODUCER_KEY
from harness.threadless_loop import ThreadlessLoop

from mqmesh.batch.delayed_batch import pack_due_times, read_delayed_meta
from mqmesh.batch.record_batch import Attributes, check_batch, decode_messages
from mqmesh.errors import InvalidArgument
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_buffer import SendBuffer

QUEUE = MessageQueue("t", "a", 0)


@pytest.fixture
def buffer():
    return SendBuffer(ProducerOptions(), ThreadlessLoop(), len)


def append(buffer, *messages):
    (lane,) = buffer.topic_lanes((QUEUE,), 0, lambda _: frozenset()).lanes
    for message in messages:
        buffer.append(lane, None, message, 100, 1_000, None, 2, False)


def taken(buffer):
    """What would be sent: header, meta and bodies of each batch."""
    codec = BatchCodec(PRODUCER_KEY, None)
    found = []
    while batches := buffer.take("a", 1_000_000, 10):
        for batch in batches:
            data = b"".join(codec.encode(batch, 5))
            header = check_batch(data)
            bodies = b"".join(one.body for one in decode_messages(data, header))
            found.append((header, read_delayed_meta(data, header), bodies))
            with buffer.lock:
                buffer.end(batch, BatchOutcome(0, 0))
    return found


def test_messages_delayed_alike_share_batches_and_no_others(buffer):
    append(
        buffer,
        Message("t", b"0"),
        Message("t", b"1", delay_level=3),
        Message("t", b"2", delay_level=3),
        Message("t", b"3", delay_level=4),
        Message("t", b"4", deliver_at_ms=900),
        Message("t", b"5", deliver_at_ms=800),
        Message("t", b"6"),
    )
    found = taken(buffer)
    assert [bodies for _, _, bodies in found] == [b"0", b"12", b"3", b"45", b"6"]
    assert [meta.level for _, meta, _ in found] == [0, 3, 4, 0, 0]
    assert found[3][1].due_times == pack_due_times([900, 800])
    delayed = [bool(header.attributes & Attributes.HAS_DELAY) for header, _, _ in found]
    assert delayed == [False, True, True, True, False]


def test_a_plain_message_does_not_join_a_delayed_batch(buffer):
    lanes = buffer.topics["t"] = buffer.topic_lanes((QUEUE,), 0, lambda _: frozenset())
    buffer.append(lanes.sticky, None, Message("t", b"0", delay_level=1), 100, 4_000, None, 2, False)
    assert lanes.sticky.open is not None
    assert lanes.sticky.open.deadline_ms == 4_000, "that of a usual send at this time"
    assert buffer.join(Message("t", b"1")) is None


def test_a_lone_delayed_message_says_so(buffer):
    topic = buffer.topic_lanes((QUEUE,), 0, lambda _: frozenset())
    batch = buffer.lone_batch(Message("t", b"0", deliver_at_ms=7), 1_000, 2, False, True)
    assert buffer.claim(batch, None, topic) is topic.lanes[0]
    data = b"".join(BatchCodec(PRODUCER_KEY, None).encode(batch, 5))
    assert read_delayed_meta(data, check_batch(data)).due_times == pack_due_times([7])


def test_a_message_is_delayed_from_now():
    before_ms = time.time_ns() // 1_000_000
    message = Message("t", b"x", "tag", ["k"], delay_level=3).delayed_by(60_000)
    assert 0 <= message.deliver_at_ms - before_ms - 60_000 < 5_000
    assert (message.delay_level, message.tag, message.keys) == (0, "tag", ["k"])


@pytest.mark.parametrize("delay_ms", [-1, 1.5, "3", 10**14])
def test_a_delay_is_a_number_of_ms(delay_ms):
    with pytest.raises(InvalidArgument, match="delay_ms"):
        Message("t", b"x").delayed_by(delay_ms)
