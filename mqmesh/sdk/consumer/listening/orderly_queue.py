"""Queue that is consumed in order: its next call, and the consequence of a failure.

No socket, no thread, no clock of its own; the worker that has the queue asks ``next_call`` and
reports the outcome. Its service calls all other methods, under the service's lock.

A message that fails stands still with all behind it, and is tried again. So the listener sees
the messages of a queue in their order, each at least once, and none before those in front of it
are done, or dead letters.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from mqmesh.errors import CorruptBatch, Reject
from mqmesh.message import PROPERTY_RECONSUME_TIMES, StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import (
    Cause,
    ConsumeResult,
    is_rejected,
    log_failure,
    where_failed,
)
from mqmesh.sdk.consumer.listening.consume_work import AnyListener, OnBroken, Portion, QueueWork

NO_LIMIT: Final = -1

_log = logging.getLogger(__name__)


class QueueState(enum.Enum):
    """State of an ordered queue."""

    IDLE = enum.auto()
    """Nothing to do."""
    READY = enum.auto()
    """Waits for a worker."""
    RUNNING = enum.auto()
    """A worker has it; no other worker may."""
    SUSPENDED = enum.auto()
    """A message failed; it goes on after a while."""
    HALTED = enum.auto()
    """The lock cannot be relied on; it goes on when the broker confirms it."""
    LEAVING_MESSAGE = enum.auto()
    """A message is on its way to the dead letters; as busy as ``RUNNING``."""


BUSY: Final = frozenset({QueueState.RUNNING, QueueState.LEAVING_MESSAGE})


class MayBegin(Protocol):
    """Permission to begin a message.

    Attributes:
        token: Token of the lock; 0 where no other member can have the queue.
    """

    token: int

    def holds(self) -> bool:
        """Return True when a message of the queue may be begun now."""


class Always(MayBegin):
    """Lease that always holds: every member reads all queues."""

    token = 0

    def holds(self) -> bool:
        return True


class Failure(enum.Enum):
    """Consequence of a message's failure."""

    SUSPEND = enum.auto()
    """The message is tried again after a while, and those behind it wait."""
    DEAD_LETTER = enum.auto()
    """The message has failed too often, or was rejected."""


class OrderlyQueue(QueueWork):
    """Ordered work of one queue.

    Args:
        listener: Listener to call with the messages.
        batch_size: Most messages of a call.
        on_progress: Called by a worker now and then, when messages of the queue were done.
        on_broken: Called by a worker when a batch cannot be decoded; nothing behind it is called.
        lease: Asked before each call.
        max_reconsume_times: A message that failed so often and fails again becomes a dead
            letter; ``NO_LIMIT`` for never.
        topic: Physical topic of the queue.

    Attributes:
        state: See ``QueueState``; under the service's lock.
        portions: Messages to be consumed, in order.
        on_idle: Called when the worker that has the queue has done with it.
        current: Messages being called, or failed and to be called again.
        attempt: Number of failures.
    """

    __slots__ = (
        "_broken",
        "_divides",
        "_max_times",
        "_span",
        "attempt",
        "current",
        "lease",
        "on_idle",
        "portions",
        "state",
    )

    def __init__(
        self,
        listener: AnyListener,
        batch_size: int,
        on_progress: Callable[[], None],
        on_broken: OnBroken,
        lease: MayBegin,
        max_reconsume_times: int = NO_LIMIT,
        *,
        topic: str = "",
    ) -> None:
        def broken(batch: PulledBatch, span: StateSpan, error: CorruptBatch) -> None:
            self._broken = True
            on_broken(batch, span, error)

        super().__init__(listener, batch_size, on_progress, broken, in_order=True, topic=topic)
        self.lease = lease
        self.state = QueueState.IDLE
        self.portions: deque[Portion] = deque()
        self.on_idle: list[Callable[[], None]] = []
        self.current: list[StoredMessage] | None = None
        self.attempt = 0
        self._max_times = max_reconsume_times
        self._span: StateSpan | None = None
        self._broken = False
        self._divides = False

    @property
    def fencing_token(self) -> int:
        """Implement ``QueueWork.fencing_token``."""
        return self.lease.token

    @property
    def begun_offset(self) -> int:
        """Queue offset behind the messages that are being called; 0 when none is."""
        current = self.current
        return 0 if current is None else current[-1].queue_offset + 1

    @property
    def has_more(self) -> bool:
        """True when there is something to call; under the service's lock."""
        if self.current is not None:
            return True
        if self._broken:
            # Messages before the damage, in the same portion, are still to be called.
            return bool(self.portions) and not self.portions[0].used_up
        while self.portions and self.portions[0].used_up:
            self.portions.popleft()
        return bool(self.portions)

    def next_call(self) -> list[StoredMessage] | None:
        """Return the messages of the next listener call, for the worker that has the queue.

        Returns:
            None when there is nothing, or nothing may be begun.
        """
        if self.revoked or not self.lease.holds():
            return None
        if self._divides and self.current is not None:
            self.portions[0].insert(self.current[1:])
            self.current = self.current[:1]
        self._divides = False
        while self.current is None and self.portions:
            portion = self.portions[0]
            portion.open()
            item = next(portion.calls, None)
            if item is None:
                if self._broken:
                    return None
                self.portions.popleft()
                self.on_progress()
                continue
            self.current = item if isinstance(item, list) else [item]
            self._span = portion.span
        return self.current

    def succeed(self) -> None:
        """Mark the current messages done; the messages behind them are next."""
        assert self.current is not None
        assert self._span is not None
        self._span.mark(self.current[0].queue_offset, self.current[-1].queue_offset, DONE)
        self.current = None
        self.attempt = 0

    def fail(self, cause: Cause) -> Failure | None:
        """Record a failure of the current messages.

        Returns:
            None if the listener had them committed before it failed: they are done.
        """
        assert self.current is not None
        assert self._span is not None
        states, base = self._span.states, self._span.base
        left = [one for one in self.current if states[one.queue_offset - base] != DONE]
        if not left:
            what = where_failed(self.current)
            log_failure(_log, logging.WARNING, what, cause, "it is done already", attempt=0)
            self.succeed()
            return None
        self.current = left
        spent = 0 <= self._max_times <= max(m.reconsume_times for m in self.current)
        spent = spent or is_rejected(self.current, cause)
        _report(self.current, self.attempt, cause, spent)
        self.attempt += 1
        if spent:
            return Failure.DEAD_LETTER
        # Of several it is not known which one was meant; one by one it will be.
        self._divides = isinstance(cause, Reject)
        for message in self.current:
            times = {PROPERTY_RECONSUME_TIMES: str(message.reconsume_times + 1)}
            message.properties = {**(message.properties or {}), **times}
        return Failure.SUSPEND

    def clear(self) -> None:
        """Gives everything up, when no worker has it."""
        self.portions.clear()
        self.current = None


def _report(messages: list[StoredMessage], attempt: int, cause: Cause, spent: bool) -> None:
    then = "it goes to the dead letters" if spent else "its queue waits, and it is tried again"
    wanted = cause is ConsumeResult.RECONSUME_LATER and not spent
    level = logging.DEBUG if wanted else logging.WARNING
    then = f"after try {attempt + 1} {then}"
    log_failure(_log, level, where_failed(messages), cause, then, attempt=attempt)
