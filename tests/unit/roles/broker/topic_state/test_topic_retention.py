"""Retention by topic: what readers see."""

from __future__ import annotations

import pytest

from mqmesh.protocol.admin import TopicStats, TopicStatsRequest
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    GroupsProgress,
    GroupsProgressRequest,
    OffsetChanges,
    ResetOffsetRequest,
    ResetWhere,
)
from mqmesh.protocol.pulling import (
    OffsetResponse,
    PullStatus,
    QueueBoundsRequest,
    QueueBoundsResponse,
    SearchOffsetRequest,
)
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.topic_state.topic_retention import LOOK_MS, shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import TopicTable


@pytest.fixture
def filled(stage):
    """A broker with ten batches of three messages in queue 0 of topic t, a second apart."""
    for number in range(10):
        stage.send(stage.batch(bodies=[b"%d" % (3 * number + at) for at in range(3)]))
        stage.clock.advance(1_000)
    return stage


def retain(stage, **retention):
    stage.features.state.topics.update(TopicConfig("t", **retention), 1)


def bounds(stage):
    answer = stage.ask(
        RequestCode.QUERY_QUEUE_BOUNDS, QueueBoundsRequest("t", 0), QueueBoundsResponse
    )
    return answer.min_queue_offset, answer.max_queue_offset


def test_a_number_of_messages_is_exact_also_within_a_batch(filled):
    retain(filled, retention_messages=5)
    assert bounds(filled) == (25, 30)
    answer, bodies = filled.pull(queue_offset=24)
    assert (answer.status, answer.min_queue_offset, bodies) == (PullStatus.OFFSET_ILLEGAL, 25, [])
    answer, bodies = filled.pull(queue_offset=25, max_bytes=1)
    assert (answer.status, answer.next_queue_offset) == (PullStatus.FOUND, 27)
    filled.send(filled.batch(bodies=(b"new",)))
    assert bounds(filled) == (26, 31)
    retain(filled, retention_messages=1_000)
    assert bounds(filled) == (0, 31)
    retain(filled)
    assert filled.pull()[1][:1] == [b"0"]


def test_an_age_is_looked_at_each_ten_seconds(filled):
    retain(filled, retention_ms=4_500)
    assert bounds(filled) == (18, 30)
    filled.clock.advance(LOOK_MS - 1)
    assert bounds(filled) == (18, 30)
    filled.clock.advance(1)
    assert bounds(filled) == (30, 30)
    assert filled.pull(queue_offset=29)[0].status == PullStatus.OFFSET_ILLEGAL
    assert filled.pull(queue_offset=30)[0].status == PullStatus.NO_NEW_MSG


def test_the_stricter_of_two_limits_counts_and_a_change_counts_at_once(filled):
    retain(filled, retention_ms=4_500, retention_messages=20)
    assert bounds(filled) == (18, 30)
    retain(filled, retention_ms=4_500, retention_messages=2)
    assert bounds(filled) == (28, 30)
    retain(filled, retention_ms=7_500)
    assert bounds(filled) == (9, 30)


def test_lag_stats_searches_and_resets_know_what_is_shown(filled):
    retain(filled, retention_messages=5)
    (queue, *_) = filled.ask(
        RequestCode.GET_TOPIC_STATS_INFO, TopicStatsRequest("t"), TopicStats
    ).queues
    assert (queue.min_queue_offset, queue.max_queue_offset, queue.unread_messages) == (25, 30, 5)
    search = SearchOffsetRequest("t", 0, 0)
    found = filled.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search, OffsetResponse)
    assert found.queue_offset == 25
    reset = ResetOffsetRequest("g", "t", ResetWhere.FIRST)
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    changes = filled.ask(code, reset, OffsetChanges).queues
    assert (changes[0].queue_id, changes[0].new_offset) == (0, 25)
    filled.send(filled.batch(bodies=[b"x"] * 5))
    (progress,) = filled.ask(
        RequestCode.GET_GROUPS_PROGRESS, GroupsProgressRequest(), GroupsProgress
    ).groups
    assert [(one.topic, one.lag) for one in progress.topics] == [("t", 5)]


def test_a_state_record_brings_a_retention_back(filled):
    wanted = TopicConfig("t", 4, 4, retention_ms=3_600_000, retention_messages=7)
    topics = filled.features.state.topics
    topics.update(wanted, 1)
    copy = TopicTable(10)
    for record in topics.records_of("t"):
        copy.apply(record)
    assert copy.require("t").config == wanted
    assert shown_bounds(filled.store, copy, filled.clock, "t", 0) == (23, 30)
