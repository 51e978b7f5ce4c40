"""Delivery window of a group in a queue: leased, waiting and settled messages. Pure.

All messages before ``floor`` are settled, none from ``next_offset`` on was ever handed out. Between
them stand runs: messages that were handed out together, of which the open ones, a bit each, are
in one state:

    hand_out           ack: bits go; without bits the run goes, and the floor moves
    --------> LEASED ------------------------------------------------------> (settled)
               |  ^  extend
      expired, |  | hand_out_again, attempt + 1
      nack     v  |
              WAITING ----- leave -----> LEAVING ------ settle ------------> (settled)
                                         sent back; in the same call

Two runs never have a message in common; their spans may overlap once a part was given back.

With order by key messages enter as runs that wait and were handed out 0 times. Of those that wait
only the first ones of their keys are handed out, and those of the same key and run behind them.
"""

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from mqmesh.protocol.request import NO_DEADLINE
from mqmesh.roles.broker.delivery_state.key_order import KeyedOffset, KeyOrder
from mqmesh.roles.broker.delivery_state.runs import (
    MAX_RUN,
    NOBODY,
    Run,
    RunList,
    RunState,
)

OnChange = Callable[[int, int, int, Run | None], None]
"""Function that notes a change of messages: first offset and end of their span, which of them as
bits from the first one on, -1 for all, and the run that has those of them that are open."""

SLOT_MS: Final = 5
"""Deadlines are kept in slots of this length, so a lease may end so much later."""
MOST_EMPTY: Final = 64
"""Slots without runs that a window knows, beside as many as have some."""


class Settled(enum.Enum):
    """Outcomes of a settlement."""

    OK = "ok"
    BEFORE = "before"
    """Some were settled before, by whatever lease."""
    STALE = "stale"
    """Another lease has one of the messages by now, or the lease is of before a reset."""
    LEAVING = "leaving"
    """One of the messages is being sent back just now."""
    FULL = "full"
    """They would be a run of their own, and the broker keeps no more."""


class LeaseNumbers:
    """Numbers of leases, of one broker, and the count of its runs.

    Args:
        first: Below all numbers to come, above those of earlier epochs.
        most: Runs that the broker keeps.

    Attributes:
        first: See above.
        last: Number given out last.
        most: Runs that the broker keeps; each takes some 360 bytes.
        runs: Runs that there are.
        due_ms: Before that no lease and no wait ends, monotonic clock; it may be set to a later
            time if none does by then.
    """

    def __init__(self, first: int, most: int) -> None:
        self.first = self.last = first
        self.most = most
        self.runs = 0
        self.due_ms = NO_DEADLINE

    def take(self) -> int:
        """Return a new number."""
        self.last += 1
        return self.last

    @property
    def is_full(self) -> bool:
        """True when no run may be added any more."""
        return self.runs >= self.most


class HeldMessages:
    """Count of messages of several windows: handed out, and not settled.

    Attributes:
        count: That number.
    """

    def __init__(self) -> None:
        self.count = 0


class DeliveryWindow:
    """Delivery window of one group in one queue.

    Args:
        start: First message that is handed out.
        numbers: Numbers of the broker's leases.
        on_change: Called with what has changed.
        held: Count to which its messages are added.

    Attributes:
        next_offset: First message that was never handed out.
        valid_from: Leases before this number were given out before a reset, and are stale.
        unsettled: Messages that were handed out and are not settled.
        leased: Messages of them that are ``LEASED``.
        noted_offset: For the log: ``next_offset`` as of the change before.
        is_resumed: It is served; before that, what waits does so as ``restore`` has left it.
        is_strict: Messages go out in the order of their keys: only the lease that has a message
            settles it.
        order: That order; None without one, and until the keys are known after a restart.
        passed: Messages that were passed over, or given back, and never handed out.
    """

    def __init__(
        self,
        start: int,
        numbers: LeaseNumbers,
        on_change: OnChange,
        held: HeldMessages | None = None,
    ) -> None:
        self.next_offset = self.noted_offset = start
        self.valid_from = 0
        self.unsettled = self.leased = 0
        self.is_resumed = True
        self.is_strict = False
        self.order: KeyOrder | None = None
        self.passed = 0
        self._admitted: Run | None = None
        self._numbers = numbers
        self._changed = on_change
        self._held = held or HeldMessages()
        self._runs = RunList()
        self._leases: dict[int, Run] = {}
        self._slots: dict[int, dict[Run, None]] = {}
        self._slot_order: list[int] = []
        self._ready: list[tuple[int, int, Run]] = []
        self._serial = count()

    # ---- What there is ---------------------------------------------------------------

    @property
    def floor(self) -> int:
        """Queue offset before which all messages are settled: the group's committed offset."""
        return self.floor_without({})

    def floor_without(self, settled: Mapping[Run, int]) -> int:
        """Return the floor as it is once some messages, from the first one of their run on, are
        settled, too."""
        floor = self.next_offset
        for run in self._runs.every:
            if run.first >= floor:
                break
            bits = run.bits & ~settled.get(run, 0)
            if bits:
                floor = min(floor, run.first + (bits & -bits).bit_length() - 1)
        return floor

    @property
    def runs(self) -> list[Run]:
        """All runs, in order of their first offset; not to be changed."""
        return self._runs.every

    def held(self, lease: int) -> Run | None:
        """Return what a lease has that is not settled; None if it has nothing any more."""
        return self._leases.get(lease)

    def oldest_since(self, now_ms: int) -> int:
        """Return when the oldest lease was given; ``now_ms`` for none. Monotonic clock."""
        # They are in the order in which they were given.
        return next((run.since_ms for run in self._leases.values()), now_ms)

    def holder_of_most(self) -> tuple[str, int]:
        """Return the member that holds most messages, and how many; "" and 0 for none."""
        held: Counter[str] = Counter()
        for run in self.runs:
            if run.lease != NOBODY:
                held[run.member] += run.count
        return held.most_common(1)[0] if held else ("", 0)

    # ---- Hand out --------------------------------------------------------------------

    def hand_out(self, end: int, bits: int, member: str, now_ms: int, lease_ms: int) -> Run | None:
        """Lease messages that were never handed out.

        Args:
            end: New ``next_offset``, at or behind the old one.
            bits: Messages of the lease, from the old ``next_offset`` on, at most ``MAX_RUN``; those
                between that are not among them are settled. 0 for none.
            member: Member that gets them.
            now_ms: Monotonic clock.
            lease_ms: Length of the lease.

        Returns:
            The lease; None for no message.
        """
        first = self.next_offset
        if first == end:
            return None  # nothing came: nothing is to be noted
        assert first < end and first + bits.bit_length() <= end
        assert bits.bit_length() <= MAX_RUN
        self.next_offset = end
        run = None
        if bits:
            run = self._lease(Run(first, bits, 1, passed_filter=True), member, now_ms, lease_ms)
        self._changed(first, end, -1, run)
        return run

    def due(self) -> Run | None:
        """Return the run with the oldest message that waits and is due; see ``tick``."""
        if self.order is not None:
            return self.order.first_free()
        ready = self._ready
        while ready:
            low, _, run = heapq.heappop(ready)
            if run.bits and run.state is RunState.WAITING and run.until_ms == 0:
                heapq.heappush(ready, (run.low, next(self._serial), run))
                if low == run.low:
                    return run
        return None

    def hand_out_again(self, run: Run, bits: int, member: str, now_ms: int, lease_ms: int) -> Run:
        """Lease messages once more.

        Args:
            run: From ``due``.
            bits: Those of its messages that are leased, from ``run.first`` on; the others wait on.
            member: Member that gets them.
            now_ms: Monotonic clock.
            lease_ms: Length of the lease.
        """
        assert bits and bits & run.bits == bits
        self._take(run, bits)
        shift = (bits & -bits).bit_length() - 1
        again = Run(run.first + shift, bits >> shift, run.attempt + 1, passed_filter=True)
        leased = self._lease(again, member, now_ms, lease_ms)
        self._note(leased)
        return leased

    def settle(self, run: Run, bits: int = -1) -> None:
        """Settle messages of a run: they are processed, sent back, or gone from the log.

        Args:
            run: It has messages.
            bits: Which of them, from ``run.first`` on; all of them by default.
        """
        first, end, bits = run.first, run.end, run.bits & bits
        self._settle(run, bits)
        self._changed(first, end, bits, None)

    # ---- Order by key ----------------------------------------------------------------

    def begin_order(self, keys: Iterable[KeyedOffset]) -> None:
        """Begin to hand out messages in the order of their keys.

        Args:
            keys: Of all unsettled messages, in order.
        """
        order = self.order = KeyOrder()
        for offset, key in keys:
            order.add(offset, key)
        waiting = [run for run in self.runs if run.state is RunState.WAITING]
        for run in waiting:
            if run.until_ms == 0:
                self.offer(run, run.bits)
        self._hold_behind(sorted(offset for run in waiting for offset in run.offsets()))

    def end_order(self) -> None:
        """Hand out messages without order from now on."""
        self.order = None
        for run in self.runs:
            if run.state is RunState.WAITING and run.until_ms == 0:
                heapq.heappush(self._ready, (run.low, next(self._serial), run))

    def admit(self, end: int, some: Sequence[KeyedOffset]) -> None:
        """Let messages that were never handed out wait for their turn.

        Args:
            end: New ``next_offset``, at or behind the old one.
            some: From the old ``next_offset`` on, over a span of at most ``MAX_RUN``; those between
                that are not among them are settled.
        """
        assert self.order is not None
        start, self.next_offset = self.next_offset, end
        run = None
        if some:
            for offset, key in some:
                self.order.add(offset, key)
            first = some[0][0]
            bits = (1 << len(some)) - 1
            if some[-1][0] - first >= len(some):
                bits = sum(1 << offset - first for offset, _ in some)
            run = self._admitted
            if run is None or not run.bits or run.until_ms or end - run.first > MAX_RUN:
                run = self._admitted = Run(first, bits, 0, passed_filter=True)
                self._wait(run, 0)
            else:
                # As few runs as possible: each is a lease, and a part of a batch, by itself.
                bits <<= first - run.first
                self._runs.remove(run)
                run.bits |= bits
                self._runs.add(run)
                self._count(run, len(some))
                self.order.offer(run, bits)
        self._changed(start, end, -1, run)

    def take_free(self, most: int, taken: dict[Run, int], *, only_again: bool = False) -> int:
        """Take messages that may be handed out; others wait for their keys.

        Args:
            most: Most messages.
            taken: Messages that were taken before, by run, as bits; these are added. The caller
                hands them out, or gives them back by ``offer``.
            only_again: Only those that were handed out before.

        Returns:
            Number of messages.
        """
        order = self.order
        assert order is not None
        count = 0
        while count < most and (run := order.first_free(only_again=only_again)) is not None:
            bits = taken.get(run, 0)
            for offset in order.chain(order.take_free()):
                bit = 1 << offset - run.first if offset >= run.first else 0
                if count == most or not run.bits & bit or bits & bit:
                    break
                bits |= bit
                count += 1
            if bits:
                taken[run] = bits
        return count

    def free_stuck(self) -> None:
        """Let messages go first that were given back, and behind which others of their keys wait.

        Those were handed out before, and count for what the group holds: a group that may hold no
        more gets them only when what is before them is settled.
        """
        assert self.order is not None
        if self.unsettled - self.passed > self.leased:
            for run in self.runs:
                if run.attempt and run.state is RunState.WAITING and not run.until_ms:
                    self.order.put_first(run.offsets())

    def offer(self, run: Run, bits: int) -> None:
        """Note that messages of a run wait."""
        assert self.order is not None
        self.order.offer(run, bits)

    def hold_back(self, run: Run) -> None:
        """Take back from members what is behind messages of a run that wait, by key."""
        if self.order is not None and run.state is RunState.WAITING:
            self._hold_behind(run.offsets())

    def _hold_behind(self, offsets: Iterable[int]) -> None:
        assert self.order is not None
        for offset in self.order.behind(offsets):
            for other, mask in list(self._runs.reaching(offset, offset + 1)):
                if other.state is RunState.LEASED:
                    back = self._carve([(other, mask)])
                    back.attempt -= 1
                    self._wait(back, 0)
                    self._note(back)

    # ---- Settle ----------------------------------------------------------------------

    def ack(self, lease: int, first: int, bits: int) -> Settled:
        """Settle messages; those that are settled already are right.

        Those that are the member's no more, which is ``STALE``, hold up no others.

        Args:
            lease: Under which the member got them. Another one is right, too, as long as nobody
                has the messages: late work is not thrown away.
            first: Queue offset of bit 0.
            bits: Messages.
        """
        run = self._leases.get(lease)
        if run is not None:  # nearly always
            mask = run.within(first, bits)
            if mask.bit_count() == bits.bit_count():
                self._settle(run, mask)
                self._changed(first, first + bits.bit_length(), bits, None)
                return Settled.OK
        claimed = self.claim(lease, first, bits)
        if isinstance(claimed, Settled):
            if claimed is Settled.STALE and self._is_known(lease, first, bits):
                self._settle_all(first, self._free_for(lease, first, bits))
            return claimed
        self._settle_all(first, claimed)
        count = sum(mask.bit_count() for _, mask in claimed)
        return Settled.OK if count == bits.bit_count() else Settled.BEFORE

    def claim(self, lease: int, first: int, bits: int) -> list[tuple[Run, int]] | Settled:
        """Return those of some messages that are open, if a lease may settle all of them.

        Args:
            lease, first, bits: As for ``ack``.

        Returns:
            Each run, and which of its messages, from its first one on; else why not.
        """
        if not self._is_known(lease, first, bits):
            return Settled.STALE
        held = self._leases.get(lease)
        if held is not None:
            mask = held.within(first, bits)
            if mask and mask.bit_count() == bits.bit_count():
                return [(held, mask)]  # nearly always
        reaching = self._runs.reaching(first, first + bits.bit_length())
        claimed = [(run, mask) for run, _ in reaching if (mask := run.within(first, bits))]
        for run, _ in claimed:
            if run.state is RunState.LEAVING:
                return Settled.LEAVING
            if run.lease not in (NOBODY, lease):
                return Settled.STALE
            if self.is_strict and lease not in (run.lease, run.noted):
                return Settled.STALE
        return claimed

    def nack(self, lease: int, first: int, bits: int, *, due_ms: int = 0) -> Run | Settled:
        """Let messages wait until they are handed out again.

        Args:
            lease: As for ``ack``.
            first: Queue offset of bit 0.
            bits: Messages.
            due_ms: When they are due, monotonic clock; 0 for at once.

        Returns:
            The messages that wait; ``OK`` if all are settled already.
        """
        claimed = self._claim_run(lease, first, bits)
        if isinstance(claimed, Settled):
            return claimed
        run = self._carve(claimed)
        self._wait(run, due_ms)
        self._note(run)
        return run

    def give_back(self, lease: int, first: int, bits: int) -> Settled:
        """Let messages wait as if this lease of them had never been.

        Args:
            lease: Under which the member got them; what it has not any more stays as it is, so
                that this may be repeated.
            first: Queue offset of bit 0.
            bits: Messages, and others between them.
        """
        run = self._leases.get(lease)
        if run is not None:
            first, bits = run.first, run.within(first, bits)
        claimed = self._claim_run(lease, first, bits)
        if isinstance(claimed, Settled):
            return claimed
        if any(one.state is not RunState.LEASED for one, _ in claimed):
            return Settled.OK
        run = self._carve(claimed)
        run.attempt -= 1
        self._wait(run, 0)
        self._note(run)
        self.hold_back(run)
        return Settled.OK

    def split(self, run: Run, bits: int) -> Run:
        """Make messages of a run that waits a run of their own.

        Args:
            run: It is ``WAITING``.
            bits: Those of its messages, from ``run.first`` on; if they are all, it stays as it is.
        """
        if bits == run.bits:
            return run
        until_ms, since_ms = run.until_ms, run.since_ms
        part = self._carve([(run, bits)])
        part.since_ms = since_ms
        self._wait(part, until_ms)
        self._note(part)
        return part

    def extend(
        self, lease: int, first: int, bits: int, member: str, now_ms: int, lease_ms: int
    ) -> Settled:
        """Let a lease end later; one that ended goes on with those of its messages that are free.

        Args:
            lease: All of its messages are extended.
            first: Queue offset of bit 0.
            bits: Messages of it that the member has.
            member: The member.
            now_ms: Monotonic clock.
            lease_ms: It lasts so long from now on, or longer if it did.

        Returns:
            ``STALE`` if none of the messages is the member's any more.
        """
        run = self._leases.get(lease)
        if run is not None:
            reaching = self._runs.reaching(first, first + bits.bit_length())
            if run.member != member or (
                not run.within(first, bits) and any(one.within(first, bits) for one, _ in reaching)
            ):
                return Settled.STALE
            self._until(run, max(run.until_ms, now_ms + lease_ms))
            return Settled.OK
        claimed = self._claim_run(lease, first, bits, partly=True)
        if isinstance(claimed, Settled):
            return claimed
        self._note(self._lease(self._carve(claimed), member, now_ms, lease_ms, number=lease))
        return Settled.OK

    def meet(self, lease: int, first: int, bits: int, end: int, most: int) -> None:
        """Take note of messages that were handed out before a failover and are not in the log.

        They, and those before them, become runs whose holders are to show them.

        Args:
            lease: That the member shows.
            first: Queue offset of bit 0.
            bits: Messages.
            end: Of the queue.
            most: Messages that ``next_offset`` may move.
        """
        behind = first + bits.bit_length()
        start = self.next_offset
        if self.is_strict:
            return  # others of their keys may have been handed out before them
        if behind <= start or behind > end or behind - start > most:
            return
        if not self.valid_from <= lease <= self._numbers.first or self._numbers.is_full:
            return
        self.next_offset = behind
        for run in _whole_runs(start, behind):
            self._wait(run, 0)
            self._note(run)

    def leave(self, run: Run) -> None:
        """Hold back a run that waits while it is sent back: ``settle`` or ``wait`` follow."""
        assert run.state is RunState.WAITING and run.bits
        self._unslot(run)
        run.state = RunState.LEAVING

    def wait(self, run: Run, due_ms: int) -> None:
        """Let a run wait that could not be sent back.

        Args:
            run: It is ``LEAVING``.
            due_ms: When it is due, monotonic clock.
        """
        assert run.state is RunState.LEAVING and run.bits
        run.state = RunState.WAITING
        self._until(run, due_ms)

    def release(self, member: str) -> list[Run]:
        """Let wait what a member holds; return that."""
        found = [run for run in self.runs if run.lease != NOBODY and run.member == member]
        for run in found:
            self._expire(run)
        return found

    def tick(self, now_ms: int) -> list[Run]:
        """Note the time: leases end, and what waits becomes due.

        Returns:
            Runs whose lease ended.
        """
        expired: list[Run] = []
        order = self._slot_order
        while order and order[0] < now_ms // SLOT_MS:
            for run in self._slots.pop(heapq.heappop(order), ()):
                if run.state is RunState.LEASED:
                    self._expire(run)
                    expired.append(run)
                else:
                    self._until(run, 0)
        return expired

    def next_ms(self) -> int | None:
        """Return when ``tick`` has something to do next, monotonic clock; None for never."""
        order = self._slot_order
        while order and order[0] not in self._slots:
            heapq.heappop(order)
        return (order[0] + 1) * SLOT_MS if order else None

    def pass_over(self, end: int) -> None:
        """Settle all messages before a queue offset: they are gone from the log."""
        start = self.floor
        if end <= start:
            return
        self.clear_before(end)
        self.next_offset = max(self.next_offset, end)
        self._changed(start, end, -1, None)

    # ---- The log ---------------------------------------------------------------------

    def restore(
        self, first: int, bits: int, attempt: int, due_ms: int, lease: int = NOBODY
    ) -> None:
        """Take over a run from the log, in place of what was known of its messages.

        Args:
            first: Queue offset of bit 0.
            bits: Its open messages.
            attempt: How often they were handed out.
            due_ms: When they are due, wall clock; 0 if somebody had them.
            lease: Their lease then, with order by key.
        """
        for known, _ in list(self._runs.reaching(first, first + bits.bit_length())):
            self._take(known, known.within(first, bits))
        self.is_resumed = False
        state = RunState.WAITING if due_ms else RunState.LEASED
        passed_filter = attempt > 0
        self._add(
            Run(
                first,
                bits,
                attempt,
                state,
                since_ms=due_ms,
                noted=lease,
                passed_filter=passed_filter,
            )
        )

    def miss(self, end: int) -> None:
        """Take messages up to an offset as handed out: what the log says of them is damaged."""
        for run in _whole_runs(self.next_offset, end):
            self.restore(run.first, run.bits, run.attempt, 0)
        self.next_offset = max(self.next_offset, end)

    def clear(self, first: int, end: int) -> None:
        """Forget the open messages of a span, of which the log says something else."""
        for run, mask in list(self._runs.reaching(first, end)):
            self._take(run, mask)

    def clear_before(self, floor: int) -> None:
        """Forget the open messages before the floor."""
        for run in self._runs.before(floor):
            self._settle(run, run.bits & ((1 << min(floor - run.first, MAX_RUN)) - 1))

    def bound(self, end: int) -> bool:
        """Forget what lies behind the end of the queue; True if there was any."""
        if self.next_offset <= end:
            return False
        for run in list(self.runs):
            kept = (1 << min(max(end - run.first, 0), MAX_RUN)) - 1
            self._take(run, run.bits & ~kept)
        before, self.next_offset = self.next_offset, end
        self._changed(end, before, -1, None)
        return True

    def resume(self, now_ms: int, wall_ms: int, quiet_ms: int) -> None:
        """Begin to serve, with what the log says.

        Args:
            now_ms: Monotonic clock.
            wall_ms: Wall clock.
            quiet_ms: Members have so long to show what they hold.
        """
        self.is_resumed = True
        for run in self.runs:
            due_wall_ms, run.since_ms = run.since_ms, now_ms
            if run.state is RunState.WAITING:
                wait_ms = due_wall_ms - wall_ms
                self._until(run, now_ms + wait_ms if wait_ms > 0 else 0)
            else:
                self._until(run, now_ms + quiet_ms)

    def drop(self) -> None:
        """Forget all runs: the window is over."""
        for run in list(self.runs):
            self._take(run, run.bits)

    # ---- Helpers ---------------------------------------------------------------------

    def _is_known(self, lease: int, first: int, bits: int) -> bool:
        """Return whether a lease is of after the last reset, and its messages were handed out."""
        return lease >= self.valid_from and first + bits.bit_length() <= self.next_offset

    def _free_for(self, lease: int, first: int, bits: int) -> list[tuple[Run, int]]:
        """Return the open ones of these messages, by run, that nobody else has.

        With order by key: those that the lease has.
        """
        return [
            (run, mask)
            for run, _ in self._runs.reaching(first, first + bits.bit_length())
            if (mask := run.within(first, bits))
            and run.lease in (NOBODY, lease)
            and run.state is not RunState.LEAVING
            and (not self.is_strict or lease in (run.lease, run.noted))
        ]

    def _settle_all(self, first: int, claimed: list[tuple[Run, int]]) -> None:
        bits = 0
        for run, mask in claimed:
            shift = run.first - first
            bits |= mask << shift if shift >= 0 else mask >> -shift
            self._settle(run, mask)
        if bits:
            self._changed(first, first + bits.bit_length(), bits, None)

    def _claim_run(
        self, lease: int, first: int, bits: int, *, partly: bool = False
    ) -> list[tuple[Run, int]] | Settled:
        """Do as ``claim``, for messages that become a run of their own; ``OK`` for none.

        Partly: what others have by now holds up nothing else of the lease.
        """
        claimed = self.claim(lease, first, bits)
        if partly and claimed is Settled.STALE and self._is_known(lease, first, bits):
            claimed = self._free_for(lease, first, bits) or claimed
        if isinstance(claimed, Settled):
            return claimed
        if not claimed:
            return Settled.OK
        if self._numbers.is_full and all(mask != run.bits for run, mask in claimed):
            return Settled.FULL
        return claimed

    def _carve(self, claimed: list[tuple[Run, int]]) -> Run:
        """Take messages out of their runs; return them as a run that is in no list yet."""
        low = min(run.first + (mask & -mask).bit_length() - 1 for run, mask in claimed)
        bits = 0
        for run, mask in claimed:
            shift = run.first - low
            bits |= mask << shift if shift >= 0 else mask >> -shift
        attempt = max(1, *(run.attempt for run, _ in claimed))
        carved = Run(low, bits, attempt, passed_filter=all(run.passed_filter for run, _ in claimed))
        for run, mask in claimed:
            self._take(run, mask)
        return carved

    def _note(self, run: Run) -> None:
        """Note a change of all open messages of a run."""
        self._changed(run.first, run.end, run.bits, run)

    def _settle(self, run: Run, mask: int) -> None:
        """Settle open messages of a run."""
        if self.order is not None:
            for offset in run.offsets(mask):
                self.order.remove(offset)
        self._take(run, mask)

    def _take(self, run: Run, mask: int) -> None:
        """Take open messages out of a run, which goes without any."""
        if mask == run.bits:
            self._remove(run)
        elif mask:
            self._count(run, -mask.bit_count())
            run.bits &= ~mask

    def _lease(
        self, run: Run, member: str, now_ms: int, lease_ms: int, *, number: int = NOBODY
    ) -> Run:
        run.state, run.member, run.since_ms = RunState.LEASED, member, now_ms
        run.lease = number or self._numbers.take()
        self._leases[run.lease] = run
        self._add(run)
        self._until(run, now_ms + lease_ms)
        return run

    def _wait(self, run: Run, due_ms: int) -> None:
        run.state, run.lease, run.member, run.noted = RunState.WAITING, NOBODY, "", NOBODY
        self._add(run)
        self._until(run, due_ms)

    def _expire(self, run: Run) -> None:
        self._leases.pop(run.lease, None)
        self.leased -= run.count
        run.state, run.lease, run.member, run.noted = RunState.WAITING, NOBODY, "", NOBODY
        self._until(run, 0)
        self._note(run)

    def _until(self, run: Run, until_ms: int) -> None:
        """Set until when a run is leased, or waits; 0 for a wait that is over."""
        self._unslot(run)
        run.until_ms = until_ms
        if until_ms == 0 and self.order is not None:
            self.offer(run, run.bits)
            return
        if until_ms == 0:
            heapq.heappush(self._ready, (run.low, next(self._serial), run))
            return
        slot = until_ms // SLOT_MS
        runs = self._slots.get(slot)
        if runs is None:
            runs = self._slots[slot] = {}
            heapq.heappush(self._slot_order, slot)
            self._numbers.due_ms = min(self._numbers.due_ms, (slot + 1) * SLOT_MS)
        runs[run] = None

    def _unslot(self, run: Run) -> None:
        slot = run.until_ms // SLOT_MS
        runs = self._slots.get(slot)
        if runs is None:
            return
        runs.pop(run, None)
        if not runs:
            del self._slots[slot]
            if len(self._slot_order) > 2 * len(self._slots) + MOST_EMPTY:
                self._slot_order[:] = sorted(self._slots)

    def _count(self, run: Run, messages: int) -> None:
        self.unsettled += messages
        if run.state is RunState.LEASED:
            self.leased += messages
        if run.attempt:
            self._held.count += messages
        else:
            self.passed += messages

    def _add(self, run: Run) -> None:
        assert run.bits  # a run without messages would hold the floor before its first one
        self._runs.add(run)
        self._count(run, run.count)
        self._numbers.runs += 1

    def _remove(self, run: Run) -> None:
        self._runs.remove(run)
        self._count(run, -run.count)
        self._numbers.runs -= 1
        self._leases.pop(run.lease, None)
        self._unslot(run)
        run.bits = 0


def _whole_runs(start: int, end: int) -> Iterator[Run]:
    """Yield runs of all messages of a span, handed out 0 times."""
    for at in range(start, end, MAX_RUN):
        yield Run(at, (1 << min(MAX_RUN, end - at)) - 1, 0)
