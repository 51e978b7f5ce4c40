"""Messages on their way out: natural batching, one request in flight a queue.

While batches of a queue are in flight, what comes next for it gathers in the
next batch; so batches grow with the load by themselves and cost no waiting. A
queue is in one request at a time, so a retry can never be overtaken by what was
sent after it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.batch.payload import Payload
from mqmesh.errors import ClientClosed, QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.admission import (
    MESSAGE_OVERHEAD_BYTES,
    STRING_OVERHEAD_BYTES,
    make_admission,
)
from mqmesh.sdk.producer.lanes import Lane, PlainOpenBatch, TopicLanes, next_lane
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_result import OnDone, PendingBatch, SendFuture
from mqmesh.transport.interface import Loop

DEADLINE_SPREAD_MS: Final = 250
"""Messages share a batch only if their deadlines are no further from the first one's."""
AT_TIMES: Final = -1
"""In place of a delay level: each message says when it is due."""
BATCHES_A_FLIGHT: Final = 4
"""Most batches of one queue in a request; brokers recognise more than these as repeated."""


class SendBuffer:
    """All lanes of a producer. Thread-safe; ``lock`` also guards the batches' outcomes.

    Args:
        options: The producer's: its room, and what batches may grow to. A message is let in while
            there is any room, so the last one may go beyond.
        loop: The client loop, whose thread must not wait for room.
        give_way: See ``SendPace.give_way``.

    Attributes:
        topics: Lanes of the topics that were sent to before; read it, never change it.
        join: See ``PlainAdmission.join``.
    """

    def __init__(
        self, options: ProducerOptions, loop: Loop, give_way: Callable[[int], None]
    ) -> None:
        self.lock = threading.Lock()
        self.topics: dict[str, TopicLanes] = {}
        self._room = threading.Condition(self.lock)
        self._max_bytes = options.buffer_memory_bytes
        self._usual_retries = options.retry_times_when_send_async_failed
        self._max_batch_bytes = options.batch_size_bytes
        self._max_batch_messages = options.batch_messages
        self._loop = loop
        self._admission = make_admission(
            self.topics, self.lock, loop.clock.monotonic_ns, give_way, options
        )
        self.join = self._admission.join
        self._closed = False
        self._lanes: dict[MessageQueue, Lane] = {}
        self._ready: dict[str, deque[Lane]] = {}

    @property
    def pending_bytes(self) -> int:
        """Bytes of all messages without an outcome."""
        return self._admission.bytes

    # ---- Lanes -----------------------------------------------------------------------

    def topic_lanes(
        self,
        queues: tuple[MessageQueue, ...],
        start: int,
        avoid: Callable[[TopicLanes], frozenset[str]],
    ) -> TopicLanes:
        """The lanes of some queues; arguments as of ``TopicLanes``."""
        with self.lock:
            lanes = tuple(self._lanes.setdefault(queue, Lane(queue)) for queue in queues)
        return TopicLanes(queues, lanes, start, avoid)

    def lane(self, queue: MessageQueue) -> Lane:
        """The lane of one queue."""
        with self.lock:
            return self._lanes.setdefault(queue, Lane(queue))

    def next_lane(self, topic: TopicLanes, avoid: frozenset[str] = frozenset()) -> Lane:
        """The next lane of a topic by round robin: idle ones first, none of a broker to avoid."""
        with self.lock:
            return next_lane(topic, avoid)

    # ---- In ----------------------------------------------------------------------------

    def append(
        self,
        lane: Lane | None,
        topic: TopicLanes | None,
        message: Message,
        size: int,
        deadline_ms: int,
        on_done: OnDone | None,
        retries: int,
        bound: bool,
        wait_store: bool = True,
    ) -> tuple[SendFuture, Lane]:
        """Adds a message to its lane's open batch, or to that of the topic's sticky lane.

        Args:
            lane: Where to, or None for the sticky lane of ``topic``.
            topic: The topic's lanes; needed without a lane.
            message: Checked.
            size: Its ``message_size``.
            deadline_ms: Monotonic; also for waiting until there is room.
            on_done: Called with the future when it is done.
            retries: How often its batch may be sent again.
            bound: It may go to this lane's queue only.
            wait_store: It wants to be on disk and at the slave, as the broker's mode says.

        Returns:
            The message's future, and the lane it went to.

        Raises:
            QueueFull: There is no room in time.
            ClientClosed: After ``close``.
        """
        with self.lock:
            if self._admission.bytes >= self._max_bytes or self._closed:
                self._wait_for_room(deadline_ms)
            if lane is None:
                assert topic is not None
                lane = topic.sticky
                # Rather not with messages that cannot leave when this broker fails.
                if (lane.open is None or lane.open.bound) and len(topic.lanes) > 1:
                    lane = next_lane(topic, topic.avoid(topic))
            batch = lane.open
            if (
                batch is None
                or batch.size + size > self._max_batch_bytes
                or not 0 <= batch.deadline_max_ms - deadline_ms <= 2 * DEADLINE_SPREAD_MS
                or batch.pending.wait_store is not wait_store
                or batch.pending.retries != retries
                or batch.pending.delay != delay_of(message)
            ):
                batch = self._open(lane, deadline_ms, retries, wait_store, delay_of(message))
            elif deadline_ms > batch.deadline_ms:
                batch.deadline_ms = deadline_ms
            messages = batch.messages
            future = SendFuture(batch.pending, len(messages))
            messages.append(message)
            batch.size += size
            self._admission.bytes += size
            if bound:
                batch.bound = True
            if on_done is not None:
                batch.pending.callbacks.append((on_done, future))
            if batch.size >= self._max_batch_bytes or len(messages) >= self._max_batch_messages:
                lane.close_open()
        return future, lane

    def append_batch(
        self,
        lane: Lane | None,
        topic: TopicLanes,
        payload: Payload,
        deadline_ms: int,
        on_done: OnDone | None,
        retries: int,
        delay: int = 0,
        due_times: bytes = b"",
    ) -> tuple[SendFuture, Lane]:
        """Adds an explicit batch, which stays one batch; errors as of ``append``.

        Args:
            lane: Where it must go, or None for the next lane of ``topic``.
            topic: The topic's lanes.
            payload: The messages.
            deadline_ms, on_done, retries: As for ``append``.
            delay, due_times: See ``PendingBatch``.

        Returns:
            The batch's future, and the lane it went to.
        """
        size = len(payload.data)
        bound = lane is not None
        with self.lock:
            if self._admission.bytes >= self._max_bytes or self._closed:
                self._wait_for_room(deadline_ms)
            if lane is None:
                lane = next_lane(topic, topic.avoid(topic))
            batch = PendingBatch(
                self.lock, lane.queue, deadline_ms, bound, payload.message_count, retries, True
            )
            batch.payload, batch.size = payload, size
            if delay:
                batch.delay, batch.due_times = delay, due_times
            future = SendFuture(batch, 0)
            if on_done is not None:
                batch.callbacks.append((on_done, future))
            if not (lane.in_flight or lane.listed):
                self._list(lane)
            self._admission.bytes += size
            lane.close_open()
            lane.closed.append(batch)
        return future, lane

    def stop_joins(self) -> None:
        """``join`` and the fast path let nothing in any more. Needs no lock: also after a fork."""
        self._admission.admitted_bytes = -1

    def wait_room(self, deadline_ms: int) -> None:
        """Waits until the buffer is below its bound.

        Raises:
            QueueFull, ClientClosed: As ``append``.
        """
        with self.lock:
            self._wait_for_room(deadline_ms)

    # ---- Past the buffer ----------------------------------------------------------------

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
        """A batch of one message for a lane to be claimed; not in the buffer's account."""
        batch = PendingBatch(self.lock, lane.queue, deadline_ms, bound, 0, retries, wait_store)
        batch.messages.append(message)
        batch.size = message_size(message)
        batch.delay = delay_of(message)
        return batch

    def claim(self, lane: Lane, batch: PendingBatch) -> bool:
        """Takes an idle lane for a batch that goes past the buffer.

        Returns:
            False when something waits or is in flight there.

        Raises:
            ClientClosed: After ``close``.
        """
        with self.lock:
            if self._closed:
                raise _closed()
            if not lane.idle:
                return False
            lane.in_flight = 1
            lane.claimant = batch
            return True

    def unclaim(self, lane: Lane, batch: PendingBatch) -> bool:
        """Gives a claimed lane back; nothing happens if it is not the batch's (any more).

        Returns:
            True when something waits there that can be sent now.
        """
        with self.lock:
            if lane.claimant is not batch:
                return False
            return self._release(lane)

    def adopt(self, lane: Lane, batch: PendingBatch) -> bool:
        """Takes a batch that went past the buffer into its account; the lane stays in flight.

        Returns:
            False when the batch has given its lane back.
        """
        with self.lock:
            if lane.claimant is not batch:
                return False
            lane.claimant = None
            self._admission.bytes += batch.size
            return True

    # ---- Out ---------------------------------------------------------------------------

    def ready_brokers(self) -> list[str]:
        """Brokers that something can be sent to."""
        with self.lock:
            return [name for name, lanes in self._ready.items() if lanes]

    def take(
        self, broker_name: str, max_bytes: int, max_batches: int
    ) -> list[tuple[Lane, PendingBatch]]:
        """Takes the next batches for a broker, a few of each lane, which is in flight then.

        A broker that refuses one refuses all later ones of its queue in the same request, so
        they keep their order also when some of them must be repeated.
        """
        taken: list[tuple[Lane, PendingBatch]] = []
        size = 0
        with self.lock:
            lanes = self._ready.get(broker_name)
            while lanes and len(taken) < max_batches:
                lane = lanes[0]
                room = min(BATCHES_A_FLIGHT, max_batches - len(taken))
                while room and (batch := lane.first()) is not None:
                    if taken and size + batch.size > max_bytes:
                        break
                    lane.pop_first()
                    lane.in_flight += 1
                    size += batch.size
                    room -= 1
                    taken.append((lane, batch))
                if not lane.in_flight and lane.waits:
                    break  # the request is full; the lane is first in the next one
                lanes.popleft()
                lane.listed = False
        return taken

    def take_late(self, broker_name: str, now_ms: int) -> list[PendingBatch]:
        """Takes what waits for a broker and has passed its deadline."""
        late: list[PendingBatch] = []
        with self.lock:
            for lane in self._ready.get(broker_name, ()):
                while (batch := lane.first()) is not None and batch.deadline_ms <= now_ms:
                    late.append(batch)
                    lane.pop_first()
        return late

    def ready_lanes(self, broker_name: str) -> list[Lane]:
        """The lanes of a broker that something can be taken from."""
        with self.lock:
            return list(self._ready.get(broker_name, ()))

    def take_free(self, lane: Lane, others: frozenset[str]) -> list[PendingBatch]:
        """Takes the batches of a lane, in order, that some other broker might take."""
        taken: list[PendingBatch] = []
        with self.lock:
            lane.close_open()
            for batches in (lane.returned, lane.closed):
                for _ in range(len(batches)):
                    batch = batches.popleft()
                    stays = batch.bound or others <= batch.holders
                    (batches if stays else taken).append(batch)
        return taken

    def unlist_empty(self, broker_name: str) -> None:
        """Takes lanes off the list that ``take_late`` or ``take_free`` left empty."""
        with self.lock:
            lanes = self._ready.get(broker_name, ())
            for lane in lanes:
                lane.listed = lane.waits
            self._ready[broker_name] = deque(lane for lane in lanes if lane.listed)

    # ---- Back ---------------------------------------------------------------------------

    def release(self, lane: Lane) -> bool:
        """Ends the flight of one of a lane's batches.

        Returns:
            True when more waits there that can be sent now.
        """
        with self.lock:
            return self._release(lane)

    def put_back(self, lane: Lane, batch: PendingBatch) -> None:
        """Puts a batch back into its lane, to be sent again before all that were not sent yet."""
        with self.lock:
            place = len(lane.returned)
            # Those of the same flight may have come back in another order.
            while place and lane.returned[place - 1].first_sequence > batch.first_sequence:
                place -= 1
            lane.returned.insert(place, batch)
            if not (lane.in_flight or lane.listed):
                self._list(lane)

    def move(self, lane: Lane, batch: PendingBatch) -> None:
        """Puts a batch of another queue behind the closed ones of a lane."""
        with self.lock:
            if batch.queue != lane.queue:
                batch.queue = lane.queue
                batch.encoded = None  # the queue id is part of it
            lane.closed.append(batch)
            if not (lane.in_flight or lane.listed):
                self._list(lane)

    def end_stored(
        self, items: Sequence[tuple[Lane, PendingBatch]], outcomes: Sequence[BatchOutcome]
    ) -> list[PendingBatch]:
        """Ends the flights of batches that are stored: ``release``, ``settle`` and ``finish``.

        All at once, since the lock is dear while many threads send.

        Returns:
            Batches that the caller has to ``tell``.
        """
        first = []
        with self.lock:
            for (lane, batch), outcome in zip(items, outcomes, strict=True):
                self._release(lane)
                self._admission.bytes -= batch.size
                if batch.conclude(outcome, None):
                    first.append(batch)
            self._room.notify_all()
        return first

    def settle(self, batch: PendingBatch) -> None:
        """Gives back the room of a batch that has its outcome."""
        with self.lock:
            self._admission.bytes -= batch.size
            self._room.notify_all()

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until every message has its outcome; False when that takes too long."""
        with self.lock:
            return self._room.wait_for(lambda: self._admission.bytes == 0, timeout_s)

    def close(self) -> list[PendingBatch]:
        """Lets nothing in any more, and takes out every batch that is not in flight."""
        with self.lock:
            self._closed = True
            self.stop_joins()
            found: list[PendingBatch] = []
            for lane in self._lanes.values():
                lane.close_open()
                found += [*lane.returned, *lane.closed]
                lane.returned.clear()
                lane.closed.clear()
                lane.listed = False
            self._ready.clear()
            self._room.notify_all()
            return found

    # ---- With the lock held -------------------------------------------------------------

    def _wait_for_room(self, deadline_ms: int) -> None:
        while self._admission.bytes >= self._max_bytes and not self._closed:
            left_ms = deadline_ms - self._loop.clock.monotonic_ms()
            if left_ms <= 0 or self._loop.in_loop_thread:
                raise QueueFull(
                    f"{self._admission.bytes} bytes wait to be sent; the limit is "
                    f"{self._max_bytes} (buffer_memory_bytes)"
                )
            self._room.wait(left_ms / 1_000)
        if self._closed:
            raise _closed()

    def _open(
        self, lane: Lane, deadline_ms: int, retries: int, wait_store: bool, delay: int
    ) -> PlainOpenBatch:
        # Listed first: Ctrl-C may strike anywhere, and an empty lane in the list does no harm.
        if not (lane.in_flight or lane.listed):
            self._list(lane)
        lane.close_open()
        latest_ms = deadline_ms + DEADLINE_SPREAD_MS
        batch = PendingBatch(self.lock, lane.queue, latest_ms, False, 0, retries, wait_store)
        batch.delay = delay
        is_usual = wait_store and retries == self._usual_retries and not delay
        lane.open = self._admission.batch_type(
            batch, batch.messages, deadline_ms, latest_ms, is_usual
        )
        return lane.open

    def _release(self, lane: Lane) -> bool:
        lane.claimant = None
        lane.in_flight -= 1
        if lane.in_flight:
            return False
        if not lane.waits:
            return False
        if not lane.listed:
            self._list(lane)
        return True

    def _list(self, lane: Lane) -> None:
        lane.listed = True
        self._ready.setdefault(lane.queue.broker_name, deque()).append(lane)


def delay_of(message: Message) -> int:
    """What messages of one batch have in common: the level, ``AT_TIMES``, or 0 for no delay."""
    return AT_TIMES if message.deliver_at_ms else message.delay_level


def message_size(message: Message) -> int:
    """What a message is taken to need, in bytes; about as much as on the wire."""
    size = len(message.body) + MESSAGE_OVERHEAD_BYTES
    texts = [text for text in (message.tag, message.sharding_key) if text is not None]
    if message.keys:
        texts += message.keys
    if message.properties is not None:
        texts += message.properties
        texts += message.properties.values()
    for text in texts:
        length = len(text) if text.isascii() else len(text.encode())
        size += length + STRING_OVERHEAD_BYTES
    return size


def _closed() -> ClientClosed:
    return ClientClosed("the producer is closed")
