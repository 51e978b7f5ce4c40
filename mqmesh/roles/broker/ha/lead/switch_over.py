"""Handing the lead of a group over on purpose, without a failover. Pure.

The leader takes no more sends, waits until its successor has what it has, confirms nothing more
from then on, and only then changes the record. So the successor has all acknowledged messages, and
begins the next epoch as the record says it. After an error before that the old leader goes on as
before.
"""

import enum
from collections.abc import Collection
from typing import Final

import msgspec

from mqmesh.coordination.interface import (
    Conflict,
    GroupState,
    MemberIncarnation,
    OutcomeUnknown,
    StateRecord,
)
from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.roles.broker.ha.effects import ChangeRecord, Effect, Follow, ReadRecord, ResumeSends
from mqmesh.roles.broker.ha.in_sync import HAS_VOTERS, REREAD_MS
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.units import MIB

MOST_LAG_BYTES: Final = 1 * MIB
"""A successor that lacks more would let clients wait: it is to catch up first."""
PATIENCE_MS: Final = 1_000
"""The successor has so long to get the rest."""
OTHERS_LEAVE_MS: Final = 100
"""Wait of a leader that is to stop: where all replicas are stopped, nobody is to take over."""
RETIRE_MS: Final = 1_300
"""Time after which it stops, whether or not another one leads; its supervisor kills it soon
after."""
IN_SET_MS: Final = 60_000
"""A preferred replica gets the lead once it was in sync for so long."""
AGAIN_MS: Final = 600_000
"""Least time between two such changes; a replica that comes and goes does so as a follower."""


def choose_successor(
    leadership: Leadership,
    log_end: int,
    wanted: int = 0,
    *,
    unable: Collection[int] = (),
    preferred: Collection[int] = (),
) -> int:
    """Return the replica that is to lead next.

    Args:
        leadership: Of now.
        log_end: Where the leader's log ends.
        wanted: Replica id; 0 for the one that has most, but a preferred one first.
        unable: Replicas whose disks take no writes, or that have never connected.
        preferred: Replicas that lead where others could as well.

    Raises:
        InvalidArgument: It cannot, or nobody can; says why.
    """
    if wanted == leadership.log.me.replica_id:
        raise InvalidArgument(f"replica {wanted} leads already")
    problems = {}
    lags = {}
    for member in leadership.log.rule.members:
        if member == leadership.log.me or wanted not in (0, member.replica_id):
            continue
        link = leadership.log.links.get(member.replica_id)
        if link is None or link.member != member:
            problems[member.replica_id] = "is not connected"
        elif member.replica_id in unable:
            problems[member.replica_id] = "takes no writes, or does not reach the coordinator"
        elif log_end - link.has > MOST_LAG_BYTES:
            problems[member.replica_id] = (
                f"lacks {log_end - link.has} bytes of the log, {MOST_LAG_BYTES} may be lacking"
            )
        else:
            lags[member.replica_id] = log_end - link.has
    if lags:
        return min(lags, key=lambda one: (one not in preferred, lags[one], one))
    if wanted and wanted not in problems:
        raise InvalidArgument(f"replica {wanted} is not in sync: {leadership.members} are")
    reasons = "; ".join(f"replica {one} {why}" for one, why in sorted(problems.items()))
    raise InvalidArgument(f"nobody can take over: {reasons or 'no other replica is in sync'}")


class RetirementStep(enum.Enum):
    """Step of a leader whose process is to stop."""

    WAIT = "wait"
    HAND_OVER = "hand over"
    STOP = "stop"


class Retirement(msgspec.Struct):
    """The end of a leader whose process is to stop: another one leads first, if it can.

    Attributes:
        began_ms: When it was asked to stop, monotonic clock.
        was_tried: A successor was requested to take over.
    """

    began_ms: int
    was_tried: bool = False

    def step(self, now_ms: int, *, leads: bool, is_switching: bool) -> RetirementStep:
        """Return the step to take now.

        Args:
            now_ms: Monotonic clock.
            leads: It still does.
            is_switching: A switch-over is under way.
        """
        waited_ms = now_ms - self.began_ms
        if not leads or waited_ms >= RETIRE_MS:
            return RetirementStep.STOP
        if is_switching:
            self.was_tried = True
            return RetirementStep.WAIT
        if self.was_tried:
            return RetirementStep.STOP
        if waited_ms < OTHERS_LEAVE_MS:
            return RetirementStep.WAIT
        self.was_tried = True
        return RetirementStep.HAND_OVER


class SwitchOver(msgspec.Struct):
    """One switch-over, at the leader that ends.

    Attributes:
        leadership: That ends.
        successor: Replica id.
        mark: Commit-log offset that the successor has to reach.
        deadline_ms: When it is given up, monotonic clock.
        reason: Goes into the record.
        wall_ms: Goes into the record, too: when it began.
        is_by_preference: The successor is preferred, and that is all.
        leaves: The old leader stops, so that the new one need not wait for it.
        wanted: The change, once it was asked for.
        reread_ms: When the record is read again, after an outcome that nobody knows.
    """

    leadership: Leadership
    successor: int
    mark: int
    deadline_ms: int
    reason: str
    wall_ms: int = 0
    leaves: bool = False
    is_by_preference: bool = False
    wanted: GroupState | None = None
    reread_ms: int | None = None

    def begin(self) -> None:
        """No more sends are taken."""
        self.leadership.closing = f"replica {self.successor} takes over"

    def tick(self, now_ms: int) -> list[Effect]:
        """Looks how far it is; after each turn, and each 20 ms."""
        leadership = self.leadership
        if self.wanted is not None:
            if self.reread_ms is not None and now_ms >= self.reread_ms:
                self.reread_ms = now_ms + REREAD_MS
                return [ReadRecord()]
            return []
        link = leadership.log.links.get(self.successor)
        has = 0 if link is None else link.has
        if has >= max(self.mark, leadership.confirmed()) and leadership.in_sync.pending is None:
            leadership.log.is_frozen = True
            state = leadership.in_sync.state
            self.wanted = msgspec.structs.replace(
                state,
                epoch=state.epoch + 1,
                master=self.successor,
                in_sync=self._next_members(state),
                reason=self.reason[:255],
                switched_ms=self.wall_ms,
                preferred_ms=self.wall_ms if self.is_by_preference else state.preferred_ms,
            )
            return [ChangeRecord(leadership.in_sync.record.version, self.wanted)]
        if link is None or now_ms >= self.deadline_ms:
            return self._give_up(
                f"replica {self.successor} did not get the rest of the log in time"
            )
        return []

    def on_outcome(self, outcome: int | MQMeshError, now_ms: int) -> list[Effect]:
        """Take the outcome of the change, or of one of the set that was on its way."""
        if self.wanted is None:
            return self.leadership.in_sync.on_outcome(outcome, now_ms)
        if isinstance(outcome, int):
            return [Follow(f"replica {self.successor} leads", StateRecord(outcome, self.wanted))]
        if isinstance(outcome, Conflict):
            assert isinstance(outcome.record, StateRecord)
            return self.on_read(outcome.record, now_ms)
        if isinstance(outcome, OutcomeUnknown) or self.reread_ms is not None:
            self.reread_ms = now_ms + REREAD_MS
            return []
        return self._give_up(str(outcome))

    def on_read(self, record: StateRecord, now_ms: int) -> list[Effect]:
        """The record, after an outcome that nobody knows."""
        leadership = self.leadership
        if self.wanted is None:
            return leadership.in_sync.on_read(record, now_ms)
        if record.state is None or record.state.epoch != leadership.epoch:
            return [Follow("another replica leads", record)]
        if record.version == leadership.in_sync.record.version:
            return [ChangeRecord(record.version, self.wanted)]
        # Only the leader changes a record without a new epoch.
        return self._give_up("the record was changed meanwhile")

    def _next_members(self, state: GroupState) -> tuple[MemberIncarnation, ...]:
        others = tuple(one for one in state.in_sync if one != self.leadership.log.me)
        has_enough = len(others) >= self.leadership.policy.minimum
        # All of the set have what is confirmed, so fewer of them do.
        return (
            others if self.leaves and has_enough and state.mode not in HAS_VOTERS else state.in_sync
        )

    def _give_up(self, reason: str) -> list[Effect]:
        self.leadership.closing = None
        self.leadership.log.is_frozen = False
        return [ResumeSends(reason)]


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
