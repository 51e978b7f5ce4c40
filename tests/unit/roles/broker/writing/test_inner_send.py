"""What the broker itself writes."""

from __future__ import annotations

import itertools

import pytest

from mqmesh.batch.record_batch import encode_batch
from mqmesh.errors import DiskFull, LocalProtocolError, NotMaster
from mqmesh.message import Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.roles.broker.writing.writes import batch_to_put, divided
from mqmesh.storage.interface import FlushDiskType
from mqmesh.units import KIB, MIB


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


def test_several_batches_are_a_group_and_each_put_another_one(make_stage):
    stage = make_stage()
    writes = stage.features.writes
    writes.put_encoded([batch(), batch("%DLQ%g")], lambda _: None)
    writes.put_encoded([batch()], lambda _: None)
    pair = [batch_to_put(batch()), batch_to_put(batch("%DLQ%g"))]
    writes.put_groups([pair, pair[:1], pair], lambda _: None)
    groups = [one.group for one in writes.stage.batches]
    assert [list(same) for _, same in itertools.groupby(groups)] == [
        [groups[0]] * 2,
        [0],
        [groups[3]] * 2,
        [0],
        [groups[6]] * 2,
    ]
    assert len(set(groups)) == 4


def test_what_fits_no_write_is_refused_before_anything_is_staged(make_stage):
    stage = make_stage(segment_bytes=64 * KIB)
    with pytest.raises(LocalProtocolError) as caught:
        stage.features.writes.put_encoded([batch(body=bytes(33_000)) for _ in range(2)], print)
    assert "2 batches of 66" in str(caught.value)
    assert "65280 fit one write (storage.mapped_file_size_commit_log)" in str(caught.value)
    assert not stage.features.writes.stage.sends


@pytest.mark.parametrize(("segment", "expected"), [(64 * KIB, 65_280), (1024 * MIB, 4 * MIB)])
def test_a_group_is_a_frame_that_a_slow_link_takes_in_time(make_stage, segment, expected):
    assert make_stage(segment_bytes=segment).features.writes.group_bytes == expected


def test_parts_are_divided_by_their_size():
    assert list(divided([3, 4, 3, 11, 1, 1], lambda size: size, 10)) == [[3, 4, 3], [11], [1, 1]]
    assert list(divided([], len, 10)) == []


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
