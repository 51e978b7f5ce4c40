"""Scheduling of listener calls: the next turn of a worker, and its outcome.

A service is a machine without threads: the client loop submits and revokes, workers take turns.
A turn asks for one call after the other and takes its outcome, so a thread, a task of
asyncio and a step of a simulation drive the same code::

    with service.changed:
        turn = service.take()
    calls = turn.calls
    messages = next(calls)
    messages = calls.send(turn.work.listener(messages))  # until StopIteration

The lock ``changed`` guards waiting work. It is the last that a thread takes: under it nothing is
called that could wait.
"""

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause, ConsumeResult, Ended, why_again
from mqmesh.sdk.consumer.listening.consume_work import (
    AnyListener,
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
"""Yields the messages of each call, a list that may be changed, and is sent the listener's result
or error. After ``Ended`` it yields nothing more, and other workers go on."""


class Turn(NamedTuple):
    """Work of one worker until it looks for other work.

    Attributes:
        work: Queue work with the listener to call.
        calls: Messages of each call.
    """

    work: QueueWork
    calls: Calls


class Tally(msgspec.Struct):
    """Counters of a topic's listener calls.

    Attributes:
        calls: Calls that were begun.
        messages: Messages in these.
        failed: Of them, those whose call failed.
        busy_ns: Time of workers in the listener, all together.
    """

    calls: int = 0
    messages: int = 0
    failed: int = 0
    busy_ns: int = 0


class Workers(Protocol):
    """Workers of one service: they take turns and call listeners."""

    def wake(self, count: int) -> None:
        """Wake so many more workers, which soon find work; under the service's lock."""

    def close(self, timeout_s: float) -> bool:
        """Waits for calls that run, after the service was closed; also from within a listener.

        Args:
            timeout_s: Longest wait.

        Returns:
            False when listeners still run.
        """


class ConsumeService(ABC):
    """Messages to be consumed. Methods are for the client loop, unless stated.

    Args:
        changed: Guards waiting work, and wakes workers.
        now_ns: Monotonic clock.

    Attributes:
        changed: The condition given.
        closed: Nothing more is handed out.
        failures: Calls that failed.
        busy_ns: Time of workers in listeners, all together, in turns that have ended.
    """

    def __init__(self, changed: Condition, now_ns: Callable[[], int]) -> None:
        self.changed = changed
        self.closed = False
        self.failures = 0
        self.busy_ns = 0
        self._workers: Workers | None = None
        self._now_ns = now_ns
        self._turns: dict[Turn, int] = {}
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)

    @property
    @abstractmethod
    def calls(self) -> int:
        """Calls that were begun; from any thread."""

    def attach(self, workers: Workers) -> None:
        """Sets the workers that take the turns, before the first message comes."""
        self._workers = workers

    @abstractmethod
    def submit(self, work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> None:
        """Has messages consumed.

        Args:
            work: The queue they belong to.
            batches: In order, at least one.
            span: States of the messages; all are ``OPEN``.
        """

    @abstractmethod
    def revoke(self, work: QueueWork) -> None:
        """Hands out nothing more of a queue."""

    @abstractmethod
    def is_idle(self, work: QueueWork) -> bool:
        """Return True when another member need not wait for the work on a queue."""

    @abstractmethod
    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        """Calls back in the client loop when ``is_idle`` of a revoked queue is true."""

    @abstractmethod
    def follow(self, work: QueueWork, before: QueueWork) -> None:
        """Note the work of a queue that takes the place of another that was revoked."""

    @abstractmethod
    def waiting(self) -> dict[QueueWork, Waiting]:
        """Return messages that no worker has begun."""

    @abstractmethod
    def close(self) -> None:
        """Hands out nothing more; from any thread."""

    def take(self) -> Turn | None:
        """Return the next turn of a worker, which holds the lock; None when there is none.

        The worker that takes it goes on to its end, or gives it up, and then calls ``end``.
        """
        turn = self._next_turn()
        if turn is not None:
            self._turns[turn] = self._now_ns()
        return turn

    def end(self, turn: Turn) -> int:
        """End a turn of a worker, which holds the lock; return how many ns it took."""
        spent_ns = self._now_ns() - self._turns.pop(turn)
        self.busy_ns += spent_ns
        self._tallies[turn.work.topic].busy_ns += spent_ns
        return spent_ns

    @property
    def with_listeners(self) -> list[StoredMessage]:
        """Messages that are with listeners now; from any thread."""
        with self.changed:
            turns = list(self._turns)
        own = [turn for turn in turns if turn.work.topic]  # handed-over messages are in no queue
        return [message for turn in own for message in _at_hand(seen(turn))]

    def tallies(self) -> dict[str, Tally]:
        """Return the counters by topic, turns under way included; from any thread."""
        with self.changed:
            found = {topic: msgspec.structs.replace(one) for topic, one in self._tallies.items()}
            for turn, began_ns in self._turns.items():
                one = found.setdefault(turn.work.topic, Tally())
                one.busy_ns += self._now_ns() - began_ns
            self._add_begun(found)
        return found

    @abstractmethod
    def _next_turn(self) -> Turn | None:
        """Return the next turn, as ``take`` does; under the lock."""

    @abstractmethod
    def _add_begun(self, tallies: dict[str, Tally]) -> None:
        """Adds begun messages that do not stand in ``_tallies`` yet; under the lock."""

    @abstractmethod
    def give_up(self, turn: Turn) -> None:
        """Give up a turn whose worker was stopped within a call of unknown outcome."""

    def _wake(self, count: int) -> None:
        assert self._workers is not None, "messages come after the start only"
        self._workers.wake(count)


class ConcurrentService(ConsumeService):
    """Messages of a queue go to several workers side by side.

    Args:
        changed, now_ns: As for ``ConsumeService``.
        on_failed: Takes over the messages of a failed call; called by a worker.
    """

    def __init__(self, changed: Condition, now_ns: Callable[[], int], on_failed: OnFailed) -> None:
        super().__init__(changed, now_ns)
        self._on_failed = on_failed
        self._ready: deque[Portion] = deque()
        self._handed: deque[Turn] = deque()
        self._calls_retired = 0

    @property
    def calls(self) -> int:
        with self.changed:
            return self.progress()[1]

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> None:
        self.submit_portions(make_portions(work, batches, span))

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: StateSpan, attempt: int
    ) -> None:
        """Has messages consumed that failed before.

        Args:
            work: The queue they belong to.
            messages: In order, at least one.
            span: States of the messages; all are ``OPEN``.
            attempt: Number of failures.
        """
        self.submit_portions([Portion(work, messages, span, attempt)])

    def submit_portions(self, portions: list[Portion]) -> None:
        """Has portions consumed, of any queues; nothing of those that were revoked."""
        with self.changed:
            left = [one for one in portions if not one.work.revoked]
            if left and not self.closed:
                self._wake(sum([one.call_count for one in left]))
                self._ready.extend(left)

    def hand_over(
        self, listener: AnyListener, message: StoredMessage, on_done: Callable[[object], None]
    ) -> Callable[[], bool]:
        """Has one message consumed before all that waits; nothing else comes of it.

        Args:
            listener: Listener to call.
            message: The message.
            on_done: Called by a worker with the listener's result or error.

        Returns:
            Takes it back; True if no worker has begun it, and none will.
        """

        def calls() -> Calls:
            on_done((yield [message]))

        turn = Turn(QueueWork(listener, 1, lambda: None, lambda *_: None), calls())

        def take_back() -> bool:
            with self.changed:
                waits = turn in self._handed
                if waits:
                    self._handed.remove(turn)
            return waits

        with self.changed:
            if not self.closed:
                self._wake(1)
                self._handed.append(turn)
        return take_back

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
                self._retire(portion)
            self._ready.clear()
            self._handed.clear()
            self.changed.notify_all()

    def _next_turn(self) -> Turn | None:
        if self._handed:
            return self._handed.popleft()
        self._retire_used_up()
        if not self._ready:
            return None
        portion = self._ready[0]
        portion.open()
        return Turn(portion.work, self._calls(portion))

    def give_up(self, turn: Turn) -> None:
        return

    def progress(self) -> tuple[bool, int]:
        """Return whether anything waits, and about how many calls were begun; under the lock."""
        self._retire_used_up()
        # Workers take from the first portion only.
        begun = self._ready[0].calls_begun if self._ready else 0
        return bool(self._ready or self._handed), self._calls_retired + begun

    # ---- Under the lock ----------------------------------------------------------------

    def _retire_used_up(self) -> None:
        while self._ready and self._ready[0].used_up:
            self._retire(self._ready.popleft())

    def _retire(self, portion: Portion) -> None:
        self._calls_retired += portion.call_count
        tally = self._tallies[portion.work.topic]
        tally.calls += portion.call_count
        tally.messages += portion.messages_begun

    def _add_begun(self, tallies: dict[str, Tally]) -> None:
        if self._ready:
            portion = self._ready[0]
            tally = tallies.setdefault(portion.work.topic, Tally())
            tally.calls += portion.calls_begun
            tally.messages += portion.messages_begun

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
                    if isinstance(result, Ended):
                        return
        else:
            for messages in portion.calls:
                assert isinstance(messages, list)
                first, last = messages[0].queue_offset, messages[-1].queue_offset
                result = yield messages.copy()
                if result is None or result is _SUCCESS or (cause := why_again(result)) is None:
                    span.mark(first, last, DONE)
                else:
                    self._fail(portion, messages, cause)
                    if isinstance(result, Ended):
                        return
        portion.work.on_progress()
        # Its memory is what the next messages need; the next turn retires it.
        portion.revoke()

    def _fail(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        messages = park(portion.span, messages)
        if not messages or portion.work.revoked:
            return  # another member has them
        with self.changed:
            self.failures += 1
            self._tallies[portion.work.topic].failed += len(messages)
        self._on_failed(portion, messages, cause)


def seen(turn: Turn) -> dict[str, Any]:
    """Return the variables of a turn, which a worker may be changing right now.

    So nothing has to be noted down for each message, millions of times for each look.
    """
    return inspect.getgeneratorlocals(turn.calls)


def _at_hand(variables: dict[str, Any]) -> list[StoredMessage]:
    """Return the messages of the listener's last call."""
    messages = variables.get("messages")
    if messages is not None:
        return list(messages)
    return [variables["message"]] if "message" in variables else []
