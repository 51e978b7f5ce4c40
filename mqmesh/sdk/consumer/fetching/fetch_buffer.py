"""Messages that were pulled and wait for the application to poll them."""

from collections import deque
from collections.abc import Callable

from mqmesh.errors import CorruptBatch, UndecodableMessages
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import FlowLimits
from mqmesh.sdk.consumer.fetching.pull_loop import QueueSink
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.transport.interface import Condition


class FetchBuffer(QueueSink):
    """Buffer of one queue of a pull consumer.

    The client loop fills it, the application's threads empty it, both under the lock
    of ``changed``.

    Args:
        start: Queue offset to begin at.
        limits: When to stop pulling for a while.
        changed: Its lock is held whenever the messages are touched.
        on_arrival: Called under that lock when messages have come.
        on_broken: Called under that lock, once, when a batch cannot be decoded; nothing behind
            it is handed out, and polls raise the error.

    Attributes:
        position: Queue offset of the next message that a poll returns.
        acked: All before this queue offset is done, as far as the application said.
        paused: Polls pass it over.
        dropped: The queue was given away.
    """

    def __init__(
        self,
        start: int,
        limits: FlowLimits,
        changed: Condition,
        on_arrival: Callable[[], None],
        on_broken: Callable[[PulledBatch, CorruptBatch], UndecodableMessages],
    ) -> None:
        self.position = start
        self.acked = start
        self.paused = False
        self.dropped = False
        self._limits = limits
        self._changed = changed
        self._on_arrival = on_arrival
        self._on_broken = on_broken
        self._broken: UndecodableMessages | None = None
        self._sent_to: int | None = None
        self._next_offset = start
        self._waiting: deque[PulledBatch | list[StoredMessage]] = deque()
        self._count = 0
        self._size_bytes = 0

    @property
    def next_offset(self) -> int:
        """Queue offset to pull next."""
        return self._next_offset

    def has_room(self) -> bool:
        """Return True when more may be pulled."""
        with self._changed:
            return self._count < self._limits.messages and (
                self._size_bytes < self._limits.size_bytes
            )

    def take(self, batches: list[PulledBatch], next_offset: int, size_bytes: int) -> None:
        """Takes pulled batches."""
        with self._changed:
            self._next_offset = next_offset
            if batches:
                self._waiting.extend(batches)
                self._count += sum(batch.count for batch in batches)
                self._size_bytes += size_bytes
                self._on_arrival()
            elif not self._waiting:
                self.position = next_offset

    def move(self, offset: int, *, by_admin: bool = False) -> None:
        """Goes on at another offset; held messages are dropped."""
        with self._changed:
            self._sent_to = offset if by_admin else None
            self._clear()
            self._broken = None
            self._next_offset = self.position = self.acked = offset

    def acknowledge(self, offset: int) -> None:
        """Mark all before an offset done, for the application; under the lock of ``changed``.

        Offsets of messages that were polled before an administrator moved the group do not count.
        """
        if self._sent_to is None or self._sent_to <= offset <= self.position:
            self.acked = offset

    def commit_offset(self) -> int:
        """Return the queue offset before which all is done."""
        return self.acked

    def held(self) -> tuple[int, int]:
        """Return how many messages no poll has returned, and about how many bytes they have."""
        return self._count, self._size_bytes

    def polled(self) -> int:
        """Return how many messages polls returned that are not acknowledged."""
        return max(self.position - self.acked, 0)

    def drop(self) -> None:
        """Drops the held messages."""
        with self._changed:
            self.dropped = True
            self._clear()

    def poll(self, most: int, found: list[StoredMessage]) -> None:
        """Hands out messages; under the lock of ``changed``.

        Args:
            most: Most messages.
            found: List that they are added to.

        Raises:
            UndecodableMessages: The next one cannot be decoded, and none before it was found.
        """
        while self._waiting and most > 0:
            if self._broken is not None:
                if found:
                    return
                raise self._broken
            first = self._waiting[0]
            if isinstance(first, PulledBatch):
                self._decode(first)
                continue
            some = first[:most]
            if len(first) <= most:
                self._waiting.popleft()
            else:
                del first[:most]
            found += some
            most -= len(some)
            self._note_handed_out(len(some))
            # Behind the last message held there may be some that the filter left out.
            last = some[-1].queue_offset + 1
            self.position = last if self._waiting else self._next_offset

    def _decode(self, batch: PulledBatch) -> None:
        try:
            messages = batch.decode()
        except CorruptBatch as error:
            self._broken = self._on_broken(batch, error)
            return
        self._note_handed_out(batch.count - len(messages))
        if messages:
            self._waiting[0] = messages
            return
        self._waiting.popleft()
        self.position = batch.end if self._waiting else self._next_offset

    def _note_handed_out(self, count: int) -> None:
        if count:
            self._size_bytes -= self._size_bytes * count // self._count
            self._count -= count

    def _clear(self) -> None:
        self._waiting.clear()
        self._count = self._size_bytes = 0


class PollOrder:
    """Round robin of polls: each begins with the queue behind the one served last."""

    def __init__(self) -> None:
        self._last: MessageQueue | None = None

    def poll(self, buffers: dict[MessageQueue, FetchBuffer], most: int) -> list[StoredMessage]:
        """Takes up to ``most`` messages of all buffers; under their lock.

        Raises:
            UndecodableMessages: It is the turn of a queue whose next message cannot be decoded.
        """
        found: list[StoredMessage] = []
        queues = list(buffers)
        if self._last in buffers:
            start = queues.index(self._last) + 1
            queues = queues[start:] + queues[:start]
        for queue in queues:
            buffer = buffers[queue]
            if not buffer.paused:
                before = len(found)
                try:
                    buffer.poll(most - before, found)
                except UndecodableMessages:
                    self._last = queue  # the other queues have their turn first
                    raise
                if len(found) > before:
                    self._last = queue
                if len(found) == most:
                    break
        return found
