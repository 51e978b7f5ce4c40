"""A replica's leadership of its group in one epoch: who follows, and what is safe. Pure.

Connects what followers say (``ConfirmedLog``), who belongs to the set (``InSyncSet``), and what
producers are promised (``AckPolicy``).
"""

from collections.abc import Callable
from typing import Final

from mqmesh.coordination.interface import (
    AckReplicas,
    GroupState,
    MemberIncarnation,
    StateRecord,
)
from mqmesh.errors import BrokerNotAvailable, InvalidArgument, NotMaster, StaleEpoch
from mqmesh.roles.broker.ha.confirm import AckPolicy, ConfirmedLog, rule_of
from mqmesh.roles.broker.ha.in_sync import InSyncSet

ISOLATED: Final = (
    "this replica reaches neither the coordinator nor enough followers: another one may lead by now"
)
CUT_OFF: Final = (
    "too few replicas in sync are reached to confirm anything; one that reaches enough takes over"
)
LEASE_OVER: Final = "its session was not renewed (ha.lease_ttl_ms): another replica may lead by now"


class Leadership:
    """One epoch of a leader.

    Args:
        record: By which it leads.
        me: As the record has it.
        policy: Acknowledgement policy, the promise to producers.
        marker_end: Commit-log offset behind the marker of the epoch.
        log_end: Returns the end of the log.
        lag_max_ms: A follower that was not caught up for so long leaves the set.
        counts_synced: A follower has what its disk has, not what it has written.
        owners_from: Least epoch in which the log must have had all owners of queues for them to be
            known now: since then copies confirm what masters answer, and no election was forced.

    Attributes:
        log: Confirmed part of the log, and the position of each replica.
        in_sync: The set.
        policy, owners_from: See above.
        last_seen_ms: Last sign of life of followers, by id; monotonic clock.
        is_over: Why this epoch is over, once that is known.
        closing: Why no more sends are taken, while the lead is handed over.
        lease_holds: Whether nobody takes this replica for gone.
        is_isolated: It reaches neither the coordinator nor enough followers.
        is_cut_off: For some seconds it has reached too few followers to confirm anything.
    """

    def __init__(
        self,
        record: StateRecord,
        me: MemberIncarnation,
        policy: AckPolicy,
        *,
        marker_end: int,
        log_end: Callable[[], int],
        lag_max_ms: int,
        counts_synced: bool,
        owners_from: int = 0,
    ) -> None:
        assert record.state is not None, "who leads does so by a record"
        self.log = ConfirmedLog(record.state.epoch, me, rule_of(record.state), marker_end)
        self.in_sync = InSyncSet(self.log, record, lag_max_ms, fewest=policy.minimum)
        self.policy = policy
        self.owners_from = owners_from
        self.last_seen_ms: dict[int, int] = {}
        self.is_over: str | None = None
        self.closing: str | None = None
        self.lease_holds: Callable[[], bool] = lambda: True
        self.is_isolated = False
        self.is_cut_off = False
        self._log_end = log_end
        self._counts_synced = counts_synced

    @property
    def epoch(self) -> int:
        """Which one it is."""
        return self.log.epoch

    @property
    def is_confirmed(self) -> bool:
        """Return whether the log that it inherited is safe: before that nothing is shown."""
        return self.log.confirmed >= self.log.marker_end

    @property
    def members(self) -> list[int]:
        """Ids of the replicas in sync."""
        return sorted(member.replica_id for member in self.log.rule.members)

    def confirmed(self) -> int:
        """No failover takes back what ends at this commit-log offset or before."""
        return self.log.confirmed

    def acknowledged(self) -> int:
        """Return the commit-log offset up to which puts may be acknowledged, 0 for none."""
        return self.policy.acknowledged(self.log)

    def may_answer(self) -> bool:
        """Return whether sends may be answered: without copies only while the lease holds."""
        return self.policy.mode is not AckReplicas.NONE or self.lease_holds()

    @property
    def electable(self) -> frozenset[int]:
        """Ids of the others that could be elected."""
        rules = (self.log.rule, self.log.next_rule or self.log.rule)
        members = {one for rule in rules for one in rule.members} - {self.log.me}
        return frozenset(one.replica_id for one in members)

    @property
    def loss(self) -> str | None:
        """Why it is to grant nothing that one leader alone may; None while it may."""
        if not self.may_answer():
            return LEASE_OVER
        return ISOLATED if self.is_isolated else None

    def check(self) -> None:
        """To be called before a put.

        Raises:
            BrokerNotAvailable: Too few replicas are there.
            NotMaster: The lead is handed over just now, or another one may have it.
        """
        if (loss := self.loss) is not None:
            raise NotMaster(loss)
        if self.closing is not None:
            raise NotMaster(self.closing)
        self.policy.check(self.log, self._log_end())
        if self.is_cut_off:
            raise BrokerNotAvailable(CUT_OFF)

    def on_own(self, position: int) -> bool:
        """The leader's own log reaches a commit-log offset; True if more is confirmed by it."""
        before = self.log.confirmed
        return self.log.on_own(position) > before

    def check_promise(self, replica_id: int, promised_epoch: int) -> None:
        """A follower wants to open.

        Raises:
            StaleEpoch: It has promised a later epoch: this one is over.
        """
        if promised_epoch > self.epoch:
            reason = f"replica {replica_id} has promised epoch {promised_epoch}"
            self.is_over = reason
            raise StaleEpoch(f"epoch {self.epoch} is over: {reason}")

    def check_voter(self, broker_name: str, replica_id: int) -> None:
        """Check that a replica which wants to follow belongs to the group.

        Raises:
            InvalidArgument: The replica does not belong to the group.
        """
        if not self.in_sync.state.is_voter(replica_id):
            raise InvalidArgument(outside(broker_name, replica_id, self.in_sync.state))

    def lost_by(self, member: MemberIncarnation, written: int) -> int:
        """Check whether a follower that opens lacks what it had acknowledged in this epoch.

        Args:
            member: The follower; if it does it counts with nothing from now on.
            written: It has the leader's log up to this commit-log offset.

        Returns:
            The commit-log offset that it had acknowledged; 0 if it lacks nothing.
        """
        had = self.log.positions.get(member, 0)
        if written >= had:
            return 0
        self.log.on_lost(member)
        return had

    def on_opened(self, member: MemberIncarnation, written: int, synced: int, now_ms: int) -> None:
        """A follower follows from a commit-log offset, to which it has the leader's log.

        Args:
            member: The follower.
            written: It has written so far, of this leader's log.
            synced: And has on its disk.
            now_ms: Monotonic clock.

        Raises:
            InvalidArgument: It lost what it had acknowledged.
        """
        had = self.log.positions.get(member, 0)
        position = min(written, synced) if self._counts_synced else written
        # With the same incarnation nothing was lost, whatever it knows of its disk by now.
        self.log.on_opened(member, max(position, min(had, written)))
        self._note_follower(member.replica_id, now_ms)

    def on_ack(
        self, replica_id: int, epoch: int, written: int, synced: int, sent: int, now_ms: int
    ) -> None:
        """A follower says how far it is.

        Args:
            replica_id: Which.
            epoch: That it follows.
            written: Commit-log offset.
            synced: Commit-log offset.
            sent: The leader has sent it the log up to here.
            now_ms: Monotonic clock.

        Raises:
            InvalidArgument: That cannot be.
        """
        link = self.log.links.get(replica_id)
        if link is not None:
            self.log.on_sent(replica_id, sent)
            position = max(synced if self._counts_synced else written, min(link.has, written))
        else:
            position = 0
        self.log.on_ack(replica_id, epoch, position)
        self._note_follower(replica_id, now_ms)

    def on_gone(self, replica_id: int) -> None:
        """A follower's connection broke."""
        self.log.on_disconnected(replica_id)

    def _note_follower(self, replica_id: int, now_ms: int) -> None:
        self.last_seen_ms[replica_id] = now_ms
        self.in_sync.on_follower(replica_id, self._log_end(), now_ms)


def outside(broker_name: str, replica_id: int, state: GroupState) -> str:
    """Return the error text for a replica that does not belong to its group."""
    return (
        f"replica {replica_id} does not belong to {broker_name}, {list(state.voters)} do; "
        f"`mqmesh ha add {broker_name} {replica_id}` lets it in"
    )
