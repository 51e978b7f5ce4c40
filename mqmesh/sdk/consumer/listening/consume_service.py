"""What a worker does next, and what becomes of the result: the one core of all who call listeners.

A service is a machine without threads: the client loop submits and revokes, workers take turns.
A turn asks for one call after the other and is told what came of it, so a thread, a task of
asyncio and a step of a simulation drive the same code::

    with service.changed:
        turn = service.take()
    calls = turn.calls
    messages = next(calls)
    messages = calls.send(turn.work.listener(messages))  # until StopIteration

The lock ``changed`` guards what waits. It is the last that a thread takes: under it nothing is
called that could wait.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, NamedTuple, Protocol

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, why_again
from mqmesh.sdk.consumer.listening.consume_work import (
    OnFailed,
    Portion,
    QueueWork,
    Waiting,
    find_waiting,
    make_portions,
    park,
)
from mqmesh.transport.interface import Condition

_SUCCESS: Final = ConsumeResult.SUCCESS

Calls = Generator[list[StoredMessage], object, None]
"""Yields what to call the listener with, a list that may be changed; is sent what it returned or
raised."""


class Turn(NamedTuple):
    """What one worker does until it looks for other work.

    Attributes:
        work: Whose listener to call.
        calls: With what.
    """

    work: QueueWork
    calls: Calls


class Workers(Protocol):
    """Those who take turns of one service and call listeners."""

    def wake(self, count: int) -> None:
        """So many workers more are about to find work; under the service's lock."""

    def close(self, timeout_s: float) -> bool:
        """Waits for calls that run, after the service was closed; also from within a listener.

        Args:
            timeout_s: How long to wait.

        Returns:
            False when listeners still run.
        """


class ConsumeService(ABC):
    """What is to be consumed. Methods are for the client loop, unless they say so.

    Args:
        changed: Guards what waits, and tells workers of it.

    Attributes:
        changed: See there.
        closed: Nothing more is handed out.
        failures: Calls that failed.
        busy_ns: How long workers were with listeners, all together, in turns that have ended.
    """

    def __init__(self, changed: Condition) -> None:
        self.changed = changed
        self.closed = False
        self.failures = 0
        self.busy_ns = 0
        self._workers: Workers | None = None

    @property
    @abstractmethod
    def calls(self) -> int:
        """Calls that were begun; from any thread."""

    def attach(self, workers: Workers) -> None:
        """Says who takes the turns, before the first message comes."""
        self._workers = workers

    @abstractmethod
    def submit(self, work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> None:
        """Has messages consumed.

        Args:
            work: The queue they belong to.
            batches: In order, at least one.
            span: Where the messages' states are kept; all are ``OPEN``.
        """

    @abstractmethod
    def revoke(self, work: QueueWork) -> None:
        """Hands out nothing more of a queue."""

    @abstractmethod
    def is_idle(self, work: QueueWork) -> bool:
        """True when nobody else need wait for what is being done with a queue."""

    @abstractmethod
    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        """Calls back in the client loop when ``is_idle`` of a revoked queue is true."""

    @abstractmethod
    def follow(self, work: QueueWork, before: QueueWork) -> None:
        """One work of a queue takes the place of another that was revoked."""

    @abstractmethod
    def waiting(self) -> dict[QueueWork, Waiting]:
        """What no worker has begun."""

    @abstractmethod
    def close(self) -> None:
        """Hands out nothing more; from any thread."""

    @abstractmethod
    def take(self) -> Turn | None:
        """The next turn of a worker, who holds the lock; None when there is none.

        Whoever takes it goes on to its end, or gives it up.
        """

    @abstractmethod
    def give_up(self, turn: Turn) -> None:
        """A worker was stopped within a call, of which nobody knows what it did."""

    def _wake(self, count: int) -> None:
        assert self._workers is not None, "messages come after the start only"
        self._workers.wake(count)


class ConcurrentService(ConsumeService):
    """Messages of a queue go to several workers side by side.

    Args:
        changed: As for ``ConsumeService``.
        on_failed: Takes over the messages of a failed call; called by a worker.
    """

    def __init__(self, changed: Condition, on_failed: OnFailed) -> None:
        super().__init__(changed)
        self._on_failed = on_failed
        self._ready: deque[Portion] = deque()
        self._calls_retired = 0

    @property
    def calls(self) -> int:
        with self.changed:
            return self.progress()[1]

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> None:
        self._add(work, list(make_portions(work, batches, span)))

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: StateSpan, attempt: int
    ) -> None:
        """Has messages consumed that failed before.

        Args:
            work: The queue they belong to.
            messages: In order, at least one.
            span: Where their states are kept; all are ``OPEN``.
            attempt: How often they have failed.
        """
        self._add(work, [Portion(work, messages, span, attempt)])

    def revoke(self, work: QueueWork) -> None:
        with self.changed:
            work.revoked = True
            for portion in self._ready:
                if portion.work is work:
                    portion.revoke()

    def is_idle(self, work: QueueWork) -> bool:
        return True

    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        callback()

    def follow(self, work: QueueWork, before: QueueWork) -> None:
        return

    def waiting(self) -> dict[QueueWork, Waiting]:
        with self.changed:
            return find_waiting(self._ready)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            for portion in self._ready:
                portion.revoke()
                self._calls_retired += portion.call_count
            self._ready.clear()
            self.changed.notify_all()

    def take(self) -> Turn | None:
        self._retire_used_up()
        if not self._ready:
            return None
        portion = self._ready[0]
        portion.open()
        return Turn(portion.work, self._calls(portion))

    def give_up(self, turn: Turn) -> None:
        return

    def progress(self) -> tuple[bool, int]:
        """Whether anything waits, and about how many calls were begun so far; under the lock."""
        self._retire_used_up()
        # Workers take from the first portion only.
        begun = self._ready[0].calls_begun if self._ready else 0
        return bool(self._ready), self._calls_retired + begun

    # ---- Under the lock ----------------------------------------------------------------

    def _add(self, work: QueueWork, portions: list[Portion]) -> None:
        with self.changed:
            if self.closed or work.revoked:
                return
            self._wake(sum(portion.call_count for portion in portions))
            self._ready.extend(portions)

    def _retire_used_up(self) -> None:
        while self._ready and self._ready[0].used_up:
            self._calls_retired += self._ready.popleft().call_count

    # ---- With a worker -----------------------------------------------------------------

    def _calls(self, portion: Portion) -> Calls:
        span = portion.span
        base, states = span.base, span.states
        if portion.work.batch_size == 1:
            for message in portion.calls:
                result = yield [message]  # type: ignore[list-item]
                if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                    states[message.queue_offset - base] = DONE  # type: ignore[union-attr]
                else:
                    self._fail(portion, [message], cause)  # type: ignore[list-item]
        else:
            for messages in portion.calls:
                assert isinstance(messages, list)
                first, last = messages[0].queue_offset, messages[-1].queue_offset
                result = yield messages.copy()
                if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                    span.mark(first, last, DONE)
                else:
                    self._fail(portion, messages, cause)
        portion.work.on_progress()
        with self.changed:
            portion.revoke()  # its memory is what the next messages need
            self._retire_used_up()

    def _fail(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        messages = park(portion.span, messages)
        if not messages or portion.work.revoked:
            return  # somebody else has them
        self.failures += 1
        self._on_failed(portion, messages, cause)
