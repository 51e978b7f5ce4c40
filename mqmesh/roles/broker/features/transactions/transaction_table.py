"""Half messages that wait for their decision. Pure.

A half batch is known by the queue offset of its first message; ``half_batches`` has the states
of its messages, ``check_timetable`` the times and targets of their checks.

Decisions are gathered until the end of the tick and then written all at once:
``take`` gives them out, ``stored`` and ``failed`` say what became of them. The
table holds what waits, no more of it than the settings allow, and remembers for
a while what has ended, so that a repeated end is recognised.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from mqmesh.errors import RemoteProtocolError, SequenceConflict, SystemBusy
from mqmesh.protocol.transactions import Decision, End, EndOutcome
from mqmesh.roles.broker.features.transactions.check_timetable import (
    Check,
    CheckTimetable,
    Members,
    Park,
    TransactionSettings,
)
from mqmesh.roles.broker.features.transactions.half_batches import (
    OPEN,
    PARKED,
    PENDING,
    STAGED,
    STATE_OF,
    HalfBatch,
)

ENDED_REMEMBERED: Final = 4_096
"""Half batches that are remembered after their end."""

Key = tuple[int, int]
"""Producer id and first sequence of a half batch."""


class DecidedRun(msgspec.Struct, eq=False):
    """A decision about consecutive messages of a half batch.

    Attributes:
        batch: Theirs.
        first: Ordinal of the first one.
        count: How many.
        decision: As it was made.
        before: States before, to go back to.
    """

    batch: HalfBatch
    first: int
    count: int
    decision: int
    before: bytes


class Transactions:
    """All half messages of a broker that wait.

    Args:
        settings: Timings and limits.

    Attributes:
        settings: The same; others may take their place, here and in the timetable.
        timetable: When they are asked about.
        batches: Half batches that wait, by queue offset, in that order.
        pending_count: Messages that wait and are not parked.
        parked_count: Messages that are parked.
        staged_halves: Messages of half batches that were let in and are not stored yet.
        half_end: Queue offset behind the last half message that is known here.
        op_end: Queue offset behind the last op record that is known here.
        changes: Grows with every change.
        runs: Decisions to take.
        staged_total: Grows whenever there is something new to take.
        staged_bytes: Bytes of log that the commits to take need, about.
    """

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self.timetable = CheckTimetable(settings)
        self.batches: dict[int, HalfBatch] = {}
        self.pending_count = 0
        self.parked_count = 0
        self.staged_halves = 0
        self.half_end = 0
        self.op_end = 0
        self.changes = 0
        self._keys: dict[Key, HalfBatch] = {}
        self._ended: dict[int, HalfBatch] = {}
        self.runs: list[DecidedRun] = []
        self.staged_total = self.staged_bytes = 0

    # ---- Half messages come ------------------------------------------------------------

    def admit(
        self, producer_id: int, first_sequence: int, count: int, producer_crc: int
    ) -> HalfBatch | None:
        """Lets a half batch in, to be stored now.

        Args:
            producer_id: Its producer's instance id.
            first_sequence: Sequence of its first message.
            count: Its messages.
            producer_crc: Its producer's checksum of it.

        Returns:
            Its twin if it was stored before; then it must not be stored again.

        Raises:
            SystemBusy: Too many wait.
            SequenceConflict: Others are stored under their ids.
        """
        twin = self._keys.get((producer_id, first_sequence))
        if twin is not None:
            if twin.count != count or twin.producer_crc != producer_crc:
                raise SequenceConflict(
                    f"producer {producer_id:016X} sent half messages from sequence "
                    f"{first_sequence} on before, with other content; does it run twice, on a "
                    "cloned machine?"
                )
            return twin
        waiting = self.pending_count + self.staged_halves
        if waiting + count > self.settings.pending_max:
            raise SystemBusy(
                f"{waiting} half messages wait for their decisions; no more than "
                f"{self.settings.pending_max} may (transaction_pending_max)",
                retry_after_ms=self.settings.busy_retry_after_ms,
            )
        self.staged_halves += count
        return None

    def on_half(
        self,
        batch: HalfBatch,
        age_ms: int,
        now_ms: int,
        immunities_ms: Sequence[int | None] | None = None,
    ) -> None:
        """A half batch was stored, or found in the store.

        Args:
            batch: Its facts.
            age_ms: How long ago it was stored; 0 or less for a clock that was set back.
            now_ms: Monotonic clock.
            immunities_ms: When its messages say that they may be asked about first, one each.
        """
        assert not batch.states
        batch.states = bytearray(batch.count)
        batch.left = batch.count
        batch.op_floor = self.op_end
        self.half_end = batch.base + batch.count
        self.batches[batch.base] = batch
        self._keys[batch.producer_id, batch.first_sequence] = batch
        self.pending_count += batch.count
        self.changes += 1
        age_ms = max(age_ms, 0)
        usual_ms = self.settings.timeout_ms
        if immunities_ms is None:
            self.timetable.add(batch, range(batch.count), now_ms + max(usual_ms - age_ms, 0))
            return
        groups: dict[int, list[int]] = {}
        for ordinal, immunity_ms in enumerate(immunities_ms):
            wait_ms = usual_ms if immunity_ms is None else immunity_ms
            groups.setdefault(wait_ms, []).append(ordinal)
        for wait_ms, ordinals in groups.items():
            self.timetable.add(batch, ordinals, now_ms + max(wait_ms - age_ms, 0))

    # ---- Decisions ----------------------------------------------------------------------

    def decide(
        self, end: End, may_commit: Callable[[str, int], bool], group: str | None = None
    ) -> EndOutcome:
        """Apply a decision about messages; new decisions are gathered for ``take``.

        Args:
            end: The decision.
            may_commit: Returns whether a queue of a topic still exists.
            group: Producer group that decides; None for administrators.

        Raises:
            RemoteProtocolError: It goes beyond its batch.
        """
        batch = self.batches.get(end.base_queue_offset) or self._ended.get(end.base_queue_offset)
        if (
            batch is None
            or batch.producer_id != end.producer_id
            or batch.first_sequence != end.first_sequence
            or (group is not None and group != batch.group)
        ):
            return EndOutcome.NOT_PENDING
        stop = end.first + end.count
        if stop > batch.count:
            raise RemoteProtocolError(
                f"the end of messages {end.first} to {stop - 1} of a batch of {batch.count}"
            )
        states = batch.states
        wanted = STATE_OF[end.decision]
        here = states[end.first : stop]
        found = set(here)
        if found & {PENDING, PARKED}:
            if wanted == 1 and not may_commit(batch.topic, batch.queue_id):
                return EndOutcome.TOPIC_GONE
            self._stage(batch, end.first, here, end.decision)
        others = found - {PENDING, PARKED, wanted}
        if others - {STAGED | wanted}:
            return EndOutcome.DECIDED_OTHERWISE
        if others:
            return EndOutcome.AGAIN
        return EndOutcome.ENDED_BEFORE if found == {wanted} else EndOutcome.ENDED

    def take(self) -> list[DecidedRun]:
        """Decisions to be written now; each must come back, stored or failed."""
        runs, self.runs = self.runs, []
        self.staged_bytes = 0
        return runs

    def stored(self, runs: Iterable[DecidedRun]) -> None:
        """Decisions are in the log."""
        for run in runs:
            wanted = STATE_OF[run.decision]
            batch = run.batch
            batch.states[run.first : run.first + run.count] = bytes((wanted,)) * run.count
            self._close(batch, run.count)

    def failed(self, runs: Iterable[DecidedRun]) -> None:
        """Decisions could not be written: nobody has decided."""
        for run in runs:
            batch = run.batch
            batch.states[run.first : run.first + run.count] = run.before
            parked = run.before.count(PARKED)
            batch.parked += parked
            self.parked_count += parked
            self.pending_count += run.count - parked

    # ---- The timetable --------------------------------------------------------------------

    def tick(self, now_ms: int, members: Members) -> list[Check | Park]:
        """Return what is due: checks of half messages, and messages to park after enough checks.

        Args:
            now_ms: Monotonic clock.
            members: Finds whom to ask.

        Returns:
            Effects. A check counts only when somebody was there to be asked.
        """
        return self.timetable.tick(now_ms, members, self.pending_count)

    def parked_or_not(self, park: Park, *, stored: bool) -> list[HalfBatch]:
        """Finish a park: it is in the log, or could not be written and is tried again.

        Returns:
            As ``parked``.
        """
        self.timetable.parked_or_not(park, stored=stored)
        return self.parked(park.batch, park.ordinals) if stored else []

    def parked(self, batch: HalfBatch, ordinals: Iterable[int]) -> list[HalfBatch]:
        """Messages are parked now: that is in the log.

        Returns:
            Batches whose parked messages are forgotten, because there are too many.
        """
        for ordinal in ordinals:
            if batch.states[ordinal] == PENDING:
                batch.states[ordinal] = PARKED
                batch.parked += 1
                self.parked_count += 1
                self.pending_count -= 1
        self.changes += 1
        forgotten: list[HalfBatch] = []
        if self.parked_count > self.settings.parked_max:
            for one in list(self.batches.values()):
                if self.parked_count <= self.settings.parked_max:
                    break
                if one.parked and one.parked == one.left and one is not batch:
                    self.forget(one)
                    forgotten.append(one)
        return forgotten

    # ---- From the log -----------------------------------------------------------------------

    def replay(self, base: int, first: int, count: int, decision: int) -> None:
        """A decision was found in the log."""
        batch = self.batches.get(base)
        if batch is None or first + count > batch.count:
            return
        for ordinal in range(first, first + count):
            state = batch.states[ordinal]
            if state not in OPEN:
                continue
            if state == PARKED:
                batch.parked -= 1
                self.parked_count -= 1
            else:
                self.pending_count -= 1
            batch.states[ordinal] = STATE_OF[decision]
            batch.left -= 1
        if not batch.left:
            self._remember(batch)

    def forget(self, batch: HalfBatch) -> None:
        """A batch is not in the log any more, or not wanted any more."""
        if self.batches.pop(batch.base, None) is None:
            return
        self._keys.pop((batch.producer_id, batch.first_sequence), None)
        self.parked_count -= batch.parked
        self.pending_count -= sum(state == PENDING for state in batch.states)
        batch.states = bytearray(b"\x02") * batch.count
        batch.left = batch.parked = 0
        self.changes += 1

    # ---- Looking ----------------------------------------------------------------------------

    def find(self, producer_id: int, sequence: int) -> tuple[HalfBatch, int] | None:
        """The batch of a message that waits, and its ordinal."""
        for batch in self.batches.values():
            ordinal = sequence - batch.first_sequence
            if batch.producer_id == producer_id and 0 <= ordinal < batch.count:
                return (batch, ordinal) if batch.states[ordinal] in OPEN else None
        return None

    # ---- Helpers ------------------------------------------------------------------------------

    def _stage(self, batch: HalfBatch, first: int, here: bytearray, decision: int) -> None:
        mark = STAGED | STATE_OF[decision]
        position, size = 0, len(here)
        while position < size:
            if here[position] not in OPEN:
                position += 1
                continue
            stop = position + 1
            while stop < size and here[stop] in OPEN:
                stop += 1
            before = bytes(here[position:stop])
            count, parked = stop - position, before.count(PARKED)
            begin = first + position
            self.staged_total += 1
            if decision == Decision.COMMIT:
                self.staged_bytes += batch.size * count // batch.count
            batch.states[begin : begin + count] = bytes((mark,)) * count
            batch.parked -= parked
            self.parked_count -= parked
            self.pending_count -= count - parked
            last = self.runs[-1] if self.runs else None
            if (
                last is not None
                and last.batch is batch
                and last.decision == decision
                and last.first + last.count == begin
            ):
                last.count += count
                last.before += before
            else:
                self.runs.append(DecidedRun(batch, begin, count, decision, before))
            position = stop

    def _close(self, batch: HalfBatch, count: int) -> None:
        if batch.base not in self.batches:
            return  # the log lost it while its end was written
        batch.left -= count
        self.changes += 1
        if not batch.left:
            self._remember(batch)

    def _remember(self, batch: HalfBatch) -> None:
        del self.batches[batch.base]
        self._ended[batch.base] = batch
        if len(self._ended) > ENDED_REMEMBERED:
            old = self._ended.pop(next(iter(self._ended)))
            self._keys.pop((old.producer_id, old.first_sequence), None)
