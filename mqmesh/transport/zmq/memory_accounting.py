"""Memory accounting of peers: bytes held for each, and the choice of peers that have to go. Pure.

Outgoing bytes are counted exactly: every ``MARK_BYTES`` a frame is handed to ZeroMQ with a
tracker, which shows when it, and so all before it, has left. Incoming bytes, which wait in ZeroMQ
to be read here, are derived: what came by the connection, as the system says, less what was read.

Nobody has a fixed share. A peer may hold a quarter of what is left of the budget, so that one
alone may have much, many have less each, and there is always some for those that hold nothing yet
(dynamic thresholds, Choudhury and Hahne 1998).
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from mqmesh.protocol.command import ANYBODY, Principal
from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq.connections import Received
from mqmesh.units import KIB

MARK_BYTES: Final = 128 * KIB
"""After so many bytes to a peer a frame is tracked. A frame of this size is large."""
SHARE: Final = 4
"""A peer may hold this part of what is left of the budget."""
OVERHEAD_BYTES: Final = 4 * KIB
"""Bytes of a connection's handshake, which are no frames."""
OVERHEAD_BYTES_PER_S: Final = 100
"""Bytes a second that are no frames either: heartbeats, and answers to ours."""
SHORT_FRAME_BYTES: Final = 255
"""The head of a frame up to here has 2 bytes, else 9 (ZMTP 3)."""


class Mark(Protocol):
    """Tracker that shows if a frame has left; ``zmq.MessageTracker`` is one."""

    @property
    def done(self) -> bool:
        """True when ZeroMQ has no use for it any more."""


class PeerState:
    """State of one peer that servers of both kinds keep.

    Attributes:
        is_gone: The connection broke, or the server is closed: nothing is sent any more.
        principal: User of the peer.
        refused: Bytes of the last answer that there was no room for: to find it took time, so as
            long as there is none, nothing else is looked for on its behalf; 0 for none.
    """

    __slots__ = ("is_gone", "principal", "refused")

    def __init__(self, principal: Principal = ANYBODY) -> None:
        self.is_gone = False
        self.principal = principal
        self.refused = 0


class PeerMemory(PeerState):
    """Memory that is held for one peer.

    Attributes:
        id: Routing id of the peer; b"" while it is not known.
        frames: Answers that ZeroMQ takes no more of for now.
        held: Bytes of them, and of those in ZeroMQ up to the last mark.
        loose: Bytes given to ZeroMQ since then.
        taken: Bytes that were read here of what it sent, with their framing.
        largest: Of its frames.
        since_ms: When it was met.
        last_seen_ms: When a frame of it was read last.
        watched: It is looked whether it lives since.
    """

    __slots__ = (
        "_marks",
        "frames",
        "held",
        "id",
        "largest",
        "last_seen_ms",
        "loose",
        "since_ms",
        "taken",
        "watched",
    )

    def __init__(
        self, since_ms: int, principal: Principal = ANYBODY, routing_id: bytes = b""
    ) -> None:
        super().__init__(principal)
        self.id = routing_id
        self.frames: deque[bytes] = deque()
        self.held = 0
        self.loose = 0
        self.taken = 0
        self.largest = 0
        self.since_ms = since_ms
        self.last_seen_ms = since_ms
        self.watched = False
        self._marks: deque[tuple[Mark, int, int]] = deque()

    @property
    def in_zmq(self) -> bool:
        """True while a marked frame may not have left."""
        return bool(self._marks)

    def take(self, size: int) -> None:
        """Count a frame of the peer that was read."""
        self.taken += size + (2 if size <= SHORT_FRAME_BYTES else 9)
        if size > self.largest:
            self.largest = size

    @property
    def waiting_since_ms(self) -> int | None:
        """Time of the oldest marked frame that may not have left; None if there is none."""
        return self._marks[0][2] if self._marks else None

    def mark(self, mark: Mark, size: int, now_ms: int) -> int:
        """Note a tracked frame that ZeroMQ got; return how many bytes are held more."""
        size += self.loose
        self.loose = 0
        self._marks.append((mark, size, now_ms))
        self.held += size
        return size

    def sweep(self) -> int:
        """Forgets what has left; returns how many bytes that were."""
        left = 0
        while self._marks and self._marks[0][0].done:
            left += self._marks.popleft()[1]
        self.held -= left
        return left

    def keep(self, frame: bytes) -> None:
        """Keep an answer that has to wait."""
        self.frames.append(frame)
        self.held += len(frame)

    def release(self) -> int:
        """Release the oldest answer, which need not wait any more; return its bytes."""
        size = len(self.frames.popleft())
        self.held -= size
        return size

    def clear(self) -> int:
        """Forget what is held for a peer that is gone, which others may refer to for long."""
        size, self.held = self.held, 0
        self.frames.clear()
        self._marks.clear()
        return size

    def incoming(self, received: Received, now_ms: int, *, most_frames: int) -> int:
        """Return the peer's bytes that wait in ZeroMQ to be read here.

        Args:
            received: By its connection.
            now_ms: Monotonic clock.
            most_frames: That ZeroMQ queues of one peer.
        """
        if received.taken_bytes is not None:
            age_ms = now_ms - self.since_ms
            overhead = OVERHEAD_BYTES + OVERHEAD_BYTES_PER_S * age_ms // 1_000
            return max(0, received.taken_bytes - self.taken - overhead)
        # Of a local connection the system counts only what ZeroMQ does not read: as long as
        # there is room for more frames, it reads everything.
        return most_frames * self.largest if received.waiting_bytes else 0


def room_of_one(total: int, limits: ServerLimits) -> int:
    """Return the bytes that may be held for a peer while ``total`` are for all together."""
    return min(limits.max_pending_bytes, (limits.max_total_pending_bytes - total) // SHARE)


class PeerLoad(msgspec.Struct, frozen=True):
    """A connection and what is held for it.

    Attributes:
        descriptor: The connection's.
        size: Bytes, both ways.
        peer: The peer; None where the connection has sent nothing yet.
        waiting_since_ms: When the oldest frame that the peer has not taken was sent; None if it
            takes them.
    """

    descriptor: int
    size: int
    peer: bytes | None = None
    waiting_since_ms: int | None = None


def worst(loads: Iterable[PeerLoad], limits: ServerLimits) -> list[PeerLoad]:
    """Choose the connections that have to end if all loads together are beyond the budget.

    Returns:
        The largest loads, so many that three quarters of the budget suffice for the others. Among
        those as large, within ``MARK_BYTES``, the one that takes nothing for longest goes first: a
        peer that was answered just now is not taken for one that does not read.
    """
    ordered = sorted(loads, key=_badness)
    total = sum(load.size for load in ordered)
    if total <= limits.max_total_pending_bytes:
        return []
    found = []
    while total > limits.max_total_pending_bytes * 3 // 4:
        found.append(ordered.pop())
        total -= found[-1].size
    return found


def _badness(load: PeerLoad) -> tuple[int, float]:
    since_ms = load.waiting_since_ms
    return load.size // MARK_BYTES, -math.inf if since_ms is None else -since_ms
