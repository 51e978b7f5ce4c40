"""Every course that three replicas can take, within bounds: breadth-first over the real machines.

The model drives ``ConfirmedLog``, ``InSyncSet``, ``Election`` and ``ReplicaState`` themselves;
logs, the coordinator's record and the network are tuples here. Each message that may be late or
lost is a step that may be taken at any time, or never. A request whose caller waits no more may
still change the record. Suspicion has no part in it: any replica stands for election at any time.

Followers are cut where the histories part, by comparing records; finding that place by epochs is
tested with ``log_copy``. A group is a record that says how many follow: replicas copy all of it at
once, and a log that lost the end of one begins without it. States are distinguished by 64 bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Final

import msgspec

from harness.chaos import say
from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    GroupState,
    OutcomeUnknown,
    StateRecord,
)
from mqmesh.errors import BrokerNotAvailable, InvalidArgument, MQMeshError
from mqmesh.roles.broker.ha.confirm import ConfirmedLog, rule_of
from mqmesh.roles.broker.ha.effects import ChangeRecord, Effect, Follow, Lead
from mqmesh.roles.broker.ha.election import (
    ELECTION_MS,
    OTHERS_WAIT_MS,
    CandidateStep,
    Election,
    FenceAnswer,
)
from mqmesh.roles.broker.ha.in_sync import REREAD_MS, CandidateState, InSyncSet
from mqmesh.roles.broker.ha.replica_state import ReplicaState, first_state

IDS = (1, 2, 3)
LAG_MAX_MS = 1_000

Record = tuple[int, str]
"""Epoch, and what stands there: of a group its size, and where in it."""
GROUP_SIZE: Final = 2
Step = tuple[str | int, ...]
"""Name and arguments of what happens next."""


class Bounds(msgspec.Struct, frozen=True):
    """Limits of the events in one course."""

    records: int = 2
    groups: int = 0
    epochs: int = 3
    crashes: int = 1
    power_cuts: int = 1
    unknown: int = 1
    set_changes: int = 1
    voters: int = 0
    elections: int = 3


class Violation(Exception):
    """Violation of a promise."""


class Asked(msgspec.Struct, frozen=True):
    """A change on its way to the coordinator; ``asker`` 0 waits no more."""

    asker: int
    of_election: bool
    version: int
    state: GroupState


class Replica(msgspec.Struct):
    """One of the three replicas."""

    state: ReplicaState
    log: tuple[Record, ...] = ()
    follows: int = 0
    ack: tuple[int, int] = (0, 0)
    lead: InSyncSet | None = None
    election: Election | None = None

    @property
    def epoch(self) -> int:
        """Epoch in which the replica leads; 0 if it does not lead."""
        return 0 if self.lead is None else self.lead.log.epoch

    def clone(self) -> Replica:
        """Returns a copy that changes on its own."""
        made = msgspec.structs.replace(self)
        if self.lead is not None:
            old = self.lead.log
            log = msgspec.structs.replace(old, positions=dict(old.positions), links=dict(old.links))
            made.lead = msgspec.structs.replace(self.lead, log=log, followers={})
        if self.election is not None:
            answers = dict(self.election.answers)
            made.election = msgspec.structs.replace(self.election, answers=answers)
        return made

    def key(self) -> tuple[object, ...]:
        """Returns the values by which states of replicas differ."""
        lead, one = self.lead, self.election
        return (
            self.state,
            self.log,
            self.follows,
            self.ack,
            lead
            and (
                (lead.log.epoch, lead.log.rule, lead.log.next_rule, lead.log.confirmed),
                (frozenset(lead.log.positions.items()), frozenset(lead.log.links.items())),
                (lead.record, lead.pending, lead.unknown_since_ms, lead.voters_change),
            ),
            one
            and (one.step, one.record, one.enough_ms, one.wanted, frozenset(one.answers.items())),
        )


class World:
    """One state of all, and the steps that lead on from it."""

    def __init__(self, mode: AckReplicas, bounds: Bounds) -> None:
        self.bounds = bounds
        self.replicas = {
            number: Replica(first_state(1, number, identity="x", boot_id="1", place="p", drawn=0))
            for number in IDS
        }
        members = tuple(one.state.member for one in self.replicas.values())
        state = GroupState(
            log_id=1, epoch=1, master=1, in_sync=members, mode=mode, copies=2, voters=IDS
        )
        self.record = StateRecord(1, state)
        self.asked: frozenset[Asked] = frozenset()
        self.masters: tuple[tuple[int, int], ...] = ()
        self.confirmed: tuple[Record, ...] = ()
        self.used = dict.fromkeys(Bounds.__struct_fields__, 0)
        self._lead(1, self.record)

    def clone(self) -> World:
        """Returns a copy that changes on its own."""
        made = object.__new__(World)
        made.__dict__.update(self.__dict__)
        made.replicas = {number: one.clone() for number, one in self.replicas.items()}
        made.used = dict(self.used)
        return made

    def key(self) -> int:
        """Returns a key that is the same for states from which the same can follow."""
        return hash(
            (
                tuple(one.key() for one in self.replicas.values()),
                (self.record, self.asked, self.masters, self.confirmed),
                tuple(self.used.values()),
            )
        )

    def after(self, step: Step) -> World:
        """Returns the state after a step.

        Raises:
            Violation: The state breaks a promise.
        """
        made = self.clone()
        name, *arguments = step
        getattr(made, f"do_{name}")(*arguments)
        return made

    def steps(self) -> Iterator[Step]:
        """Yields the steps that may happen now."""
        yield from self._steps_of_changes()
        for number, one in self.replicas.items():
            if one.lead is not None:
                if self._may("records"):
                    yield "append", number
                if self._may("groups"):
                    yield "append_group", number
                if one.lead.pending is None and self._may("set_changes"):
                    yield from (("look", number, late) for late in (0, *IDS) if late != number)
                yield from self._steps_of_voters(number, one.lead)
                if one.lead.unknown_since_ms is not None or self.record.version != (
                    one.lead.record.version
                ):
                    yield "read", number
            elif one.follows and one.follows >= one.state.promised_epoch:
                leader = self._leader(one.follows)
                if leader is not None and len(leader.log) > len(one.log):
                    yield "copy", number
                    if _left(leader.log[len(one.log)]) and self._may("crashes"):
                        yield "tear", number
            if one.ack[0] and self._leader(one.ack[0]) is not None:
                yield "ack", number
            for epoch, leader_id in self.masters:
                leader = self._leader(epoch)
                if leader is None or leader_id == number or one.state.promised_epoch > epoch:
                    continue
                if leader.lead is not None and not leader.lead.state.is_voter(number):
                    continue
                if one.follows != epoch and one.epoch < epoch:
                    yield "follow", number, epoch
            yield from self._steps_of_candidate(number, one)
            if self._may("crashes") and (one.lead or one.election):
                yield "crash", number
            if self._may("power_cuts"):
                yield from (("lose_power", number, end) for end in range(len(one.log)))

    def _steps_of_voters(self, number: int, lead: InSyncSet) -> Iterator[Step]:
        if lead.voters_change is not None:
            if lead.pending is None:
                yield "tick", number
        elif self._may("voters") and lead.log.confirmed >= lead.log.marker_end:
            yield from (("vote", number, other) for other in IDS if other != number)

    def _steps_of_changes(self) -> Iterator[Step]:
        for at in range(len(self._sorted())):
            yield "carry_out", at
            if self._sorted()[at].asker and self._may("unknown"):
                yield "carry_out_untold", at
                yield "delay", at

    def _steps_of_candidate(self, number: int, one: Replica) -> Iterator[Step]:
        election = one.election
        if election is None:
            state = self.record.state
            assert state is not None
            may = self._may("elections") and state.epoch < self.bounds.epochs
            if may and one.lead is None:
                yield "stand", number
            return
        if election.step is CandidateStep.FENCING:
            yield from (("fence", number, other) for other in IDS if other not in election.answers)
            if election.enough_ms is not None:
                yield "wait_no_longer", number
        elif election.step is CandidateStep.UNSURE:
            yield "read", number
        yield "give_up", number

    # ---- Steps -----------------------------------------------------------------------

    def do_append(self, number: int) -> None:
        """Appends a record at the leader."""
        self._use("records")
        one = self.replicas[number]
        one.log += ((one.epoch, f"record {self.used['records']}"),)
        self._own(one)

    def do_append_group(self, number: int) -> None:
        """Appends a group of records at the leader."""
        self._use("groups")
        one = self.replicas[number]
        name = f"group {self.used['groups']}"
        one.log += tuple((one.epoch, f"{name}, {left} left") for left in range(GROUP_SIZE)[::-1])
        self._own(one)

    def do_follow(self, number: int, epoch: int) -> None:
        """Makes a replica follow a leader: it cuts the records that differ."""
        one, leader = self.replicas[number], self._leader(epoch)
        assert leader is not None and leader.lead is not None
        same = 0
        while one.log[: same + 1] == leader.log[: same + 1] and same < len(one.log):
            same += 1
        one.lead = None
        one.state = one.state.promise(epoch)
        one.log, one.follows, one.ack = one.log[:same], epoch, (0, 0)
        try:
            leader.lead.log.on_opened(one.state.member, same)
        except InvalidArgument:
            one.follows = 0
        self._check_confirmed(leader)

    def do_copy(self, number: int) -> None:
        """Copies the next record, or group, to a follower, which acknowledges it."""
        one = self.replicas[number]
        leader = self._leader(one.follows)
        assert leader is not None and leader.lead is not None
        one.log = leader.log[: chunk_end(leader.log, len(one.log))]
        leader.lead.log.on_sent(number, len(one.log))
        one.ack = (one.follows, len(one.log))

    def do_tear(self, number: int) -> None:
        """Kills a follower inside of a group that it is writing."""
        self._use("crashes")
        one = self.replicas[number]
        leader = self._leader(one.follows)
        assert leader is not None
        self._stop(number)
        one.log = recovered(leader.log[: len(one.log) + 1])

    def do_ack(self, number: int) -> None:
        """Delivers an acknowledgement to the leader."""
        one = self.replicas[number]
        (epoch, position), one.ack = one.ack, (0, 0)
        leader = self._leader(epoch)
        assert leader is not None and leader.lead is not None
        leader.lead.log.on_ack(number, epoch, position)
        self._check_confirmed(leader)

    def do_look(self, number: int, late: int) -> None:
        """Updates the set of replicas in sync at the leader; one follower is late."""
        self._use("set_changes")
        one = self.replicas[number]
        assert one.lead is not None
        for other in IDS:
            at = -LAG_MAX_MS - 1 if other == late else 0
            one.lead.followers[other] = CandidateState(at, len(one.log), at)
        self._carry_out(number, one.lead.tick(0), of_election=False)

    def do_vote(self, number: int, other: int) -> None:
        """Removes a replica from the group, or adds it again, as an administrator."""
        self._use("voters")
        lead = self.replicas[number].lead
        assert lead is not None
        adds = not lead.state.is_voter(other)
        with suppress(InvalidArgument):
            lead.change_voters(other, 1, adds=adds, deadline_ms=LAG_MAX_MS)

    def do_tick(self, number: int) -> None:
        """Lets the leader check whether it may change the members of the group."""
        lead = self.replicas[number].lead
        assert lead is not None
        self._carry_out(number, lead.tick(0), of_election=False)

    def do_stand(self, number: int) -> None:
        """Makes a replica a candidate, whatever the reason; it reads the record."""
        self._use("elections")
        one = self.replicas[number]
        one.election = Election(one.state.member)
        one.election.stand("", 0)
        self._carry_out(number, one.election.on_read(self.record, 0, leader_lives=False))

    def do_fence(self, number: int, other: int) -> None:
        """Requests a promise of a replica; the answer arrives at once."""
        election, asked = self.replicas[number].election, self.replicas[other]
        assert election is not None and election.record.state is not None
        epoch = election.record.state.epoch + 1
        try:
            asked.state = asked.state.promise(epoch)
        except BrokerNotAvailable:
            self._carry_out(number, election.on_stale(asked.state.promised_epoch))
            return
        self._fenced(other)
        last = asked.log[-1][0] if asked.log else 0
        answer = FenceAnswer(asked.state.member, last, len(asked.log))
        self._carry_out(number, election.on_fence_answer(epoch, answer, 0))

    def do_wait_no_longer(self, number: int) -> None:
        """Ends the wait for promises: enough have promised."""
        election = self.replicas[number].election
        assert election is not None
        self._carry_out(number, election.tick(OTHERS_WAIT_MS))

    def do_give_up(self, number: int) -> None:
        """Ends the candidate's time; its requests may still be carried out."""
        election = self.replicas[number].election
        assert election is not None
        self._carry_out(number, election.tick(ELECTION_MS))

    def do_read(self, number: int) -> None:
        """Reads the record, after a change of unknown outcome, or as a watch does."""
        one = self.replicas[number]
        if one.election is not None:
            effects = one.election.on_read(self.record, 0, leader_lives=False)
            self._carry_out(number, effects)
        elif one.lead is not None:
            effects = one.lead.on_read(self.record, REREAD_MS)
            self._carry_out(number, effects, of_election=False)

    def do_carry_out(self, at: int) -> None:
        """Carries out a change at the coordinator, which answers the caller."""
        asked = self._sorted()[at]
        self._told(asked, self._change(asked))

    def do_carry_out_untold(self, at: int) -> None:
        """Carries out a change whose answer is lost."""
        self._use("unknown")
        asked = self._sorted()[at]
        self._change(asked)
        self._told(asked, OutcomeUnknown("lost"))

    def do_delay(self, at: int) -> None:
        """Gives up waiting for a change; the change may come later."""
        self._use("unknown")
        asked = self._sorted()[at]
        self._orphan(asked)
        self._told(asked, OutcomeUnknown("late"))

    def do_crash(self, number: int) -> None:
        """Kills a process, which begins anew."""
        self._use("crashes")
        self._stop(number)

    def do_lose_power(self, number: int, end: int) -> None:
        """Cuts the power of a machine, which loses unsynced data."""
        self._use("power_cuts")
        self._stop(number)
        one = self.replicas[number]
        one.log = recovered(one.log[:end])
        boot_id = f"{one.state.boot_id}1"
        one.state = one.state.started(boot_id, "p", syncs=False, drawn=one.state.incarnation)

    # ---- What follows from them ------------------------------------------------------

    def _may(self, what: str) -> bool:
        return self.used[what] < int(getattr(self.bounds, what))

    def _use(self, what: str) -> None:
        self.used[what] += 1

    def _sorted(self) -> list[Asked]:
        return sorted(self.asked, key=_order) if len(self.asked) > 1 else list(self.asked)

    def _leader(self, epoch: int) -> Replica | None:
        found = [one for one in self.replicas.values() if one.lead and one.epoch == epoch]
        return found[0] if found else None

    def _stop(self, number: int) -> None:
        one = self.replicas[number]
        one.lead = one.election = None
        one.follows = 0
        for asked in [asked for asked in self.asked if asked.asker == number]:
            self._orphan(asked)

    def _orphan(self, asked: Asked) -> None:
        self.asked = self.asked - {asked} | {msgspec.structs.replace(asked, asker=0)}

    def _fenced(self, number: int) -> None:
        one = self.replicas[number]
        if one.lead is not None and one.state.promised_epoch > one.epoch:
            one.lead = None
        if one.election is not None:
            effects = one.election.on_stale(one.state.promised_epoch)
            self._carry_out(number, effects)

    def _change(self, asked: Asked) -> int | MQMeshError:
        self.asked -= {asked}
        if asked.version != self.record.version:
            return Conflict("", self.record)
        self.record = StateRecord(asked.version + 1, asked.state)
        return self.record.version

    def _told(self, asked: Asked, outcome: int | MQMeshError) -> None:
        if not asked.asker:
            return
        one = self.replicas[asked.asker]
        if asked.of_election and one.election and asked.state == one.election.wanted:
            self._carry_out(asked.asker, one.election.on_outcome(outcome, 0))
        elif not asked.of_election and one.lead and one.epoch == asked.state.epoch:
            effects = one.lead.on_outcome(outcome, 0)
            self._carry_out(asked.asker, effects, of_election=False)

    def _carry_out(self, number: int, effects: list[Effect], *, of_election: bool = True) -> None:
        one = self.replicas[number]
        for effect in effects:
            if isinstance(effect, ChangeRecord):
                self.asked |= {Asked(number, of_election, effect.version, effect.state)}
            elif isinstance(effect, Lead):
                one.election = None
                self._lead(number, effect.record)
            elif isinstance(effect, Follow):
                one.election = None
                if not of_election:
                    one.lead = None
        if one.lead is not None:
            self._check_confirmed(one)

    def _lead(self, number: int, record: StateRecord) -> None:
        one, state = self.replicas[number], record.state
        assert state is not None
        try:
            one.state = one.state.promise(state.epoch)
        except BrokerNotAvailable:
            return
        if dict(self.masters).get(state.epoch, number) != number:
            raise Violation(f"epoch {state.epoch} has two masters")
        self.masters += ((state.epoch, number),)
        if state.unclean_since == state.epoch:
            self.confirmed = _common(self.confirmed, one.log)  # it knows what may be lost
        one.log += ((state.epoch, f"marker of {number}"),)
        log = ConfirmedLog(state.epoch, one.state.member, rule_of(state), len(one.log))
        one.lead, one.follows = InSyncSet(log, record, LAG_MAX_MS), 0
        self._own(one)
        self._check_newest()

    def _own(self, one: Replica) -> None:
        assert one.lead is not None
        one.lead.log.on_own(len(one.log))
        self._check_confirmed(one)

    def _check_confirmed(self, leader: Replica) -> None:
        assert leader.lead is not None
        now = leader.log[: leader.lead.log.confirmed]
        if not is_whole(now):
            raise Violation(f"consumers see a part of a group: {now}")
        if _common(now, self.confirmed) not in (now, self.confirmed):
            raise Violation(f"a place has two contents: {self.confirmed}, {now}")
        if len(now) > len(self.confirmed):
            self.confirmed = now
            self._check_newest()

    def _check_newest(self) -> None:
        newest = self._leader(max(dict(self.masters)))
        if newest is not None and newest.log[: len(self.confirmed)] != self.confirmed:
            raise Violation(f"confirmed was {self.confirmed}, the leader has {newest.log}")


def chunk_end(log: tuple[Record, ...], start: int) -> int:
    """Returns where the record, or group, that begins at a place of a log ends."""
    end = start + 1
    while _left(log[end - 1]):
        end += 1
    return end


def recovered(log: tuple[Record, ...]) -> tuple[Record, ...]:
    """Returns a log as it is after a start: without the group that is not whole at its end."""
    while log and _left(log[-1]):
        log = log[:-1]
    return log


def is_whole(log: tuple[Record, ...]) -> bool:
    """Returns True if a log has no part of a group."""
    return all(
        not _left(one) or one[1].partition(",")[0] == following[1].partition(",")[0]
        for one, following in pairwise((*log, (0, "the end")))
    )


def _left(record: Record) -> int:
    """Returns how many records of the same group follow."""
    name, _, left = record[1].partition(", ")
    return int(left.split()[0]) if name.startswith("group") else 0


def _order(asked: Asked) -> tuple[object, ...]:
    state = asked.state
    members = tuple((one.replica_id, one.incarnation) for one in state.in_sync)
    who = (state.master or 0, members, state.voters)
    return asked.asker, asked.of_election, asked.version, state.epoch, *who


def _common(one: tuple[Record, ...], other: tuple[Record, ...]) -> tuple[Record, ...]:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return one[:same]


class Explored(msgspec.Struct):
    """Result of a search.

    Attributes:
        states: Number of visited states.
        depth: Depth of the deepest state, in steps.
        is_exhausted: True if there are no other states within the bounds.
        found: Violation that was found; None for none.
        course: Shortest course to the violation.
    """

    states: int = 0
    depth: int = 0
    is_exhausted: bool = False
    found: str | None = None
    course: tuple[Step, ...] = ()


def explore(mode: AckReplicas, bounds: Bounds, *, most_states: int) -> Explored:
    """Visits all states within the bounds, the nearest first, until something must not be."""
    first = World(mode, bounds)
    told, seen = Explored(), {first.key()}
    queue: deque[tuple[World, tuple[Step, ...]]] = deque([(first, ())])
    while queue:
        world, course = queue.popleft()
        told.states, told.depth = told.states + 1, len(course)
        if told.states > most_states:
            return told
        for step in world.steps():
            try:
                after = world.after(step)
            except Violation as error:
                told.found, told.course = str(error), (*course, step)
                return told
            key = after.key()
            if key not in seen:
                seen.add(key)
                queue.append((after, (*course, step)))
    told.is_exhausted = True
    return told


def bounds(records: int = 0, epochs: int = 2, elections: int = 1, **more: int) -> Bounds:
    """Returns bounds that allow these events, and no others."""
    none = {"crashes": 0, "power_cuts": 0, "unknown": 0, "set_changes": 0, "voters": 0}
    return Bounds(records=records, epochs=epochs, elections=elections, **(none | more))


LONG: Final = (
    (AckReplicas.ALL, bounds(1, crashes=1)),
    (AckReplicas.QUORUM, bounds(1, elections=2)),
    (AckReplicas.ALL, bounds(set_changes=1)),
    (AckReplicas.QUORUM, bounds(power_cuts=1, set_changes=1)),
    (AckReplicas.QUORUM, bounds(epochs=3, elections=2, crashes=1)),
    (AckReplicas.ALL, bounds(unknown=1)),
    (AckReplicas.ALL, bounds(elections=2, unknown=1)),
    (AckReplicas.ALL, bounds(unknown=1, set_changes=1)),
    (AckReplicas.ALL, bounds(power_cuts=1, set_changes=1)),
    (AckReplicas.QUORUM, bounds(1, voters=1, unknown=1)),
    (AckReplicas.QUORUM, bounds(1, voters=2, set_changes=1)),
    (AckReplicas.ALL, bounds(1, voters=2, set_changes=1)),
    (AckReplicas.QUORUM, bounds(1, groups=1, power_cuts=1)),
    (AckReplicas.ALL, bounds(1, groups=1, crashes=1)),
    (AckReplicas.ALL, Bounds()),
    (AckReplicas.QUORUM, Bounds()),
)
"""Searches of ``scripts/simulate --model``; the last two never come to an end."""
MOST_STATES: Final = 500_000


def explore_all(most_states: int = MOST_STATES) -> bool:
    """Explores all of ``LONG`` and prints what comes of it; True if all is well."""
    is_well = True
    for mode, within in LONG:
        told = explore(mode, within, most_states=most_states)
        end = "all of them" if told.is_exhausted else f"up to {told.depth} steps"
        say(f"{mode}, {within}: {told.states} states, {end}")
        if told.found is not None:
            is_well = False
            say(f"  {told.found}, after {told.course}")
    return is_well
