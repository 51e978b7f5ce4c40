"""Whom a queue is read from: the master's advice, until it is over or was bad."""

from __future__ import annotations

import pytest

from mqmesh.sdk.consumer.fetching.replica_choice import ADVICE_MS, ReplicaChoice
from mqmesh.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_the_master_is_read_from_until_he_says_otherwise(clock):
    choice = ReplicaChoice(clock)
    assert choice.replica() == 0
    choice.advised(0)
    assert choice.replica() == 0
    choice.advised(2)
    assert choice.replica() == 2


def test_after_a_while_the_master_is_asked_again_and_may_say_the_same(clock):
    choice = ReplicaChoice(clock)
    choice.advised(2)
    clock.advance(ADVICE_MS - 1)
    assert choice.replica() == 2
    clock.advance(1)
    assert choice.replica() == 0
    choice.advised(3)
    assert choice.replica() == 3


def test_advice_that_was_bad_is_not_taken_again_for_a_while(clock):
    choice = ReplicaChoice(clock)
    choice.advised(2)
    choice.disappointed()
    assert choice.replica() == 0
    choice.advised(2)
    assert choice.replica() == 0
    clock.advance(ADVICE_MS)
    choice.advised(2)
    assert choice.replica() == 2


def test_a_queue_that_goes_on_elsewhere_is_shown_to_the_master_first(clock):
    choice = ReplicaChoice(clock)
    choice.advised(2)
    choice.return_to_master()
    assert choice.replica() == 0
    choice.advised(2)
    assert choice.replica() == 2
