"""Runs: messages of a queue that were handed out together, and lists of them. Pure."""

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

import msgspec

MAX_RUN: Final = 1_024
"""Messages that one lease may span."""
NARROW: Final = 32
"""Width up to which a run is narrow."""
NOBODY: Final = 0
"""Lease of a run that nobody holds, or whose holder did not show it to this master yet."""


class RunState(enum.Enum):
    """States of the open messages of a run."""

    LEASED = "leased"
    """A member has them until the deadline; with the lease ``NOBODY``, one of before a restart."""
    WAITING = "waiting"
    """They are handed out again once they are due."""
    LEAVING = "leaving"
    """They are being sent back, or become dead letters; settled once that is stored."""


class Run(msgspec.Struct, eq=False):
    """Messages that were handed out together, and are in one state.

    Attributes:
        first: Queue offset of bit 0.
        bits: Messages that are not settled, a bit each.
        attempt: How often they were handed out.
        state: See ``RunState``.
        lease: Number of the lease; ``NOBODY`` unless it is ``LEASED``.
        member: Member that holds it.
        until_ms: When the lease ends, or when the wait does; monotonic clock.
        since_ms: When it was handed out last; monotonic clock.
        noted: With order by key: its lease as the log says, until its holder shows it.
        passed_filter: The group's filter let its messages pass; False where the filter was not
            applied: they lie before messages that a member showed after a failover, or their record
            is damaged.
        is_wide: Its list has it among the wide ones.
    """

    first: int
    bits: int
    attempt: int
    state: RunState = RunState.WAITING
    lease: int = NOBODY
    member: str = ""
    until_ms: int = 0
    since_ms: int = 0
    noted: int = NOBODY
    passed_filter: bool = False
    is_wide: bool = False

    @property
    def count(self) -> int:
        """Number of open messages."""
        return self.bits.bit_count()

    @property
    def low(self) -> int:
        """Queue offset of the first open message."""
        return self.first + (self.bits & -self.bits).bit_length() - 1

    @property
    def end(self) -> int:
        """Queue offset behind the last open message."""
        return self.first + self.bits.bit_length()

    def offsets(self, bits: int = -1) -> Iterator[int]:
        """Yield the queue offsets of its open messages, or of those among others, in order."""
        bits &= self.bits
        while bits:
            lowest = bits & -bits
            yield self.first + lowest.bit_length() - 1
            bits ^= lowest

    def within(self, first: int, bits: int) -> int:
        """Return those of its open messages that are among others, as bits from ``self.first``."""
        shift = first - self.first
        if shift >= MAX_RUN:
            return 0  # a member may name any offset: no number of so many bits is made
        return self.bits & (bits << shift if shift >= 0 else bits >> -shift)


class RunList:
    """Runs in order of their first offset.

    Those wider than ``NARROW`` are in a list of their own, too: a search for what reaches into a
    span goes back by the width of the others only.

    Attributes:
        every: All runs, not to be changed.
    """

    def __init__(self) -> None:
        self._every = _Sorted()
        self._wide = _Sorted()
        self.every = self._every.runs

    def __len__(self) -> int:
        return len(self.every)

    def add(self, run: Run) -> None:
        """Add a run."""
        self._every.add(run)
        run.is_wide = run.bits.bit_length() > NARROW
        if run.is_wide:
            self._wide.add(run)

    def remove(self, run: Run) -> None:
        """Remove a run."""
        self._every.remove(run)
        if run.is_wide:
            self._wide.remove(run)

    def before(self, end: int) -> list[Run]:
        """Return the runs that begin before an offset."""
        return self._every.between(0, end)

    def reaching(self, first: int, end: int) -> Iterator[tuple[Run, int]]:
        """Yield the runs with open messages in a span, and which, from ``run.first`` on."""
        near = first - NARROW + 1
        far = self._wide.between(first - MAX_RUN + 1, near)
        for run in (*far, *self._every.between(near, end)):
            mask = run.bits
            if first > run.first:
                mask &= -1 << (first - run.first)
            if end < run.end:
                mask &= (1 << (end - run.first)) - 1
            if mask:
                yield run, mask


class _Sorted:
    """Runs in order, in two lists: the search in a list of numbers is one call."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._firsts: list[int] = []

    def add(self, run: Run) -> None:
        at = bisect_right(self._firsts, run.first)
        self._firsts.insert(at, run.first)
        self.runs.insert(at, run)

    def remove(self, run: Run) -> None:
        at = bisect_left(self._firsts, run.first)
        while self.runs[at] is not run:
            at += 1
        del self._firsts[at], self.runs[at]

    def between(self, first: int, end: int) -> list[Run]:
        return self.runs[bisect_left(self._firsts, first) : bisect_left(self._firsts, end)]


def stretches(first: int, bits: int) -> Iterator[tuple[int, int]]:
    """Yield messages that follow one another, as first and count.

    Args:
        first: Queue offset of bit 0.
        bits: Messages.
    """
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        first += skipped
        count = (~bits & bits + 1).bit_length() - 1
        yield first, count
        bits >>= count
        first += count
