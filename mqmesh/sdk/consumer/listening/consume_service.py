"""Hands messages to listeners on worker threads; what they share stands in ``consume_work``.

Threads are woken sparingly, because they share one interpreter and a fast listener is served
best by one of them. Work that finds no other work waiting wakes one thread, unless one is
awake that was quick until now. As long as work waits and hardly moves, as many again are
woken as are at work: 20 are reached in 10 ms.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, Span
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, why_again
from mqmesh.sdk.consumer.listening.consume_work import (
    OnFailed,
    Portion,
    QueueWork,
    Waiting,
    Workers,
    find_waiting,
    make_portions,
    park,
)

WATCH_MS: Final = 2
QUICK_PORTION_S: Final = 0.002
"""Who was done with a portion so soon will be back soon, and nobody else need be woken."""
CALLS_PER_WATCH: Final = 2
"""A worker that begins fewer calls than this between two looks is slow: others would help."""

_SUCCESS: Final = ConsumeResult.SUCCESS
_log = logging.getLogger(__name__)


class ConsumeService(Workers):
    """The worker threads of one consumer.

    Args:
        name: For the threads' names.
        threads: Most threads.
        call_later: Calls in the client's own thread after so many milliseconds.
        on_failed: Takes over the messages of a failed call.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        call_later: Callable[[int, Callable[[], None]], object],
        on_failed: OnFailed,
    ) -> None:
        self._name = name
        self._most_threads = threads
        self._call_later = call_later
        self._on_failed = on_failed
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
        while (portion := self._next()) is not None:
            began_s = time.monotonic()
            if portion.work.batch_size == 1:
                self._consume_one_by_one(portion)
            else:
                self._consume_lists(portion)
            self._quick = time.monotonic() - began_s < QUICK_PORTION_S
            portion.work.on_progress()
            self._retire(portion)

    def _next(self) -> Portion | None:
        with self._changed:
            while not self._ready and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if self._closed:
                return None
            self._ready[0].open()
            return self._ready[0]

    def _retire(self, used_up: Portion) -> None:
        with self._changed:
            used_up.revoke()  # its memory is what the next messages need
            if self._ready and self._ready[0] is used_up:
                self._calls_retired += self._ready.popleft().call_count

    def _consume_one_by_one(self, portion: Portion) -> None:
        listener = portion.work.listener
        base, states = portion.span.base, portion.span.states
        result: BaseException | object
        for message in portion.calls:
            try:
                result = listener([message])  # type: ignore[list-item]
            except BaseException as error:
                result = error
            if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                states[message.queue_offset - base] = DONE  # type: ignore[union-attr]
            else:
                self._fail(portion, [message], cause)  # type: ignore[list-item]

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
            if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                span.mark(first, last, DONE)
            else:
                self._fail(portion, messages, cause)

    def _fail(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        messages = park(portion.span, messages)
        if not messages or portion.work.revoked:
            return  # somebody else has them
        self._on_failed(portion, messages, cause)
