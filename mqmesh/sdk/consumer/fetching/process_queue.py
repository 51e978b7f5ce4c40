"""Messages in flight of one queue, and how far may be committed. Pure.

Messages are handed out in any order to several workers, and the smallest one that is not
done bounds the commit: a crash repeats, but never skips. Each message has one byte, its
state, in the ``bytearray`` of its span; workers write it by themselves, which under
Python is one indivisible step, and ``has_room`` is looked at by them, too; everything else
happens in the client loop.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.units import MIB

OPEN: Final = 0
"""Waits for a worker, or is with one."""
DONE: Final = 1
PARKED: Final = 2
"""Failed; waits for its next try. Holds the commit back, but not the messages behind it."""

SPAN_TARGET: Final = 1_024
"""Small arrivals are joined into spans of about so many messages."""

_DONE_BYTE: Final = b"\x01"


class FlowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits beyond which a queue is not pulled; pulled messages are never dropped.

    Attributes:
        messages: Messages held.
        size_bytes: Bytes held, as stored.
        span: From the first message not yet handled to the last one held; failed messages
            that wait for their next try do not count.
    """

    messages: int = 1_000
    size_bytes: int = 100 * MIB
    span: int = 2_000


class StateSpan:
    """The states of messages that stand behind one another.

    Attributes:
        base: Queue offset of the first one.
        states: A state for each offset from ``base`` on.
    """

    __slots__ = ("base", "size_bytes", "states")

    def __init__(self, base: int, states: bytearray, size_bytes: int) -> None:
        self.base = base
        self.states = states
        self.size_bytes = size_bytes

    @property
    def end(self) -> int:
        """Queue offset behind the last one."""
        return self.base + len(self.states)

    def first_not_done(self) -> int:
        """Return the position of the first message that is open or parked; -1 when all are done."""
        # Finding a byte is a hundred times quicker than counting one.
        states = self.states
        # In this order: workers turn open into parked, but never the other way round.
        opened, parked = states.find(OPEN), states.find(PARKED)
        return parked if opened < 0 else opened if parked < 0 else min(opened, parked)

    def mark(self, first: int, last: int, state: int) -> None:
        """Sets the state of messages; from any thread.

        Args:
            first: Queue offset of the first.
            last: Queue offset of the last; those between belong to it.
            state: ``OPEN``, ``DONE`` or ``PARKED``.
        """
        start, count = first - self.base, last - first + 1
        self.states[start : start + count] = bytes((state,)) * count


class ProcessQueue:
    """Messages of one message queue that a consumer holds.

    Args:
        start: Queue offset of the first message to come.
        limits: When to stop pulling for a while.

    Attributes:
        next_offset: Queue offset to pull next.
    """

    def __init__(self, start: int, limits: FlowLimits) -> None:
        self.next_offset = start
        self._limits = limits
        self._unfinished: list[StateSpan] = []

    def add(
        self, batches: Sequence[PulledBatch], next_offset: int, size_bytes: int
    ) -> StateSpan | None:
        """Takes in pulled batches.

        Args:
            batches: In order, from ``next_offset`` of this queue on; what stands between them
                is not wanted.
            next_offset: Queue offset behind them, and behind what else is not wanted.
            size_bytes: As stored.

        Returns:
            Where the messages' states are kept; None when there is no message.
        """
        self._tidy()
        first, self.next_offset = self.next_offset, next_offset
        if not batches:
            return None
        states = bytearray(next_offset - first)
        place = first
        for batch in batches:
            if batch.first > place:
                states[place - first : batch.first - first] = _DONE_BYTE * (batch.first - place)
            if batch.offsets is not None:
                states[batch.first - first : batch.end - first] = _DONE_BYTE * (
                    batch.end - batch.first
                )
                for offset in batch.offsets:
                    states[offset - first] = OPEN
            place = batch.end
        if next_offset > place:
            states[place - first :] = _DONE_BYTE * (next_offset - place)
        last = self._unfinished[-1] if self._unfinished else None
        if last is not None and last.end == first and len(last.states) < SPAN_TARGET:
            last.states += states
            last.size_bytes += size_bytes
            return last
        span = StateSpan(first, states, size_bytes)
        self._unfinished.append(span)
        return span

    def finish(self, first: int, last: int) -> None:
        """Mark messages done, from one queue offset to another one, also those at work."""
        for span in self._unfinished:
            low, high = max(first, span.base), min(last, span.end - 1)
            if low <= high:
                span.mark(low, high, DONE)

    def commit_offset(self) -> int:
        """Return the offset of the first message not done: all before it need not come again."""
        self._tidy()
        for span in self._unfinished:
            at = span.first_not_done()
            if at >= 0:
                return span.base + at
        return self.next_offset

    def open_before(self, offset: int, waiting: frozenset[int]) -> list[tuple[int, StateSpan]]:
        """Return the messages that are with a worker, and where their states are kept.

        Args:
            offset: From here on none was begun.
            waiting: Queue offsets before it whose messages wait for a further try.
        """
        found = []
        for span in self._unfinished:
            at = span.states.find(OPEN, 0, max(offset - span.base, 0))
            while at >= 0:
                if span.base + at not in waiting:
                    found.append((span.base + at, span))
                at = span.states.find(OPEN, at + 1, max(offset - span.base, 0))
        return found

    def has_room(self) -> bool:
        """Return True when more may be pulled; in other threads a hint.

        Nothing is counted as long as the span of what is held is over its limit, for that is
        quick to see, and workers look after each portion.
        """
        limits, unfinished = self._limits, self._unfinished
        if len(unfinished) == 1:
            # A lone message, nearly always: there is room even if none of its span is done.
            (one,) = unfinished
            most = self.next_offset - one.base
            if most < limits.messages and most < limits.span and one.size_bytes < limits.size_bytes:
                return True
        if self.next_offset - self._first_open() >= limits.span:
            return False
        count, size = self.held()
        return count < limits.messages and size < limits.size_bytes

    def held(self) -> tuple[int, int]:
        """Return how many messages are not done, and about how many bytes they have."""
        count, size = 0, 0
        for span in self._unfinished:
            at = span.first_not_done()
            if at < 0:
                continue
            length = len(span.states)
            not_done = length - at - span.states.count(DONE, at)
            count += not_done
            size += span.size_bytes * not_done // length
        return count, size

    def _first_open(self) -> int:
        for span in self._unfinished:
            at = span.states.find(OPEN)
            if at >= 0:
                return span.base + at
        return self.next_offset

    def _tidy(self) -> None:
        # Only what is not done bounds anything, so finished spans can go, wherever they stand:
        # a message that fails for hours does not keep all that came after it in memory.
        if self._unfinished:
            self._unfinished = [span for span in self._unfinished if span.first_not_done() >= 0]
