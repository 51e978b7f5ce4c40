"""Offsets of queues and of groups."""

from __future__ import annotations

import pytest

from mqmesh.errors import DiskFull, InvalidArgument, MessageIllegal, OffsetIllegal, TopicNotFound
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import LOOK_GROUP_PREFIX
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueBoundsRequest,
    QueueBoundsResponse,
    QueueOffsetEntry,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.route import TopicConfig
from mqmesh.storage.interface import QueueMove


@pytest.fixture
def filled(stage):
    """A broker with five messages in queue 0 of topic t, a second between each."""
    for number in range(5):
        stage.send(stage.batch(bodies=(b"%d" % number,)))
        stage.clock.advance(1_000)
    return stage


def commit(stage, *entries, group="g"):
    update = UpdateConsumerOffsetRequest(
        group, "client", [QueueOffsetEntry(*one) for one in entries]
    )
    stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update)


def query(stage, *queues, group="g"):
    request = QueryConsumerOffsetRequest(group, [QueueOffsetEntry(*one) for one in queues])
    found = stage.ask(RequestCode.QUERY_CONSUMER_OFFSET, request, ConsumerOffsets)
    return [one.queue_offset for one in found.queues]


@pytest.mark.parametrize("offset", [6, -1, 2**62])
def test_an_offset_outside_of_the_queue_is_refused_and_nothing_jumps(filled, offset):
    commit(filled, ("t", 0, 2))
    with pytest.raises(OffsetIllegal, match=str(offset)):
        commit(filled, ("t", 0, offset))
    assert query(filled, ("t", 0)) == [2]


def test_one_illegal_offset_does_not_lose_the_others(filled):
    with pytest.raises(TopicNotFound):
        commit(filled, ("gone", 0, 0), ("t", 0, 4), ("t", 0, 99))
    assert query(filled, ("t", 0)) == [4]


@pytest.mark.parametrize("group", ["", "a b", "%RETRY%g", "CID_RMQ_SYS_x", "x" * 256])
def test_groups_that_are_none_are_refused(filled, group):
    with pytest.raises(InvalidArgument):
        commit(filled, ("t", 0, 1), group=group)
    with pytest.raises(InvalidArgument):
        query(filled, ("t", 0), group=group)


def test_a_group_that_only_looks_commits_nothing(filled):
    with pytest.raises(InvalidArgument, match="leaves nothing behind"):
        commit(filled, ("t", 0, 1), group=f"{LOOK_GROUP_PREFIX}1")
    assert query(filled, ("t", 0), group=f"{LOOK_GROUP_PREFIX}1") == [-1]


def test_a_queue_that_is_not_written_any_more_can_still_be_finished(filled):
    filled.features.state.topics.set(TopicConfig("t", 1, 0, 2), 1)
    commit(filled, ("t", 0, 5))
    assert query(filled, ("t", 0)) == [5]


def test_bounds_of_a_queue(filled):
    def bounds(*queue):
        return filled.ask(
            RequestCode.QUERY_QUEUE_BOUNDS, QueueBoundsRequest(*queue), QueueBoundsResponse
        )

    assert bounds("t", 0) == QueueBoundsResponse(0, 5)
    assert bounds("t", 1) == QueueBoundsResponse(0, 0)
    with pytest.raises(MessageIllegal, match="4 queues"):
        bounds("t", 4)
    with pytest.raises(TopicNotFound):
        bounds("unknown", 0)


def test_the_offset_of_a_time(filled):
    def at(timestamp_ms):
        request = SearchOffsetRequest("t", 0, timestamp_ms)
        found = filled.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, request, OffsetResponse)
        return found.queue_offset

    end_ms = filled.clock.wall_ms()
    assert [at(0), at(end_ms - 5_000), at(end_ms - 4_999), at(end_ms)] == [0, 0, 1, 5]


def test_a_commit_that_cannot_be_saved_is_no_success(filled):
    filled.features.core.state.failure = DiskFull("there is no room")
    with pytest.raises(DiskFull, match="no room"):
        commit(filled, ("t", 0, 3))
    # The group goes on while the broker lives.
    assert query(filled, ("t", 0)) == [3]
    with pytest.raises(OffsetIllegal):
        commit(filled, ("t", 0, 99))
    filled.features.core.state.failure = None
    commit(filled, ("t", 0, 4))


def test_what_forced_cleaning_took_from_groups_is_told_and_counted(filled, caplog):
    commit(filled, ("t", 0, 2))
    moves = [[QueueMove("t", 0, 0, 5)], []]
    filled.store.take_forced_moves = lambda: moves.pop(0)
    filled.features.offsets.sample()
    filled.features.offsets.sample()
    assert filled.features.core.stats.total.forced_lost_messages == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "group 'g' lost 3 messages of topic 't'" in caplog.text


def test_a_commit_from_behind_a_cut_of_the_log_is_refused(filled):
    store = filled.features.core.store
    store.epoch = lambda: 3
    store.cut_offset = lambda topic, queue_id, epoch: 2 if epoch < 3 else None
    assert filled.ask(
        RequestCode.QUERY_CONSUMER_OFFSET,
        QueryConsumerOffsetRequest("g", [QueueOffsetEntry("t", 0)]),
        ConsumerOffsets,
    ).queues == [QueueOffsetEntry("t", 0, -1, 3)]
    with pytest.raises(OffsetIllegal, match="lost what queue 0 of topic 't' had from offset 2 on"):
        commit(filled, ("t", 0, 4, 2))
    assert query(filled, ("t", 0)) == [-1]
    for entry in (("t", 0, 2, 2), ("t", 0, 4, 3), ("t", 0, 5)):
        commit(filled, entry)
        assert query(filled, ("t", 0)) == [entry[2]]
