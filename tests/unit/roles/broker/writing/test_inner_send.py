"""What the broker itself writes."""

from __future__ import annotations

from mqmesh.batch.record_batch import encode_batch
from mqmesh.errors import DiskFull, NotMaster
from mqmesh.message import Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.storage.interface import FlushDiskType


def batch(topic="%RETRY%g", queue_id=0, body=b"x"):
    return encode_batch(
        [Message("orders", body)],
        topic=topic,
        queue_id=queue_id,
        producer_id=1,
        first_sequence=0,
        born_timestamp=0,
        attributes=32,
    )


def test_it_is_stored_with_the_tick_and_told(make_stage):
    stage, told = make_stage(), []
    stage.features.writes.put_encoded([batch(), batch("%DLQ%g")], told.append)
    assert told == []
    stage.end_tick()
    assert [[one.code, one.base_queue_offset] for one in told[0]] == [[0, 0], [0, 0]]
    assert stage.store.queue_bounds("%RETRY%g", 0) == (0, 1)
    assert stage.saved


def test_a_missing_topic_gets_as_many_queues_as_are_wanted(make_stage):
    stage = make_stage()
    stage.features.writes.put_encoded([batch("SCHEDULE_TOPIC_XXXX", 2)], lambda _: None)
    assert stage.features.state.topics.require("SCHEDULE_TOPIC_XXXX").queue_count == 3
    assert stage.features.writes.ensure_topic("SCHEDULE_TOPIC_XXXX", 18).queue_count == 3


def test_a_refusing_store_is_told(make_stage):
    stage, told = make_stage(), []
    stage.store.failure = DiskFull("full")
    stage.features.writes.put_encoded([batch()], told.append)
    stage.end_tick()
    assert told[0][0].code == ResponseCode.DISK_FULL


def test_sync_flush_waits_for_the_disk(make_stage):
    stage, told = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH), []
    stage.store.synced = 0
    stage.features.writes.put_encoded([batch()], told.append)
    stage.end_tick()
    assert told == []
    stage.store.synced = None
    stage.features.writes.answer_confirmed()
    assert told[0][0].status == SendStatus.SEND_OK


def test_a_disk_that_is_too_slow_is_told(make_stage):
    stage, told = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH), []
    stage.store.synced = 0
    stage.features.writes.put_encoded([batch()], told.append)
    stage.end_tick()
    late_ms = stage.clock.monotonic_ms() + stage.config.sync_flush_timeout_ms
    stage.features.writes.answer_expired(late_ms)
    assert told[0][0].status == SendStatus.FLUSH_DISK_TIMEOUT


def test_a_group_that_elects_its_master_waits_for_replicas_as_long_as_it_takes(make_stage):
    stage, told = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH), []
    stage.store.synced = 0
    features = stage.features
    features.core.leadership = object()
    features.writes.put_encoded([batch()], told.append)
    stage.end_tick()
    late_ms = stage.clock.monotonic_ms() + stage.config.sync_flush_timeout_ms
    features.writes.answer_expired(late_ms)
    assert told == [], "an election may take it back"
    stage.store.synced = None
    features.writes.answer_confirmed()
    assert told[0][0].status == SendStatus.SEND_OK


def test_a_deposed_master_has_not_stored_what_is_not_confirmed(make_stage):
    stage, told = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH), []
    stage.store.synced = 0
    stage.features.writes.put_encoded([batch(), batch()], told.append)
    stage.end_tick()
    stage.features.writes.refuse_all(NotMaster("another replica leads"))
    assert [one.code for one in told[0]] == [ResponseCode.NOT_MASTER] * 2
