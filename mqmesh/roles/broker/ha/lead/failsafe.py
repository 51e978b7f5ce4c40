"""A leader whose sends wait for nobody goes on without the coordinator by promises. Pure.

With copies that confirm an old leader is harmless: nobody confirms for it. Without them (``none``)
its session alone says that nobody else leads. When that cannot be renewed the leader asks all who
could be elected, each of whom promises not to stand, nor to lead, for as long as a session lives.
While all of them have promised nobody can lead but the one that asks. Any one that does not answer
may be the one that is elected by a coordinator which only it reaches.

All times are of the clock since boot, which goes on while a machine sleeps. A promise counts from
when it was asked for; who gives it counts from when it did, which is later.
"""

from collections.abc import Collection
from typing import Final

import msgspec

from mqmesh.coordination.interface import AckReplicas, GroupState
from mqmesh.roles.broker.ha.lead.lease import ISOLATED_MS

REQUESTS_PER_LEASE: Final = 4
"""Times that all are asked within the life of a session, from half of it without a renewal."""


class Failsafe(msgspec.Struct):
    """Promises to a leader.

    Attributes:
        ttl_ms: A promise holds for so long (lease_ttl_ms).
        is_enabled: It asks for promises (failsafe).
        until_ms: Until when each replica has promised, by id.
        next_ms: When all are asked next.
    """

    ttl_ms: int
    is_enabled: bool = True
    until_ms: dict[int, int] = {}
    next_ms: int = 0

    def must_ask(self, lease_ms: int, now_ms: int) -> bool:
        """Return whether to ask all electable replicas now, and plan the next time.

        Args:
            lease_ms: The leader's session lives for so long if it is not renewed.
            now_ms: Clock since boot.
        """
        if not self.is_enabled or lease_ms > self.ttl_ms // 2 or now_ms < self.next_ms:
            return False
        self.next_ms = now_ms + self.ttl_ms // REQUESTS_PER_LEASE
        return True

    def on_promised(self, replica_id: int, sent_ms: int) -> None:
        """A replica has promised to hold still.

        Args:
            replica_id: Which.
            sent_ms: When it was asked, clock since boot.
        """
        until_ms = sent_ms + self.ttl_ms
        self.until_ms[replica_id] = max(until_ms, self.until_ms.get(replica_id, 0))

    def holds(self, others: Collection[int], now_ms: int) -> bool:
        """Return whether nobody else can lead, with time to spare.

        Args:
            others: All who could be elected, but the leader.
            now_ms: Clock since boot.
        """
        return self.is_enabled and all(
            now_ms < self.until_ms.get(one, 0) - ISOLATED_MS for one in others
        )


class VoteAbstention(msgspec.Struct):
    """Promise of a replica to leaders: not to stand, and not to lead.

    A start forgets it, so a replica that was started holds still as if it had just promised, unless
    it is the leader itself, or there is none.

    Attributes:
        until_ms: Clock since boot.
        started_until_ms: The same, by the start.
    """

    until_ms: int = 0
    started_until_ms: int = 0

    def promise(self, until_ms: int) -> None:
        """Promise to hold still until then."""
        self.until_ms = max(self.until_ms, until_ms)

    def left_ms(self, state: GroupState, replica_id: int, last_epoch: int, now_ms: int) -> int:
        """Return for how many ms it holds still yet, 0 if it need not.

        Args:
            state: Of the group, by the record as it is known.
            replica_id: Of this replica.
            last_epoch: Of the last record of its log.
            now_ms: Clock since boot.
        """
        has_led = state.master == replica_id and last_epoch >= state.epoch
        has_led = state.master == replica_id and last_epoch >= state.epoch
        if state.mode is not AckReplicas.NONE or has_led:
            return 0
        by_start_ms = 0 if state.master is None else self.started_until_ms
        return max(self.until_ms - now_ms, by_start_ms - now_ms, 0)
