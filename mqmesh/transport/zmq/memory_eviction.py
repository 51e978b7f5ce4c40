"""Keeps the unread bytes of peers within a server's budget of memory."""

from typing import Final

from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.process_memory import MemoryWatch, give_back
from mqmesh.transport.zmq.connections import measure
from mqmesh.transport.zmq.memory_accounting import MARK_BYTES, PeerLoad, PeerMemory, worst
from mqmesh.transport.zmq.outbox import PeerOutbox
from mqmesh.transport.zmq.peers import PeerTable

LOOK_MS: Final = 10
"""Shortest time between two measurements of the process's memory."""
STEPS: Final = 8
"""Part of the budget: whenever memory has grown by one part, connections are measured."""
TRIM_MS: Final = 5_000
"""Shortest time between two returns of freed memory to the system."""
SETTLE_MS: Final = 1_000
"""Time after a peer's end in which ZeroMQ frees the memory for it."""
TRIMS: Final = 2
"""Returns of freed memory after a peer's end: on a busy machine freeing takes long, and memory
freed after the first return would stay with the allocator."""


class MemoryEviction:
    """Finds the connections that take too much memory.

    Args:
        peers: The connections.
        outbox: Answers that are held for them.
        limits: Limits for the peers.
        queued_frames: Number of frames of one peer that ZeroMQ queues.
        now_ms: Monotonic clock.

    Attributes:
        look_ms: Time before which ``tick`` does nothing.
        incoming: Bytes that waited in ZeroMQ to be read here, at the last look.
    """

    def __init__(
        self,
        peers: PeerTable,
        outbox: PeerOutbox,
        limits: ServerLimits,
        *,
        queued_frames: int,
        now_ms: int,
    ) -> None:
        self._peers = peers
        self._outbox = outbox
        self._limits = limits
        self._queued_frames = queued_frames
        self._started_ms = now_ms
        self._connected_ms: dict[int, int] = {}
        self._memory = MemoryWatch()
        self.look_ms = 0
        self._trim_ms = 0
        self._trims_wanted = 0
        self.incoming = 0

    def connected(self, descriptor: int, now_ms: int) -> None:
        """Note a connection that was made; the next one by this descriptor takes its place."""
        self._connected_ms[descriptor] = now_ms

    def peer_left(self, account: PeerMemory, now_ms: int) -> None:
        """Note that a peer is gone; the memory held for it is to be given back."""
        if account.held or account.largest >= MARK_BYTES:
            if not self._trims_wanted:
                self._trim_ms = max(self._trim_ms, now_ms + SETTLE_MS)
            self._trims_wanted = TRIMS

    def tick(self, now_ms: int) -> list[PeerLoad]:
        """Measures the process's memory when it is time.

        Returns:
            Connections that have to end.
        """
        if now_ms < self.look_ms:
            return []
        self.look_ms = now_ms + LOOK_MS
        found: list[PeerLoad] = []
        growth = self._memory.growth
        if growth >= self._limits.max_total_pending_bytes // STEPS:
            found = self.measure(now_ms)
            if 2 * (self.incoming + self._outbox.held) < growth:
                self._trims_wanted = max(self._trims_wanted, 1)  # its growth is no peer's now
            self._memory.settle()
        if self._trims_wanted and now_ms >= self._trim_ms:
            self._trim_ms = now_ms + TRIM_MS
            self._trims_wanted -= 1
            give_back()
        return found

    def measure(self, now_ms: int) -> list[PeerLoad]:
        """Measures all connections.

        Returns:
            Connections that have to end because all together exceed the budget.
        """
        self._outbox.sweep()
        loads = []
        self.incoming = 0
        for descriptor, peer in self._peers.connections():
            account = self._outbox.accounts.get(peer) if peer is not None else None
            if account is None:  # it has sent no whole frame yet
                account = PeerMemory(self._connected_ms.get(descriptor, self._started_ms))
            received = measure(descriptor)
            incoming = 0
            if received is not None:
                incoming = account.incoming(received, now_ms, most_frames=self._queued_frames)
            self.incoming += incoming
            loads.append(
                PeerLoad(descriptor, incoming + account.held, peer, account.waiting_since_ms)
            )
        return worst(loads, self._limits)
