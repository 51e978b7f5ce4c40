"""Order of a window's messages by sharding key: the next one of each key. Pure.

A key with an unsettled message is busy: later ones of it wait until that is settled, or go out
together with it. Messages without a key have no order.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from mqmesh.roles.broker.delivery_state.runs import Run, RunState

KeyedOffset = tuple[int, str | None]
"""Queue offset of a message, and its sharding key."""


class KeyOrder:
    """Unsettled messages of one delivery window, by key.

    Attributes:
        ahead: Messages behind the window that were read already, in order.
        ahead_end: Where to go on reading behind them.
    """

    def __init__(self) -> None:
        self.ahead: deque[KeyedOffset] = deque()
        self.ahead_end = 0
        self._key_of: dict[int, str] = {}
        self._offsets_of: dict[str, deque[int]] = {}
        self._run_of: dict[int, Run] = {}
        # Those that were handed out before, and others.
        self._again: list[int] = []
        self._new: list[int] = []

    def __len__(self) -> int:
        """Messages that have a key."""
        return len(self._key_of)

    # ---- What is read ahead ----------------------------------------------------------

    def read(self, some: Sequence[KeyedOffset], end: int) -> None:
        """Take messages that were read behind those that are known.

        Args:
            some: In order.
            end: Where to go on reading.
        """
        self.ahead += some
        self.ahead_end = end

    def take_ahead(self, start: int, most: int, span: int) -> tuple[list[KeyedOffset], int]:
        """Take messages that were read ahead.

        Args:
            start: Queue offset before which they are known.
            most: Most messages.
            span: Most offsets from the first to the last.

        Returns:
            Messages, in order, and the queue offset behind them.
        """
        ahead = self.ahead
        while ahead and ahead[0][0] < start:
            ahead.popleft()
        if not ahead:
            return [], start
        taken: list[KeyedOffset] = []
        limit = ahead[0][0] + span
        while ahead and len(taken) < most and ahead[0][0] < limit:
            taken.append(ahead.popleft())
        return taken, taken[-1][0] + 1 if ahead else max(self.ahead_end, taken[-1][0] + 1)

    # ---- Unsettled messages ----------------------------------------------------------

    def add(self, offset: int, key: str | None) -> None:
        """Note an unsettled message; all of its key before it were noted before."""
        if key:
            self._key_of[offset] = key
            offsets = self._offsets_of.get(key)
            if offsets is None:
                offsets = self._offsets_of[key] = deque()
            offsets.append(offset)

    def remove(self, offset: int) -> None:
        """Note that a message is settled: the next one of its key is free."""
        self._run_of.pop(offset, None)
        key = self._key_of.pop(offset, None)
        if key is None:
            return
        offsets = self._offsets_of[key]
        if offsets[0] != offset:
            offsets.remove(offset)
            return
        offsets.popleft()
        if not offsets:
            del self._offsets_of[key]
        elif (run := self._run_of.get(offsets[0])) is not None:
            self._push(offsets[0], run)

    def is_first(self, offset: int) -> bool:
        """Return whether all of a message's key before it are settled."""
        key = self._key_of.get(offset)
        return key is None or self._offsets_of[key][0] == offset

    def chain(self, offset: int) -> Iterator[int]:
        """Yield a message that is the first of its key, and the others of that key, in order."""
        key = self._key_of.get(offset)
        return iter((offset,)) if key is None else iter(self._offsets_of[key])

    def behind(self, offsets: Iterable[int]) -> list[int]:
        """Return the messages that stand behind some, by key.

        Args:
            offsets: Queue offsets, in order.
        """
        lowest: dict[str, int] = {}
        for offset in offsets:
            key = self._key_of.get(offset)
            if key is not None:
                lowest.setdefault(key, offset)
        return [at for key, first in lowest.items() for at in self._offsets_of[key] if at > first]

    def longest(self) -> tuple[str, int]:
        """Return the key of most unsettled messages, and how many it has; "" and 0 for none."""
        return max(
            ((key, len(offsets)) for key, offsets in self._offsets_of.items()),
            key=lambda pair: pair[1],
            default=("", 0),
        )

    # ---- Free messages ---------------------------------------------------------------

    def offer(self, run: Run, bits: int) -> None:
        """Note that messages of a run wait; those that are the first of their keys are free."""
        for offset in run.offsets(bits):
            self._run_of[offset] = run
            if self.is_first(offset):
                self._push(offset, run)

    def first_free(self, *, only_again: bool = False) -> Run | None:
        """Return the run of the first message that is free, the next one that is taken.

        Those that were handed out before come first.

        Args:
            only_again: Among those only.
        """
        run = self._first(self._again)
        return run if run is not None or only_again else self._first(self._new)

    def put_first(self, offsets: Iterable[int]) -> None:
        """Let the first messages of keys be taken as if they had been handed out before.

        Args:
            offsets: Messages of these keys.
        """
        keys = {key for offset in offsets if (key := self._key_of.get(offset)) is not None}
        for offset in sorted(self._offsets_of[key][0] for key in keys):
            run = self._run_of.get(offset)
            if run is not None and not run.attempt and self._is_free(offset, run):
                heapq.heappush(self._again, offset)

    def take_free(self) -> int:
        """Take the message that ``first_free`` has found."""
        return heapq.heappop(self._again or self._new)

    def _push(self, offset: int, run: Run) -> None:
        heapq.heappush(self._again if run.attempt else self._new, offset)

    def _first(self, free: list[int]) -> Run | None:
        while free:
            offset = free[0]
            run = self._run_of.get(offset)
            if (
                run is not None
                and (free is self._again or not run.attempt)
                and self._is_free(offset, run)
            ):
                return run
            heapq.heappop(free)
        return None

    def _is_free(self, offset: int, run: Run) -> bool:
        return (
            offset >= run.first
            and bool(run.bits >> offset - run.first & 1)
            and run.state is RunState.WAITING
            and run.until_ms == 0
            and self.is_first(offset)
        )
