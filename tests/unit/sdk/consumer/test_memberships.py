"""What a consumer learns of its standing from heartbeats."""

from __future__ import annotations

import pytest

from mqmesh.message import MessageQueue
from mqmesh.protocol.membership import HeartbeatResponse, Membership
from mqmesh.sdk.consumer.memberships import Memberships, Standing


def answer(instance_id, joined=None, generation=9, group="g"):
    own = [] if joined is None else [Membership(group, joined, generation)]
    return HeartbeatResponse(instance_id, [Membership("other", 1, 1), *own])


@pytest.mark.parametrize(
    ("first", "second", "standing"),
    [
        (answer(1, 5), answer(1, 5, 12), Standing.KNOWN),
        (answer(1, 5), answer(1, 7), Standing.REPLACED),
        (answer(1, 5), answer(2, 7), Standing.RESTARTED),
        (answer(1, 5), answer(2, 5), Standing.RESTARTED),
        (answer(1, 5), answer(1), Standing.KNOWN),  # it left by itself
        (answer(1), answer(1, 5), Standing.KNOWN),
        (answer(1), answer(2), Standing.RESTARTED),
        (answer(1, 5), HeartbeatResponse(1), Standing.KNOWN),
    ],
)
def test_two_answers_tell_what_happened_between(first, second, standing):
    memberships = Memberships("g")
    assert memberships.on_heartbeat("broker-a", first) is Standing.KNOWN
    assert memberships.on_heartbeat("broker-a", second) is standing


def test_brokers_count_for_themselves():
    memberships = Memberships("g")
    memberships.on_heartbeat("broker-a", answer(1, 5, 6))
    assert memberships.on_heartbeat("broker-b", answer(2, 8, 9)) is Standing.KNOWN
    assert memberships.generation("broker-a") == 6
    assert memberships.generation("broker-b") == 9
    assert memberships.generation("broker-c") == 0
    queue = MessageQueue("t", "broker-a", 0)
    assert memberships.claimed(queue) == 0
    memberships.on_claim([queue], 7)
    assert memberships.generation("broker-a") == 7
    memberships.on_heartbeat("broker-a", answer(1, 5, 8))
    # Whoever joined meanwhile has the queue in the eighth, if anybody.
    assert (memberships.generation("broker-a"), memberships.claimed(queue)) == (8, 7)
    memberships.on_heartbeat("broker-a", answer(3, 1, 2))  # another life, which counts anew
    assert memberships.claimed(queue) == 2


def test_a_refused_commit_is_looked_into_once():
    memberships = Memberships("g")
    memberships.doubt()  # nobody was met yet
    assert memberships.on_heartbeat("broker-a", answer(1, 5)) is Standing.KNOWN
    memberships.doubt()
    assert memberships.on_heartbeat("broker-a", answer(1, 5)) is Standing.DOUBTED
    assert memberships.on_heartbeat("broker-a", answer(1, 5)) is Standing.KNOWN


@pytest.mark.parametrize(
    ("second", "standing"),
    [(answer(1, 7), Standing.REPLACED), (answer(2, 7), Standing.RESTARTED)],
)
def test_what_explains_a_refused_commit_goes_first(second, standing):
    memberships = Memberships("g")
    memberships.on_heartbeat("broker-a", answer(1, 5))
    memberships.doubt()
    assert memberships.on_heartbeat("broker-a", second) is standing
    assert memberships.on_heartbeat("broker-a", second) is Standing.KNOWN
