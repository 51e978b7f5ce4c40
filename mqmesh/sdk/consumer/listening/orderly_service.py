"""Delivery to listeners in the order of each queue, several queues side by side.

A worker takes a queue, calls the listener message by message, and puts the queue back. No
other worker can have the queue meanwhile: its state says so, and changes only under one lock.
That is what ordered consumption calls the lock of a queue at the consumer. A rebalance must
win it too: ``when_idle`` calls back when the worker has done with a queue that was revoked.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, why_again
from mqmesh.sdk.consumer.listening.consume_service import (
    Calls,
    ConsumeService,
    Tally,
    Turn,
    seen,
)
from mqmesh.sdk.consumer.listening.consume_work import QueueWork, Waiting, make_portions
from mqmesh.sdk.consumer.listening.orderly_queue import BUSY, Failure, OrderlyQueue, QueueState
from mqmesh.transport.interface import Condition

CALLS_PER_TURN: Final = 256
"""A queue with many messages lets others have the worker after so many calls."""

_SUCCESS: Final = ConsumeResult.SUCCESS


class ToDeadLetters(Protocol):
    """Interface that makes dead letters of messages."""

    def __call__(
        self,
        messages: list[StoredMessage],
        cause: Cause,
        on_done: Callable[[bool], None],
    ) -> None:
        """Make dead letters, from a worker's thread; ``on_done`` is called in the client's.

        Args:
            messages: Of one queue, in order.
            cause: Error of the listener, or ``RECONSUME_LATER``.
            on_done: Called with True when they are stored as dead letters.
        """


class OrderlyService(ConsumeService):
    """Service for ordered work: each queue is with one worker at a time, message by message.

    Args:
        changed, now_ns: As for ``ConsumeService``.
        suspend_ms: Wait of a queue after a failure.
        call_later: Calls in the client loop after so many ms; from any thread.
        to_dead_letters: Takes messages that failed too often.
    """

    def __init__(
        self,
        changed: Condition,
        now_ns: Callable[[], int],
        suspend_ms: int,
        call_later: Callable[[int, Callable[[], None]], object],
        to_dead_letters: ToDeadLetters,
    ) -> None:
        super().__init__(changed, now_ns)
        self._suspend_ms = suspend_ms
        self._call_later = call_later
        self._to_dead_letters = to_dead_letters
        self._ready: deque[OrderlyQueue] = deque()
        self._halted: dict[OrderlyQueue, None] = {}  # no set: they go on in the order they came
        self._calls_begun = 0

    @property
    def calls(self) -> int:
        return self._calls_begun

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> None:
        assert isinstance(work, OrderlyQueue)
        with self.changed:
            if self.closed or work.revoked:
                return
            work.portions.extend(make_portions(work, batches, span))
            if work.state is QueueState.IDLE:
                self._make_ready(work)

    def revoke(self, work: QueueWork) -> None:
        assert isinstance(work, OrderlyQueue)
        with self.changed:
            work.revoked = True
            if work.state not in BUSY:
                self._rest(work)

    def is_idle(self, work: QueueWork) -> bool:
        assert isinstance(work, OrderlyQueue)
        return work.state not in BUSY

    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        assert isinstance(work, OrderlyQueue)
        with self.changed:
            if work.state in BUSY:
                work.on_idle.append(callback)
                return
        self._call_later(0, callback)

    def follow(self, work: QueueWork, before: QueueWork) -> None:
        assert isinstance(work, OrderlyQueue)
        work.state = QueueState.SUSPENDED
        self.when_idle(before, partial(self._resume, work, QueueState.SUSPENDED))

    def waiting(self) -> dict[QueueWork, Waiting]:
        return {}

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self._ready.clear()
            self.changed.notify_all()

    def _next_turn(self) -> Turn | None:
        if not self._ready:
            return None
        work = self._ready.popleft()
        work.state = QueueState.RUNNING
        return Turn(work, self._calls(work))

    def give_up(self, turn: Turn) -> None:
        assert isinstance(turn.work, OrderlyQueue)
        self._settle(turn.work, None, None, (1, len(turn.work.current or ())))

    def look(self) -> None:
        """Resume queues whose locks can be relied on again; in the client loop."""
        with self.changed:
            regained = [work for work in self._halted if work.lease.holds() or work.revoked]
        for work in regained:
            self._resume(work, QueueState.HALTED)

    # ---- Under the lock ----------------------------------------------------------------

    def _add_begun(self, tallies: dict[str, Tally]) -> None:
        for turn in self._turns:
            at = seen(turn)
            tally = tallies.setdefault(turn.work.topic, Tally())
            tally.calls += at.get("begun", 0)
            tally.messages += at.get("count", 0)

    def _make_ready(self, work: OrderlyQueue) -> None:
        work.state = QueueState.READY
        self._wake(1)
        self._ready.append(work)

    def _rest(self, work: OrderlyQueue) -> None:
        work.state = QueueState.IDLE
        self._halted.pop(work, None)
        if work.revoked:
            work.clear()
        callbacks, work.on_idle = work.on_idle, []
        for callback in callbacks:
            self._call_later(0, callback)

    # ---- With a worker -----------------------------------------------------------------

    def _calls(self, work: OrderlyQueue) -> Calls:
        failure: Failure | None = None
        cause: Cause | None = None
        begun = count = 0
        while begun < CALLS_PER_TURN:
            messages = work.next_call()
            if messages is None or self.closed:
                break
            begun += 1
            count += len(messages)
            result = yield messages.copy()
            # Asked here, too: most calls succeed, and this is on the way of each message.
            done = result is None or result is _SUCCESS
            if not done and (cause := why_again(result)) is not None:
                failure = work.fail(cause)
                if failure is not None:
                    break
            else:
                work.succeed()
        self._settle(work, failure, cause, (begun, count))

    # ---- From any thread ---------------------------------------------------------------

    def _resume(self, work: OrderlyQueue, state: QueueState) -> None:
        with self.changed:
            if work.state is not state:
                return
            self._halted.pop(work, None)
            if self.closed or work.revoked or not work.has_more:
                self._rest(work)
            else:
                self._make_ready(work)

    def _settle(
        self,
        work: OrderlyQueue,
        failure: Failure | None,
        cause: Cause | None,
        begun: tuple[int, int],
    ) -> None:
        """Settle a queue that a worker has done with for now, after so many calls and messages."""
        dead: list[StoredMessage] | None = None
        with self.changed:
            calls, messages = begun
            self._calls_begun += calls
            tally = self._tallies[work.topic]
            tally.calls += calls
            tally.messages += messages
            if failure is not None and work.current is not None:
                self.failures += 1
                tally.failed += len(work.current)
            if failure is Failure.DEAD_LETTER and work.current is not None:
                work.state = QueueState.LEAVING_MESSAGE
                dead = work.current
            elif work.revoked or self.closed or not work.has_more:
                self._rest(work)
            elif failure is Failure.SUSPEND:
                work.state = QueueState.SUSPENDED
            elif work.lease.holds():
                # This worker takes the next one; another is needed only for a second one.
                work.state = QueueState.READY
                if self._ready:
                    self._wake(1)
                self._ready.append(work)
            else:
                work.state = QueueState.HALTED
                self._halted[work] = None
        if dead is not None and cause is not None:
            self._to_dead_letters(dead, cause, partial(self._after_letter, work))
        elif failure is Failure.SUSPEND:
            self._call_later(self._suspend_ms, partial(self._resume, work, QueueState.SUSPENDED))
        work.on_progress()

    def _after_letter(self, work: OrderlyQueue, safe: bool) -> None:
        with self.changed:
            if safe:
                work.succeed()
            work.state = QueueState.SUSPENDED
        if safe or work.revoked:
            self._resume(work, QueueState.SUSPENDED)
        else:
            self._call_later(self._suspend_ms, partial(self._resume, work, QueueState.SUSPENDED))
        work.on_progress()
