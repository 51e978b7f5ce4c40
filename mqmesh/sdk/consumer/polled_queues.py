"""Queues of a pull consumer, as polls see them."""

import logging
from collections.abc import Callable, Iterable, Mapping

from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, InvalidArgument, UndecodableMessages
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.sdk.consumer.fetching.fetch_buffer import FetchBuffer, PollOrder
from mqmesh.sdk.consumer.fetching.process_queue import FlowLimits
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.transport.interface import Condition

_log = logging.getLogger(__name__)


class PolledQueues:
    """Buffers of the queues that a pull consumer was given; from any thread.

    Args:
        changed: A condition for it alone: its lock guards the buffers.
        clock: Of the client.
        limits: Of each queue.
        counters: Counts undecodable batches.
        check_open: Raises ``ClientClosed`` when polls are to end.
        check_able: Raises an error when nothing can come as things are.

    Attributes:
        on_arrival: Called under the lock whenever a poll may find something.
    """

    def __init__(
        self,
        changed: Condition,
        clock: Clock,
        limits: FlowLimits,
        counters: PullCounters,
        check_open: Callable[[], None],
        check_able: Callable[[], None],
    ) -> None:
        self.on_arrival: Callable[[], None] = _nothing
        self._changed = changed
        self._clock = clock
        self._limits = limits
        self._counters = counters
        self._check_open = check_open
        self._check_able = check_able
        self._buffers: dict[MessageQueue, FetchBuffer] = {}
        self._order = PollOrder()

    def add(self, queue: MessageQueue, start: int) -> FetchBuffer:
        """Takes a queue on, from an offset; those that were given away meanwhile are forgotten."""

        def broken(batch: PulledBatch, error: CorruptBatch) -> UndecodableMessages:
            self._counters.corrupt_batches += 1
            undecodable = UndecodableMessages(
                f"messages {batch.first} to {batch.end - 1} of {queue} cannot be decoded; "
                f"seek({batch.end}) passes them over: {error}",
                topic=queue.topic,
                broker_name=queue.broker_name,
                queue_id=queue.queue_id,
                queue_offset=batch.first,
                next_offset=batch.end,
            )
            _log.error("%s", undecodable)
            return undecodable

        with self._changed:
            self._buffers = {other: one for other, one in self._buffers.items() if not one.dropped}
            buffer = self._buffers[queue] = FetchBuffer(
                start, self._limits, self._changed, self.wake, broken
            )
            self._changed.notify_all()
        return buffer

    def wake(self) -> None:
        """Has waiting polls look again; under the lock or not."""
        with self._changed:
            self._changed.notify_all()
            self.on_arrival()

    def poll(self, most: int, timeout_ms: int, *, auto_commit: bool) -> list[StoredMessage]:
        """Waits for messages.

        Args:
            most: Most messages.
            timeout_ms: Longest wait.
            auto_commit: Messages of earlier polls are done.

        Raises:
            ClientClosed, UndecodableMessages, NoPermission, TopicNotFound: As for
                ``PullConsumer.poll``.
        """
        until_ms: int | None = None
        with self._changed:
            self._check_open()  # a close before this wakes no poll
            if auto_commit:
                self._acknowledge_all()
            while not (found := self._order.poll(self._buffers, most)):
                self._check_able()
                now_ms = self._clock.monotonic_ms()
                if until_ms is None:
                    until_ms = now_ms + timeout_ms
                if now_ms >= until_ms:
                    return []
                self._changed.wait((until_ms - now_ms) / 1_000)
                self._check_open()
        return found

    def wait_ready(self, queues: Iterable[MessageQueue], timeout_ms: int) -> None:
        """Waits until all of these can be polled, or the consumer is to end."""
        wanted = list(queues)

        def ready() -> bool:
            self._check_open()
            self._check_able()
            return all(map(self._has, wanted))

        with self._changed:
            self._changed.wait_for(ready, timeout_ms / 1_000)

    def wait_change(self, timeout_ms: int) -> None:
        """Waits until anything changes."""
        with self._changed:
            self._changed.wait(timeout_ms / 1_000)

    def acknowledge(self, offsets: Mapping[MessageQueue, int] | None) -> None:
        """Marks messages done: all before these offsets; None: all that polls returned.

        Raises:
            InvalidArgument: A queue is not assigned.
        """
        with self._changed:
            if offsets is None:
                self._acknowledge_all()
                return
            for queue, offset in offsets.items():
                self.buffer(queue).acknowledge(offset)

    def buffer(self, queue: MessageQueue) -> FetchBuffer:
        """Return the buffer of a queue.

        Raises:
            InvalidArgument: It is not assigned.
        """
        if not self._has(queue):
            raise InvalidArgument(f"{queue} is not assigned to this consumer")
        return self._buffers[queue]

    def chosen(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Return these queues; all that are assigned if there are none.

        Raises:
            InvalidArgument: One is not assigned.
        """
        wanted = list(queues)
        for queue in wanted:
            self.buffer(queue)
        with self._changed:
            return wanted or [q for q, one in self._buffers.items() if not one.dropped]

    def set_paused(self, queues: Iterable[MessageQueue], paused: bool) -> None:
        """Has polls pass queues over, or not any more."""
        with self._changed:
            for queue in queues:
                self._buffers[queue].paused = paused
            self._changed.notify_all()

    def _has(self, queue: MessageQueue) -> bool:
        buffer = self._buffers.get(queue)
        return buffer is not None and not buffer.dropped

    def _acknowledge_all(self) -> None:
        for buffer in self._buffers.values():
            buffer.acked = buffer.position


def _nothing() -> None:
    """Do nothing."""
