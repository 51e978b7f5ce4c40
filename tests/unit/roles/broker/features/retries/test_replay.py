"""REPLAY_MESSAGES: stored messages once more."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import GroupNotFound, InvalidArgument, NoPermission, OffsetIllegal, TopicNotFound
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.replay import ReplayRequest, ReplayResponse, ReplayRun
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.sdk.admin.replays import runs_of
from mqmesh.storage.interface import GetStatus


@pytest.fixture
def filled(stage):
    """A broker with two batches of three messages in queue 1 of topic t, and a group g."""
    for bodies in ((b"0", b"1", b"2"), (b"3", b"4", b"5")):
        stage.send(stage.batch(queue_id=1, bodies=bodies))
    stage.features.state.group_table.update(GroupConfig("g"))
    stage.features.state.topics.set(TopicConfig("copy", 4, 4), 1)
    return stage


def replay(stage, *runs, topic="t", queue_id=1, **target):
    request = ReplayRequest(topic, queue_id, list(runs), **target)
    return stage.ask(RequestCode.REPLAY_MESSAGES, request, ReplayResponse).copied


def stored(stage, topic, queue_id=0):
    found, place = [], 0
    while True:
        result = stage.store.get(topic, queue_id, place, max_bytes=1)
        if result.status is not GetStatus.FOUND:
            return found
        data = bytes(result.data[0])
        found += decode_messages(data, check_stored(data))
        place = result.next_queue_offset


def test_a_group_gets_messages_under_their_ids_in_its_retry_topic(filled):
    assert replay(filled, ReplayRun(1, 3), ReplayRun(5), group="g") == 4
    copies = stored(filled, "%RETRY%g")
    first = stored(filled, "t", 1)
    assert [one.body for one in copies] == [b"1", b"2", b"3", b"5"]
    assert [one.message_id for one in copies] == [first[at].message_id for at in (1, 2, 3, 5)]
    assert {(one.topic, one.reconsume_times) for one in copies} == {("t", 0)}


def test_another_topic_gets_them_in_the_queue_of_the_same_number(filled):
    assert replay(filled, ReplayRun(0, 6), into_topic="copy") == 6
    assert [one.body for one in stored(filled, "copy", 1)] == [b"%d" % n for n in range(6)]
    filled.features.state.topics.set(TopicConfig("copy", 1, 1), 1)
    replay(filled, ReplayRun(2), into_topic="copy")
    assert [one.body for one in stored(filled, "copy", 0)] == [b"2"]


def test_one_request_copies_as_much_as_fits_a_group(filled):
    filled.features.writes.group_bytes = 1
    assert replay(filled, ReplayRun(1, 5), group="g") == 2
    assert [one.body for one in stored(filled, "%RETRY%g")] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidArgument),
        ({"group": "g", "into_topic": "copy"}, InvalidArgument),
        ({"into_topic": "t"}, InvalidArgument),
        ({"group": "unknown"}, GroupNotFound),
        ({"into_topic": "unknown"}, TopicNotFound),
        ({"group": "g", "topic": "unknown"}, TopicNotFound),
        ({"into_topic": "read-only"}, NoPermission),
        ({"into_topic": "%RETRY%g"}, NoPermission),
        ({"group": "g", "queue_id": 2}, OffsetIllegal),
    ],
)
def test_what_cannot_be_replayed_is_refused(filled, options, error):
    filled.features.state.topics.set(TopicConfig("read-only", 4, 4, Perm.READ.value), 1)
    filled.features.state.topics.set(TopicConfig("%RETRY%g", 1, 1, Perm.READ.value), 1)
    with pytest.raises(error):
        replay(filled, ReplayRun(0), **options)
    with pytest.raises(InvalidArgument, match="at least one run"):
        replay(filled, group="g")
    assert stored(filled, "copy", 1) == []


def test_offsets_become_runs():
    assert runs_of([1, 2, 3, 7, 8, 10]) == [ReplayRun(1, 3), ReplayRun(7, 2), ReplayRun(10)]
