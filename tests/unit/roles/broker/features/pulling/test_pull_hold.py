"""Pulls that wait."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import SystemBusy
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.request import PendingReply
from mqmesh.roles.broker.features.pulling.held_pulls import SLOT_MS, HeldPull, PullHold

opaques = itertools.count()


def held(topic="t", queue_id=0, peer=b"p", deadline_ms=1_000):
    pending = PendingReply(peer, 11, next(opaques), 0, deadline_ms)
    return HeldPull(pending, PullRequest("g", topic, queue_id, 0), 0)


def test_an_arrival_ends_the_wait_of_all_at_that_queue_in_their_order():
    hold = PullHold(10)
    pulls = [held(), held(queue_id=1), held(), held("u")]
    for pull in pulls:
        hold.hold(pull)
    assert hold.release("t", 0) == [pulls[0], pulls[2]]
    assert hold.release("t", 0) == []
    assert len(hold) == 2


def test_a_lost_peer_waits_no_more():
    hold = PullHold(10)
    pulls = [held(peer=b"p"), held(peer=b"q"), held(queue_id=1, peer=b"p")]
    for pull in pulls:
        hold.hold(pull)
    assert hold.release_peer(b"p") == [pulls[0], pulls[2]]
    assert hold.release("t", 0) == [pulls[1]]
    assert not hold.queues


def test_a_deleted_topic_ends_the_wait_at_all_its_queues():
    hold = PullHold(10)
    pulls = [held(), held("u"), held(queue_id=7)]
    for pull in pulls:
        hold.hold(pull)
    assert hold.release_topic("t") == [pulls[0], pulls[2]]
    assert hold.release_all() == [pulls[1]]
    assert len(hold) == 0


def test_nobody_waits_less_than_asked_nor_a_slot_longer():
    hold = PullHold(10)
    pull = held(deadline_ms=1_030)
    hold.hold(pull)
    assert hold.tick(1_030) == []
    assert hold.tick(1_030 + SLOT_MS) == [pull]
    assert hold.tick(10**9) == []


def test_a_wait_that_begins_late_is_not_overlooked():
    hold = PullHold(10)
    hold.hold(held(deadline_ms=100_000))
    assert hold.tick(50_000) == []
    past = held(deadline_ms=10)
    hold.hold(past)
    assert hold.tick(50_000) == [past]


def test_the_number_of_waits_is_limited():
    hold = PullHold(2, busy_retry_after_ms=70)
    hold.hold(held())
    hold.hold(held())
    with pytest.raises(SystemBusy, match="max_held_pulls") as caught:
        hold.hold(held())
    assert caught.value.retry_after_ms == 70
    assert len(hold.release_all()) == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("hold"), st.integers(0, 2), st.sampled_from([b"p", b"q"]), st.integers(0, 500)
        ),
        st.tuples(st.just("release"), st.integers(0, 2)),
        st.tuples(st.just("lose"), st.sampled_from([b"p", b"q"])),
        st.tuples(st.just("tick"), st.integers(0, 200)),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_agrees_with_a_plain_list(steps):
    hold, model, now_ms = PullHold(1_000), [], 0
    for step, *arguments in steps:
        if step == "hold":
            queue_id, peer, wait_ms = arguments
            pull = held(queue_id=queue_id, peer=peer, deadline_ms=now_ms + wait_ms)
            hold.hold(pull)
            model.append(pull)
            continue
        if step == "release":
            expected = [pull for pull in model if pull.pull.queue_id == arguments[0]]
            assert hold.release("t", arguments[0]) == expected
        elif step == "lose":
            expected = [pull for pull in model if pull.pending.peer == arguments[0]]
            assert hold.release_peer(arguments[0]) == expected
        else:
            now_ms += arguments[0]
            found = hold.tick(now_ms)
            assert all(pull.pending.deadline_ms <= now_ms for pull in found)
            late = [pull for pull in model if pull.pending.deadline_ms <= now_ms - SLOT_MS]
            assert not [pull for pull in late if pull not in found]
            expected = found
        model = [pull for pull in model if pull not in expected]
        assert len(hold) == len(model)
        assert hold.queues.keys() == {("t", pull.pull.queue_id) for pull in model}
