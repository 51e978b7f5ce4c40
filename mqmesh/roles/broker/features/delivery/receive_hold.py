"""Receives that wait for a message or for their deadline. Pure."""

from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.delivery import ReceiveRequest
from mqmesh.protocol.request import NO_DEADLINE, Peer, PendingReply
from mqmesh.roles.broker.reading.pull_filter import PullFilter
from mqmesh.roles.broker.writing.writes import StoredListener
from mqmesh.storage.interface import BatchToPut, PutResult

MOST_OF_ONE: Final = 1_000
"""Receives of one connection that wait."""


class HeldReceive(msgspec.Struct, eq=False):
    """One receive that waits.

    Attributes:
        pending: Answer that it waits for, and until when: then it is given even if nothing came.
        wanted: Request.
        filter: Messages that match; None for all.
        topics: Topic and retry topic.
        codes: Response codes of the settlements that came with it.
    """

    pending: PendingReply
    wanted: ReceiveRequest
    filter: PullFilter | None
    topics: tuple[str, str]
    codes: list[int] = []

    @property
    def key(self) -> tuple[str, str]:
        """Group and topic: what is there for one receive of these is there for all."""
        return self.wanted.group, self.wanted.topic


class _Arrivals:
    """Listener of what is stored in a topic that receives wait for."""

    def __init__(self, topic: str, stirred: dict[str, None]) -> None:
        self._topic = topic
        self._stirred = stirred

    def on_stored(self, batch: BatchToPut, result: PutResult, now_ms: int) -> None:
        """Implement ``StoredListener.on_stored``."""
        self._stirred[self._topic] = None

    def on_visible(self) -> None:
        """Implement ``StoredListener.on_visible``."""
        self._stirred[self._topic] = None


class ReceiveHold:
    """All receives that wait at a broker.

    Args:
        most: Receives that may wait.
        busy_retry_after_ms: Retry delay of clients beyond that.
        listeners: Listeners of what is stored, by topic; it adds those of topics waited for.

    Attributes:
        most: Receives that may wait; may be changed.
        stirred: Topics in which there may be something for those that wait.
        due_ms: Before that no wait ends, monotonic clock.
    """

    def __init__(
        self, most: int, busy_retry_after_ms: int, listeners: dict[str, StoredListener]
    ) -> None:
        self.most = most
        self.stirred: dict[str, None] = {}
        self.due_ms = NO_DEADLINE
        self._busy_retry_after_ms = busy_retry_after_ms
        self._listeners = listeners
        self._keys_of: dict[str, dict[tuple[str, str], None]] = {}
        self._by_key: dict[tuple[str, str], dict[HeldReceive, None]] = {}
        self._of_peer: dict[Peer, int] = {}
        self._held: dict[HeldReceive, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, held: HeldReceive) -> None:
        """Let a receive wait.

        Raises:
            SystemBusy: Too many wait already.
        """
        peer = held.pending.peer
        if len(self._held) >= self.most or self._of_peer.get(peer, 0) >= MOST_OF_ONE:
            raise SystemBusy(
                f"{len(self._held)} receives wait at this broker, no more may (max_held_pulls; "
                f"{MOST_OF_ONE} of one connection)",
                retry_after_ms=self._busy_retry_after_ms,
            )
        self._held[held] = None
        self.due_ms = min(self.due_ms, held.pending.deadline_ms)
        self._of_peer[peer] = self._of_peer.get(peer, 0) + 1
        waiting = self._by_key.get(held.key)
        if waiting is not None:
            waiting[held] = None
            return
        self._by_key[held.key] = {held: None}
        for topic in held.topics:
            self._keys_of.setdefault(topic, {})[held.key] = None
            self._listeners.setdefault(topic, _Arrivals(topic, self.stirred))

    def release(self, held: HeldReceive) -> bool:
        """End the wait of a receive; False if it waits no more."""
        if held not in self._held:
            return False
        del self._held[held]
        peer = held.pending.peer
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        waiting = self._by_key[held.key]
        del waiting[held]
        if waiting:
            return True
        del self._by_key[held.key]
        for topic in held.topics:
            keys = self._keys_of[topic]
            del keys[held.key]
            if not keys:
                del self._keys_of[topic]
                if isinstance(self._listeners[topic], _Arrivals):
                    del self._listeners[topic]
        return True

    def stir(self, topic: str) -> None:
        """Note that there may be something in a topic for those that wait."""
        if topic in self._keys_of:
            self.stirred[topic] = None

    def stir_all(self) -> None:
        """Note that there may be something for everybody."""
        self.stirred.update(dict.fromkeys(self._keys_of))

    def take_stirred(self) -> list[tuple[str, str]]:
        """Return the groups and topics for which there may be something; their receives wait on."""
        topics = list(self.stirred)
        self.stirred.clear()
        return [key for topic in topics for key in self._keys_of.get(topic, ())]

    def of_key(self, key: tuple[str, str]) -> list[HeldReceive]:
        """Return the receives of a group and topic, those that wait longest first."""
        return list(self._by_key.get(key, ()))

    def of_topic(self, topic: str) -> list[HeldReceive]:
        """Return the receives that wait for a topic."""
        return [held for key in self._keys_of.get(topic, ()) for held in self._by_key[key]]

    def of_peer(self, peer: Peer) -> list[HeldReceive]:
        """Return the receives of a connection."""
        if peer not in self._of_peer:
            return []
        return [held for held in self._held if held.pending.peer == peer]

    def expired(self, now_ms: int) -> list[HeldReceive]:
        """Return the receives whose deadline has passed; ``expect_next`` follows."""
        if now_ms < self.due_ms:
            return []  # nearly always
        return [held for held in self._held if held.pending.deadline_ms <= now_ms]

    def expect_next(self) -> None:
        """Note when a wait ends next."""
        deadlines = (held.pending.deadline_ms for held in self._held)
        self.due_ms = min(deadlines, default=NO_DEADLINE)

    def all(self) -> list[HeldReceive]:
        """Return all receives that wait."""
        return list(self._held)
