"""Half messages that wait for their decision, and when who is asked about them. Pure.

A half batch is known by the queue offset of its first message. Every message of it is

======== ================================================================
state    meaning
======== ================================================================
PENDING  nobody has decided
STAGED   a decision is being written
PARKED   asked about as often as allowed, in vain; may still be decided
ENDED    committed, or rolled back
======== ================================================================

Decisions are gathered until the end of the tick and then written all at once:
``take`` gives them out, ``stored`` and ``failed`` say what became of them. The
table holds what waits, no more of it than the settings allow, and remembers for
a while what has ended, so that a repeated end is recognised.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mqmesh.errors import RemoteProtocolError, SystemBusy
from mqmesh.protocol.transactions import Decision, End, EndOutcome

ENDED_REMEMBERED: Final = 4_096
"""Half batches that are remembered after their end."""
CHECK_BYTES_A_TICK: Final = 4 * 1024 * 1024
"""A producer that died with many open transactions must not make a flood of its checks."""
REJOIN_MS: Final = 1_000
"""Between looks whether groups without members have some again."""
PARKS_A_TICK: Final = 1_000
UNSWEPT: Final = 10_000

PENDING: Final = 0
PARKED: Final = 3
_STAGED: Final = 4
_STATE_OF: Final = {int(Decision.COMMIT): 1, int(Decision.ROLLBACK): 2}
_OPEN: Final = (PENDING, PARKED)

Key = tuple[int, int]
"""Producer id and first sequence of a half batch."""
Members = Callable[[str], Sequence[bytes]]
"""Routing ids of the members of a producer group that are there."""


class TransactionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and limits; see ``BrokerConfig``."""

    timeout_ms: int = 6_000
    check_interval_ms: int = 30_000
    check_max: int = 15
    pending_max: int = 200_000
    parked_max: int = 10_000
    busy_retry_after_ms: int = 100


class HalfBatch(msgspec.Struct, eq=False):
    """One half batch of which something waits, or did lately.

    Attributes:
        base: Queue offset of its first message in the half topic.
        count: Messages.
        commitlog_offset: Where it begins in the log.
        end_offset: It is on disk when the log is synced to here.
        size: In the log, in bytes.
        store_timestamp: When it was stored.
        producer_id: Instance id of its producer.
        first_sequence: Sequence of its first message.
        group: Producer group.
        topic: Where its messages go.
        queue_id: Queue of that topic.
        op_floor: Every op record about it stands at or behind this queue offset.
        left: Messages that are not ended.
        parked: Those of them that are parked.
        states: One byte a message.
    """

    base: int
    count: int
    commitlog_offset: int
    end_offset: int
    size: int
    store_timestamp: int
    producer_id: int
    first_sequence: int
    group: str
    topic: str
    queue_id: int
    op_floor: int = 0
    left: int = 0
    parked: int = 0
    states: bytearray = msgspec.field(default_factory=bytearray)

    def open_ordinals(self, among: Iterable[int]) -> list[int]:
        """Those of some messages that nobody has decided about and that are not parked."""
        states = self.states
        return [ordinal for ordinal in among if states[ordinal] == PENDING]


class Watch(msgspec.Struct, eq=False):
    """Messages of a half batch that are asked about together.

    Attributes:
        batch: Theirs.
        ordinals: Which ones.
        checks: How often they were asked about.
        due_ms: When they are next, monotonic.
        parking: They are being parked.
    """

    batch: HalfBatch
    ordinals: Sequence[int]
    checks: int
    due_ms: int
    parking: bool = False

    def __lt__(self, other: "Watch") -> bool:
        return self.due_ms < other.due_ms


class Run(msgspec.Struct, eq=False):
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


class Asked(msgspec.Struct, frozen=True):
    """That consecutive messages of a batch were asked about, as the log has it.

    Attributes:
        first: Ordinal of the first one.
        count: How many.
        checks: How often they had been asked about by then.
        due_ms: When they are next, monotonic.
    """

    first: int
    count: int
    checks: int
    due_ms: int


class Check(msgspec.Struct, frozen=True):
    """Effect: ask a member of the group."""

    peer: bytes
    batch: HalfBatch
    ordinals: list[int]
    check_times: int


class Park(msgspec.Struct, frozen=True):
    """Effect: note that messages were asked about in vain, and copy them to where it is seen."""

    watch: Watch
    ordinals: list[int]

    @property
    def batch(self) -> HalfBatch:
        """Theirs."""
        return self.watch.batch

    @property
    def check_times(self) -> int:
        """How often they were asked about."""
        return self.watch.checks


class Transactions:
    """All half messages of a broker that wait.

    Args:
        settings: Timings and limits.

    Attributes:
        batches: What waits, by queue offset, in that order.
        pending_count: Messages that wait and are not parked.
        parked_count: Messages that are parked.
        staged_halves: Messages of half batches that were let in and are not stored yet.
        half_end: Queue offset behind the last half message that is known here.
        op_end: Queue offset behind the last op record that is known here.
        changes: Grows with every change.
        staged_total: Grows whenever there is something new to take.
        staged_bytes: What the commits to take are in the log, about.
    """

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self.batches: dict[int, HalfBatch] = {}
        self.pending_count = 0
        self.parked_count = 0
        self.staged_halves = 0
        self.half_end = 0
        self.op_end = 0
        self.changes = 0
        self._keys: dict[Key, HalfBatch] = {}
        self._ended: dict[int, HalfBatch] = {}
        self._watches: list[Watch] = []
        self._lonely: dict[str, list[Watch]] = {}
        self._rejoin_ms = self._parking = 0
        self._unswept = UNSWEPT
        self._runs: list[Run] = []
        self.staged_total = self.staged_bytes = 0

    # ---- Half messages come ------------------------------------------------------------

    def admit(self, producer_id: int, first_sequence: int, count: int) -> HalfBatch | None:
        """Lets a half batch in, to be stored now.

        Returns:
            Its twin if it was stored before; then it must not be stored again.

        Raises:
            SystemBusy: Too many wait.
        """
        twin = self._keys.get((producer_id, first_sequence))
        if twin is not None and twin.count == count:
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
            self._watch(batch, range(batch.count), 0, now_ms + max(usual_ms - age_ms, 0))
            return
        groups: dict[int, list[int]] = {}
        for ordinal, immunity_ms in enumerate(immunities_ms):
            wait_ms = usual_ms if immunity_ms is None else immunity_ms
            groups.setdefault(wait_ms, []).append(ordinal)
        for wait_ms, ordinals in groups.items():
            self._watch(batch, ordinals, 0, now_ms + max(wait_ms - age_ms, 0))

    # ---- Decisions ----------------------------------------------------------------------

    def decide(
        self, end: End, may_commit: Callable[[str, int], bool], group: str | None = None
    ) -> EndOutcome:
        """Somebody decides about messages; what is new about it is gathered for ``take``.

        Args:
            end: The decision.
            may_commit: Tells whether a queue of a topic still exists.
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
        wanted = _STATE_OF[end.decision]
        here = states[end.first : stop]
        found = set(here)
        if found & {PENDING, PARKED}:
            if wanted == 1 and not may_commit(batch.topic, batch.queue_id):
                return EndOutcome.TOPIC_GONE
            self._stage(batch, end.first, here, end.decision)
        others = found - {PENDING, PARKED, wanted}
        if others - {_STAGED | wanted}:
            return EndOutcome.DECIDED_OTHERWISE
        if others:
            return EndOutcome.AGAIN
        return EndOutcome.ENDED_BEFORE if found == {wanted} else EndOutcome.ENDED

    def take(self) -> list[Run]:
        """Decisions to be written now; each must come back, stored or failed."""
        runs, self._runs = self._runs, []
        self.staged_bytes = 0
        return runs

    @property
    def staged_count(self) -> int:
        """Runs to take."""
        return len(self._runs)

    def stored(self, runs: Iterable[Run]) -> None:
        """Decisions are in the log."""
        for run in runs:
            wanted = _STATE_OF[run.decision]
            batch = run.batch
            batch.states[run.first : run.first + run.count] = bytes((wanted,)) * run.count
            self._close(batch, run.count)

    def failed(self, runs: Iterable[Run]) -> None:
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
        """What is due: whom to ask, and what was asked about often enough.

        Args:
            now_ms: Monotonic clock.
            members: Finds whom to ask.

        Returns:
            Effects. A check counts only when somebody was there to be asked.
        """
        self._sweep()
        self._rejoin(now_ms, members)
        effects = self._crowded(now_ms)
        size = 0
        asked: dict[str, Sequence[bytes]] = {}
        while self._watches and self._watches[0].due_ms <= now_ms and size < CHECK_BYTES_A_TICK:
            watch = heapq.heappop(self._watches)
            batch = watch.batch
            ordinals = batch.open_ordinals(watch.ordinals)
            if not ordinals:
                if any(batch.states[one] >= _STAGED for one in watch.ordinals):
                    # A decision is being written; should that fail they are asked about again.
                    self._push(watch, now_ms + self.settings.check_interval_ms)
                continue
            watch.ordinals = ordinals
            if watch.checks >= self.settings.check_max:
                if not watch.parking:
                    watch.parking = True
                    self._parking += len(ordinals)
                    size += batch.size
                    effects.append(Park(watch, ordinals))
                self._push(watch, now_ms + self.settings.check_interval_ms)
                continue
            peers = asked.get(batch.group)
            if peers is None:
                peers = asked[batch.group] = members(batch.group)
            if not peers:
                self._lonely.setdefault(batch.group, []).append(watch)
                continue
            # Another member each time: the one that was asked may hang.
            peer = peers[(batch.base + watch.checks) % len(peers)]
            watch.checks += 1
            size += batch.size
            effects.append(Check(peer, batch, ordinals, watch.checks))
            self._push(watch, now_ms + self.settings.check_interval_ms)
        return effects

    def parked_or_not(self, park: Park, *, stored: bool) -> list[HalfBatch]:
        """What was to be parked is in the log, or could not be written and is tried again.

        Returns:
            As ``parked``.
        """
        self._parking -= len(park.ordinals)
        if stored:
            return self.parked(park.batch, park.ordinals)
        park.watch.parking = False
        return []

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
            if state not in _OPEN:
                continue
            if state == PARKED:
                batch.parked -= 1
                self.parked_count -= 1
            else:
                self.pending_count -= 1
            batch.states[ordinal] = _STATE_OF[decision]
            batch.left -= 1
        if not batch.left:
            self._remember(batch)

    def replay_checks(self, found: Mapping[int, Sequence[Asked]]) -> None:
        """It was found in the log how often messages were asked about.

        Args:
            found: For each batch, by queue offset, what was asked.
        """
        for watch in self._watches:
            for asked in found.get(watch.batch.base, ()):
                if asked.checks > watch.checks and any(
                    asked.first <= ordinal < asked.first + asked.count for ordinal in watch.ordinals
                ):
                    watch.checks, watch.due_ms = asked.checks, asked.due_ms
        heapq.heapify(self._watches)

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
                return (batch, ordinal) if batch.states[ordinal] in _OPEN else None
        return None

    def watches(self) -> Iterator[Watch]:
        """Everything that is going to be asked about, in no order."""
        yield from self._watches
        for watches in self._lonely.values():
            yield from watches

    def checks_of(self, batch: HalfBatch, ordinal: int) -> tuple[int, int]:
        """How often a message was asked about, and when it is next (monotonic; -1 for never)."""
        for watch in self.watches():
            if watch.batch is batch and ordinal in watch.ordinals:
                return watch.checks, watch.due_ms
        return self.settings.check_max, -1

    # ---- Helpers ------------------------------------------------------------------------------

    def _stage(self, batch: HalfBatch, first: int, here: bytearray, decision: int) -> None:
        mark = _STAGED | _STATE_OF[decision]
        position, size = 0, len(here)
        while position < size:
            if here[position] not in _OPEN:
                position += 1
                continue
            stop = position + 1
            while stop < size and here[stop] in _OPEN:
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
            last = self._runs[-1] if self._runs else None
            if (
                last is not None
                and last.batch is batch
                and last.decision == decision
                and last.first + last.count == begin
            ):
                last.count += count
                last.before += before
            else:
                self._runs.append(Run(batch, begin, count, decision, before))
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

    def _watch(self, batch: HalfBatch, ordinals: Sequence[int], checks: int, due_ms: int) -> None:
        heapq.heappush(self._watches, Watch(batch, ordinals, checks, due_ms))

    def _push(self, watch: Watch, due_ms: int) -> None:
        watch.due_ms = due_ms
        heapq.heappush(self._watches, watch)

    def _sweep(self) -> None:
        # What has ended is watched no more: its immunity, or its group's absence, may be long.
        lonely = self._lonely.items()
        if len(self._watches) + sum(len(watches) for _, watches in lonely) > self._unswept:
            self._watches = [one for one in self._watches if one.batch.left]
            heapq.heapify(self._watches)
            left = [(name, [one for one in some if one.batch.left]) for name, some in lonely]
            self._lonely = {name: some for name, some in left if some}
            self._unswept = UNSWEPT + 2 * sum(1 for _ in self.watches())

    def _rejoin(self, now_ms: int, members: Members) -> None:
        # Whoever waits for a group without members is asked about as soon as it has one.
        if now_ms < self._rejoin_ms or not self._lonely:
            return
        self._rejoin_ms = now_ms + min(REJOIN_MS, self.settings.check_interval_ms)
        for group in [group for group in self._lonely if members(group)]:
            for watch in self._lonely.pop(group):
                self._push(watch, now_ms)

    def _crowded(self, now_ms: int) -> list[Check | Park]:
        """Parks what waits for groups that nobody is in, so that it does not keep out others."""
        effects: list[Check | Park] = []
        excess = self.pending_count - self._parking - self.settings.pending_max // 2
        while excess > 0 and self._lonely and len(effects) < PARKS_A_TICK:
            group = next(iter(self._lonely))
            watch = self._lonely[group].pop(0)
            if not self._lonely[group]:
                del self._lonely[group]
            ordinals = watch.batch.open_ordinals(watch.ordinals)
            if not ordinals:
                continue
            watch.ordinals, watch.parking = ordinals, True
            excess -= len(ordinals)
            self._parking += len(ordinals)
            effects.append(Park(watch, ordinals))
            # Comes again only if it could not be parked.
            self._push(watch, now_ms + self.settings.check_interval_ms)
        return effects
