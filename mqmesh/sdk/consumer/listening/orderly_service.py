"""Hands messages to listeners in the order of their queues, several queues side by side.

A worker takes a queue, calls the listener message by message, and puts the queue back. No
other worker can have the queue meanwhile: its state says so, and changes only under one lock.
That is what ordered consumption calls the lock of a queue at the consumer. A rebalance must
win it too: ``when_idle`` tells when the worker has done with a queue that was revoked.
"""

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import Span
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, why_again
from mqmesh.sdk.consumer.listening.consume_work import QueueWork, Workers, make_portions
from mqmesh.sdk.consumer.listening.orderly_queue import BUSY, Failure, OrderlyQueue, QueueState

CALLS_PER_TURN: Final = 256
"""A queue with many messages lets others have the worker after so many calls."""


class ToDeadLetters(Protocol):
    """Makes dead letters of messages."""

    def __call__(
        self,
        messages: list[StoredMessage],
        cause: Cause,
        on_done: Callable[[bool], None],
    ) -> None:
        """From a worker's thread; ``on_done`` is told in the client's, whether they are safe.

        Args:
            messages: Of one queue, in order.
            cause: What the listener raised, or ``RECONSUME_LATER``.
            on_done: Told True when they are stored as dead letters.
        """


class OrderlyWorkers(Workers):
    """What threads and tasks that consume in order have in common.

    Args:
        suspend_ms: How long a queue waits after a failure.
        call_later: Calls in the client's own thread after so many ms; from any thread.
        to_dead_letters: Takes messages that failed too often.

    Attributes:
        failures: Calls that failed.
    """

    def __init__(
        self,
        suspend_ms: int,
        call_later: Callable[[int, Callable[[], None]], object],
        to_dead_letters: ToDeadLetters,
    ) -> None:
        self.failures = 0
        self._suspend_ms = suspend_ms
        self._call_later = call_later
        self._to_dead_letters = to_dead_letters
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[OrderlyQueue] = deque()
        self._halted: set[OrderlyQueue] = set()
        self._closed = False

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: Span) -> None:
        assert isinstance(work, OrderlyQueue)
        with self._changed:
            if self._closed or work.revoked:
                return
            work.portions.extend(make_portions(work, batches, span))
            if work.state is QueueState.IDLE:
                self._make_ready(work)

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: Span, attempt: int
    ) -> None:
        raise AssertionError("what fails in order is not taken out of it")

    def revoke(self, work: QueueWork) -> None:
        assert isinstance(work, OrderlyQueue)
        with self._changed:
            work.revoked = True
            if work.state not in BUSY:
                self._rest(work)

    def is_idle(self, work: QueueWork) -> bool:
        assert isinstance(work, OrderlyQueue)
        return work.state not in BUSY

    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        assert isinstance(work, OrderlyQueue)
        with self._changed:
            if work.state in BUSY:
                work.on_idle.append(callback)
                return
        self._call_later(0, callback)

    def follow(self, work: QueueWork, before: QueueWork) -> None:
        assert isinstance(work, OrderlyQueue)
        work.state = QueueState.SUSPENDED
        self.when_idle(before, lambda: self._resume(work, QueueState.SUSPENDED))

    def look(self) -> None:
        """Queues whose locks can be relied on again go on; in the client's own thread."""
        with self._changed:
            regained = [work for work in self._halted if work.lease.holds() or work.revoked]
        for work in regained:
            self._resume(work, QueueState.HALTED)

    # ---- Under the lock ----------------------------------------------------------------

    def _make_ready(self, work: OrderlyQueue) -> None:
        work.state = QueueState.READY
        self._ready.append(work)
        self._wake()

    @abstractmethod
    def _wake(self) -> None:
        """There is work for one worker more."""

    def _rest(self, work: OrderlyQueue) -> None:
        work.state = QueueState.IDLE
        self._halted.discard(work)
        if work.revoked:
            work.clear()
        told, work.on_idle = work.on_idle, []
        for callback in told:
            self._call_later(0, callback)

    # ---- From any thread ---------------------------------------------------------------

    def _resume(self, work: OrderlyQueue, state: QueueState) -> None:
        with self._changed:
            if work.state is not state:
                return
            self._halted.discard(work)
            if self._closed or work.revoked or not work.has_more:
                self._rest(work)
            else:
                self._make_ready(work)

    def _settle(self, work: OrderlyQueue, failure: Failure | None, cause: Cause | None) -> None:
        """A worker has done with a queue for now."""
        dead: list[StoredMessage] | None = None
        with self._changed:
            if failure is Failure.DEAD_LETTER and work.current is not None:
                work.state = QueueState.LEAVING_MESSAGE
                dead = work.current
            elif work.revoked or self._closed or not work.has_more:
                self._rest(work)
            elif failure is Failure.SUSPEND:
                work.state = QueueState.SUSPENDED
            elif work.lease.holds():
                # This worker takes the next one; another is needed only for a second one.
                work.state = QueueState.READY
                self._ready.append(work)
                if len(self._ready) > 1:
                    self._wake()
            else:
                work.state = QueueState.HALTED
                self._halted.add(work)
        if dead is not None and cause is not None:
            self._to_dead_letters(dead, cause, lambda safe: self._after_letter(work, safe))
        elif failure is Failure.SUSPEND:
            self._call_later(self._suspend_ms, lambda: self._resume(work, QueueState.SUSPENDED))
        work.on_progress()

    def _after_letter(self, work: OrderlyQueue, safe: bool) -> None:
        with self._changed:
            if safe:
                work.succeed()
            work.state = QueueState.SUSPENDED
        if safe or work.revoked:
            self._resume(work, QueueState.SUSPENDED)
        else:
            self._call_later(self._suspend_ms, lambda: self._resume(work, QueueState.SUSPENDED))
        work.on_progress()


class OrderlyService(OrderlyWorkers):
    """The worker threads of one ordered consumer.

    Args:
        name: For the threads' names.
        threads: Most threads, so most queues consumed side by side.
        suspend_ms, call_later, to_dead_letters: As for ``OrderlyWorkers``.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        suspend_ms: int,
        call_later: Callable[[int, Callable[[], None]], object],
        to_dead_letters: ToDeadLetters,
    ) -> None:
        super().__init__(suspend_ms, call_later, to_dead_letters)
        self._name = name
        self._most_threads = threads
        self._threads: list[threading.Thread] = []
        self._idle = 0

    @property
    def thread_count(self) -> int:
        """Threads started so far."""
        return len(self._threads)

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in others)

    def _wake(self) -> None:
        if self._idle >= len(self._ready):
            self._changed.notify()
        elif len(self._threads) < self._most_threads:
            # Daemons, so that a listener that hangs cannot keep the program from ending.
            thread = threading.Thread(
                target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        else:
            self._changed.notify()

    def _work(self) -> None:
        while (work := self._next()) is not None:
            self._consume(work)

    def _next(self) -> OrderlyQueue | None:
        with self._changed:
            while not self._ready and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if self._closed:
                return None
            work = self._ready.popleft()
            work.state = QueueState.RUNNING
            return work

    def _consume(self, work: OrderlyQueue) -> None:
        failure: Failure | None = None
        cause: Cause | None = None
        result: object
        for _ in range(CALLS_PER_TURN):
            messages = work.next_call()
            if messages is None or self._closed:
                break
            try:
                result = work.listener(messages.copy())
            except BaseException as error:
                result = error
            if (cause := why_again(result)) is not None:
                self.failures += 1
                failure = work.fail(cause)
                break
            work.succeed()
        self._settle(work, failure, cause)
