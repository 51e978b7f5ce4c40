"""PULL_MESSAGE: messages at once, or a wait for them."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import (
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    RemoteProtocolError,
    SystemBusy,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.policies import FOREVER_MS
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.storage.interface import FlushDiskType, GetStatus
from mqmesh.testing.store_contract import batches_in


@pytest.fixture
def filled(stage):
    """A broker with three messages in queue 0 of topic t: tags A, B, none."""
    for tag, body in (("A", b"a"), ("B", b"b"), (None, b"c")):
        stage.send(stage.batch(bodies=(body,), tag=tag))
    return stage


def test_a_pull_gets_what_is_there(filled):
    answer, bodies = filled.pull()
    assert bodies == [b"a", b"b", b"c"]
    assert (answer.status, answer.next_queue_offset) == (PullStatus.FOUND, 3)
    assert (answer.min_queue_offset, answer.max_queue_offset) == (0, 3)
    assert filled.pull(queue_offset=1, max_bytes=1)[1] == [b"b"]


def test_at_the_end_of_the_queue_there_is_nothing_new(filled):
    answer, bodies = filled.pull(queue_offset=3)
    assert (answer.status, answer.next_queue_offset, bodies) == (PullStatus.NO_NEW_MSG, 3, [])


def test_outside_of_the_queue_the_bounds_are_told(filled):
    answer, bodies = filled.pull(queue_offset=4, suspend_timeout_ms=30_000)
    assert (answer.status, bodies) == (PullStatus.OFFSET_ILLEGAL, [])
    assert (answer.min_queue_offset, answer.max_queue_offset) == (0, 3)


def test_tags_are_told_by_their_hashes(filled):
    assert filled.pull(expression="B || X")[1] == [b"b"]
    answer, bodies = filled.pull(expression="X")
    assert (answer.status, answer.next_queue_offset) == (PullStatus.NO_MATCHED_MSG, 3)
    assert bodies == []


def lose(stage, monkeypatch, *lost):
    """From now on the store reads as if damage had cost it batches of queue 0."""
    get = stage.features.core.store.get

    def get_good(*place, **options):
        result = get(*place, **options)
        good = [one for one in batches_in(result) if read_header(one).base_queue_offset not in lost]
        if result.status is not GetStatus.FOUND:
            return result
        status = GetStatus.FOUND if good else GetStatus.NO_MATCHED_MESSAGE
        return msgspec.structs.replace(result, status=status, data=good, message_count=len(good))

    monkeypatch.setattr(stage.features.core.store, "get", get_good)


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 2}, {0, 1, 2}])
def test_lost_messages_are_passed_and_an_answer_never_has_a_hole(filled, monkeypatch, lost):
    lose(filled, monkeypatch, *lost)
    offset, received = 0, []
    for _ in range(4):
        answer, bodies = filled.pull(queue_offset=offset)
        if answer.status == PullStatus.FOUND:
            expected = [b"abc"[n : n + 1] for n in range(offset, offset + len(bodies))]
            assert bodies == expected
            offset += len(bodies)  # a client goes by what it got
        elif answer.status == PullStatus.MESSAGES_LOST:
            offset = answer.next_queue_offset
        received += bodies
    assert offset == 3
    assert received == [b"abc"[n : n + 1] for n in range(3) if n not in lost]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"topic": "unknown"}, TopicNotFound),
        ({"queue_id": 4}, MessageIllegal),
        ({"topic": "write-only"}, NoPermission),
        ({"expression": "A || "}, InvalidArgument),
        ({"expression": "a = ", "expression_type": "SQL92"}, InvalidArgument),
        ({"expression_type": "LUA"}, UnsupportedCommand),
    ],
)
def test_what_cannot_be_pulled_is_refused(filled, options, error):
    filled.features.state.topics.set(TopicConfig("write-only", 4, 4, Perm.WRITE.value), 1)
    with pytest.raises(error):
        filled.pull(suspend_timeout_ms=1_000, **options)
    assert len(filled.features.pulling.holds) == 0


@pytest.mark.parametrize("header", [b"", b"junk", b"\x91\xa1g", b"\xc1" * 50])
def test_a_header_that_is_none_is_refused(stage, header):
    with pytest.raises(RemoteProtocolError):
        stage.ask(RequestCode.PULL_MESSAGE, header)


def test_read_queues_outlive_write_queues(filled):
    filled.features.state.topics.set(TopicConfig("t", 4, 0), 2)
    assert filled.pull()[1] == [b"a", b"b", b"c"]


def test_a_held_pull_is_answered_by_the_tick_that_brings_a_message(filled):
    opaque = filled.begin_pull(queue_offset=3, suspend_timeout_ms=15_000)
    other_queue = filled.begin_pull(queue_id=1, suspend_timeout_ms=15_000)
    assert not filled.answers.keys() & {opaque, other_queue}
    filled.send(filled.batch(bodies=(b"new",)))
    assert filled.pulled(opaque)[1] == [b"new"]
    assert other_queue not in filled.answers


def test_every_group_that_waits_is_answered(filled):
    opaques = [
        filled.begin_pull(queue_offset=3, suspend_timeout_ms=15_000, peer=bytes([number]))
        for number in range(5)
    ]
    filled.send(filled.batch(bodies=(b"new",)))
    assert [filled.pulled(opaque)[1] for opaque in opaques] == [[b"new"]] * 5
    assert len(filled.features.pulling.holds) == 0


def test_a_held_pull_passes_over_what_it_does_not_want(filled):
    opaque = filled.begin_pull(queue_offset=3, suspend_timeout_ms=1_000, expression="A")
    filled.send(filled.batch(bodies=(b"no",), tag="B"))
    assert opaque not in filled.answers
    filled.send(filled.batch(bodies=(b"yes",), tag="A"))
    answer, bodies = filled.pulled(opaque)
    assert (bodies, answer.next_queue_offset) == ([b"yes"], 5)


def test_a_wait_has_an_end_and_tells_how_far_it_came(filled):
    plain = filled.begin_pull(queue_offset=3, suspend_timeout_ms=1_000)
    picky = filled.begin_pull(queue_id=1, suspend_timeout_ms=1_000, expression="A")
    filled.send(filled.batch(queue_id=1, tag="B"))
    filled.clock.advance(900)
    filled.features.pulling.tick(filled.clock.monotonic_ms())
    assert not filled.answers.keys() & {plain, picky}
    filled.clock.advance(200)
    filled.features.pulling.tick(filled.clock.monotonic_ms())
    assert filled.pulled(plain)[0].status == PullStatus.NO_NEW_MSG
    answer = filled.pulled(picky)[0]
    assert (answer.status, answer.next_queue_offset) == (PullStatus.NO_MATCHED_MSG, 1)


@pytest.mark.parametrize("before", [True, False], ids=["before the wait", "during the wait"])
def test_what_was_passed_over_is_told_within_a_second(filled, before):
    if before:
        filled.send(filled.batch(queue_id=1, tag="B"))
    opaque = filled.begin_pull(queue_id=1, suspend_timeout_ms=15_000, expression="A")
    if not before:
        filled.clock.advance(5_000)
        filled.features.pulling.tick(filled.clock.monotonic_ms())
        filled.send(filled.batch(queue_id=1, tag="B"))
    assert opaque not in filled.answers
    filled.clock.advance(1_100)
    filled.features.pulling.tick(filled.clock.monotonic_ms())
    answer = filled.pulled(opaque)[0]
    assert (answer.status, answer.next_queue_offset) == (PullStatus.NO_MATCHED_MSG, 1)


def test_the_broker_has_the_last_word_on_how_long(make_stage):
    stage = make_stage(long_polling_max_ms=100)
    stage.send(stage.batch())
    opaque = stage.begin_pull(queue_offset=1, suspend_timeout_ms=30_000)
    stage.clock.advance(200)
    stage.features.pulling.tick(stage.clock.monotonic_ms())
    assert opaque in stage.answers


def test_too_many_waiting_pulls_are_told_to_come_back(make_stage):
    stage = make_stage(max_held_pulls=2)
    stage.send(stage.batch())
    for _ in range(2):
        stage.begin_pull(queue_offset=1, suspend_timeout_ms=1_000)
    with pytest.raises(SystemBusy, match="max_held_pulls"):
        stage.pull(queue_offset=1, suspend_timeout_ms=1_000)
    assert stage.pull(queue_offset=0)[1] == [b"body"], "who finds something never waits"


def test_with_sync_flush_nobody_sees_what_a_crash_could_take_back(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    stage.send(stage.batch(bodies=(b"first",)))
    stage.store.synced = stage.store.stats().max_commitlog_offset
    opaque = stage.begin_pull(queue_offset=1, suspend_timeout_ms=1_000)
    stage.begin_send(stage.batch(bodies=(b"new",)))
    stage.end_tick()
    assert opaque not in stage.answers
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.features.writes.answer_confirmed()
    assert stage.pulled(opaque)[1] == [b"new"]


def test_with_sync_flush_a_pull_that_came_in_between_is_woken_too(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    stage.send(stage.batch(bodies=(b"first",)))
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.begin_send(stage.batch(bodies=(b"new",)))
    stage.end_tick()
    opaque = stage.begin_pull(queue_offset=1, suspend_timeout_ms=1_000)
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.features.writes.answer_confirmed()
    assert stage.pulled(opaque)[1] == [b"new"]


def test_what_was_handed_out_is_counted(filled):
    filled.pull()
    total = filled.features.core.stats.total
    assert (total.pull_requests, total.get_messages, total.get_bytes > 300) == (1, 3, True)
    assert filled.features.state.topics.require("t").get_messages == 3


def test_who_stands_behind_a_cut_of_the_log_is_told_to_go_back(stage):
    for number in range(5):
        stage.send(stage.batch(bodies=(b"%d" % number,)))
    store = stage.features.core.store
    store.epoch = lambda: 3
    store.cut_offset = lambda topic, queue_id, epoch: 2 if epoch < 3 else None

    def pulled(offset, epoch):
        request = PullRequest("g", "t", 0, offset, epoch=epoch)
        answer = stage.ask(RequestCode.PULL_MESSAGE, request, PullResponse)
        assert answer.epoch == 3
        return PullStatus(answer.status), answer.next_queue_offset

    for offset in (3, 5, 99):
        assert pulled(offset, 1) == (PullStatus.OFFSET_CUT, 2)
    assert pulled(2, 2) == (PullStatus.FOUND, 5)
    # Who came there since, or does not know.
    assert pulled(3, 3) == (PullStatus.FOUND, 5)
    assert pulled(3, 0) == (PullStatus.FOUND, 5)
    # A store that cannot tell.
    del store.epoch
    request = PullRequest("g", "t", 0, 3, epoch=1)
    assert stage.ask(RequestCode.PULL_MESSAGE, request, PullResponse).epoch == 0


def test_who_has_not_seen_the_epoch_waits_for_nothing(stage, monkeypatch):
    stage.send(stage.batch())
    monkeypatch.setattr(stage.store, "epoch", lambda: 9)
    monkeypatch.setattr(stage.store, "cut_offset", lambda topic, queue_id, epoch: None)
    answer, _ = stage.pull("t", 0, 1, suspend_timeout_ms=1_000, epoch=8)
    assert (answer.status, answer.epoch) == (PullStatus.NO_NEW_MSG, 9)
    waiting = stage.begin_pull("t", 0, 1, suspend_timeout_ms=1_000, epoch=9)
    assert waiting not in stage.answers


def set_group(stage, **settings):
    stage.features.state.group_table.update(GroupConfig("g", **settings))


def go_to(stage, ms):
    stage.clock.advance(ms)
    stage.features.pulling.tick(stage.clock.monotonic_ms())
    stage.end_tick()


def test_pulls_of_a_paused_group_are_held_until_the_pause_is_over(filled):
    set_group(filled, paused_until=filled.clock.wall_ms() + 1_000)
    opaque = filled.begin_pull(suspend_timeout_ms=15_000)
    filled.send(filled.batch(bodies=(b"new",)))
    go_to(filled, 900)
    assert opaque not in filled.answers
    go_to(filled, 200)
    assert filled.pulled(opaque)[1] == [b"a", b"b", b"c", b"new"]
    assert len(filled.features.pulling.held_back) == 0


def test_a_pull_that_waits_at_the_end_gets_nothing_during_a_pause(filled):
    early = filled.begin_pull(queue_offset=3, suspend_timeout_ms=15_000)
    late = filled.begin_pull(queue_offset=3, suspend_timeout_ms=1_000)
    set_group(filled, paused_until=FOREVER_MS)
    filled.send(filled.batch(bodies=(b"new",)))
    assert not filled.answers.keys() & {early, late}
    go_to(filled, 1_100)
    assert filled.pulled(late)[0].status == PullStatus.NO_NEW_MSG
    set_group(filled)
    go_to(filled, 100)
    assert filled.pulled(early)[1] == [b"new"]


def test_a_pull_without_a_wait_gets_nothing_at_once(filled):
    set_group(filled, paused_until=FOREVER_MS)
    answer, bodies = filled.pull()
    assert (answer.status, answer.next_queue_offset, bodies) == (PullStatus.NO_NEW_MSG, 0, [])


def test_a_pause_of_one_topic_leaves_the_others_alone(filled):
    filled.features.state.topics.set(TopicConfig("other", 4, 4), 1)
    filled.send(filled.batch("other", bodies=(b"o",)))
    set_group(filled, paused_topics={"t": FOREVER_MS})
    assert filled.pull()[1] == []
    assert filled.pull("other")[1] == [b"o"]


def test_pulls_that_are_held_back_end_with_their_connection_topic_and_broker(filled):
    set_group(filled, paused_until=FOREVER_MS)
    filled.begin_pull(suspend_timeout_ms=15_000, peer=b"gone")
    filled.features.pulling.client_gone(filled.peer(b"gone"), filled.clock.monotonic_ms())
    assert len(filled.features.pulling.held_back) == 0
    opaque = filled.begin_pull(suspend_timeout_ms=15_000)
    filled.features.pulling.stopping()
    assert isinstance(filled.answers[opaque], Exception)
    opaque = filled.begin_pull(suspend_timeout_ms=15_000)
    filled.features.state.topics.delete("t", 1)
    assert isinstance(filled.answers[opaque], TopicNotFound)


@pytest.mark.parametrize("expression", ["*", "A"])
@pytest.mark.parametrize("size", [1, 3, 50, 1_000])
def test_a_rate_is_kept_whatever_the_size_of_batches(stage, size, expression):
    count = 3_000
    numbers = [b"%d" % number for number in range(count)]
    for start in range(0, count, size):
        stage.send(stage.batch(bodies=numbers[start : start + size], tag="A"))
    set_group(stage, max_messages_per_s=200)
    received, begun = [], stage.clock.monotonic_ms()
    opaque = None
    while len(received) < count:
        if opaque is None:
            opaque = stage.begin_pull(
                queue_offset=len(received), suspend_timeout_ms=15_000, expression=expression
            )
        if opaque not in stage.answers:
            go_to(stage, 100)
            continue
        answer, bodies = stage.pulled(opaque)
        # Whole batches come whole: those behind the offset that was asked for count.
        received += bodies[len(bodies) - (answer.next_queue_offset - len(received)) :]
        opaque = None
    assert received == numbers
    # A second's worth is there at first.
    seconds = (stage.clock.monotonic_ms() - begun) / 1_000
    assert 13.5 <= seconds <= 14.5


def test_a_rate_is_shared_by_queues_in_turn(stage):
    for queue_id in range(4):
        stage.send(stage.batch(queue_id=queue_id, bodies=[b"x"] * 1_000))
    set_group(stage, max_messages_per_s=100)
    got = dict.fromkeys(range(4), 0)
    waiting = {
        queue_id: stage.begin_pull(queue_id=queue_id, suspend_timeout_ms=30_000) for queue_id in got
    }
    for _ in range(200):
        for queue_id, opaque in list(waiting.items()):
            if opaque in stage.answers:
                got[queue_id] = stage.pulled(opaque)[0].next_queue_offset
                waiting[queue_id] = stage.begin_pull(
                    queue_id=queue_id, queue_offset=got[queue_id], suspend_timeout_ms=30_000
                )
        go_to(stage, 100)
    assert max(got.values()) - min(got.values()) <= 20
    assert 1_900 <= sum(got.values()) <= 2_110
