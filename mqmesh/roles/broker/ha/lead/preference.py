"""When a leader hands the lead to a replica that is preferred. Pure."""

from collections.abc import Collection
from typing import Final

import msgspec

from mqmesh.coordination.interface import GroupState

IN_SET_MS: Final = 60_000
"""A preferred replica gets the lead once it was in sync for so long."""
AGAIN_MS: Final = 600_000
"""Least time between two such changes; a replica that comes and goes does so as a follower."""


class Preference(msgspec.Struct):
    """Preferred replicas, as one leader knows them.

    Attributes:
        since_ms: Since when each was in sync without a break, by id; monotonic clock.
    """

    since_ms: dict[int, int] = {}

    def due(
        self, state: GroupState, me: int, preferred: Collection[int], now_ms: int, wall_ms: int
    ) -> int | None:
        """Return the replica that is to get the lead now, or None. To be called again and again.

        A replica is returned again after another ``IN_SET_MS``, if it does not lead by then.

        Args:
            state: Of the group.
            me: The leader.
            preferred: Replicas that are there and preferred.
            now_ms: Monotonic clock.
            wall_ms: Wall clock; those of all replicas are nearly the same.
        """
        able = {one.replica_id for one in state.in_sync} & set(preferred)
        self.since_ms = {one: self.since_ms.get(one, now_ms) for one in able}
        if state.paused or me in able or 0 <= wall_ms - state.preferred_ms < AGAIN_MS:
            return None
        due = [one for one, at in self.since_ms.items() if now_ms - at >= IN_SET_MS]
        if not due:
            return None
        found = min(due)
        self.since_ms[found] = now_ms
        return found
