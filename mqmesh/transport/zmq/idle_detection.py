"""Finds peers that hang in cases in which ZeroMQ does not.

A client's ZeroMQ pings its server each ``HEARTBEAT_INTERVAL_MS``, and each ping says how soon
another frame follows. So the server's ZeroMQ detects a client that stopped after a ping. It does
not detect one that stopped between another frame and the next ping, which makes it forget that
promise.

Hence each peer that sent a frame is watched until it has lived for ``PROOF_MS`` after the last one,
since by then it has pinged. The proof comes from the peer's ZeroMQ, not from its program, so a
program that is busy for minutes does no harm:

* for TCP the system knows the time of the last bytes,
* for a local connection it knows only how many bytes the peer has not taken, so the peer is sent a
  frame, and has to take it.

A peer that has proved to live is not watched until its next frame: idle ones cost nothing.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.transport.zmq.connections import Received, measure, not_taken
from mqmesh.transport.zmq.memory_accounting import Mark, PeerMemory
from mqmesh.transport.zmq.peers import PeerTable
from mqmesh.transport.zmq.sockets import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS

PROOF_MS: Final = HEARTBEAT_INTERVAL_MS + 100
"""Time after a frame within which a live peer has sent a ping."""
LOOK_MS: Final = 100
"""Shortest time between two checks of the peers."""
HANDSHAKE_BYTES: Final = 107
"""Bytes that a client's ZeroMQ sends before its first frame. A peer that has sent no more beside
its frames than this sends no pings, and its silence proves nothing."""


class _Probe(msgspec.Struct):
    """A frame that a peer has to take.

    Attributes:
        mark: Tracker that shows if the frame has left this process; None if ZeroMQ did not take it.
        since_ms: Time at which it was sent.
        last_seen_ms: Time at which the last frame of the peer had been read.
        not_taken: Bytes that were on their way at the last look.
    """

    mark: Mark | None
    since_ms: int
    last_seen_ms: int
    not_taken: int


class IdleDetection:
    """Watches peers from a frame on until they have proved to live.

    Args:
        peers: The connections.
        accounts: Accounts of living peers; they hold the time of each one's last frame.
        probe: Sends a peer a frame that it need not answer.
        ask: Queries the system about a connection.
    """

    def __init__(
        self,
        peers: PeerTable,
        accounts: Mapping[bytes, PeerMemory],
        probe: Callable[[bytes], Mark | None],
        ask: Callable[[int], Received | None] = measure,
    ) -> None:
        self._peers = peers
        self._accounts = accounts
        self._probe = probe
        self._ask = ask
        self._order = itertools.count()
        self._looks: list[tuple[int, int, bytes]] = []
        self._probes: dict[bytes, _Probe] = {}

    @property
    def due_ms(self) -> int | None:
        """Time of the next look; None if no peer is watched."""
        return self._looks[0][0] if self._looks else None

    def watch(self, peer: bytes, account: PeerMemory) -> None:
        """Watch a peer that sent a frame at ``last_seen_ms``, if it is not watched yet."""
        account.watched = True
        self._plan(peer, account.last_seen_ms + PROOF_MS)

    def look(self, now_ms: int) -> list[tuple[bytes, int]]:
        """Checks the peers whose time it is.

        Args:
            now_ms: Monotonic clock.

        Returns:
            Peers that hang, and the descriptors of their connections.
        """
        hung = []
        while self._looks and self._looks[0][0] <= now_ms:
            peer = heapq.heappop(self._looks)[2]
            account, descriptor = self._accounts.get(peer), self._peers.living.get(peer)
            if account is None or descriptor is None:
                self._probes.pop(peer, None)  # the peer is gone
                continue
            again_ms = self._judge(peer, account, descriptor, now_ms)
            if again_ms is not None and again_ms > now_ms:
                self._plan(peer, again_ms)
                continue
            self._probes.pop(peer, None)
            account.watched = False
            if again_ms is not None:
                hung.append((peer, descriptor))
        return hung

    def _plan(self, peer: bytes, due_ms: int) -> None:
        heapq.heappush(self._looks, (due_ms, next(self._order), peer))

    def _judge(self, peer: bytes, account: PeerMemory, descriptor: int, now_ms: int) -> int | None:
        """Return the time of the next check; None if the peer lives, ``now_ms`` if it hangs."""
        if now_ms < account.last_seen_ms + PROOF_MS:
            self._probes.pop(peer, None)
            return account.last_seen_ms + PROOF_MS
        received = self._ask(descriptor)
        if received is None:
            return None
        if received.waiting_bytes:
            return now_ms + LOOK_MS  # bytes of it wait to be read by this process
        if received.silent_ms is None or received.taken_bytes is None:
            return self._judge_by_probe(peer, account, descriptor, now_ms)
        if received.taken_bytes - account.taken <= HANDSHAKE_BYTES:
            return None
        came_ms = now_ms - received.silent_ms
        if came_ms >= account.last_seen_ms + PROOF_MS:
            return None
        return max(now_ms, came_ms + HEARTBEAT_TIMEOUT_MS)

    def _judge_by_probe(
        self, peer: bytes, account: PeerMemory, descriptor: int, now_ms: int
    ) -> int | None:
        size = not_taken(descriptor)
        if size is None:
            return None
        probe = self._probes.get(peer)
        if probe is None or probe.last_seen_ms != account.last_seen_ms:
            mark = self._probe(peer)
            self._probes[peer] = _Probe(mark, now_ms, account.last_seen_ms, size)
            return now_ms + LOOK_MS
        if size < probe.not_taken or (size == 0 and probe.mark is not None and probe.mark.done):
            return None
        probe.not_taken = size
        return now_ms if now_ms >= probe.since_ms + HEARTBEAT_TIMEOUT_MS else now_ms + LOOK_MS
