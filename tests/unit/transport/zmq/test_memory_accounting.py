"""How many bytes are held for whom, and who has to go."""

from __future__ import annotations

import pytest

from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq.connections import Received
from mqmesh.transport.zmq.memory_accounting import (
    OVERHEAD_BYTES,
    PeerLoad,
    PeerMemory,
    room_of_one,
    worst,
)
from mqmesh.units import MIB


class FakeMark:
    def __init__(self):
        self.done = False


@pytest.fixture
def account():
    return PeerMemory(0)


def test_what_has_left_is_not_held_any_more_and_neither_is_what_went_before(account):
    marks = [FakeMark() for _ in range(3)]
    account.loose = 30
    assert account.mark(marks[0], 100, 7) == 130
    for mark in marks[1:]:
        assert account.mark(mark, 100, 8) == 100
    assert (account.held, account.loose, account.in_zmq) == (330, 0, True)
    assert account.waiting_since_ms == 7
    # A frame never leaves before the one in front of it.
    marks[1].done = True
    assert account.sweep() == 0
    marks[0].done = True
    assert account.sweep() == 230
    assert (account.held, account.waiting_since_ms) == (100, 8)
    marks[2].done = True
    assert account.sweep() == 100
    assert (account.held, account.in_zmq) == (0, False)


def test_answers_that_wait_here_count_too(account):
    account.keep(b"one")
    account.keep(b"three")
    assert account.held == 8
    assert account.release() == 3
    assert account.held == 5


def test_nothing_is_kept_in_memory_for_a_peer_that_is_gone(account):
    """Tables of groups and of late answers hold the peer itself for longer."""
    account.keep(b"answer")
    account.mark(FakeMark(), 100, 7)
    assert account.clear() == 106
    assert (account.held, len(account.frames), account.in_zmq) == (0, 0, False)


@pytest.mark.parametrize("size", [0, 255, 256, 5_000])
def test_a_peer_whose_frames_were_all_read_has_nothing_waiting(account, size):
    for _ in range(1_000):
        account.take(size)
    came = 1_000 * (size + (2 if size < 256 else 9)) + OVERHEAD_BYTES
    assert account.incoming(Received(came, 77), 0, most_frames=16) == 0
    assert account.incoming(Received(came + 10, 77), 0, most_frames=16) == 10


def test_heartbeats_of_a_day_are_no_frames(account):
    day_ms = 86_400_000
    heartbeats = day_ms // 400 * 18
    assert account.incoming(Received(heartbeats, 0), day_ms, most_frames=16) == 0


def test_a_local_peer_that_is_not_read_from_has_filled_its_queue(account):
    account.take(1_000)
    account.take(10)
    assert account.incoming(Received(None, 0), 0, most_frames=16) == 0
    assert account.incoming(Received(None, 1), 0, most_frames=16) == 16_000


def test_one_peer_may_have_much_and_many_less_each():
    limits = ServerLimits(max_pending_bytes=200, max_total_pending_bytes=1_000)
    assert room_of_one(0, limits) == 200
    assert room_of_one(600, limits) == 100
    assert room_of_one(1_000, limits) == 0
    # Greedy ones come to rest before the budget is used up, however many they are.
    total = 0
    for _ in range(10_000):
        held = 0
        while held + 1 <= room_of_one(total, limits):
            held += 1
            total += 1
    assert 990 < total <= 1_000


def test_the_largest_go_and_only_when_all_together_are_too_many():
    limits = ServerLimits(max_total_pending_bytes=100 * MIB)
    loads = [PeerLoad(descriptor, descriptor * MIB) for descriptor in (5, 40, 10, 30, 15)]
    assert worst(loads, limits) == []
    loads.append(PeerLoad(1, 1 * MIB))
    assert worst(loads, limits) == [PeerLoad(40, 40 * MIB)]
    assert worst([PeerLoad(3, 101 * MIB)], limits) == [PeerLoad(3, 101 * MIB)]
    assert worst([], limits) == []


def test_of_equal_loads_those_go_first_that_take_nothing_for_longest():
    limits = ServerLimits(max_total_pending_bytes=8 * MIB)
    deaf = [
        PeerLoad(descriptor, MIB + descriptor, waiting_since_ms=descriptor)
        for descriptor in range(8)
    ]
    reads = PeerLoad(100, MIB + 200, waiting_since_ms=100)
    sends = PeerLoad(101, MIB + 300)
    assert worst([reads, sends, *deaf], limits) == deaf[:5]
    assert worst([PeerLoad(102, 3 * MIB), *deaf], limits)[0].descriptor == 102
