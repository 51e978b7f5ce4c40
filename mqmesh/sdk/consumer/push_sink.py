"""Sink of a push consumer: messages of one queue on their way through the listener."""

from collections.abc import Callable

from mqmesh.sdk.consumer.consumer_options import PushConsumerOptions
from mqmesh.sdk.consumer.fetching.process_queue import ProcessQueue, StateSpan
from mqmesh.sdk.consumer.fetching.pull_loop import QueueSink
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService
from mqmesh.sdk.consumer.listening.consume_work import QueueWork, Waiting
from mqmesh.sdk.consumer.listening.orderly_queue import OrderlyQueue


class PushSink(QueueSink):
    """The messages of one queue on their way through the listener.

    Args:
        start: Queue offset to begin at.
        options: Settings of the consumer.
        service: Has listeners called.
        make_work: Makes the queue's side of the work.
    """

    def __init__(
        self,
        start: int,
        options: PushConsumerOptions,
        service: ConsumeService,
        make_work: Callable[[], QueueWork],
    ) -> None:
        self._options = options
        self._service = service
        self._make_work = make_work
        self._process = ProcessQueue(start, options.flow_limits())
        self._work = make_work()
        self._since_ms: dict[int, int] = {}
        self._reported: set[int] = set()

    @property
    def next_offset(self) -> int:
        """Queue offset to pull next."""
        return self._process.next_offset

    def has_room(self) -> bool:
        """Return True when more may be pulled; from any thread."""
        return self._process.has_room()

    def take(self, batches: list[PulledBatch], next_offset: int, size_bytes: int) -> None:
        """Takes pulled batches and has them consumed."""
        span = self._process.add(batches, next_offset, size_bytes)
        if span is not None:
            self._service.submit(self._work, batches, span)

    def move(self, offset: int, *, by_admin: bool = False) -> None:
        """Goes on at another offset; held messages are dropped."""
        before, self._work = self._work, self._make_work()
        self._service.revoke(before)
        self._service.follow(self._work, before)
        self._process = ProcessQueue(offset, self._options.flow_limits())
        self._since_ms.clear()
        self._reported.clear()

    def commit_offset(self) -> int:
        """Return the queue offset before which all is done."""
        return self._process.commit_offset()

    def finish(self, first: int, last: int) -> None:
        """Mark messages done that a listener still has: they are committed."""
        self._process.finish(first, last)

    def held(self) -> tuple[int, int]:
        """Return how many messages are not done, and about how many bytes they have."""
        return self._process.held()

    def drop(self) -> None:
        """Hands out nothing more."""
        self._service.revoke(self._work)

    def is_idle(self) -> bool:
        """Return True when no listener is at work that others must wait for."""
        return self._service.is_idle(self._work)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back when ``is_idle`` is true, after ``drop``."""
        self._service.when_idle(self._work, callback)

    def overdue(
        self, now_ms: int, waiting: dict[QueueWork, Waiting]
    ) -> list[tuple[int, StateSpan]]:
        """Return messages that are with the listener for longer than ``consume_timeout_ms``.

        Args:
            now_ms: Monotonic clock.
            waiting: Messages that no worker has begun.

        Returns:
            Queue offsets, each given once, and where the states are kept.
        """
        left = waiting.get(self._work, Waiting())
        if isinstance(self._work, OrderlyQueue):
            left = Waiting(self._work.begun_offset)
        begun = self._process.open_before(left.first, left.again)
        self._since_ms = {offset: self._since_ms.get(offset, now_ms) for offset, _ in begun}
        self._reported &= self._since_ms.keys()
        until_ms = now_ms - self._options.consume_timeout_ms
        late = [
            one
            for one in begun
            if self._since_ms[one[0]] <= until_ms and one[0] not in self._reported
        ]
        self._reported.update(offset for offset, _ in late)
        return late

    def begun_ms(self, offset: int) -> int | None:
        """Return since when the listener has a message, monotonic; None for less than a second."""
        return self._since_ms.get(offset)
