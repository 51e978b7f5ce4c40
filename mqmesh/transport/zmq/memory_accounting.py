"""Memory accounting of peers: bytes held for each, and the choice of peers to disconnect. Pure.

Outgoing bytes are counted exactly: every ``MARK_BYTES`` a frame is handed to ZeroMQ with a
tracker, which shows when it, and so all before it, has left. Incoming bytes, which wait in ZeroMQ
to be read here, are derived: the bytes that the system counts for the connection, less those read.

No peer has a fixed share. A peer may hold a quarter of the remaining budget, so that one alone may
have much, many have less each, and there is always some for peers that hold nothing yet
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
"""Number of bytes to a peer after which a frame is tracked. A frame of this size is large."""
SHARE: Final = 4
"""Divisor of the remaining budget that a peer may hold."""
OVERHEAD_BYTES: Final = 4 * KIB
"""Bytes of a connection's handshake, which are no frames."""
OVERHEAD_BYTES_PER_S: Final = 100
"""Bytes a second that are no frames either: heartbeats, and answers to the server's."""
SHORT_FRAME_BYTES: Final = 255
"""Longest frame whose head has 2 bytes; others have 9 (ZMTP 3)."""


class Mark(Protocol):
    """Tracker that shows if a frame has left; ``zmq.MessageTracker`` is one."""

    @property
    def done(self) -> bool:
        """True when ZeroMQ does not use the frame any more."""


class PeerState:
    """State of one peer that servers of both kinds keep.

    Attributes:
        is_gone: The connection broke, or the server is closed: nothing is sent any more.
        principal: User of the peer.
        refused: Bytes of the last answer for which there was no room: finding it took time, so
            without that room no other answer is searched for the peer; 0 for none.
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
        frames: Answers that ZeroMQ does not accept for now.
        held: Bytes of these answers, and of those in ZeroMQ up to the last mark.
        loose: Bytes given to ZeroMQ since the last mark.
        taken: Bytes of the peer that were read here, with their framing.
        largest: Size of its largest frame.
        since_ms: Time of the peer's first frame.
        last_seen_ms: Time at which a frame of the peer was read last.
        watched: The peer has to prove that it lives since then.
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
        """Note a tracked frame that ZeroMQ got; return the number of additional bytes held."""
        size += self.loose
        self.loose = 0
        self._marks.append((mark, size, now_ms))
        self.held += size
        return size

    def sweep(self) -> int:
        """Forgets frames that have left; returns the number of their bytes."""
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
        """Forget the frames for a lost peer, whose account other code may keep for long."""
        size, self.held = self.held, 0
        self.frames.clear()
        self._marks.clear()
        return size

    def incoming(self, received: Received, now_ms: int, *, most_frames: int) -> int:
        """Return the peer's bytes that wait in ZeroMQ to be read here.

        Args:
            received: Bytes that arrived by its connection.
            now_ms: Monotonic clock.
            most_frames: Number of frames of one peer that ZeroMQ queues.
        """
        if received.taken_bytes is not None:
            age_ms = now_ms - self.since_ms
            overhead = OVERHEAD_BYTES + OVERHEAD_BYTES_PER_S * age_ms // 1_000
            return max(0, received.taken_bytes - self.taken - overhead)
        # For a local connection the system counts only bytes that ZeroMQ has not read: as long as
        # there is room for more frames, it reads everything.
        return most_frames * self.largest if received.waiting_bytes else 0


def room_of_one(total: int, limits: ServerLimits) -> int:
    """Return the bytes that may be held for a peer while ``total`` are for all together."""
    return min(limits.max_pending_bytes, (limits.max_total_pending_bytes - total) // SHARE)


class PeerLoad(msgspec.Struct, frozen=True):
    """A connection and the bytes that are held for it.

    Attributes:
        descriptor: Descriptor of the connection.
        size: Number of bytes, both ways.
        peer: The peer; None if the connection has sent no frame yet.
        waiting_since_ms: Time at which the oldest frame that the peer has not taken was sent; None
            if it takes them.
    """

    descriptor: int
    size: int
    peer: bytes | None = None
    waiting_since_ms: int | None = None


def worst(loads: Iterable[PeerLoad], limits: ServerLimits) -> list[PeerLoad]:
    """Choose the connections that have to end if all loads together exceed the budget.

    Returns:
        The largest loads, so many that three quarters of the budget suffice for the others. Among
        those of the same size, within ``MARK_BYTES``, the one that has taken nothing for longest
        goes first: a peer that was answered just now is not taken for one that does not read.
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
