"""Hands messages to listeners on worker threads.

Work lies in portions, and workers share a portion's iterator: taking the next message is
one indivisible step under Python, so there is no lock for each message, and a message
whose listener hangs holds up nobody as long as another thread is free.

Threads are woken sparingly, because they share one interpreter and a fast listener is served
best by one of them. Work that finds no other work waiting wakes one thread, unless one is
awake that was quick until now. As long as work waits and hardly moves, as many again are
woken as are at work: 20 are reached in 10 ms.

For the same reason a quick and busy worker with more to do borrows the turns of the client's event
loop and takes them between its portions: bytes stay in the thread that received them, and two
threads no longer wait for each other. One whose listener becomes slow loses them after 10 ms.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import Final, Protocol

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import StoredMessage
from mqmesh.sdk.consume_result import ConsumeResult, Listener
from mqmesh.sdk.process_queue import DONE, OPEN, PARKED, Span
from mqmesh.sdk.pulled_batch import PulledBatch
from mqmesh.sdk.worker_pace import WorkerPace
from mqmesh.units import MAX_OFFSET

PORTION_MESSAGES: Final = 256
"""A portion has at least so many if there are, and more only for one call."""
WATCH_MS: Final = 2
QUICK_PORTION_S: Final = 0.002
"""Who was done with a portion so soon will be back soon, and nobody else need be woken."""
TURN_INTERVAL_S: Final = 0.002
"""So often the loop's turns are taken at least, for its timers, and at once if there is news."""
LEAD_WAIT_MS: Final = 5
"""Who took the loop's turns waits so long for more work before it gives them back."""
CALLS_PER_WATCH: Final = 2
"""A worker that begins fewer calls than this between two looks is slow: others would help."""

_SUCCESS: Final = ConsumeResult.SUCCESS
_log = logging.getLogger(__name__)


OnBroken = Callable[[PulledBatch, Span, CorruptBatch], None]
"""Takes over the messages of a batch that cannot be decoded."""


class QueueWork:
    """One queue's side of the work.

    Args:
        listener: Whom the messages are for.
        batch_size: How many a call gets at most.
        on_progress: Called by a worker now and then, when messages of the queue were done.
        on_broken: Called by a worker when a batch cannot be decoded; it takes its messages over.
        in_order: What stands behind such a batch must not be called either.

    Attributes:
        revoked: The queue was given away; what was not begun will not be.
    """

    __slots__ = ("batch_size", "in_order", "listener", "on_broken", "on_progress", "revoked")

    def __init__(
        self,
        listener: Listener,
        batch_size: int,
        on_progress: Callable[[], None],
        on_broken: OnBroken,
        *,
        in_order: bool = False,
    ) -> None:
        self.listener = listener
        self.in_order = in_order
        self.batch_size = batch_size
        self.on_progress = on_progress
        self.on_broken = on_broken
        self.revoked = False


class Portion:
    """Messages that workers take from one after the other. Used under the workers' lock.

    Args:
        work: The queue they belong to.
        source: Batches, or messages that failed before, in order.
        span: Where their states are kept.
        attempt: How often they have failed.

    Attributes:
        calls: What is still to be begun: messages, or lists of them when a call gets several;
            taking the next one needs no lock.
        call_count: About how many there were at first.
    """

    __slots__ = ("_items", "_source", "attempt", "call_count", "calls", "span", "work")

    def __init__(
        self,
        work: QueueWork,
        source: list[PulledBatch] | list[StoredMessage],
        span: Span,
        attempt: int = 0,
    ) -> None:
        count = sum(item.count if isinstance(item, PulledBatch) else 1 for item in source)
        self._source: list[PulledBatch] | list[StoredMessage] | None = source
        self._items: list[StoredMessage] | list[list[StoredMessage]] = []
        self.calls: Iterator[StoredMessage | list[StoredMessage]] = iter(self._items)
        self.call_count = -(-count // work.batch_size)
        self.work = work
        self.span = span
        self.attempt = attempt

    @property
    def used_up(self) -> bool:
        """True when every call was begun."""
        return self._source is None and not length_hint(self.calls)

    @property
    def calls_begun(self) -> int:
        """About how many calls were begun."""
        return 0 if self._source is not None else self.call_count - length_hint(self.calls)

    def waiting(self) -> list[int]:
        """Queue offsets of what was not begun; of a first try the first one stands for all."""
        if self._source is not None:
            source: Sequence[PulledBatch | StoredMessage | list[StoredMessage]] = self._source
        else:
            left = length_hint(self.calls)
            source = self._items[len(self._items) - left :] if left else []
        if not self.attempt:
            source = source[:1]
        offsets: list[int] = []
        for item in source:
            if isinstance(item, PulledBatch):
                offsets.append(item.first)
            else:
                messages = item if isinstance(item, list) else [item]
                offsets += [message.queue_offset for message in messages]
        return offsets

    def open(self) -> None:
        """Decodes the messages, unless that was done."""
        if self._source is None:
            return
        source, self._source = self._source, None
        messages: list[StoredMessage] = []
        for item in source:
            if not isinstance(item, PulledBatch):
                messages.append(item)
                continue
            try:
                found = item.decode()
            except CorruptBatch as error:
                self.work.on_broken(item, self.span, error)
                if self.work.in_order:
                    break
                continue
            if len(found) < item.count:
                self._mark_unwanted(item, found)
            messages += found
        size = self.work.batch_size
        if size == 1:
            self._items = messages
        else:
            self._items = [messages[at : at + size] for at in range(0, len(messages), size)]
        self.calls = iter(self._items)

    def revoke(self) -> None:
        """What was not begun will not be; from any thread."""
        self._source = None
        self._items.clear()  # a list's iterator ends where its list does

    def _mark_unwanted(self, batch: PulledBatch, found: list[StoredMessage]) -> None:
        unwanted = set(range(batch.first, batch.end))
        unwanted.difference_update(message.queue_offset for message in found)
        for offset in unwanted:
            self.span.mark(offset, offset, DONE)


def park(span: Span, messages: list[StoredMessage]) -> list[StoredMessage]:
    """Parks messages whose call failed.

    Returns:
        Those that are still the worker's: none that were taken from it, being late.
    """
    base, states = span.base, span.states
    own = [message for message in messages if states[message.queue_offset - base] == OPEN]
    for message in own:
        span.mark(message.queue_offset, message.queue_offset, PARKED)
    return own


class Waiting(msgspec.Struct):
    """Messages of a queue that no worker has begun.

    Attributes:
        first: All from this queue offset on.
        again: Queue offsets of those before that wait for a further try.
    """

    first: int = MAX_OFFSET
    again: frozenset[int] = frozenset()


def find_waiting(portions: Iterable[Portion]) -> dict[QueueWork, Waiting]:
    """What was not begun of each queue that has something left.

    Args:
        portions: Those that workers will take from.
    """
    found: dict[QueueWork, Waiting] = {}
    for portion in portions:
        offsets = portion.waiting()
        if not offsets:
            continue
        waiting = found.setdefault(portion.work, Waiting())
        if portion.attempt:
            waiting.again |= frozenset(offsets)
        else:
            waiting.first = min(waiting.first, offsets[0])
    return found


def make_portions(work: QueueWork, batches: list[PulledBatch], span: Span) -> Iterator[Portion]:
    """Divides batches into portions."""
    start, count = 0, 0
    for at, batch in enumerate(batches):
        more = batch.count
        if count >= PORTION_MESSAGES and count + more > work.batch_size:
            yield Portion(work, batches[start:at], span)
            start, count = at, 0
        count += more
    yield Portion(work, batches[start:], span)


class OnFailed(Protocol):
    """What becomes of messages whose listener failed; called by a worker."""

    def __call__(
        self, portion: Portion, messages: list[StoredMessage], cause: BaseException | object
    ) -> None:
        """Sees to it that they come again.

        Args:
            portion: Which they were part of; their states are ``PARKED``.
            messages: What the failed call was given.
            cause: What the listener raised, or answered instead of SUCCESS.
        """


class Workers(Protocol):
    """Those who call listeners."""

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: Span) -> None:
        """Has messages consumed; in the client's own thread.

        Args:
            work: The queue they belong to.
            batches: In order, at least one.
            span: Where the messages' states are kept; all are ``OPEN``.
        """

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: Span, attempt: int
    ) -> None:
        """Has messages consumed that failed before; in the client's own thread.

        Args:
            work: The queue they belong to.
            messages: In order, at least one.
            span: Where their states are kept; all are ``OPEN``.
            attempt: How often they have failed.
        """

    def revoke(self, work: QueueWork) -> None:
        """Hands out nothing more of a queue; in the client's own thread."""

    def is_idle(self, work: QueueWork) -> bool:
        """True when nobody else need wait for what is being done with a queue."""
        return True

    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        """Calls back in the client's own thread when ``is_idle`` of a revoked queue is true."""
        callback()

    def follow(self, work: QueueWork, before: QueueWork) -> None:
        """One work of a queue takes the place of another that was revoked."""
        return

    def waiting(self) -> dict[QueueWork, Waiting]:
        """What no worker has begun; in the client's own thread."""
        return {}

    def close(self, timeout_s: float) -> bool:
        """Hands out nothing more, and waits for calls that run; also from within a listener.

        Args:
            timeout_s: How long to wait.

        Returns:
            False when listeners still run.
        """


class Turns(Protocol):
    """The turns of the client's event loop, which are borrowed; see ``EventLoop``."""

    def borrow(self) -> bool:
        """True if they are the calling thread's from now on."""

    def borrowed_turn(self, wait_ms: int) -> bool:
        """Takes one; False when they are not the calling thread's."""

    def give_back(self) -> None:
        """They are the loop's own thread's again."""

    def has_news(self) -> bool:
        """True when a turn would find something."""


class ConsumeService(Workers):
    """The worker threads of one consumer.

    Args:
        name: For the threads' names.
        threads: Most threads.
        call_later: Calls in the client's own thread after so many milliseconds.
        on_failed: Takes over the messages of a failed call.
        turns: Of the client's event loop.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        call_later: Callable[[int, Callable[[], None]], object],
        on_failed: OnFailed,
        turns: Turns,
    ) -> None:
        self._name = name
        self._most_threads = threads
        self._call_later = call_later
        self._on_failed = on_failed
        self._turns = turns
        self._turn_s = 0.0
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Portion] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._watching = False
        self._quick = False
        self._calls_retired = 0
        self._calls_seen = 0

    @property
    def thread_count(self) -> int:
        """Threads started so far."""
        return len(self._threads)

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: Span) -> None:
        self._add(work, list(make_portions(work, batches, span)))

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: Span, attempt: int
    ) -> None:
        self._add(work, [Portion(work, messages, span, attempt)])

    def revoke(self, work: QueueWork) -> None:
        work.revoked = True
        with self._changed:
            for portion in self._ready:
                if portion.work is work:
                    portion.revoke()

    def waiting(self) -> dict[QueueWork, Waiting]:
        with self._changed:
            return find_waiting(self._ready)

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._closed = True
            for portion in self._ready:
                portion.revoke()
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in others)

    # ---- In the client's thread, or under the lock ------------------------------------

    def _add(self, work: QueueWork, portions: list[Portion]) -> None:
        with self._changed:
            if self._closed or work.revoked:
                return
            self._retire_used_up()
            someone_comes = self._quick and self._idle < len(self._threads)
            if not self._ready and not someone_comes:
                self._wake(1)
            self._ready.extend(portions)
        if not self._watching:
            self._watching = True
            self._calls_seen = self._calls_begun()
            self._call_later(WATCH_MS, self._watch)

    def _calls_begun(self) -> int:
        # Workers take from the first portion only.
        return self._calls_retired + (self._ready[0].calls_begun if self._ready else 0)

    def _retire_used_up(self) -> None:
        while self._ready and self._ready[0].used_up:
            self._calls_retired += self._ready.popleft().call_count

    def _wake(self, count: int) -> None:
        woken = min(count, self._idle)
        self._changed.notify(woken)
        for _ in range(min(count - woken, self._most_threads - len(self._threads))):
            # Daemons, so that a listener that hangs cannot keep the program from ending.
            thread = threading.Thread(
                target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _watch(self) -> None:
        with self._changed:
            self._retire_used_up()
            if self._closed or not self._ready:
                self._watching = False
                return
            begun = self._calls_begun()
            awake = max(len(self._threads) - self._idle, 1)
            if begun - self._calls_seen < awake * CALLS_PER_WATCH:
                self._wake(awake)
            self._calls_seen = begun
        self._call_later(WATCH_MS, self._watch)

    # ---- In the workers' threads ------------------------------------------------------

    def _work(self) -> None:
        pace = WorkerPace()
        is_needed = True
        while (portion := self._next(rest=not is_needed)) is not None:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            if portion.work.batch_size == 1:
                self._consume_one_by_one(portion)
            else:
                self._consume_lists(portion)
            took_s = time.monotonic() - began_s
            pace.note(took_s, time.thread_time() - cpu_s)
            self._quick = took_s < QUICK_PORTION_S
            portion.work.on_progress()
            self._retire(portion)
            is_needed = self._take_turns(pace)
        self._turns.give_back()

    def _next(self, *, rest: bool) -> Portion | None:
        with self._changed:
            while (rest or not self._ready) and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
                rest = False
            if self._closed:
                return None
            self._ready[0].open()
            return self._ready[0]

    def _retire(self, used_up: Portion) -> None:
        with self._changed:
            used_up.revoke()  # its memory is what the next messages need
            if self._ready and self._ready[0] is used_up:
                self._calls_retired += self._ready.popleft().call_count

    def _take_turns(self, pace: WorkerPace) -> bool:
        """Takes turns of the client's event loop, if this worker is the one to do it.

        Returns:
            False when another one does it, and this one would only take the interpreter from it.
        """
        turns = self._turns
        if pace.waits or not self._quick:
            turns.give_back()
        elif self._ready:
            if not turns.borrow():
                return False
            now_s = time.monotonic()
            if turns.has_news() or now_s - self._turn_s >= TURN_INTERVAL_S:
                self._turn_s = now_s
                turns.borrowed_turn(0)
        else:
            self._wait_for_work()
        return True

    def _wait_for_work(self) -> None:
        """Waits inside the loop's turns for a moment, if they are borrowed."""
        turns = self._turns
        end_s = time.monotonic() + LEAD_WAIT_MS / 1_000
        left_ms = LEAD_WAIT_MS
        while left_ms and not self._ready and not self._closed:
            if not turns.borrowed_turn(left_ms):
                return
            left_ms = max(int((end_s - time.monotonic()) * 1_000), 0)
        if not self._ready:
            turns.give_back()

    def _consume_one_by_one(self, portion: Portion) -> None:
        listener = portion.work.listener
        base, states = portion.span.base, portion.span.states
        result: BaseException | object
        for message in portion.calls:
            try:
                result = listener([message])  # type: ignore[list-item]
            except BaseException as error:
                result = error
            if result is _SUCCESS:
                states[message.queue_offset - base] = DONE  # type: ignore[union-attr]
            else:
                self._fail(portion, [message], result)  # type: ignore[list-item]

    def _consume_lists(self, portion: Portion) -> None:
        listener, span = portion.work.listener, portion.span
        result: BaseException | object
        for messages in portion.calls:
            assert isinstance(messages, list)
            first, last = messages[0].queue_offset, messages[-1].queue_offset
            try:
                result = listener(messages.copy())  # theirs to change
            except BaseException as error:
                result = error
            if result is _SUCCESS:
                span.mark(first, last, DONE)
            else:
                self._fail(portion, messages, result)

    def _fail(
        self, portion: Portion, messages: list[StoredMessage], cause: BaseException | object
    ) -> None:
        messages = park(portion.span, messages)
        if not messages or portion.work.revoked:
            return  # somebody else has them
        self._on_failed(portion, messages, cause)
