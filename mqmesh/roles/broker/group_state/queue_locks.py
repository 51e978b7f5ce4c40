"""Locks of queues for ordered consumption: which member of a group alone may have one. Pure.

A lock ends when its holder gives it back, when it was not renewed for the time of the lease,
or a while after the connection broke that it was last renewed by. That while is longer than a
client needs to see that its connection is gone, and a client that sees it begins no message.
So a queue changes hands 3 s after a crash, not after the 60 s of the lease.

Tokens distinguish holders: a client that presents the token of a lock and gets it back
was never replaced. Each epoch's tokens are above those of the ones before.

Where copies confirm the log, owners are in it, and a new master restores them as holders whose
connection broke: who comes back keeps its token, and others get the queue after the same while.

Elsewhere the table is empty after a restart, while consumers still work on what they have. So for
the same while nothing is granted, and who held a queue before says so; of those who do, the one
with the newest token goes on. It gets a new token, and so begins again where the group has
committed: that it was the last to hold the queue cannot be known. A member that stood still while
another had its queue may be the only one that claims it. After an election without copies a new
client waits longer: consumers of a cut-off master notice only when it does.
"""

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.membership import LOCK_HELD_BY_OTHER, LOCK_PENDING
from mqmesh.protocol.request import Peer

TICK_MS: Final = 10_000
"""Locks that ended long ago are forgotten so often."""

QueueKey = tuple[str, int]
"""Topic and queue id."""
OnOwner = Callable[[str, str, int], None]
"""Function that notes another owner of a queue: group, topic, queue id."""


class QueueLock(msgspec.Struct):
    """One queue's lock.

    Attributes:
        client_id: Client that holds the lock.
        peer: Connection that renewed it last; None when that connection is gone.
        token: Fencing token; a new one whenever another client gets the lock.
        ends_ms: Monotonic time from which on others may have it.
    """

    client_id: str
    peer: Peer | None
    token: int
    ends_ms: int


class QueueLocks:
    """The locks of all groups at one broker.

    Args:
        lease_ms: How long a lock lasts that is not renewed.
        lost_grace_ms: How long it lasts after its holder's connection broke.
        most: Locks allowed.
        first_token: Above the tokens of earlier epochs, and the first of this one.
        busy_retry_after_ms: Retry delay of clients when there are too many.

    Attributes:
        lease_ms: See above.
        on_owner: Called with group, topic and queue id when another client has a queue, or nobody.
    """

    def __init__(
        self,
        *,
        lease_ms: int,
        lost_grace_ms: int,
        most: int,
        first_token: int = 1,
        busy_retry_after_ms: int = 100,
    ) -> None:
        self.lease_ms = lease_ms
        self.on_owner: OnOwner = ignore_owner
        self._lost_grace_ms = lost_grace_ms
        self._most = most
        self._first_token = self._next_token = first_token
        self._settled_ms = self._free_ms = 0
        self._waits = False
        self._busy_retry_after_ms = busy_retry_after_ms
        self._groups: dict[str, dict[QueueKey, QueueLock]] = {}
        self._of_peer: dict[Peer, dict[tuple[str, QueueKey], None]] = {}
        self._count = 0
        self._next_tick_ms = 0

    def __len__(self) -> int:
        return self._count

    def wait(self, settled_ms: int, free_ms: int) -> None:
        """Wait for former holders of locks, which are not known.

        Args:
            settled_ms: Monotonic time until which only they count.
            free_ms: Monotonic time until which only they are granted what nobody holds.
        """
        self._settled_ms, self._free_ms = settled_ms, free_ms
        self._waits = True

    def lock(
        self, group: str, client_id: str, peer: Peer, queue: QueueKey, token: int, now_ms: int
    ) -> int:
        """A member wants a queue, or wants to keep it.

        Args:
            group: Consumer group.
            client_id: The member.
            peer: Its connection.
            queue: Which.
            token: Of the lock that it believes to hold, 0 for none.
            now_ms: Monotonic clock.

        Returns:
            The token of its lock, ``LOCK_HELD_BY_OTHER`` or ``LOCK_PENDING``.

        Raises:
            SystemBusy: There are too many locks.
        """
        known = self._groups.get(group, {}).get(queue)
        is_former = 0 < token < self._first_token
        if now_ms < self._settled_ms:
            if is_former and (known is None or token >= known.token):
                self._enter(group, queue, client_id, peer, token, self._settled_ms + self.lease_ms)
            return LOCK_PENDING
        if known is not None and known.client_id != client_id and now_ms < known.ends_ms:
            return LOCK_HELD_BY_OTHER
        if now_ms < self._free_ms and known is None and not is_former:
            return LOCK_PENDING
        is_doubtful = self._waits and known is not None and known.token < self._first_token
        if known is None or known.client_id != client_id or is_doubtful:
            token = self._next_token
            self._next_token += 1
        else:
            token = known.token
        self._enter(group, queue, client_id, peer, token, now_ms + self.lease_ms)
        return token

    def restore(
        self, group: str, queue: QueueKey, client_id: str, token: int, ends_ms: int
    ) -> None:
        """Restore a lock of an earlier epoch, which ends unless its holder comes back.

        It counts even if there are more than allowed by now: somebody may be at work.
        """
        self._groups.setdefault(group, {})[queue] = QueueLock(client_id, None, token, ends_ms)
        self._count += 1

    def unlock(self, group: str, client_id: str, queue: QueueKey) -> bool:
        """A member gives a queue back; returns False if it had not got it."""
        known = self._groups.get(group, {}).get(queue)
        if known is None or known.client_id != client_id:
            return False
        self._remove(group, queue, known)
        return True

    def holder(self, group: str, queue: QueueKey, now_ms: int) -> str | None:
        """Return the client that holds a queue, or None."""
        known = self._groups.get(group, {}).get(queue)
        return known.client_id if known is not None and now_ms < known.ends_ms else None

    def find(self, group: str, queue: QueueKey) -> QueueLock | None:
        """Return the lock of a queue, also one that has ended; None if there is none."""
        return self._groups.get(group, {}).get(queue)

    def locked(self) -> Iterator[tuple[str, QueueKey]]:
        """Yield group and queue of each lock."""
        for group, queues in self._groups.items():
            for queue in queues:
                yield group, queue

    def on_leave(self, client_id: str, peer: Peer) -> None:
        """A client leaves; what it did not give back is still being worked on.

        Such locks end with their lease, though the connection breaks now.
        """
        for group, queue in list(self._of_peer.get(peer, ())):
            lock = self._groups[group][queue]
            if lock.client_id == client_id:
                self._forget_peer(group, queue, lock)

    def on_disconnect(self, peer: Peer, now_ms: int) -> None:
        """A connection broke: the locks renewed by it end soon, unless their holders return."""
        for group, queue in self._of_peer.pop(peer, ()):
            lock = self._groups[group][queue]
            lock.peer = None
            lock.ends_ms = min(lock.ends_ms, max(now_ms, self._settled_ms) + self._lost_grace_ms)

    def remove_topic(self, topic: str) -> None:
        """The topic's queues are no more."""
        for group in list(self._groups):
            for queue, lock in list(self._groups[group].items()):
                if queue[0] == topic:
                    self._remove(group, queue, lock)

    def tick(self, now_ms: int) -> None:
        """Forgets locks that ended long ago; until then their holders may come back to them."""
        if now_ms < self._next_tick_ms:
            return
        self._next_tick_ms = now_ms + TICK_MS
        for group in list(self._groups):
            for queue, lock in list(self._groups[group].items()):
                if now_ms >= lock.ends_ms + self.lease_ms:
                    self._remove(group, queue, lock)

    def _enter(
        self,
        group: str,
        queue: QueueKey,
        client_id: str,
        peer: Peer,
        token: int,
        ends_ms: int,
    ) -> None:
        known = self._groups.get(group, {}).get(queue)
        if known is not None:
            self._forget_peer(group, queue, known)
        elif self._count >= self._most:
            raise SystemBusy(
                f"this broker keeps {self._most} locks of queues, no more (max_consumer_offsets)",
                retry_after_ms=self._busy_retry_after_ms,
            )
        else:
            self._count += 1
        lock = QueueLock(client_id, peer, token, ends_ms)
        self._groups.setdefault(group, {})[queue] = lock
        self._of_peer.setdefault(peer, {})[group, queue] = None
        if known is None or (known.client_id, known.token) != (client_id, token):
            self.on_owner(group, *queue)

    def _remove(self, group: str, queue: QueueKey, lock: QueueLock) -> None:
        self._forget_peer(group, queue, lock)
        self._count -= 1
        del self._groups[group][queue]
        if not self._groups[group]:
            del self._groups[group]
        self.on_owner(group, *queue)

    def _forget_peer(self, group: str, queue: QueueKey, lock: QueueLock) -> None:
        peer, lock.peer = lock.peer, None
        held = None if peer is None else self._of_peer.get(peer)
        if held is not None and peer is not None:
            held.pop((group, queue), None)
            if not held:
                del self._of_peer[peer]


def ignore_owner(group: str, topic: str, queue_id: int) -> None:
    """Ignore another owner of a queue, where owners are not kept."""
