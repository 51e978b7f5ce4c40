"""Confirmed part of a group's log: no failover takes it back. Pure.

Every member of the in-sync set has what is confirmed (``all``, ``none``), or as many of the voters
as the group asks for (``quorum``, ``one``). While a change of the set is on its way the stricter of
both sets holds, since nobody knows which of them an election will read.

A member counts with what it had of this epoch's log at its last acknowledgement, connected or not.
It counts with its incarnation only: one that lost its disk is another member until the
coordinator's record says otherwise.

Nothing is confirmed before the marker of the epoch is. Records of earlier epochs may be on enough
replicas and still be replaced: by a later leader whose newest record is of a later epoch than all
of them. Once the marker is confirmed no replica without it is elected.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation
from mqmesh.errors import BrokerNotAvailable, InvalidArgument
from mqmesh.units import MIB

COPIES_OF_ONE: Final = 2
"""Mode ``one``: the leader and one follower."""


class ConfirmRule(msgspec.Struct, frozen=True):
    """Rule of whose copies confirm.

    Attributes:
        members: The set.
        copies: So many of it, 1 or more.
    """

    members: tuple[MemberIncarnation, ...]
    copies: int

    def position(self, positions: Mapping[MemberIncarnation, int]) -> int:
        """Commit-log offset that ``copies`` members have reached, 0 if there are too few.

        Args:
            positions: Of members; who is not there has nothing.
        """
        if self.copies > len(self.members):
            return 0
        have = sorted((positions.get(member, 0) for member in self.members), reverse=True)
        return have[self.copies - 1]


def rule_of(state: GroupState) -> ConfirmRule:
    """Return the rule of confirmation by a group's record."""
    if state.mode is AckReplicas.QUORUM:
        copies = state.copies
    elif state.mode is AckReplicas.ONE:
        copies = COPIES_OF_ONE
    else:
        copies = max(len(state.in_sync), 1)
    return ConfirmRule(state.in_sync, copies)


def least_to_confirm(state: GroupState, minimum: int) -> int:
    """Return how many replicas have to be there, the leader too, for a send to be acknowledged.

    Args:
        state: The group's record.
        minimum: With ``all``: members that the set has at least (min_in_sync_replicas).
    """
    if state.mode is AckReplicas.NONE:
        return 1
    return minimum if state.mode is AckReplicas.ALL else rule_of(state).copies


def with_members(state: GroupState, members: tuple[MemberIncarnation, ...]) -> GroupState:
    """A group's record with another set; in the mode ``quorum`` most of it confirm."""
    copies = state.copies
    if state.mode is AckReplicas.QUORUM and len(members) != len(state.in_sync):
        copies = len(members) // 2 + 1
    return msgspec.structs.replace(state, in_sync=members, copies=copies)


class HaveSent(msgspec.Struct, frozen=True):
    """Log offsets that a leader and a follower agree on.

    Attributes:
        member: The follower.
        has: Commit-log offset it has reached.
        sent: It was sent the log up to here.
    """

    member: MemberIncarnation
    has: int
    sent: int


class ConfirmedLog(msgspec.Struct):
    """Confirmed part of the log in one epoch, at its leader.

    Attributes:
        epoch: Of the leader.
        me: The leader, as the record has it.
        rule: By the record.
        next_rule: Of a change that is on its way; None when there is none.
        marker_end: Commit-log offset behind the marker of this epoch.
        confirmed: Commit-log offset; it never goes back.
        positions: Of members in this epoch.
        links: Followers that are connected, by replica id.
        lost: Members that lack what they had acknowledged, and count with nothing.
        is_frozen: Nothing more is confirmed: another one is to lead.
    """

    epoch: int
    me: MemberIncarnation
    rule: ConfirmRule
    marker_end: int
    confirmed: int = 0
    next_rule: ConfirmRule | None = None
    positions: dict[MemberIncarnation, int] = {}
    links: dict[int, HaveSent] = {}
    lost: frozenset[MemberIncarnation] = frozenset()
    is_frozen: bool = False

    def on_own(self, position: int) -> int:
        """The leader's own log: written, or with SYNC_FLUSH synced, to a commit-log offset.

        Returns:
            How far the log is confirmed.
        """
        return self._reached(self.me, position)

    def on_opened(self, member: MemberIncarnation, position: int) -> int:
        """A follower follows; it has the leader's log up to a commit-log offset.

        Returns:
            How far the log is confirmed.

        Raises:
            InvalidArgument: It lost what it had acknowledged, and has the same incarnation. Nothing
                has moved.
        """
        # Under another incarnation it has lost what it had.
        for one in [one for one in self.positions if one.replica_id == member.replica_id]:
            if one != member:
                del self.positions[one]
        had = self.positions.get(member, 0)
        if position < had:
            raise InvalidArgument(
                f"replica {member.replica_id} has the log up to {position} and had acknowledged "
                f"{had}; a store that lost records needs a new incarnation"
            )
        self.links[member.replica_id] = HaveSent(member, position, position)
        return self._reached(member, position)

    def on_lost(self, member: MemberIncarnation) -> None:
        """A follower lacks what it had acknowledged; it is to come under another incarnation."""
        self.lost |= {member}

    def on_sent(self, replica_id: int, end_offset: int) -> None:
        """A follower was sent the log up to a commit-log offset."""
        link = self.links[replica_id]
        self.links[replica_id] = HaveSent(link.member, link.has, max(link.sent, end_offset))

    def on_ack(self, replica_id: int, epoch: int, position: int) -> int:
        """A follower says how far it is.

        Args:
            replica_id: Of who says it.
            epoch: That it follows.
            position: Commit-log offset; written, or with SYNC_FLUSH synced.

        Returns:
            How far the log is confirmed.

        Raises:
            InvalidArgument: That cannot be. Nothing has moved; the connection is to be closed.
        """
        link = self.links.get(replica_id)
        if link is None:
            raise InvalidArgument(f"replica {replica_id} acknowledges and has not opened")
        if epoch != self.epoch:
            raise InvalidArgument(
                f"replica {replica_id} acknowledges epoch {epoch}, this is epoch {self.epoch}"
            )
        if not link.has <= position <= link.sent:
            raise InvalidArgument(
                f"replica {replica_id} acknowledges {position}; it had {link.has}, and was sent "
                f"the log up to {link.sent}"
            )
        self.links[replica_id] = HaveSent(link.member, position, link.sent)
        return self._reached(link.member, position)

    def on_disconnected(self, replica_id: int) -> None:
        """A follower is gone; it counts with what it has until it has left the set."""
        self.links.pop(replica_id, None)

    def on_changing(self, rule: ConfirmRule) -> None:
        """Apply both rules from now on; to be called before a change of the set is sent."""
        assert self.next_rule is None, "one change at a time"
        self.next_rule = rule

    def on_changed(self, rule: ConfirmRule) -> int:
        """The record is known again.

        Returns:
            How far the log is confirmed.
        """
        self.rule, self.next_rule = rule, None
        kept = {*rule.members, self.me, *(link.member for link in self.links.values())}
        self.positions = {one: at for one, at in self.positions.items() if one in kept}
        return self._move()

    def reach(self, rule: ConfirmRule) -> int:
        """Commit-log offset that would be confirmed by a rule."""
        return rule.position(
            {one: at for one, at in self.positions.items() if one not in self.lost}
        )

    def _reached(self, member: MemberIncarnation, position: int) -> int:
        self.positions[member] = max(position, self.positions.get(member, 0))
        return self._move()

    def _move(self) -> int:
        if self.is_frozen:
            return self.confirmed
        reached = self.reach(self.rule)
        if self.next_rule is not None:
            reached = min(reached, self.reach(self.next_rule))
        if reached >= self.marker_end:
            self.confirmed = max(self.confirmed, reached)
        return self.confirmed


class AckPolicy(msgspec.Struct, frozen=True):
    """Acknowledgement policy: the promise to producers.

    Attributes:
        mode: Replicas whose copies a send waits for.
        minimum: With ``all``: members that the set has at least (min_in_sync_replicas).
        refuses_below: Sends are refused below the minimum, and not stored with a lesser status.
        fall_behind_bytes: With ``one``: a follower that lacks more counts as not there.
    """

    mode: AckReplicas
    minimum: int = 1
    refuses_below: bool = False
    fall_behind_bytes: int = 256 * MIB

    def check(self, log: ConfirmedLog, log_end: int) -> None:
        """Check, before each put, that it can be confirmed.

        Args:
            log: Positions of the replicas.
            log_end: Where the leader's log ends.

        Raises:
            BrokerNotAvailable: Too few replicas are there; nothing is stored.
        """
        if not self.refuses_below:
            return
        if self._size(log) < self.minimum:
            raise BrokerNotAvailable(
                f"{self._size(log)} replicas are in sync, {self.minimum} must be "
                "(min_in_sync_replicas)"
            )
        if not self.is_available(log, log_end):
            raise BrokerNotAvailable(
                f"{len(log.links)} followers are connected or near enough, "
                f"{log.rule.copies - 1} must be (ack_replicas {self.mode})"
            )

    def is_available(self, log: ConfirmedLog, log_end: int) -> bool:
        """Return whether copies may come soon; without them no put is taken.

        Args:
            log: Positions of the replicas.
            log_end: Where the leader's log ends.
        """
        if self.mode is AckReplicas.NONE:
            return True
        if self.mode is AckReplicas.ALL:
            return self._size(log) >= self.minimum
        nearest = self.fall_behind_bytes if self.mode is AckReplicas.ONE else log_end
        near = [
            link
            for link in log.links.values()
            if link.member in log.rule.members and log_end - link.has <= nearest
        ]
        return len(near) + 1 >= log.rule.copies

    def acknowledged(self, log: ConfirmedLog) -> int:
        """Return the commit-log offset up to which puts may be acknowledged, 0 for none.

        With ``all`` that is nothing while the set is too small: what one replica has is confirmed
        once the others have left the set, and would be lost with its machine.

        Args:
            log: Positions of the replicas.
        """
        is_small = self.mode is AckReplicas.ALL and self._size(log) < self.minimum
        return 0 if is_small else log.confirmed

    def _size(self, log: ConfirmedLog) -> int:
        sets: Iterable[ConfirmRule] = (log.rule, log.next_rule or log.rule)
        return min(len(rule.members) for rule in sets)
