"""Pulls that wait for a message or for their deadline.

Pure: callers report arrivals, lost peers and the time, and get the
pulls whose wait is over. Holding and releasing cost the same however many wait.
"""

from typing import Final, TypeVar

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.request import Peer, PendingReply

SLOT_MS: Final = 50
"""Deadlines are kept in slots of this length, so a pull may wait so much longer."""


_K = TypeVar("_K")


class HeldPull(msgspec.Struct, eq=False):
    """One pull that waits.

    Attributes:
        pending: Answer that it waits for, and until when: then it is given even if nothing came.
        pull: Request.
        queue_offset: Next message wanted; grows beyond ``pull.queue_offset`` while messages
            arrive that the filter passes over.
    """

    pending: PendingReply
    pull: PullRequest
    queue_offset: int


class PullHold:
    """All pulls that wait at a broker.

    Args:
        most: Pulls that may wait.
        busy_retry_after_ms: Retry delay of clients beyond that.

    Attributes:
        most: Pulls that may wait; may be changed.
        queues: Queues that somebody waits at, by topic and queue id; not to be changed.
    """

    def __init__(self, most: int, busy_retry_after_ms: int = 100) -> None:
        self.most = most
        self._busy_retry_after_ms = busy_retry_after_ms
        # Dicts serve as sets that keep their order: who waits longest is answered first.
        self.queues: dict[tuple[str, int], dict[HeldPull, None]] = {}
        self._by_peer: dict[Peer, dict[HeldPull, None]] = {}
        self._by_slot: dict[int, dict[HeldPull, None]] = {}
        self._count = 0
        self._next_slot: int | None = None

    def __len__(self) -> int:
        return self._count

    def is_waiting(self, group: str, topic: str, queue_id: int) -> bool:
        """True when a pull of a group waits at a queue."""
        return any(held.pull.group == group for held in self.queues.get((topic, queue_id), ()))

    def hold(self, held: HeldPull) -> None:
        """Lets a pull wait.

        Raises:
            SystemBusy: Too many wait already.
        """
        if self._count >= self.most:
            raise SystemBusy(
                f"{self.most} pulls wait at this broker, no more may (max_held_pulls)",
                retry_after_ms=self._busy_retry_after_ms,
            )
        self._count += 1
        slot = held.pending.deadline_ms // SLOT_MS
        if self._next_slot is None or slot < self._next_slot:
            self._next_slot = slot
        key = (held.pull.topic, held.pull.queue_id)
        self.queues.setdefault(key, {})[held] = None
        self._by_peer.setdefault(held.pending.peer, {})[held] = None
        self._by_slot.setdefault(slot, {})[held] = None

    def release(self, topic: str, queue_id: int) -> list[HeldPull]:
        """Ends the wait of all pulls at a queue, and returns them."""
        return self._release(self.queues.get((topic, queue_id)))

    def release_topic(self, topic: str) -> list[HeldPull]:
        """Ends the wait of all pulls at the queues of a topic, and returns them."""
        keys = [key for key in self.queues if key[0] == topic]
        return [held for key in keys for held in self.release(*key)]

    def release_peer(self, peer: Peer) -> list[HeldPull]:
        """Ends the wait of all pulls of a peer, and returns them."""
        return self._release(self._by_peer.get(peer))

    def release_all(self) -> list[HeldPull]:
        """Ends every wait."""
        return [held for key in list(self.queues) for held in self.release(*key)]

    def tick(self, now_ms: int) -> list[HeldPull]:
        """Ends the wait of pulls whose deadline has passed, and returns them.

        Args:
            now_ms: Monotonic clock.
        """
        found: list[HeldPull] = []
        if self._next_slot is None:
            return found
        # A slot is over when its last millisecond is.
        end = now_ms // SLOT_MS
        if end - self._next_slot > len(self._by_slot):
            slots = sorted(slot for slot in self._by_slot if slot < end)
        else:
            slots = list(range(self._next_slot, end))
        for slot in slots:
            found += self._release(self._by_slot.get(slot))
        self._next_slot = max(end, self._next_slot) if self._by_slot else None
        return found

    def _release(self, waiting: dict[HeldPull, None] | None) -> list[HeldPull]:
        if waiting is None:
            return []
        found = list(waiting)
        for held in found:
            _remove(self.queues, (held.pull.topic, held.pull.queue_id), held)
            _remove(self._by_peer, held.pending.peer, held)
            _remove(self._by_slot, held.pending.deadline_ms // SLOT_MS, held)
        self._count -= len(found)
        return found


def _remove(index: dict[_K, dict[HeldPull, None]], key: _K, held: HeldPull) -> None:
    waiting = index[key]
    del waiting[held]
    if not waiting:
        del index[key]
