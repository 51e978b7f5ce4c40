from __future__ import annotations

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.errors import SystemBusy, TopicNotFound
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import ProducerBatch, ProducerInfo, ProducerRequest, SendStatus
from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.storage.interface import FlushDiskType


def ask(stage, topic="t", queue_id=0, **options):
    request = ProducerRequest(topic, queue_id, PRODUCER_ID, **options)
    return stage.ask(RequestCode.QUERY_PRODUCER, request, ProducerInfo)


def test_a_sender_learns_what_it_has_stored(stage):
    stage.send(stage.batch(bodies=(b"a", b"b"), first_sequence=5))
    stage.send(stage.batch(queue_id=1, first_sequence=7))
    found = ask(stage)
    assert found.batches == [ProducerBatch(5, 2)]
    assert found.min_offset == 0 < found.end_offset
    assert ask(stage, queue_id=1).batches == [ProducerBatch(7, 1)]
    assert ask(stage, queue_id=2).batches == []
    with pytest.raises(TopicNotFound):
        ask(stage, "u")


def test_what_is_not_safe_yet_is_asked_for_again(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    stage.store.synced = 0
    stage.begin_send(stage.batch())
    stage.end_tick()
    with pytest.raises(SystemBusy, match="is not safe yet; ask again"):
        ask(stage)
    stage.store.synced = None
    assert len(ask(stage).batches) == 1


def test_what_an_absent_follower_lacks_is_reported(stage, monkeypatch):
    stage.send(stage.batch(first_sequence=5))
    monkeypatch.setattr(CommitPoint, "status_of", lambda *_: SendStatus.SLAVE_NOT_AVAILABLE)
    assert ask(stage).batches == [ProducerBatch(5, 1, int(SendStatus.SLAVE_NOT_AVAILABLE))]
