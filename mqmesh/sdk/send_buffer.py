"""Messages on their way out: natural batching, one batch in flight a queue.

While a queue's batch is in flight, what comes next for it gathers in the next
batch; so batches grow with the load by themselves and cost no waiting. With
one batch in flight a queue, a retry can never overtake what was sent after it.
"""

import threading
import time
from collections import deque
from typing import Final

from mqmesh.errors import QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.send_result import OnDone, PendingBatch, SendFuture

MESSAGE_OVERHEAD_BYTES: Final = 64
"""What a message is taken to need beside its body."""
LANES_LOOKED_AT: Final = 8
"""How many queues are looked at for an idle one."""


class Lane:
    """What waits for one message queue; guarded by the buffer's lock."""

    __slots__ = ("closed", "in_flight", "listed", "open", "queue")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.open: PendingBatch | None = None
        self.closed: deque[PendingBatch] = deque()
        self.in_flight = False
        self.listed = False


class TopicLanes:
    """The lanes of a topic's writable queues, and the one that keyless messages stick to."""

    __slots__ = ("brokers", "index", "lanes", "members", "queues", "sticky")

    def __init__(
        self, queues: tuple[MessageQueue, ...], lanes: tuple[Lane, ...], index: int
    ) -> None:
        self.queues = queues
        self.members = frozenset(queues)
        self.brokers = frozenset(queue.broker_name for queue in queues)
        self.lanes = lanes
        self.index = index
        self.sticky = lanes[index % len(lanes)]


class SendBuffer:
    """All lanes of a producer. Thread-safe; ``lock`` also guards the batches' outcomes.

    Args:
        max_bytes: Room for messages without an outcome.
        max_batch_bytes: A batch is closed beyond it.
        max_batch_messages: A batch is closed at so many messages.
    """

    def __init__(self, *, max_bytes: int, max_batch_bytes: int, max_batch_messages: int) -> None:
        self.lock = threading.Lock()
        self._room = threading.Condition(self.lock)
        self._max_bytes = max_bytes
        self._max_batch_bytes = max_batch_bytes
        self._max_batch_messages = max_batch_messages
        self._bytes = 0
        self._lanes: dict[MessageQueue, Lane] = {}
        self._ready: dict[str, deque[Lane]] = {}

    @property
    def pending_bytes(self) -> int:
        """Bytes of all messages without an outcome."""
        return self._bytes

    def topic_lanes(self, queues: tuple[MessageQueue, ...], start: int) -> TopicLanes:
        """The lanes of some queues.

        Args:
            queues: At least one.
            start: Where the round robin begins.
        """
        with self.lock:
            lanes = tuple(self._lanes.setdefault(queue, Lane(queue)) for queue in queues)
        return TopicLanes(queues, lanes, start)

    def lane(self, queue: MessageQueue) -> Lane:
        """The lane of one queue."""
        with self.lock:
            return self._lanes.setdefault(queue, Lane(queue))

    def append(
        self,
        lane: Lane | None,
        topic: TopicLanes | None,
        message: Message,
        deadline_ms: int,
        on_done: OnDone | None,
        retries: int,
        wait_store: bool = True,
    ) -> tuple[SendFuture, Lane]:
        """Adds a message to its lane's open batch, or to that of the topic's sticky lane.

        Returns:
            The message's future, and the lane it went to.
        """
        size = len(message.body) + MESSAGE_OVERHEAD_BYTES
        with self.lock:
            bound = lane is not None
            if lane is None:
                assert topic is not None
                lane = topic.sticky
                if lane.open is None and len(topic.lanes) > 1:
                    lane = _next_lane(topic)
            batch = lane.open
            if batch is None or batch.wait_store is not wait_store or batch.retries != retries:
                if batch is not None:
                    self._close(lane)
                batch = lane.open = PendingBatch(
                    self.lock,
                    lane.queue,
                    deadline_ms,
                    bound=bound,
                    explicit=False,
                    retries=retries,
                    wait_store=wait_store,
                )
                if not (lane.in_flight or lane.listed):
                    self._list(lane)
            else:
                # The batch lives as long as its youngest message may wait.
                batch.deadline_ms = deadline_ms
                batch.bound |= bound
            messages = batch.messages
            future = SendFuture(batch, len(messages))
            messages.append(message)
            batch.size += size
            self._bytes += size
            if on_done is not None:
                batch.callbacks.append((on_done, future))
            if batch.size >= self._max_batch_bytes or len(messages) >= self._max_batch_messages:
                self._close(lane)
        return future, lane

    def append_batch(
        self,
        lane: Lane,
        messages: list[Message],
        deadline_ms: int,
        on_done: OnDone | None,
        *,
        bound: bool,
        retries: int,
        wait_store: bool = True,
    ) -> SendFuture:
        """Adds an explicit batch, which stays one batch."""
        batch = PendingBatch(
            self.lock,
            lane.queue,
            deadline_ms,
            bound=bound,
            explicit=True,
            retries=retries,
            wait_store=wait_store,
        )
        batch.messages = messages
        batch.size = sum(map(_body_size, messages)) + MESSAGE_OVERHEAD_BYTES * len(messages)
        future = SendFuture(batch, 0)
        with self.lock:
            self._bytes += batch.size
            if on_done is not None:
                batch.callbacks.append((on_done, future))
            self._close(lane)
            lane.closed.append(batch)
            if not (lane.in_flight or lane.listed):
                self._list(lane)
        return future

    def lone_batch(
        self,
        lane: Lane,
        message: Message,
        deadline_ms: int,
        *,
        bound: bool,
        retries: int,
        wait_store: bool,
    ) -> PendingBatch:
        """A batch of one message for a claimed lane, which is not in the buffer's account."""
        batch = PendingBatch(
            self.lock,
            lane.queue,
            deadline_ms,
            bound=bound,
            explicit=False,
            retries=retries,
            wait_store=wait_store,
        )
        batch.messages.append(message)
        batch.size = len(message.body) + MESSAGE_OVERHEAD_BYTES
        return batch

    def next_lane(self, topic: TopicLanes, avoid: frozenset[str] = frozenset()) -> Lane:
        """The next lane of a topic by round robin: idle ones first, none of a broker to avoid."""
        with self.lock:
            return _next_lane(topic, avoid)

    def claim(self, lane: Lane) -> bool:
        """Takes an idle lane for a send that goes past the buffer.

        Returns:
            False when something waits or is in flight there.
        """
        with self.lock:
            if lane.in_flight or lane.open is not None or lane.closed:
                return False
            lane.in_flight = True
            return True

    def release(self, lane: Lane) -> bool:
        """Ends a lane's flight.

        Returns:
            True when more waits there.
        """
        with self.lock:
            lane.in_flight = False
            more = lane.open is not None or bool(lane.closed)
            if more and not lane.listed:
                self._list(lane)
            return more

    def account(self, batch: PendingBatch) -> None:
        """Counts a batch that went past the buffer so far."""
        with self.lock:
            self._bytes += batch.size

    def settle(self, batch: PendingBatch) -> None:
        """Gives back the room of a batch that has its outcome."""
        with self.lock:
            self._bytes -= batch.size
            self._room.notify_all()

    def put_back(self, lane: Lane, batch: PendingBatch) -> None:
        """Puts a batch at the head of a lane, of the same queue or another, to be sent again."""
        with self.lock:
            if batch.queue != lane.queue:
                batch.queue = lane.queue
                batch.encoded = None  # the queue id is part of it
            lane.closed.appendleft(batch)
            if not (lane.in_flight or lane.listed):
                self._list(lane)

    def ready_brokers(self) -> list[str]:
        """Brokers that something can be sent to."""
        with self.lock:
            return [name for name, lanes in self._ready.items() if lanes]

    def take(
        self, broker_name: str, max_bytes: int, max_batches: int
    ) -> list[tuple[Lane, PendingBatch]]:
        """Takes the next batches for a broker, one a lane, and marks their lanes as in flight."""
        taken: list[tuple[Lane, PendingBatch]] = []
        size = 0
        with self.lock:
            lanes = self._ready.get(broker_name)
            while lanes and len(taken) < max_batches:
                lane = lanes[0]
                batch = lane.closed[0] if lane.closed else lane.open
                if batch is not None:
                    if taken and size + batch.size > max_bytes:
                        break
                    if lane.closed:
                        lane.closed.popleft()
                    else:
                        lane.open = None
                    lane.in_flight = True
                    size += batch.size
                    taken.append((lane, batch))
                lanes.popleft()
                lane.listed = False
        return taken

    def wait_room(self, timeout_ms: int) -> None:
        """Waits until the buffer is below its bound.

        Args:
            timeout_ms: 0 does not wait.

        Raises:
            QueueFull: There is no room in time.
        """
        if self._bytes < self._max_bytes:
            return
        deadline = time.monotonic() + timeout_ms / 1_000
        with self.lock:
            while self._bytes >= self._max_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or not self._room.wait(left):
                    raise QueueFull(
                        f"{self._bytes} bytes wait to be sent; the limit is {self._max_bytes} "
                        "(buffer_memory_bytes)"
                    )

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until every message has its outcome; False when that takes too long."""
        with self.lock:
            return self._room.wait_for(lambda: self._bytes == 0, timeout_s)

    def drain(self) -> list[PendingBatch]:
        """Takes out every batch that is not in flight, for closing."""
        with self.lock:
            found: list[PendingBatch] = []
            for lane in self._lanes.values():
                self._close(lane)
                found += lane.closed
                lane.closed.clear()
            self._ready.clear()
            return found

    def _close(self, lane: Lane) -> None:
        if lane.open is not None:
            lane.closed.append(lane.open)
            lane.open = None

    def _list(self, lane: Lane) -> None:
        lane.listed = True
        self._ready.setdefault(lane.queue.broker_name, deque()).append(lane)


def _next_lane(topic: TopicLanes, avoid: frozenset[str] = frozenset()) -> Lane:
    lanes, count = topic.lanes, len(topic.lanes)
    chosen: int | None = None
    # A bounded look-round: with 10,000 queues the choice must not cost more than with 4.
    for step in range(1, min(count, LANES_LOOKED_AT) + 1):
        index = (topic.index + step) % count
        lane = lanes[index]
        if lane.queue.broker_name in avoid:
            continue
        if chosen is None:
            chosen = index
        if not lane.in_flight and lane.open is None and not lane.closed:
            chosen = index
            break
    if chosen is None:
        # Rare: all of the next ones belong to brokers to avoid.
        allowed = (i for i, lane in enumerate(lanes) if lane.queue.broker_name not in avoid)
        chosen = next(allowed, (topic.index + 1) % count)
    topic.index = chosen
    topic.sticky = lanes[chosen]
    return topic.sticky


def _body_size(message: Message) -> int:
    return len(message.body)
