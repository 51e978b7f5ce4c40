"""Isolation of a leader with copies that reaches too few replicas. Pure.

**Isolated** is one that reaches neither the coordinator nor enough followers. That decides nothing
about what is safe: what such a leader stores nobody confirms. But another one may lead by now, whom
it does not see; clients are to look for that one, and it must not grant locks of queues that the
other one grants, too.

**Cut off** is one that reaches too few followers to confirm anything, with or without the
coordinator. Where it does, its session lives on, and nobody would take its place. So it says at the
coordinator that it is cut off. A follower that misses it, and is promised the next epoch by as many
as are needed to confirm, takes over then (``election.Suspicion.CUT_OFF``). Until one does it leads:
where all followers are dead, or do not reach one another either, nobody could do better.
"""

from typing import Final

import msgspec

from mqmesh.coordination.interface import AckReplicas
from mqmesh.roles.broker.ha.confirm import ConfirmRule, least_to_confirm
from mqmesh.roles.broker.ha.in_sync import ACKS_MS
from mqmesh.roles.broker.ha.leadership import Leadership

CUT_OFF_MS: Final = 2_000
"""A leader that has reached too few for so long is cut off."""


def is_isolated(leadership: Leadership, now_ms: int) -> bool:
    """Return whether the leader is to take nothing.

    Args:
        leadership: Of the leader.
        now_ms: Monotonic clock.
    """
    if leadership.policy.mode is AckReplicas.NONE or leadership.lease_holds():
        return False
    return any(_live_members(leadership, rule, now_ms) < rule.copies for rule in _rules(leadership))


class FollowerWatch(msgspec.Struct):
    """Time for which a leader has reached too few followers to confirm anything.

    Attributes:
        since_ms: Since when, monotonic clock; None while it reaches enough.
    """

    since_ms: int | None = None

    def is_cut_off(self, leadership: Leadership, now_ms: int) -> bool:
        """Return whether the leader is cut off; to be asked again and again.

        Args:
            leadership: Of the leader.
            now_ms: Monotonic clock.
        """
        least = least_to_confirm(leadership.in_sync.state, leadership.policy.minimum)
        if all(_live_members(leadership, rule, now_ms) >= least for rule in _rules(leadership)):
            self.since_ms = None
            return False
        if self.since_ms is None:
            self.since_ms = now_ms
        return now_ms - self.since_ms >= CUT_OFF_MS


def _rules(leadership: Leadership) -> tuple[ConfirmRule, ConfirmRule]:
    log = leadership.log
    return log.rule, log.next_rule or log.rule


def _live_members(leadership: Leadership, rule: ConfirmRule, now_ms: int) -> int:
    """Members of a set that are there, the leader too."""
    recent = {one for one, at in leadership.last_seen_ms.items() if now_ms - at <= ACKS_MS}
    recent.add(leadership.log.me.replica_id)
    return sum(member.replica_id in recent for member in rule.members)
