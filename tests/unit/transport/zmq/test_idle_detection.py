"""Which peers hang, by what the system says of their connections."""

from __future__ import annotations

import socket

import pytest

from mqmesh.transport.zmq.connections import Received
from mqmesh.transport.zmq.idle_detection import HANDSHAKE_BYTES, LOOK_MS, PROOF_MS, IdleDetection
from mqmesh.transport.zmq.memory_accounting import PeerMemory
from mqmesh.transport.zmq.peers import PeerTable
from mqmesh.transport.zmq.sockets import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS

PEER = b"\0abcd"
PING_BYTES = 9
MOST_MS = HEARTBEAT_INTERVAL_MS + HEARTBEAT_TIMEOUT_MS + 2 * LOOK_MS


class Sent:
    """A probe that has left this process, or not."""

    done = True


class Scene:
    """One peer, whose first frame came at 0."""

    def __init__(self, descriptor: int = 5, connection: socket.socket | None = None) -> None:
        self.peers = PeerTable()
        self.accounts = {PEER: PeerMemory(0)}
        self.account = self.accounts[PEER]
        self.descriptor = connection.fileno() if connection else descriptor
        self.connection = connection
        self.mark = Sent()
        self.probes = 0
        self.asked = 0
        self.came_ms = 0
        self.pings = 0
        self.waiting = 0
        self.now_ms = 0
        self.peers.accept(self.descriptor)
        self.peers.meet(PEER, self.descriptor)
        options = {} if connection else {"ask": self.ask}
        self.watch = IdleDetection(self.peers, self.accounts, self.probe, **options)
        self.hear(0)

    def probe(self, peer):
        assert peer == PEER
        self.probes += 1
        self.connection.sendall(b"probe")
        return self.mark

    def ask(self, descriptor):
        assert descriptor == self.descriptor
        self.asked += 1
        taken = HANDSHAKE_BYTES + self.account.taken + PING_BYTES * self.pings
        return Received(taken, self.waiting, self.now_ms - self.came_ms)

    def ping(self, now_ms: int) -> None:
        self.came_ms = now_ms
        self.pings += 1

    def hear(self, now_ms: int) -> None:
        self.came_ms = self.account.last_seen_ms = now_ms
        self.account.take(20)
        if not self.account.watched:
            self.watch.watch(PEER, self.account)

    def until_hung(self, most_ms: int = 60_000, step=lambda now_ms: None) -> int | None:
        """When the peer is found to hang; None if it is not."""
        while self.now_ms < most_ms:
            self.now_ms += 10
            step(self.now_ms)
            if self.watch.due_ms is not None and self.watch.due_ms <= self.now_ms:
                for found in self.watch.look(self.now_ms):
                    assert found == (PEER, self.descriptor)
                    return self.now_ms
        return None


@pytest.fixture
def local():
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        yield Scene(connection=one), other


def drain(connection) -> None:
    try:
        connection.recv(65_536)
    except BlockingIOError:
        return


def test_a_peer_that_stops_right_after_a_frame_is_found_out():
    scene = Scene()
    scene.pings = 3  # of before
    assert scene.until_hung() == HEARTBEAT_TIMEOUT_MS
    assert not scene.account.watched


def test_a_busy_peer_that_stops_is_found_out_as_soon():
    scene = Scene()
    scene.pings = 3
    busy = lambda now_ms: scene.hear(now_ms) if now_ms <= 5_000 else None  # noqa: E731
    assert scene.until_hung(step=busy) <= 5_000 + HEARTBEAT_TIMEOUT_MS + 10


def test_who_pings_lives_and_is_looked_at_no_more():
    scene = Scene()

    def step(now_ms):
        if now_ms % HEARTBEAT_INTERVAL_MS == 0:
            scene.ping(now_ms)

    assert scene.until_hung(10_000, step) is None
    assert not scene.account.watched
    assert scene.watch.due_ms is None
    assert scene.asked <= 3


def test_a_ping_right_after_the_frame_proves_nothing():
    """A piece of a frame comes as well, and ends what libzmq knows as little."""
    scene = Scene()
    step = lambda now_ms: scene.ping(now_ms) if now_ms == PROOF_MS - 10 else None  # noqa: E731
    assert scene.until_hung(step=step) == PROOF_MS - 10 + HEARTBEAT_TIMEOUT_MS


def test_who_never_pings_is_left_alone():
    scene = Scene()
    assert scene.until_hung() is None
    assert not scene.account.watched


def test_bytes_that_this_process_has_not_read_are_waited_for():
    scene = Scene()
    scene.pings, scene.waiting = 3, 1
    assert scene.until_hung(10_000) is None
    scene.waiting = 0
    assert scene.until_hung() == 10_000 + LOOK_MS


def test_a_local_peer_that_takes_nothing_hangs(local):
    scene, _ = local
    assert PROOF_MS + HEARTBEAT_TIMEOUT_MS <= scene.until_hung() <= MOST_MS
    assert scene.probes == 1


def test_a_local_peer_is_probed_once_a_silence(local):
    scene, other = local
    assert scene.until_hung(10_000, lambda now_ms: drain(other)) is None
    assert scene.probes == 1
    assert not scene.account.watched
    scene.hear(10_000)
    assert scene.until_hung(20_000, lambda now_ms: drain(other)) is None
    assert scene.probes == 2


def test_a_local_peer_that_speaks_on_is_not_probed(local):
    scene, _ = local
    assert scene.until_hung(10_000, scene.hear) is None
    assert scene.probes == 0


def test_a_probe_that_this_process_has_not_sent_proves_nothing(local):
    scene, other = local
    scene.mark.done = False
    drained = lambda now_ms: drain(other) if now_ms < PROOF_MS + LOOK_MS - 10 else None  # noqa: E731
    assert scene.until_hung(step=drained) is not None


def test_a_local_peer_that_reads_on_lives(local):
    scene, other = local
    scene.connection.sendall(bytes(100_000))
    scene.mark = None  # nothing more is taken
    read = lambda now_ms: drain(other) if now_ms == 1_000 else None  # noqa: E731
    assert scene.until_hung(step=read) is None


def test_a_local_peer_that_reads_nothing_of_what_waits_hangs(local):
    scene, _ = local
    scene.connection.sendall(bytes(100_000))
    scene.mark = None
    assert scene.until_hung() <= MOST_MS


def test_a_frame_ends_the_probe_of_before(local):
    scene, other = local

    def step(now_ms):
        if now_ms == 1_500:
            scene.hear(now_ms)
        if now_ms >= 1_500:
            drain(other)

    assert scene.until_hung(10_000, step) is None
    assert scene.probes == 2


def test_a_peer_that_is_gone_is_forgotten(local):
    scene, _ = local
    assert scene.until_hung(PROOF_MS + LOOK_MS) is None
    del scene.accounts[PEER]
    assert scene.until_hung() is None
    assert scene.watch.due_ms is None
