"""Topics of a relay: their queues, and which of them wait because they failed."""

import logging
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import BrokerNotAvailable, MQMeshError, NoRoute, TransportError
from mqmesh.message import MessageQueue
from mqmesh.sdk.connector.numbered_sender import NumberedBatch

ROUTE_AGE_MS: Final = 30_000
"""Time after which the queues of a topic, and the ends of logs, are read again."""
RETRY_MS: Final = 100
"""First pause after a failure that may pass; the next failure doubles it."""
REFUSED_MS: Final = 1_000
REFUSED_MAX_MS: Final = 60_000
"""Longest pause of a topic that refuses its messages."""
MOST_REMEMBERED: Final = 10_000
"""Topics whose failures are remembered; with one more the oldest of them is tried again at once."""

_log = logging.getLogger(__name__)


class RowSender(Protocol):
    """Part of ``NumberedSender`` that a relay uses."""

    def log_end(self, queue: MessageQueue) -> int:
        """Return where the log of a queue's broker ends."""

    def is_sent(self, batch: NumberedBatch, log_end: int) -> bool:
        """Return True if a batch is stored and safe."""

    def try_send(
        self, batches: Sequence[NumberedBatch]
    ) -> list[tuple[NumberedBatch, MQMeshError | None]]:
        """Send batches, and return each with its error."""

    def writable_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic."""

    def close(self) -> None:
        """Close the connections."""


class _Blocked(msgspec.Struct):
    """Topic whose rows wait.

    Attributes:
        reason: Error of the last try.
        until_ms: Monotonic time of the next try.
        pause_ms: Pause after the last failure; the next failure doubles it.
    """

    reason: str
    until_ms: int
    pause_ms: int


class _Away(msgspec.Struct):
    """Broker group that did not answer.

    Attributes:
        error: Error of the last request.
        until_ms: Monotonic time of the next request.
        pause_ms: Pause after the last failure; the next failure doubles it.
    """

    error: MQMeshError
    until_ms: int
    pause_ms: int


class RelayTopics:
    """Queues of topics, topics whose rows wait, and broker groups that are away.

    Args:
        clock: Source of time.
        most_pause_ms: Longest pause after failures that may pass.
        lost_brokers: Broker groups whose queues are left out.

    Attributes:
        queues: Queues that may be written to, by topic, where they are known.
        log_ends: By broker group, where its log ended when they were looked up.
    """

    def __init__(self, clock: Clock, most_pause_ms: int, lost_brokers: Collection[str]) -> None:
        self._clock = clock
        self._most_pause_ms = most_pause_ms
        self._lost_brokers = lost_brokers
        self._since_ms = 0
        self._blocked: dict[str, _Blocked] = {}
        self._away: dict[str, _Away] = {}
        self.queues: dict[str, tuple[MessageQueue, ...]] = {}
        self.log_ends: dict[str, int] = {}

    def drop_old(self) -> bool:
        """Forget routes older than ``ROUTE_AGE_MS``; return True if they were forgotten."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._since_ms < ROUTE_AGE_MS:
            return False
        self._since_ms = now_ms
        self.forget_routes()
        return True

    def forget_routes(self) -> None:
        """Forget queues and ends of logs; rows have them looked up again."""
        self.queues.clear()
        self.log_ends.clear()

    def look_up(self, topic: str, sender: RowSender) -> bool:
        """Look the queues of a topic up; return False if it has to wait."""
        try:
            found = sender.writable_queues(topic)
            queues = tuple(one for one in found if one.broker_name not in self._lost_brokers)
            if not queues:
                raise NoRoute(f"topic {topic!r} has no queue that may be written to")
            for queue in queues:
                away = self.away(queue.broker_name)
                if away is not None:
                    raise away
            for queue in queues:
                if queue.broker_name not in self.log_ends:
                    self.log_ends[queue.broker_name] = self.ask_log_end(queue, sender)
        except MQMeshError as error:
            self.block(topic, str(error), error)
            return False
        self.queues[topic] = queues
        return True

    def ask_log_end(self, queue: MessageQueue, sender: RowSender) -> int:
        """Return where the log of a queue's broker ends; note whether it answers."""
        began_ms = self._clock.monotonic_ms()
        try:
            found = sender.log_end(queue)
        except MQMeshError as error:
            self.note_failure(queue.broker_name, error, began_ms)
            raise
        self.note_answer(queue.broker_name)
        return found

    def note_failure(self, broker: str, error: MQMeshError, began_ms: int) -> None:
        """Ask a broker group that did not answer no more for a while, for no topic.

        Args:
            broker: Its name.
            error: Error of a request; others than those of a broker that is away do not count.
            began_ms: Monotonic time of the request: a pause is as long as the wait for it, too.
        """
        if not error.retriable or not isinstance(error, TransportError | BrokerNotAvailable):
            return
        now_ms = self._clock.monotonic_ms()
        before = self._away.get(broker)
        if before is None or before.until_ms <= now_ms:
            pause_ms = RETRY_MS if before is None else before.pause_ms * 2
            pause_ms = min(max(pause_ms, now_ms - began_ms), self._most_pause_ms)
            self._away[broker] = _Away(error, now_ms + pause_ms, pause_ms)

    def note_answer(self, broker: str) -> None:
        """Forget the failures of a broker group."""
        self._away.pop(broker, None)

    def away(self, broker: str) -> MQMeshError | None:
        """Return why a broker group gets no requests now; None if it may get some."""
        found = self._away.get(broker)
        return found.error if found and found.until_ms > self._clock.monotonic_ms() else None

    def has_failed(self, broker: str) -> bool:
        """Return True if the last request to a broker group had no answer."""
        return broker in self._away

    def block(self, topic: str, reason: str, error: MQMeshError) -> None:
        """Let the rows of a topic wait, longer after each failure."""
        first, most, level = REFUSED_MS, REFUSED_MAX_MS, logging.ERROR
        if error.retriable:
            first, most, level = RETRY_MS, self._most_pause_ms, logging.WARNING
        now_ms = self._clock.monotonic_ms()
        before = self._blocked.get(topic)
        if before is None or before.until_ms <= now_ms:
            pause_ms = first if before is None else max(first, min(before.pause_ms * 2, most))
            before = self._blocked[topic] = _Blocked(reason, now_ms + pause_ms, pause_ms)
            if len(self._blocked) > MOST_REMEMBERED:
                del self._blocked[next(iter(self._blocked))]
        self.queues.pop(topic, None)
        _log.log(level, "rows of topic %r wait for %d ms: %s", topic, before.pause_ms, reason)

    def unblock(self, topic: str) -> None:
        """Forget the failures of a topic."""
        self._blocked.pop(topic, None)

    def waiting(self) -> list[str]:
        """Return the topics that wait now."""
        now_ms = self._clock.monotonic_ms()
        return [topic for topic, one in self._blocked.items() if one.until_ms > now_ms]

    def reasons(self) -> dict[str, str]:
        """Return the topics whose last try failed, each with the reason."""
        return {topic: one.reason for topic, one in list(self._blocked.items())}
