"""Connections that have to end because all together take too much memory."""

from __future__ import annotations

import pytest

from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq import memory_eviction as relief
from mqmesh.transport.zmq.connections import Received
from mqmesh.transport.zmq.memory_accounting import PeerMemory
from mqmesh.transport.zmq.memory_eviction import SETTLE_MS, TRIM_MS, TRIMS, MemoryEviction
from mqmesh.transport.zmq.peers import PeerTable
from mqmesh.units import MIB

DAY_MS = 86_400_000
PING_BYTES_PER_DAY = 86_400 * 30
"""A ping of some bytes each 400 ms."""


class NothingHeld:
    """An outbox with accounts, and no answers that wait."""

    def __init__(self) -> None:
        self.accounts: dict[bytes, PeerMemory] = {}
        self.held = 0

    def sweep(self) -> None:
        """Nothing has left, since nothing was sent."""


class Scene:
    """A server that was started at 0, and what the system says of its connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received: dict[int, int] = {}
        self.peers = PeerTable()
        monkeypatch.setattr(relief, "measure", lambda fd: Received(self.received[fd], 0))
        self.relief = MemoryEviction(
            self.peers,
            NothingHeld(),
            ServerLimits(max_total_pending_bytes=100 * MIB),
            queued_frames=16,
            now_ms=0,
        )

    def connect(self, descriptor: int, now_ms: int) -> None:
        self.peers.accept(descriptor)
        self.relief.connected(descriptor, now_ms)

    def ended(self, now_ms: int) -> list[int]:
        return sorted(load.descriptor for load in self.relief.measure(now_ms))


@pytest.fixture
def scene(monkeypatch):
    return Scene(monkeypatch)


def test_the_beginnings_of_frames_are_counted_however_long_the_server_runs(scene):
    """Each connection has sent most of a large frame, and nothing whole."""
    now_ms = 30 * DAY_MS
    for descriptor in range(10, 14):
        scene.connect(descriptor, now_ms - 1_000)
        scene.received[descriptor] = 60 * MIB
    assert len(scene.ended(now_ms)) >= 3
    assert scene.relief.incoming > 230 * MIB


def test_a_connection_that_only_pings_for_days_holds_nothing(scene):
    scene.connect(10, 0)
    scene.received[10] = 30 * PING_BYTES_PER_DAY
    assert scene.ended(30 * DAY_MS) == []
    assert scene.relief.incoming == 0


def test_a_descriptor_that_was_used_before_is_as_old_as_its_connection(scene):
    scene.connect(10, 0)
    scene.received[10] = 200 * MIB
    scene.connect(10, 30 * DAY_MS)
    assert scene.ended(30 * DAY_MS + 1_000) == [10]


def test_memory_that_is_freed_long_after_its_peer_has_gone_is_given_back_too(scene, monkeypatch):
    given_back = []
    monkeypatch.setattr(relief, "give_back", lambda: given_back.append(now_ms))
    account = PeerMemory(0)
    account.take(MIB)
    scene.relief.peer_left(account, 0)
    scene.relief.peer_left(account, SETTLE_MS - 1)
    for now_ms in range(0, 60_000, 100):
        scene.relief.tick(now_ms)
    assert given_back == [SETTLE_MS, SETTLE_MS + TRIM_MS]
    scene.relief.peer_left(account, now_ms)
    last_ms = now_ms
    for now_ms in range(last_ms, last_ms + 60_000, 100):
        scene.relief.tick(now_ms)
    assert len(given_back) == 2 * TRIMS


def test_a_small_peer_that_goes_leaves_nothing_to_give_back(scene, monkeypatch):
    monkeypatch.setattr(relief, "give_back", lambda: pytest.fail("there was nothing"))
    account = PeerMemory(0)
    account.take(100)
    scene.relief.peer_left(account, 0)
    for now_ms in range(0, 60_000, 100):
        scene.relief.tick(now_ms)
