"""Dispatch of trace records: beside the client's own work, and never at its cost."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from mqmesh.errors import MQMeshError
from mqmesh.message import MAX_KEYS, Message
from mqmesh.metrics import Measured, counter
from mqmesh.sdk.client.at_exit import close_at_exit, closed
from mqmesh.sdk.client.forks import call_in_forks
from mqmesh.transport.interface import Condition, LoopThread, Transport

MAX_WAITING: Final = 4_096
"""Records that wait; further ones are dropped."""
MESSAGE_RECORDS: Final = 100
"""Records of a trace message, at most; a message has no more than 64 keys, either."""
WAKE_RECORDS: Final = 512
"""Records that are written without waiting for others: to wake a thread, and to ask a broker,
costs as much as many records."""
MESSAGE_BYTES: Final = 128_000
"""And its size, as in RocketMQ."""
LINGER_S: Final = 0.5
"""Longest time that a record waits for others."""
FLUSH_S: Final = 2.0
"""Longest wait of ``close`` until all is sent; mostly some milliseconds are enough."""
STORE_S: Final = 0.5
"""And so long again until it is stored."""

Traced = tuple[str, str, Sequence[str]]
"""A record that is to be written: its text, and by what it is found: the message's id, its keys."""

_Fact = TypeVar("_Fact")
_log = logging.getLogger(__name__)


class TraceOutcome(Protocol):
    """The outcome of a send; ``SendFuture`` has it."""

    def exception(self) -> MQMeshError | None:
        """Return why the send failed."""


class TraceProducer(Protocol):
    """Producer of trace messages; ``Producer`` implements it."""

    def start(self) -> None:
        """Connects."""

    def send_async(self, message: Message, on_done: Callable[[Any], None]) -> object:
        """Sends a message; may wait for room."""

    def close(self) -> None:
        """Waits for outcomes for a moment, and closes; idempotent."""


class TraceDispatcher:
    """Dispatcher of records in the order in which they come, by a producer and a thread of its own.

    Args:
        topic: Trace topic.
        make_producer: Makes the producer, which must not be traced; called with the first record.

    Attributes:
        sent: Records that are stored.
        dropped: Records that were lost: too many waited, or they could not be sent.
    """

    def __init__(self, topic: str, make_producer: Callable[[], TraceProducer]) -> None:
        self._topic = topic
        self._make_producer = make_producer
        self._producer: TraceProducer | None = None
        self._changed: Condition | None = None
        self._thread: LoopThread | None = None
        self._waiting: list[Callable[[], Iterable[Traced]]] = []
        self._count = 0
        self._closing = False
        self._is_logged = False
        self.sent = 0
        self.dropped = 0
        call_in_forks(self._forked)

    def start(self, transport: Transport, *, at_exit: bool) -> None:
        """Takes records from now on; also once more after ``close``.

        Args:
            transport: Makes its thread.
            at_exit: The end of the program closes it; else its owner does.
        """
        self._changed = transport.condition()
        self._producer, self._closing = None, False
        self._thread = transport.run_loop(self._work, "mqmesh-trace")
        if at_exit:
            close_at_exit(self)

    def add(
        self, facts: Sequence[_Fact], make: Callable[[Sequence[_Fact]], Iterable[Traced]]
    ) -> None:
        """Takes facts of messages to trace, as far as there is room; never waits; thread-safe.

        Args:
            facts: Facts of each message.
            make: Makes their records, in the dispatcher's thread: there no caller waits for it, and
                it runs for many batches one after the other.
        """
        changed = self._changed
        if changed is None:
            self.dropped += len(facts)
            return
        with changed:
            before, wanted = self._count, len(facts)
            count = 0 if self._closing else min(wanted, MAX_WAITING - before)
            self.dropped += wanted - count
            if not count:
                return
            self._waiting.append(partial(make, facts if count == wanted else facts[:count]))
            self._count = before + count
            if not before or before < WAKE_RECORDS <= self._count:
                changed.notify()

    def close(self) -> None:
        """Sends waiting records, within ``FLUSH_S`` and ``STORE_S``, and ends; idempotent."""
        if self._closing or self._changed is None or self._thread is None:
            return
        closed(self)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(FLUSH_S)
        if self._producer is not None:
            self._producer.close()  # it ends any wait of the thread
        self._thread.join(STORE_S)
        if self.dropped:
            _log.warning("%d of %d trace records were lost", self.dropped, self.dropped + self.sent)

    def _forked(self) -> None:
        # The thread stayed with the parent, and perhaps the lock.
        self._closing = self._changed is not None

    def _work(self) -> None:
        while True:
            changed = self._changed
            assert changed is not None
            with changed:
                changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
            try:
                self._send_all(self._producer or self._start_producer(), self._take(changed))
            except Exception:
                # The next ones may go well.
                _log.exception("trace records could not be written")
                with changed:
                    self.dropped += self._count
                    self._waiting, self._count = [], 0

    def _start_producer(self) -> TraceProducer:
        producer = self._make_producer()
        producer.start()
        closed(producer)  # it has its end when this has
        self._producer = producer
        return producer

    def _take(self, changed: Condition) -> list[Callable[[], Iterable[Traced]]]:
        with changed:
            changed.wait_for(lambda: self._count >= WAKE_RECORDS or self._closing, LINGER_S)
            waiting, self._waiting, self._count = self._waiting, [], 0
        return waiting

    def _send_all(
        self, producer: TraceProducer, makers: list[Callable[[], Iterable[Traced]]]
    ) -> None:
        for body, keys, count in pack(one for make in makers for one in make()):
            self._send(producer, Message(self._topic, body, keys=keys), count)

    def _send(self, producer: TraceProducer, message: Message, count: int) -> None:
        try:
            producer.send_async(message, partial(self._done, count))
        except MQMeshError as error:
            self._lose(count, error)

    def _done(self, count: int, outcome: TraceOutcome) -> None:
        error = outcome.exception()
        if error is not None:
            self._lose(count, error)
        else:
            self.sent += count

    def _lose(self, count: int, error: MQMeshError) -> None:
        self.dropped += count
        if not self._is_logged:
            self._is_logged = True
            _log.warning("trace records are lost, of which only the first are logged: %s", error)


def pack(traced: Iterable[Traced]) -> Iterator[tuple[bytes, list[str], int]]:
    """Yield trace messages: body, keys, and how many records each has."""
    texts: list[str] = []
    keys: dict[str, None] = {}
    size = 0
    for text, message_id, own_keys in traced:
        more = (message_id, *own_keys[: MAX_KEYS - 1]) if own_keys else (message_id,)
        own_size = len(text) if text.isascii() else len(text.encode())
        size += own_size
        if texts and (
            len(texts) >= MESSAGE_RECORDS
            or size > MESSAGE_BYTES
            or (
                len(keys) + len(more) > MAX_KEYS
                and len(keys) + sum(key not in keys for key in set(more)) > MAX_KEYS
            )
        ):
            yield "".join(texts).encode(), list(keys), len(texts)
            texts, keys, size = [], {}, own_size
        texts.append(text)
        for key in more:
            keys[key] = None
    if texts:
        yield "".join(texts).encode(), list(keys), len(texts)


TRACE_METRICS: Final[tuple[Measured[TraceDispatcher], ...]] = (
    counter(
        "trace_records_total",
        "records of the message trace: sent, or dropped",
        lambda one: {("sent",): one.sent, ("dropped",): one.dropped},
        unit="records",
        labels=("outcome",),
    ),
)
