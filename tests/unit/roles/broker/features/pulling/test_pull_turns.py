"""What is read for pulls in one turn, and whose turn it is."""

from __future__ import annotations

import itertools

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.request import PendingReply
from mqmesh.roles.broker.features.pulling.held_pulls import HeldPull
from mqmesh.roles.broker.features.pulling.pull_turns import (
    LEAST_BYTES,
    MOST_OF_ONE,
    PULLS_A_TURN,
    TURN_BYTES,
    PullTurns,
)

opaques = itertools.count()


def held(peer=b"p"):
    pending = PendingReply(peer, 11, next(opaques), 0, 1_000)
    return HeldPull(pending, PullRequest("g", "t", 0, 0), 0)


def test_nothing_is_taken_beyond_the_budget_of_a_turn():
    turns = PullTurns()
    for _ in range(3):
        turns.wait(held())
    turns.begin()
    assert turns.most_bytes == TURN_BYTES
    assert turns.take() is not None
    turns.left -= TURN_BYTES - 1
    assert turns.most_bytes == LEAST_BYTES, "no crumbs"
    assert turns.take() is not None
    turns.left -= LEAST_BYTES
    assert turns.take() is None
    assert len(turns) == 1
    turns.begin()
    assert turns.take() is not None
    assert turns.take() is None
    assert len(turns) == 0


def test_clients_take_turns_however_many_pulls_one_has():
    turns = PullTurns()
    many, one, two = [held(b"p") for _ in range(3)], held(b"q"), held(b"r")
    for pull in (*many, one, two):
        turns.wait(pull)
    taken = [turns.take() for _ in range(5)]
    assert taken == [many[0], one, two, many[1], many[2]]


def test_pulls_that_find_nothing_end_a_turn_too():
    turns = PullTurns()
    for number in range(PULLS_A_TURN + 1):
        turns.wait(held(str(number).encode()))
    turns.begin()
    while turns.take() is not None:
        pass
    assert len(turns) == 1


def test_the_wait_is_bounded_for_each_client_and_for_all():
    turns = PullTurns(MOST_OF_ONE + 1, 70)
    for _ in range(MOST_OF_ONE):
        turns.wait(held())
    with pytest.raises(SystemBusy, match=f"{MOST_OF_ONE} pulls of this connection") as caught:
        turns.wait(held())
    assert caught.value.retry_after_ms == 70
    turns.wait(held(b"q"))
    with pytest.raises(SystemBusy, match="max_held_pulls"):
        turns.wait(held(b"r"))
    assert len(turns) == MOST_OF_ONE + 1


def test_who_is_gone_waits_no_more():
    turns = PullTurns()
    pulls = [held(b"p"), held(b"q"), held(b"p")]
    for pull in pulls:
        turns.wait(pull)
    assert turns.release_peer(b"p") == [pulls[0], pulls[2]]
    assert turns.release_peer(b"p") == []
    assert len(turns) == 1
    assert turns.release_all() == [pulls[1]]
    assert len(turns) == 0
    assert turns.take() is None
