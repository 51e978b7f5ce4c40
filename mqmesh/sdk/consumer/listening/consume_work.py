"""Work of consumers: messages in portions, and the interface that calls listeners for them.

Work lies in portions, and workers share a portion's iterator: taking the next message is
one indivisible step under Python, so there is no lock for each message, and a message
whose listener hangs holds up no other as long as another thread is free.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import length_hint
from typing import Final, Protocol

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, OPEN, PARKED, StateSpan
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import Cause
from mqmesh.units import MAX_OFFSET

PORTION_MESSAGES: Final = 256
"""A portion has at least so many if there are, and more only for one call."""

AnyListener = Callable[[list[StoredMessage]], object]
"""A listener, or a coroutine function that is one."""

OnBroken = Callable[[PulledBatch, StateSpan, CorruptBatch], None]
"""Takes over the messages of a batch that cannot be decoded."""


class QueueWork:
    """Work of one queue.

    Args:
        listener: Listener to call with the messages.
        batch_size: Most messages of a call.
        on_progress: Called by a worker now and then, when messages of the queue were done.
        on_broken: Called by a worker when a batch cannot be decoded; it takes its messages over.
        in_order: Messages behind such a batch must not be called either.
        topic: Physical topic of the queue.

    Attributes:
        revoked: The queue was given away; no further message is begun.
    """

    __slots__ = (
        "batch_size",
        "in_order",
        "listener",
        "on_broken",
        "on_progress",
        "revoked",
        "topic",
    )

    def __init__(
        self,
        listener: AnyListener,
        batch_size: int,
        on_progress: Callable[[], None],
        on_broken: OnBroken,
        *,
        in_order: bool = False,
        topic: str = "",
    ) -> None:
        self.topic = topic
        self.listener = listener
        self.in_order = in_order
        self.batch_size = batch_size
        self.on_progress = on_progress
        self.on_broken = on_broken
        self.revoked = False

    @property
    def fencing_token(self) -> int:
        """Fencing token of the lock that the queue is consumed under; 0 without one."""
        return 0


class Portion:
    """Messages that workers take from one after the other. Used under the workers' lock.

    Args:
        work: The queue they belong to.
        source: Batches, or messages that failed before, in order.
        span: States of the messages.
        attempt: Number of failures.

    Attributes:
        calls: Calls still to be begun: messages, or lists of them when a call gets several;
            taking the next one needs no lock.
        call_count: Number of calls in all; before ``open`` about so many.
    """

    __slots__ = ("_items", "_messages", "_source", "attempt", "call_count", "calls", "span", "work")

    def __init__(
        self,
        work: QueueWork,
        source: list[PulledBatch] | list[StoredMessage],
        span: StateSpan,
        attempt: int = 0,
    ) -> None:
        count = 0
        for item in source:
            count += item.count if isinstance(item, PulledBatch) else 1
        self._source: list[PulledBatch] | list[StoredMessage] | None = source
        self._items: list[StoredMessage] | list[list[StoredMessage]] = []
        self.calls: Iterator[StoredMessage | list[StoredMessage]] = iter(self._items)
        self.call_count = -(-count // work.batch_size)
        self._messages = count
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

    @property
    def messages_begun(self) -> int:
        """About how many messages were in these calls."""
        return min(self.calls_begun * self.work.batch_size, self._messages)

    def waiting(self) -> list[int]:
        """Return queue offsets of messages not begun; of a first try, the first stands for all."""
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
                found = item.decode(self.work.fencing_token)
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
        self._messages, self.call_count = len(messages), len(self._items)
        self.calls = iter(self._items)

    def insert(self, messages: list[StoredMessage]) -> None:
        """Has messages begun next, each by a call of its own."""
        at = len(self._items) - length_hint(self.calls)
        self._items[at:at] = [[message] for message in messages]  # type: ignore[misc]
        self.call_count += len(messages)

    def revoke(self) -> None:
        """Drop messages that were not begun; from any thread."""
        self._messages, self.call_count = self.messages_begun, self.calls_begun
        self._source = None
        self._items.clear()  # a list's iterator ends where its list does

    def _mark_unwanted(self, batch: PulledBatch, found: list[StoredMessage]) -> None:
        unwanted = set(range(batch.first, batch.end))
        unwanted.difference_update(message.queue_offset for message in found)
        for offset in unwanted:
            self.span.mark(offset, offset, DONE)


def park(span: StateSpan, messages: list[StoredMessage]) -> list[StoredMessage]:
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
    """Return the offsets that were not begun, of each queue that has something left.

    Args:
        portions: Portions that workers will take from.
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


def make_portions(work: QueueWork, batches: list[PulledBatch], span: StateSpan) -> list[Portion]:
    """Divides batches into portions."""
    portions = []
    start, count = 0, 0
    for at, batch in enumerate(batches):
        more = batch.count
        if count >= PORTION_MESSAGES and count + more > work.batch_size:
            portions.append(Portion(work, batches[start:at], span))
            start, count = at, 0
        count += more
    portions.append(Portion(work, batches[start:], span))
    return portions


class OnFailed(Protocol):
    """Handler of messages whose listener failed; called by a worker."""

    def __call__(self, portion: Portion, messages: list[StoredMessage], cause: Cause) -> None:
        """Sees to it that they come again.

        Args:
            portion: Portion of the messages; their states are ``PARKED``.
            messages: Messages of the failed call.
            cause: Error of the listener, or ``RECONSUME_LATER``.
        """
