"""Election of a group's leader: when a replica stands, and what it has to do. Pure.

A candidate reads the group's record, has the members of the set promise the next epoch, and looks
who of them has the best position: the newest record of the latest epoch. That one changes the
record, by compare-and-swap. A promise is no vote, two candidates may have it for one epoch; what
decides is the record, and it lets one of them change it.

Nothing that is confirmed is lost. It is on ``copies`` members. Of those who promised, as many that
one of them has it, the best has it, too: what it lacks was confirmed in no epoch that it has seen
the end of. And after the promises no leader of an earlier epoch gets another ``copies``
acknowledgements. Clocks have no part in this.
"""

import enum
from typing import Final

import msgspec

from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    GroupState,
    GroupView,
    MemberIncarnation,
    OutcomeUnknown,
    Presence,
    StateRecord,
)
from mqmesh.errors import MQMeshError
from mqmesh.roles.broker.ha.confirm import least_to_confirm, rule_of, with_members
from mqmesh.roles.broker.ha.effects import (
    AskToStand,
    ChangeRecord,
    Effect,
    Fence,
    Follow,
    Lead,
    ReadRecord,
)
from mqmesh.roles.broker.ha.in_sync import HAS_VOTERS, REREAD_MS

OTHERS_WAIT_MS: Final = 100
"""Once enough have promised, the others have so long to do it, too."""
ELECTION_MS: Final = 1_000
"""After so long a candidate gives up, and may stand again."""
SILENCE_MS: Final = 1_200
"""A leader that was silent for so long may be dead."""
CUT_OFF_SILENCE_MS: Final = 2_500
"""A leader that reports itself cut off must have been silent for at least so long."""
RENEWALS_MISSED: Final = 2
RANK_MS: Final = 50
MAX_RANK: Final = 2
"""Last rank: the best position stands first, those behind it by ``RANK_MS`` a rank later."""


class Suspicion(enum.StrEnum):
    """Suspicion of a replica about its group's leader."""

    NONE = "the leader lives"
    BAD_LINK = "the leader lives and is not reached from here"
    NOBODY = "nobody leads"
    NAMED = "this replica was elected last, and leads again once it is elected anew"
    RESTARTING = "the leader's process has ended, and has time to come back"
    PAUSED = "the leader is missed, and an administrator wants nobody to stand"
    SESSION_ENDED = "the leader's session has ended"
    SILENT = "the leader is silent and renews nothing"
    CUT_OFF = "the leader is silent, and reaches too few replicas to confirm anything"

    @property
    def stands(self) -> bool:
        """Return whether it is a reason to stand."""
        return self not in _HOLDS_STILL


_HOLDS_STILL: Final = frozenset(
    {Suspicion.NONE, Suspicion.BAD_LINK, Suspicion.RESTARTING, Suspicion.PAUSED}
)


def suspicion_of(
    view: GroupView,
    replica_id: int,
    *,
    silent_ms: int,
    ttl_ms: int,
    restart_ms: int = 0,
    minimum: int = 1,
) -> Suspicion:
    """Return a follower's suspicion about its leader.

    Args:
        view: The group, as the coordinator reported it last.
        replica_id: Of that follower.
        silent_ms: Since the last sign of life of the leader.
        ttl_ms: Of sessions; they are renewed each quarter of it.
        restart_ms: A leader whose process ended has so long to come back
            (restart_before_failover_ms).
        minimum: With ``all``: so many have to be in sync (min_in_sync_replicas).
    """
    state = view.record.state
    if state is None or replica_id not in {one.replica_id for one in state.in_sync}:
        return Suspicion.NONE
    if state.master is None:
        return Suspicion.NOBODY
    if state.master == replica_id:
        return Suspicion.NAMED
    leader = [one for one in view.members if one.presence.replica_id == state.master]
    if not leader and silent_ms < restart_ms:
        return Suspicion.RESTARTING
    if not leader:
        return Suspicion.PAUSED if state.paused else Suspicion.SESSION_ENDED
    if state.mode is AckReplicas.NONE or silent_ms < SILENCE_MS:
        return Suspicion.NONE
    is_late = leader[0].age_ms >= RENEWALS_MISSED * ttl_ms // 4
    if not is_late and not _is_cut_off(state, view, leader[0].presence, silent_ms, minimum):
        return Suspicion.BAD_LINK
    if state.paused:
        return Suspicion.PAUSED
    return Suspicion.SILENT if is_late else Suspicion.CUT_OFF


def _is_cut_off(
    state: GroupState, view: GroupView, leader: Presence, silent_ms: int, minimum: int
) -> bool:
    """Return whether the leader confirms nothing, and as many others are there as could."""
    ids = {one.presence.replica_id for one in view.members} - {state.master}
    others = sum(state.is_voter(one) for one in ids)
    is_missed = leader.is_cut_off and silent_ms >= CUT_OFF_SILENCE_MS
    return is_missed and others >= least_to_confirm(state, minimum)


def standing_delay_ms(view: GroupView, replica_id: int, drawn: int) -> int:
    """Return the delay in ms before a replica stands: the best position first.

    Args:
        view: The group.
        replica_id: Of the replica that stands.
        drawn: A random number, 0 or more.

    Returns:
        0 to 149.
    """
    assert view.record.state is not None
    members = {one.replica_id for one in view.record.state.in_sync}
    places = sorted(
        (_rank(one.presence) for one in view.members if one.presence.replica_id in members),
        reverse=True,
    )
    ahead = [place for place in places if place[-1] != -replica_id]
    mine = [place for place in places if place[-1] == -replica_id]
    rank = sum(place > mine[0] for place in ahead) if mine else len(ahead)
    return min(rank, MAX_RANK) * RANK_MS + drawn % RANK_MS


def _rank(one: Presence) -> tuple[bool, int, int, bool, int]:
    return one.can_lead, one.last_epoch, one.end_offset, one.preferred, -one.replica_id


class FenceAnswer(msgspec.Struct, frozen=True):
    """Position of a replica that promised an epoch, read after the promise was durable.

    Attributes:
        member: It, with the incarnation it has now.
        last_epoch: Of the last record of its log.
        end: Commit-log offset behind it.
        can_lead: Its disk takes writes.
        preferred: It leads where others could as well.
    """

    member: MemberIncarnation
    last_epoch: int
    end: int
    can_lead: bool = True
    preferred: bool = False

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """The largest is the best; no two replicas have the same."""
        return self.last_epoch, self.end, self.preferred, -self.member.replica_id


class CandidateStep(enum.Enum):
    """Step of a candidate."""

    IDLE = "idle"
    READING = "reading"
    FENCING = "fencing"
    CHANGING = "changing"
    UNSURE = "unsure"


class Election(msgspec.Struct):
    """One replica's candidature.

    Attributes:
        me: The replica.
        step: Where it is.
        reason: Why it stands.
        is_unclean: It wins without the others; an administrator wants it so.
        least: So many have to promise, beside what safety needs: the leader lives, and the
            replica that replaces it has to be able to confirm.
        wall_ms: When it stands, for people.
        record: That it read.
        answers: Of replicas that promised, by id.
        deadline_ms: When it gives up.
        enough_ms: When enough had answered.
        reread_ms: When the record is read again.
        wanted: The change that it makes.
    """

    me: MemberIncarnation
    step: CandidateStep = CandidateStep.IDLE
    reason: str = ""
    is_unclean: bool = False
    least: int = 0
    wall_ms: int = 0
    record: StateRecord = StateRecord(0, None)
    answers: dict[int, FenceAnswer] = {}
    deadline_ms: int = 0
    enough_ms: int | None = None
    reread_ms: int = 0
    wanted: GroupState | None = None

    def stand(
        self,
        reason: str,
        now_ms: int,
        *,
        is_unclean: bool = False,
        least: int = 0,
        wall_ms: int = 0,
    ) -> list[Effect]:
        """Begins, if it is not under way.

        Args:
            reason: Why; it goes into the record.
            now_ms: Monotonic clock.
            is_unclean, least, wall_ms: See the attributes.
        """
        if self.step is not CandidateStep.IDLE:
            return []
        self.step, self.reason, self.is_unclean = CandidateStep.READING, reason, is_unclean
        self.answers, self.enough_ms, self.wanted = {}, None, None
        self.wall_ms, self.least = wall_ms, least
        self.deadline_ms = now_ms + ELECTION_MS
        return [ReadRecord()]

    def on_read(self, record: StateRecord, now_ms: int, *, leader_lives: bool) -> list[Effect]:
        """The record, read after ``ReadRecord``.

        Args:
            record: As it is.
            now_ms: Monotonic clock.
            leader_lives: Another replica leads by this record, and does so as far as one knows.
        """
        if self.step is CandidateStep.UNSURE:
            return self._still_wanted(record)
        if self.step is not CandidateStep.READING:
            return []
        if record.state is None:
            return self._stop("the coordinator does not know the group", record)
        if leader_lives:
            return self._stop("another replica leads", record)
        ids = tuple(member.replica_id for member in record.state.in_sync)
        if self.me.replica_id not in ids and not self.is_unclean:
            return self._stop("this replica is not in sync", record)
        self.step, self.record = CandidateStep.FENCING, record
        # Those that are not in sync promise that they can be brought in sync.
        others = record.state.voters if self.least else ()
        return [Fence(record.state.epoch + 1, tuple({*ids, *others, self.me.replica_id}))]

    def on_fence_answer(self, epoch: int, answer: FenceAnswer, now_ms: int) -> list[Effect]:
        """A replica promised, this one or another."""
        if self.step is not CandidateStep.FENCING or epoch != self._epoch:
            return []
        self.answers[answer.member.replica_id] = answer
        return self._decide(now_ms)

    def on_stale(self, epoch: int) -> list[Effect]:
        """A replica has promised a higher epoch than this candidate asks for, or another leads."""
        if self.step in (CandidateStep.IDLE, CandidateStep.READING) or epoch <= self._epoch:
            return []
        return self._stop(f"epoch {epoch} was promised by others")

    def on_outcome(self, outcome: int | MQMeshError, now_ms: int) -> list[Effect]:
        """Handle the change's outcome: a new version, or an error of ``Coordinator.change``."""
        if self.step not in (CandidateStep.CHANGING, CandidateStep.UNSURE):
            return []
        if isinstance(outcome, int):
            return self._won(StateRecord(outcome, self.wanted))
        if isinstance(outcome, OutcomeUnknown):
            self.step, self.reread_ms = CandidateStep.UNSURE, now_ms + REREAD_MS
            return [ReadRecord()]
        if isinstance(outcome, Conflict):
            assert isinstance(outcome.record, StateRecord)
            return self._still_wanted(outcome.record)
        return self._stop(f"the record cannot be changed: {outcome}")

    def tick(self, now_ms: int) -> list[Effect]:
        """Take the steps that are due: give up, decide, or read the record again.

        Args:
            now_ms: Monotonic clock.
        """
        if self.step is CandidateStep.IDLE:
            return []
        if now_ms >= self.deadline_ms:
            return self._stop(f"no end of the election after {ELECTION_MS} ms")
        if self.step is CandidateStep.FENCING:
            return self._decide(now_ms)
        if self.step is CandidateStep.UNSURE and now_ms >= self.reread_ms:
            self.reread_ms = now_ms + REREAD_MS
            return [ReadRecord()]
        return []

    @property
    def _epoch(self) -> int:
        return 1 + (self.record.state.epoch if self.record.state is not None else 0)

    def _decide(self, now_ms: int) -> list[Effect]:
        state = self.record.state
        assert state is not None, "who fences has read a record"
        if self.me.replica_id not in self.answers:
            return []
        in_sync_ids = {member.replica_id for member in state.in_sync}
        pool = self._pool(state, now_ms, has_all=in_sync_ids <= self.answers.keys())
        if not pool:
            return []
        best = max(pool, key=lambda answer: answer.rank).member
        if best != self.me:
            return [AskToStand(best.replica_id), *self._stop("another has the better position")]
        self.step = CandidateStep.CHANGING
        self.wanted = self._next_state(state, pool)
        return [ChangeRecord(self.record.version, self.wanted)]

    def _pool(self, state: GroupState, now_ms: int, *, has_all: bool) -> list[FenceAnswer]:
        """Among whom the best leads; nobody for as long as that is not known."""
        if self.is_unclean:
            return [self.answers[self.me.replica_id]]
        if len(self.answers) < self.least:
            return []
        intact = [one for one in self.answers.values() if one.member in state.in_sync]
        able = [answer for answer in intact if answer.can_lead]
        if len(able) < _needed(state):
            # All have reported, and too few are what they were: nothing better can come.
            is_lost = has_all and len(intact) < _needed(state)
            return [one for one in self.answers.values() if one.can_lead] if is_lost else []
        if self.enough_ms is None:
            self.enough_ms = now_ms
        return able if has_all or now_ms - self.enough_ms >= OTHERS_WAIT_MS else []

    def _next_state(self, state: GroupState, pool: list[FenceAnswer]) -> GroupState:
        intact = [answer for answer in pool if answer.member in state.in_sync]
        is_clean = not self.is_unclean and len(intact) >= _needed(state)
        if is_clean and state.mode in HAS_VOTERS:
            members = state.in_sync
        elif is_clean:
            answered = {answer.member for answer in pool}
            members = tuple(member for member in state.in_sync if member in answered)
        elif state.mode in HAS_VOTERS:
            # Others count again once this one has caught them up.
            others = [one for one in state.in_sync if one.replica_id != self.me.replica_id]
            members = (self.me, *others)
        else:
            members = (self.me,)
        return msgspec.structs.replace(
            with_members(state, members),
            epoch=self._epoch,
            master=self.me.replica_id,
            reason=self.reason[:255],
            switched_ms=self.wall_ms,
            unclean_since=state.unclean_since if is_clean else self._epoch,
        )

    def _still_wanted(self, record: StateRecord) -> list[Effect]:
        if record.state == self.wanted:
            return self._won(record)
        if record.version == self.record.version and self.wanted is not None:
            self.step = CandidateStep.CHANGING
            return [ChangeRecord(record.version, self.wanted)]
        return self._stop("another was first", record)

    def _won(self, record: StateRecord) -> list[Effect]:
        self.step = CandidateStep.IDLE
        return [Lead(record)]

    def _stop(self, reason: str, record: StateRecord | None = None) -> list[Effect]:
        self.step = CandidateStep.IDLE
        return [Follow(reason, record)]


def _needed(state: GroupState) -> int:
    """So many members have to promise: one of them has what is confirmed."""
    return max(len(state.in_sync) - rule_of(state).copies + 1, 1)
