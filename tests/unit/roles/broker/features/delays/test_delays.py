"""Delayed messages on their way into the schedule topic."""

from __future__ import annotations

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import (
    ANY_TIME_QUEUE,
    DelayedMeta,
    pack_due_times,
    read_delayed_meta,
)
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, decode_messages, read_header
from mqmesh.message import SCHEDULE_TOPIC, Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.roles.broker.features.delays.placement import DelayPlacement
from mqmesh.roles.broker.features.retries.retry_plan import plan_retry


def delayed(first_sequence=0, queue_id=2, **wish):
    return b"".join(
        batch_parts(
            encode_payload([Message("t", b"a"), Message("t", b"b")]),
            topic="t",
            queue_id=queue_id,
            producer_id=PRODUCER_ID,
            first_sequence=first_sequence,
            born_timestamp=1,
            attributes=Attributes.HAS_DELAY,
            meta=DelayedMeta("t", **wish),
        )
    )


def scheduled(stage, queue_id):
    result = stage.store.get(SCHEDULE_TOPIC, queue_id, 0, max_bytes=1_000_000)
    data = b"".join(result.data)
    header = read_header(data)
    return data, header, read_delayed_meta(data, header)


@pytest.mark.parametrize(
    ("wish", "queue_id", "delay_ms"),
    [
        ({"level": 1}, 0, 1_000),
        ({"level": 3}, 2, 10_000),
        ({"level": 18}, 17, 7_200_000),
        ({"level": 99}, 17, 7_200_000),
        ({"due_times": pack_due_times([5, 6])}, ANY_TIME_QUEUE, 0),
    ],
)
def test_delayed_messages_wait_in_the_schedule_topic(make_stage, wish, queue_id, delay_ms):
    stage = make_stage()
    (outcome,) = stage.send(delayed(**wish))
    assert (outcome.code, outcome.base_queue_offset) == (0, 0)
    data, header, meta = scheduled(stage, queue_id)
    assert (meta.real_topic, meta.real_queue_id, meta.delay_ms) == ("t", 2, delay_ms)
    assert meta.level == min(wish.get("level", 0), 18)
    assert [message.body for message in decode_messages(data, header)] == [b"a", b"b"]
    assert stage.store.queue_bounds("t", 2) == (0, 0)


def test_levels_are_the_brokers_to_configure(make_stage):
    stage = make_stage(message_delay_level="7s 2h")
    stage.send(delayed(level=2))
    assert scheduled(stage, 1)[2].delay_ms == 7_200_000


def test_a_repeated_send_is_stored_once_among_many_queues(make_stage):
    stage = make_stage()
    for number in range(40):
        stage.send(delayed(number * 2, number % 4, level=1))
    stage.send(delayed(0, 0, level=1))
    assert stage.store.queue_bounds(SCHEDULE_TOPIC, 0) == (0, 80)
    assert stage.features.core.stats.total.put_duplicates == 1


@pytest.mark.parametrize("wish", [{}, {"level": 1, "due_times": pack_due_times([5])}])
def test_wishes_that_make_no_sense_are_refused(make_stage, wish):
    stage = make_stage()
    (outcome,) = stage.send(delayed(**wish))
    assert outcome.code == ResponseCode.MESSAGE_ILLEGAL


def test_a_retry_is_built_once_as_what_waits(make_stage):
    stage = make_stage()
    stage.send(stage.batch(bodies=(b"a", b"b", b"c"), first_sequence=10))
    data = b"".join(stage.store.get("t", 0, 0, max_bytes=1_000).data)
    messages = decode_messages(data, read_header(data))
    (step,) = plan_retry(messages[1:2], topic="t", max_reconsume_times=16, reason="no")
    batch = step.batch(
        "%RETRY%g",
        0,
        DelayPlacement(
            stage.features.core, stage.features.writes, stage.features.state.schedule
        ).place,
    )
    assert (batch.topic, batch.queue_id) == (SCHEDULE_TOPIC, 2)
    assert read_header(batch.data) == batch.header
    stage.features.writes.put([batch], lambda outcomes: None)
    stage.end_tick()
    data, header, meta = scheduled(stage, 2)
    (message,) = decode_messages(data, header)
    assert (message.topic, message.body, message.reconsume_times) == ("t", b"b", 1)
    assert (header.producer_id, header.first_sequence) == (PRODUCER_ID, 11)
    assert header.attributes & Attributes.REDELIVERED
    assert (meta.real_topic, meta.real_queue_id, meta.delay_ms) == ("%RETRY%g", 0, 10_000)
