"""Turns of pulls: how much one turn of the loop reads, so that sends come in between. Pure.

ZeroMQ hands over one request of each client in turn. Where sixty clients ask for 16 MiB each, a
send would wait for nearly a GiB to be read. So a turn has a budget of bytes; pulls that come when
it is used up wait here, and each client has one of its own answered before another has its second.
"""

from collections import deque
from typing import Final

from mqmesh.errors import SystemBusy
from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.features.pulling.held_pulls import HeldPull
from mqmesh.units import MIB

TURN_BYTES: Final = 4 * MIB
"""Given out in one turn: some milliseconds where all of it has to be copied."""
LEAST_BYTES: Final = 1 * MIB
"""The last pull of a turn may take so much, whatever is left, so that none gets crumbs."""
PULLS_A_TURN: Final = 256
"""Waiting pulls looked at in one turn: also one that finds nothing takes its time."""
MOST_OF_ONE: Final = 1_000
"""Pulls of one connection that wait for their turn."""


class PullTurns:
    """The budget of this turn, and the pulls that wait for another.

    Args:
        most: Pulls that may wait.
        busy_retry_after_ms: Retry delay of clients beyond that.

    Attributes:
        most: Pulls that may wait; may be changed.
        left: Bytes of this turn's budget; with none left, pulls have to ``wait``.
    """

    def __init__(self, most: int = 100_000, busy_retry_after_ms: int = 100) -> None:
        self.most = most
        self._busy_retry_after_ms = busy_retry_after_ms
        # The dict keeps whose turn it is: first who has waited longest since an answer.
        self._by_peer: dict[Peer, deque[HeldPull]] = {}
        self._count = 0
        self._pulls_left = PULLS_A_TURN
        self.left = TURN_BYTES

    def __len__(self) -> int:
        return self._count

    @property
    def most_bytes(self) -> int:
        """Number of bytes that the next answer may have."""
        return self.left if self.left > LEAST_BYTES else LEAST_BYTES

    def begin(self) -> bool:
        """Begin a turn; return True if pulls wait for it."""
        self.left = TURN_BYTES
        self._pulls_left = PULLS_A_TURN
        return self._count > 0

    def wait(self, held: HeldPull) -> None:
        """Lets a pull wait for its turn.

        Raises:
            SystemBusy: Too many wait already.
        """
        peer = held.pending.peer
        waiting = self._by_peer.get(peer)
        if waiting is not None and len(waiting) >= MOST_OF_ONE:
            raise self._busy(f"{MOST_OF_ONE} pulls of this connection wait for their turn")
        if self._count >= self.most:
            raise self._busy(f"{self.most} pulls wait for their turn (max_held_pulls)")
        if waiting is None:
            waiting = self._by_peer[peer] = deque()
        waiting.append(held)
        self._count += 1

    def take(self) -> HeldPull | None:
        """The next pull to be answered in this turn; None if there is none, or no budget."""
        if not self._count or self.left <= 0 or not self._pulls_left:
            return None
        self._pulls_left -= 1
        self._count -= 1
        peer = next(iter(self._by_peer))
        waiting = self._by_peer.pop(peer)
        held = waiting.popleft()
        if waiting:
            self._by_peer[peer] = waiting
        return held

    def release_peer(self, peer: Peer) -> list[HeldPull]:
        """Ends the wait of all pulls of a peer, and returns them."""
        waiting = self._by_peer.pop(peer, None)
        if waiting is None:
            return []
        self._count -= len(waiting)
        return list(waiting)

    def release_all(self) -> list[HeldPull]:
        """Ends every wait."""
        return [held for peer in list(self._by_peer) for held in self.release_peer(peer)]

    def _busy(self, what: str) -> SystemBusy:
        return SystemBusy(f"{what}, no more may", retry_after_ms=self._busy_retry_after_ms)
