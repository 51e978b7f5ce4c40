"""What happened to a message, as far as it follows from what brokers say."""

from __future__ import annotations

import pytest

from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.groups import ConsumerConnection, ConsumeStats, QueueProgress
from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.sdk.admin.queries import QueryResult
from mqmesh.sdk.admin.tracks import TrackClient, TrackState


def copy(topic="t", offset=5, *, tag=None, at=1, **properties):
    info = BatchInfo(
        topic=topic,
        queue_id=0,
        broker_name="b",
        base_queue_offset=offset,
        commitlog_offset=at * 100,
        store_size=1,
        born_timestamp=1,
        store_timestamp=at,
        born_host="h",
        store_host="127.0.0.1:1",
        producer_id=1,
        first_sequence=1,
        payload_crc=0,
    )
    return StoredMessage("t", b"x", tag, properties=properties, queue_offset=offset, batch=info)


def member(expression="*", model="CLUSTERING", kind="TAG"):
    data = ConsumerData("g", model, "LAST_OFFSET", [Subscription("t", expression, kind)])
    return ConsumerConnection("c", "PYTHON", "1", True, 0, data)


class FakeTrackClient(TrackClient):
    """Answers from what a test says."""

    def __init__(self, copies, *, done=0, pulled=-1, members=(), readers=("g",), goals=None):
        self.copies = sorted(copies, key=lambda one: -one.store_timestamp)
        self.members, self.readers, self.goals = list(members), list(readers), goals or {}
        self.queue = QueueProgress("t", 0, 0, 100, done, pulled, 1, "c" if members else "")

    def by_id(self, message_id, **options):
        return QueryResult(self.copies, notes={"b": "note"})

    def topic_consumers(self, topic):
        return self.readers

    def connections(self, group):
        return self.members

    def _ask(self, endpoint, code, request, kind):
        return ConsumeStats([self.queue], False, 0.0, 1)

    def _goal(self, one):
        return self.goals[one.store_timestamp]


def only(*copies, **facts):
    (track,) = FakeTrackClient(copies, **facts).track("id").tracks
    return track


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"done": 6}, TrackState.CONSUMED),
        ({"done": 6, "members": [member()]}, TrackState.CONSUMED),
        ({"done": 6, "members": [member("a || b")]}, TrackState.FILTERED),
        ({"done": 6, "members": [member("x > 1", kind="SQL92")]}, TrackState.FILTERED),
        ({"done": 6, "members": [member("TAGS = 'c'", kind="SQL92")]}, TrackState.CONSUMED),
        ({"done": 6, "members": [member("(", kind="SQL92")]}, TrackState.CONSUMED),
        ({"done": 6, "members": [member("0" * 32, kind="PYTHON")]}, TrackState.CONSUMED),
        ({"done": 5}, TrackState.WAITING),
        ({"done": 5, "pulled": 5}, TrackState.WAITING),
        ({"done": 2, "pulled": 6, "members": [member()]}, TrackState.IN_FLIGHT),
        ({"done": -1}, TrackState.WAITING),
        ({"done": 6, "members": [member(model="BROADCASTING")]}, TrackState.UNKNOWN),
    ],
)
def test_the_offset_and_the_members_tell(facts, state):
    track = only(copy(tag="c"), **facts)
    assert (track.group, track.state) == ("g", state)


def test_messages_before_it_are_counted():
    assert only(copy(), done=2).messages_before == 3
    assert only(copy(), done=2, members=[member()]).client_id == "c"


FAILED = {"RECONSUME_TIMES": "2", "LAST_FAILURE": "ValueError: no"}


def test_the_newest_copy_tells_where_a_group_is():
    original, retry, dead = copy(), copy("%RETRY%g", at=2, **FAILED), copy("%DLQ%g", at=3, **FAILED)
    track = only(original, retry, done=0)
    assert (track.state, track.reconsume_times) == (TrackState.RETRYING, 2)
    assert track.last_failure == "ValueError: no"
    assert only(original, retry, done=6).state is TrackState.CONSUMED
    assert only(original, retry, dead, done=6).state is TrackState.DEAD
    resent = copy(at=4)
    assert only(original, retry, dead, resent, done=6).state is TrackState.CONSUMED


def test_a_retry_that_is_not_due_waits_in_the_schedule_topic():
    waiting = copy("SCHEDULE_TOPIC_XXXX", at=2, **FAILED)
    track = only(copy(), waiting, goals={2: ("%RETRY%g", 9_000)}, readers=())
    assert (track.group, track.state, track.due_ms) == ("g", TrackState.RETRYING, 9_000)


def test_one_group_knows_nothing_of_the_retries_of_another():
    tracks = FakeTrackClient([copy(), copy("%DLQ%h", at=2, **FAILED)], done=6).track("id").tracks
    assert {one.group: one.state for one in tracks} == {
        "g": TrackState.CONSUMED,
        "h": TrackState.DEAD,
    }


def test_a_delayed_message_waits_for_its_time():
    waiting = copy("SCHEDULE_TOPIC_XXXX", at=1)
    client = FakeTrackClient([waiting], goals={1: ("t", 5_000)})
    found = client.track("id")
    assert found.due_ms == 5_000
    assert [one.state for one in found.tracks] == [TrackState.WAITING]
    found = FakeTrackClient([waiting, copy(at=2)], goals={1: ("t", 5_000)}, done=6).track("id")
    assert found.due_ms == 0
    assert [one.state for one in found.tracks] == [TrackState.CONSUMED]


def test_what_is_nowhere_has_no_track():
    found = FakeTrackClient([]).track("id")
    assert (found.copies, found.tracks, found.notes) == ([], [], {"b": "note"})
