"""Whether a leader with copies hears neither the coordinator nor enough followers. Pure.

That decides nothing about what is safe: what such a leader stores nobody confirms. But another one
may lead by now, whom it does not hear; clients are to look for that one, and it must not grant
locks of queues that the other one grants, too.
"""

from typing import Final

from mqmesh.coordination.interface import AckReplicas
from mqmesh.roles.broker.ha.leadership import Leadership

ACKS_MS: Final = 1_000
"""A leader without a session goes on while as many as confirm were heard in that time."""


def is_isolated(leadership: Leadership, now_ms: int) -> bool:
    """Whether it is to take nothing.

    Args:
        leadership: Of the leader.
        now_ms: Monotonic clock.
    """
    if leadership.policy.mode is AckReplicas.NONE or leadership.lease_holds():
        return False
    log = leadership.log
    recent = {one for one, at in leadership.heard_ms.items() if now_ms - at <= ACKS_MS}
    recent.add(log.me.replica_id)
    return any(
        sum(member.replica_id in recent for member in rule.members) < rule.copies
        for rule in (log.rule, log.next_rule or log.rule)
    )
