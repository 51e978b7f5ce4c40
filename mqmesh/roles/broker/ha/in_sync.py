"""In-sync set of a group: the leader proposes, the coordinator's record decides. Pure.

One change at a time, made from one view of all followers. From the moment it is proposed until its
outcome is known the log is confirmed by both sets. An outcome that nobody knows is no reason to let
go of either: a change that is still on its way may be made as long as the record has the version
that it was made on. So the same change is asked for again, until the version has moved.

In the modes ``quorum`` and ``one`` the voters stay, and a change only gives one the incarnation
that it has by now, or takes one in that was added and has all that is confirmed.

An administrator changes the members of the group, one replica at a time. Where that changes the
rule of confirmation, the stricter of both rules holds from then on, and the record is changed once
the new one confirms as far as the old: a leader elected by the new rule then has all that was
confirmed.
"""

from typing import Final

import msgspec

from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    GroupState,
    MemberIncarnation,
    OutcomeUnknown,
    StateRecord,
)
from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.roles.broker.ha.confirm import ConfirmedLog, rule_of, with_members
from mqmesh.roles.broker.ha.effects import ChangeRecord, Effect, Follow, ReadRecord

REREAD_MS: Final = 200
FLAP_WINDOW_MS: Final = 60_000
FLAPS: Final = 3
"""A member that came in so often within ``FLAP_WINDOW_MS`` waits before it comes in again."""
FLAP_WAITS_MS: Final = (10_000, 20_000, 40_000, 80_000, 120_000)
GONE_MS: Final = 200
"""A member without session and connection leaves after so long; where all replicas are stopped, the
leader knows that it is, too, before that."""
ACKS_MS: Final = 1_000
"""A follower that acknowledged within that time is there; each does every 200 ms."""
HAS_VOTERS: Final = frozenset({AckReplicas.ONE, AckReplicas.QUORUM})


class CandidateState(msgspec.Struct, frozen=True):
    """State of a follower at the leader, beside its position.

    Attributes:
        caught_up_ms: When it had, last, all that the leader had at that time.
        mark: Commit-log offset where the log ended at ``mark_ms``.
        mark_ms: Once it has reached the mark it was caught up then.
        can_store: Its disk takes writes and is not nearly full.
        last_seen_ms: Its last sign of life in this epoch; None for never.
        entered_ms: When it came into the set, of late.
        waits: How often it had to wait for coming and going too often.
    """

    caught_up_ms: int
    mark: int
    mark_ms: int
    can_store: bool = True
    last_seen_ms: int | None = None
    entered_ms: tuple[int, ...] = ()
    waits: int = 0


class VotersChange(msgspec.Struct, frozen=True):
    """Change of the group's members that is under way.

    Attributes:
        voters: Members after the change.
        deadline_ms: The change is given up then if the record was not changed; monotonic clock.
    """

    voters: tuple[int, ...]
    deadline_ms: int


class InSyncSet(msgspec.Struct):
    """The set of the group that this replica leads.

    Attributes:
        log: Confirmed part of the log, and the position of each replica.
        record: As it is known.
        lag_max_ms: A member that has not been caught up for so long leaves (replica_lag_max_ms).
        pending: The change that is on its way, or may be.
        unknown_since_ms: Since when the outcome of ``pending`` is not known; None when it will be.
        reread_ms: When the record is read again for that.
        fewest: With ``all``: nobody leaves before ``lag_max_ms`` who leaves fewer behind.
        followers: By replica id.
        voters_change: Change that an administrator requested, until it is done or given up.
        gone_ms: Since when members have no session at the coordinator, by id.
    """

    log: ConfirmedLog
    record: StateRecord
    lag_max_ms: int = 3_000
    pending: GroupState | None = None
    unknown_since_ms: int | None = None
    reread_ms: int = 0
    fewest: int = 1
    followers: dict[int, CandidateState] = {}
    voters_change: VotersChange | None = None
    gone_ms: dict[int, int] = {}

    @property
    def state(self) -> GroupState:
        """The group's state by the record."""
        assert self.record.state is not None, "a group without a record has no leader"
        return self.record.state

    def on_follower(
        self, replica_id: int, log_end: int, now_ms: int, *, can_store: bool = True
    ) -> None:
        """A follower opened, or acknowledged; the log knows its position already.

        Args:
            replica_id: 1 to 64.
            log_end: Where the leader's log ends now.
            now_ms: Monotonic clock.
            can_store: Its disk takes writes and is not nearly full.
        """
        one = self.followers.get(replica_id, CandidateState(now_ms, log_end, now_ms))
        has = self.log.links[replica_id].has
        changes: dict[str, object] = {"can_store": can_store, "last_seen_ms": now_ms}
        if has >= log_end:
            changes |= {"caught_up_ms": now_ms, "mark": log_end, "mark_ms": now_ms}
        elif has >= one.mark:
            changes |= {"caught_up_ms": one.mark_ms, "mark": log_end, "mark_ms": now_ms}
        self.followers[replica_id] = msgspec.structs.replace(one, **changes)

    def change_voters(self, replica_id: int, minimum: int, *, adds: bool, deadline_ms: int) -> None:
        """An administrator wants a replica to belong to the group, or one no more.

        ``voters_change`` says what is to come of it; None if it is so already.

        Args:
            replica_id: Which, 1 to 64.
            minimum: So many must be in sync for sends to be taken (min_in_sync_replicas).
            adds: It is to belong to the group.
            deadline_ms: When it is given up, monotonic clock.

        Raises:
            InvalidArgument: That cannot be; says why.
        """
        if self.voters_change is not None:
            raise InvalidArgument(
                f"replicas {list(self.voters_change.voters)} are to belong to the group, and only "
                "one comes or goes at a time; ask again when that is done"
            )
        before = set(self.state.voters) or {one.replica_id for one in self.state.in_sync}
        voters = before | {replica_id} if adds else before - {replica_id}
        if voters == set(self.state.voters):
            return
        change = VotersChange(tuple(sorted(voters)), deadline_ms)
        if not adds:
            self._check_removal(replica_id, minimum, change.voters)
        self.voters_change = change

    def _check_removal(self, replica_id: int, minimum: int, voters: tuple[int, ...]) -> None:
        if replica_id == self.log.me.replica_id:
            raise InvalidArgument(
                f"replica {replica_id} is the master: have it hand the lead over first "
                "(mqmesh ha switch)"
            )
        state = with_voters(self.state, voters)
        rule = rule_of(state)
        if rule.copies > len(rule.members):
            raise InvalidArgument(
                f"{len(rule.members)} replicas would be left, and {rule.copies} must have a "
                f"message (ack_replicas {state.mode.value}): add another one first (mqmesh ha add)"
            )
        shrinks = len(rule.members) < len(self.state.in_sync)
        left = min(len(voters), len(rule.members) if shrinks else minimum)
        if state.mode is AckReplicas.ALL and left < minimum:
            raise InvalidArgument(
                f"{left} replicas would be in sync, {minimum} must be "
                "(min_in_sync_replicas): add another one first (mqmesh ha add)"
            )

    def on_sessions(self, present: frozenset[int], now_ms: int) -> None:
        """Which replicas have sessions at the coordinator, as far as is known.

        Args:
            present: Their ids.
            now_ms: Monotonic clock.
        """
        absent = {member.replica_id for member in self.state.in_sync} - present
        self.gone_ms = {one: self.gone_ms.get(one, now_ms) for one in absent}

    def lags_ms(self, log_end: int, now_ms: int) -> dict[int, int]:
        """Since when followers that are connected lack something, by id; 0 while they have all.

        Args:
            log_end: Where the leader's log ends now.
            now_ms: Monotonic clock.
        """
        return {
            replica_id: 0 if link.has >= log_end else max(now_ms - one.caught_up_ms, 0)
            for replica_id, link in self.log.links.items()
            if (one := self.followers.get(replica_id)) is not None
        }

    def tick(self, now_ms: int) -> list[Effect]:
        """Looks whether the set is to change; each 100 ms or so, and after a change of a follower.

        Args:
            now_ms: Monotonic clock.
        """
        if self.pending is not None:
            if self.unknown_since_ms is not None and now_ms >= self.reread_ms:
                self.reread_ms = now_ms + REREAD_MS
                return [ReadRecord()]
            return []
        if self.voters_change is not None:
            return self._tick_voters(self.voters_change, now_ms)
        members = self._next_members(now_ms)
        if members == self.state.in_sync:
            return []
        wanted = with_members(self.state, members)
        comes = self.state.mode in HAS_VOTERS and len(members) > len(self.state.in_sync)
        if comes and self.log.reach(rule_of(wanted)) < self.log.confirmed:
            return []
        self.pending = wanted
        self.log.on_changing(rule_of(wanted))
        return [ChangeRecord(self.record.version, wanted)]

    def _tick_voters(self, change: VotersChange, now_ms: int) -> list[Effect]:
        wanted = with_voters(self.state, change.voters)
        if wanted == self.state or now_ms >= change.deadline_ms:
            self.voters_change = None
            self.log.on_changed(rule_of(self.state))
            return []
        if self.log.next_rule is None:
            self.log.on_changing(rule_of(wanted))
        if self.log.reach(rule_of(wanted)) < self.log.confirmed:
            return []
        self.pending = wanted
        return [ChangeRecord(self.record.version, wanted)]

    def on_outcome(self, outcome: int | MQMeshError, now_ms: int) -> list[Effect]:
        """Handle the change's outcome: a new version, or an error of ``Coordinator.change``."""
        if self.pending is None:
            return []
        if isinstance(outcome, int):
            return self._known(StateRecord(outcome, self.pending), now_ms)
        if isinstance(outcome, Conflict):
            assert isinstance(outcome.record, StateRecord)
            return self._known(outcome.record, now_ms)
        if isinstance(outcome, OutcomeUnknown) or self.unknown_since_ms is not None:
            if self.unknown_since_ms is None:
                self.unknown_since_ms = now_ms
            self.reread_ms = now_ms + REREAD_MS
            return [ReadRecord()] if isinstance(outcome, OutcomeUnknown) else []
        self._settle(now_ms)  # it was not made for sure
        return []

    def on_read(self, record: StateRecord, now_ms: int) -> list[Effect]:
        """The record as it was read after an outcome that is not known, or seen by a watch."""
        if record.version == self.record.version:
            if self.pending is None or self.unknown_since_ms is None:
                return []
            return [ChangeRecord(self.record.version, self.pending)]
        if self.pending is not None and self.unknown_since_ms is None:
            return []  # the answer says it, too
        return self._known(record, now_ms)

    def _known(self, record: StateRecord, now_ms: int) -> list[Effect]:
        state = record.state
        if state is None or (state.epoch, state.master) != (self.log.epoch, self.log.me.replica_id):
            # The confirmed offset never goes back; both sets confirm while this leader answers.
            return [Follow("another replica leads, or will", record)]
        self.record = record
        self._settle(now_ms)
        return []

    def _settle(self, now_ms: int) -> None:
        before = set(self.log.rule.members)
        self.pending = self.unknown_since_ms = None
        self.log.on_changed(rule_of(self.state))
        if self.voters_change is not None and self.voters_change.voters == self.state.voters:
            self.voters_change = None
        for member in set(self.state.in_sync) - before:
            one = self.followers.get(member.replica_id)
            if one is not None:
                late = tuple(at for at in one.entered_ms if now_ms - at < FLAP_WINDOW_MS)
                self.followers[member.replica_id] = msgspec.structs.replace(
                    one,
                    entered_ms=(*late, now_ms)[-FLAPS:],
                    waits=one.waits + 1 if len(late) >= FLAPS else one.waits if late else 0,
                )

    def _next_members(self, now_ms: int) -> tuple[MemberIncarnation, ...]:
        may_enter = [
            link.member
            for replica_id, link in sorted(self.log.links.items())
            if self._may_enter(replica_id, now_ms)
        ]
        if self.state.mode in HAS_VOTERS:
            present = {member.replica_id: member for member in may_enter}
            voters = tuple(
                present.pop(member.replica_id, member) if member != self.log.me else member
                for member in self.state.in_sync
            )
            return (*voters, *present.values())
        coming = {member.replica_id for member in may_enter}
        staying = [
            member
            for member in self.state.in_sync
            if member == self.log.me
            or (member.replica_id not in coming and self._may_stay(member, now_ms))
        ]
        if self.state.mode is AckReplicas.ALL:
            left = [member for member in staying if not self._is_gone(member, now_ms)]
            if len(left) + len(may_enter) >= self.fewest:
                staying = left
            elif len(staying) + len(may_enter) < self.fewest:
                staying = self._electable(staying, coming, now_ms)
        return (*staying, *may_enter)

    def _electable(
        self, staying: list[MemberIncarnation], coming: set[int], now_ms: int
    ) -> list[MemberIncarnation]:
        """Keeps members that live, and are not reached from here, where the others are too few.

        Nothing is acknowledged by so few; but who leaves the set can be elected no more, and one of
        those may be able to confirm.
        """
        return [
            member
            for member in self.state.in_sync
            if member in staying
            or (member.replica_id not in coming and self._lives_elsewhere(member, now_ms))
        ]

    def _lives_elsewhere(self, member: MemberIncarnation, now_ms: int) -> bool:
        one = self.followers[member.replica_id]
        is_live = one.last_seen_ms is not None and now_ms - one.last_seen_ms <= ACKS_MS
        return one.can_store and not is_live and member.replica_id not in self.gone_ms

    def _is_gone(self, member: MemberIncarnation, now_ms: int) -> bool:
        """Return whether a member's process has ended, so that sends would wait for it in vain."""
        since_ms = self.gone_ms.get(member.replica_id)
        is_connected = member.replica_id in self.log.links
        return since_ms is not None and not is_connected and now_ms - since_ms >= GONE_MS

    def _may_stay(self, member: MemberIncarnation, now_ms: int) -> bool:
        one = self.followers.get(member.replica_id)
        if one is None:
            # It has not acknowledged in this epoch; it has so long to come.
            self.followers[member.replica_id] = CandidateState(now_ms, self.log.marker_end, now_ms)
            return True
        return one.can_store and now_ms - one.caught_up_ms <= self.lag_max_ms

    def _may_enter(self, replica_id: int, now_ms: int) -> bool:
        link, one = self.log.links[replica_id], self.followers.get(replica_id)
        if one is None or link.member in self.state.in_sync or not self.state.is_voter(replica_id):
            return False
        late = [at for at in one.entered_ms if now_ms - at < FLAP_WINDOW_MS]
        wait_ms = FLAP_WAITS_MS[min(one.waits, len(FLAP_WAITS_MS) - 1)]
        flaps = len(late) >= FLAPS and now_ms - late[-1] < wait_ms
        if link.has < max(self.log.confirmed, self.log.marker_end) or not one.can_store:
            return False
        is_late = now_ms - one.caught_up_ms > self.lag_max_ms
        return self.state.mode in HAS_VOTERS or not (flaps or is_late)


def with_voters(state: GroupState, voters: tuple[int, ...]) -> GroupState:
    """A group's record with other replicas that belong to the group."""
    members = tuple(one for one in state.in_sync if one.replica_id in voters)
    return msgspec.structs.replace(with_members(state, members), voters=voters)
