"""Metrics of a replica's membership: elections, changes of the set, and its session."""

import logging
from typing import Final

import msgspec

from mqmesh.coordination.interface import GroupState, MemberIncarnation
from mqmesh.metrics import Distribution, Measured, counter, gauge, histogram
from mqmesh.roles.broker.ha.leadership import Leadership

_log = logging.getLogger(__name__)

REASONS: Final = ("founding", "failover", "handed_over", "unclean")


class HaMetrics(msgspec.Struct):
    """Metrics of elections, and of changes of the in-sync set while this replica led.

    Attributes:
        elections: How often it came to lead, by reason: ``founding`` of the group, ``failover``,
            ``handed_over`` by the master before it, ``unclean`` by an administrator.
        set_changes: How often the set changed while it led.
        failover_ms: From the last word of the former master until this one served; 0 if it never
            was elected.
        members: The set that was seen last.
        leaderless_ms: Last sign of life of the former master, monotonic clock; None while there is
            one.
    """

    elections: dict[tuple[str, ...], int] = msgspec.field(
        default_factory=lambda: {(one,): 0 for one in REASONS}
    )
    set_changes: int = 0
    failover_ms: int = 0
    members: tuple[MemberIncarnation, ...] = ()
    leaderless_ms: int | None = None

    def on_missed(self, last_seen_ms: int) -> None:
        """Note that the replica stands: the last sign of life of the master was at that time."""
        if self.leaderless_ms is None:
            self.leaderless_ms = last_seen_ms

    def on_followed(self) -> None:
        """Another replica leads."""
        self.leaderless_ms = None

    def on_elected(self, leadership: Leadership, state: GroupState) -> None:
        """Note that the replica leads, by what the group's record says."""
        reason = "founding" if state.epoch == 1 else "handed_over"
        if state.unclean_since == state.epoch:
            reason = "unclean"
        elif self.leaderless_ms is not None:
            reason = "failover"
        self.elections[reason,] += 1
        self.members = leadership.log.rule.members

    def look(self, leadership: Leadership, now_ms: int) -> None:
        """Logs the outcome of elections, and changes of the set."""
        if self.leaderless_ms is not None and leadership.is_confirmed:
            self.failover_ms = now_ms - self.leaderless_ms
            self.leaderless_ms = None
            _log.info("this replica serves; there was no master for %d ms", self.failover_ms)
        members = leadership.log.rule.members
        if members != self.members:
            before = sorted(one.replica_id for one in self.members)
            if leadership.members == before:
                renewed = sorted(one.replica_id for one in members if one not in self.members)
                _log.info("replicas in sync are %s; begun anew: %s", before, renewed)
            else:
                _log.warning("replicas in sync are %s now, not %s", leadership.members, before)
            self.members = members
            self.set_changes += 1


class MemberStatus(msgspec.Struct, frozen=True):
    """A replica's membership at one moment.

    Attributes:
        elections: As of ``HaMetrics``.
        lease_ms: How long its session lives if it is not renewed; 0 without one.
        has_session: The coordinator knows it, as far as that can be known.
        promised_epoch: It follows nobody of an earlier one.
        renewals: How long the coordinator took to answer renewals.
        set_changes: How often the set of replicas in sync changed while it led.
        failover_ms: From the last word of the former master until this one served; 0 if it never
            was elected.
        is_failsafe: It leads although its session is over: there is no failover meanwhile.
        lease_age_ms: Since its session was renewed, -1 without one.
        state: The group's, as it is known; None if it is not.
    """

    elections: dict[tuple[str, ...], int]
    lease_ms: int
    has_session: bool
    promised_epoch: int
    renewals: Distribution
    set_changes: int
    failover_ms: int
    is_failsafe: bool
    lease_age_ms: int
    state: GroupState | None


MEMBER_METRICS: Final[tuple[Measured[MemberStatus], ...]] = (
    counter(
        "ha_elections_total",
        "how often it came to lead, by founding, failover, handed_over, unclean",
        lambda one: one.elections,
        labels=("reason",),
    ),
    gauge(
        "ha_lease_remaining_ms",
        "how long its session lives if it is not renewed",
        lambda one: one.lease_ms,
        unit="ms",
    ),
    gauge("ha_coordinator_up", "it has a session at the coordinator", lambda one: one.has_session),
    gauge(
        "ha_promised_epoch", "it follows nobody of an earlier one", lambda one: one.promised_epoch
    ),
    histogram(
        "ha_renewal_ms",
        "how long renewals of its session took; ha.lease_ttl_ms should be four times the slowest",
        lambda one: one.renewals,
        unit="ms",
    ),
    counter(
        "ha_set_changes_total",
        "changes of the replicas in sync while it led; many mean a replica or link at its limit",
        lambda one: one.set_changes,
    ),
    gauge(
        "ha_failover_ms",
        "from the last word of the former master until this one served",
        lambda one: one.failover_ms,
        unit="ms",
    ),
    gauge(
        "ha_failsafe",
        "it leads although its session at the coordinator is over: no failover meanwhile",
        lambda one: one.is_failsafe,
    ),
)
