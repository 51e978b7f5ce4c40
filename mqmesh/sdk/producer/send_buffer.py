"""Messages on their way out: they join batches here, and leave from the lanes of their queues.

While batches of a queue are in flight, new messages for it gather in the next batch; so batches
grow with the load by themselves and cost no waiting. A queue is in one request at a time, so later
messages can never overtake a retry.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.batch.payload import Payload
from mqmesh.errors import ClientClosed, MQMeshError, QueueFull
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.producer.admission import (
    MESSAGE_OVERHEAD_BYTES,
    STRING_OVERHEAD_BYTES,
    make_admission,
)
from mqmesh.sdk.producer.lanes import Lane, PendingBatch, PlainOpenBatch, TopicLanes, next_lane
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_result import OnDone, SendFuture
from mqmesh.transport.interface import Transport

BATCHES_A_FLIGHT: Final = 4
"""Most batches of one queue in a request; brokers recognise more than these as repeated."""
DEADLINE_SPREAD_MS: Final = 250
"""Messages share a batch only if their deadlines are no further from the first one's."""
NO_QUEUE: Final = MessageQueue("", "", 0)
"""Queue of a batch that has none yet."""
AT_TIMES: Final = -1
"""Value in place of a delay level: each message says when it is due."""


class SendBuffer:
    """Buffer of a producer's messages: its capacity, and its lanes. Thread-safe.

    Args:
        options: The producer's: its room, and what batches may grow to. A message is let in while
            there is any room, so the last one may go beyond.
        transport: The client's; the thread of its loop must not wait for room.
        give_way: See ``SendPace.give_way``.

    Attributes:
        lock: Guards the lanes and everything in them, the room, and the batches' outcomes.
        topics: Lanes of the topics that were sent to before.
        closed: After ``close``.
        join: See ``PlainAdmission.join``.
    """

    def __init__(
        self, options: ProducerOptions, transport: Transport, give_way: Callable[[int], None]
    ) -> None:
        self.lock = ranked_lock(LockRank.LANES)
        self.topics: dict[str, TopicLanes] = {}
        self.closed = False
        self._transport = transport
        self._loop = transport.loop
        self._room = transport.condition(self.lock)
        self._room_wanted = 0
        self._max_bytes = options.buffer_memory_bytes
        self._usual_retries = options.retry_times_when_send_async_failed
        self._max_batch_bytes = options.batch_size_bytes
        self._max_batch_messages = options.batch_messages
        self._linger_ms = options.linger_ms
        self._lingering: deque[tuple[int, Lane, PendingBatch]] = deque()
        self._has_company = False
        self._lanes: dict[MessageQueue, Lane] = {}
        self._ready: dict[str, deque[Lane]] = {}
        self._admission = make_admission(
            self.topics, self.lock, self._loop.clock.monotonic_ns, give_way, options
        )
        self.join = self._admission.join

    @property
    def pending_bytes(self) -> int:
        """Bytes of all messages without an outcome."""
        return self._admission.bytes

    @property
    def is_quiet(self) -> bool:
        """True while messages come one by one: none is without an outcome, the last one was alone.

        Where several come together they share a request, and none of them leaves before the others.
        """
        return not (self._admission.bytes or self._has_company)

    def topic_lanes(
        self,
        queues: tuple[MessageQueue, ...],
        start: int,
        avoid: Callable[[TopicLanes], frozenset[str]],
    ) -> TopicLanes:
        """Return the lanes of some queues; arguments as of ``TopicLanes``."""
        with self.lock:
            lanes = tuple(self._lanes.setdefault(queue, Lane(queue)) for queue in queues)
        return TopicLanes(queues, lanes, start, avoid)

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
        ttl_ms: int = 0,
    ) -> tuple[SendFuture, Lane]:
        """Adds a message to its lane's open batch, or to that of the topic's sticky lane.

        Args:
            lane: Lane, or None for the sticky lane of ``topic``.
            topic: The topic's lanes; needed without a lane.
            message: Checked.
            size: Its ``message_size``.
            deadline_ms: Monotonic; also for waiting until there is room.
            on_done: Called with the future when it is done.
            retries: Times its batch may be sent again.
            bound: It may go to this lane's queue only.
            wait_store: It wants to be on disk and at the slave, as the broker's mode says.
            ttl_ms: Time that it lives, 0 for no limit; that of its whole batch.

        Returns:
            The message's future, and the lane it went to.

        Raises:
            QueueFull: There is no room in time.
            ClientClosed: After ``close``.
        """
        delay = delay_of(message)
        with self.lock:
            if self._admission.bytes >= self._max_bytes or self.closed:
                self._wait_for_room(deadline_ms)
            if lane is None:
                assert topic is not None
                lane = topic.sticky
                # Rather not with messages that cannot leave when this broker fails.
                if (lane.open is None or lane.open.bound) and len(topic.lanes) > 1:
                    lane = next_lane(topic)
            batch = lane.open
            if (
                batch is None
                or batch.size + size > self._max_batch_bytes
                or not 0 <= batch.deadline_max_ms - deadline_ms <= 2 * DEADLINE_SPREAD_MS
                or batch.pending.wait_store is not wait_store
                or batch.pending.retries != retries
                or batch.pending.delay != delay
                or batch.pending.ttl_ms != ttl_ms
            ):
                batch = self._open(lane, deadline_ms, retries, wait_store, delay, ttl_ms)
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
                batch.pending.callbacks.append(partial(on_done, future))
            if batch.size >= self._max_batch_bytes or len(messages) >= self._max_batch_messages:
                lane.close_open()
                self._list_ready(lane)
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
        ttl_ms: int = 0,
    ) -> tuple[SendFuture, Lane]:
        """Adds an explicit batch, which stays one batch; errors as of ``append``.

        Args:
            lane: Lane it must go to, or None for the next lane of ``topic``.
            topic: The topic's lanes.
            payload: The messages.
            deadline_ms, on_done, retries: As for ``append``.
            delay, due_times, ttl_ms: See ``PendingBatch``.

        Returns:
            The batch's future, and the lane it went to.
        """
        size = len(payload.data)
        bound = lane is not None
        with self.lock:
            if self._admission.bytes >= self._max_bytes or self.closed:
                self._wait_for_room(deadline_ms)
            if lane is None:
                lane = next_lane(topic)
            batch = PendingBatch(
                self.lock,
                self._transport,
                lane.queue,
                deadline_ms,
                bound,
                payload.message_count,
                retries,
                True,
            )
            batch.payload, batch.size = payload, size
            if delay:
                batch.delay, batch.due_times = delay, due_times
            batch.ttl_ms = ttl_ms
            future = SendFuture(batch, 0)
            if on_done is not None:
                batch.callbacks.append(partial(on_done, future))
            lane.lingers = False
            self._list_ready(lane)
            self._admission.bytes += size
            lane.close_open()
            lane.closed.append(batch)
        return future, lane

    def lone_batch(
        self, message: Message, deadline_ms: int, retries: int, bound: bool, wait_store: bool
    ) -> PendingBatch:
        """Return a batch for ``claim``, of one message; arguments as of ``append``."""
        batch = PendingBatch(
            self.lock, self._transport, NO_QUEUE, deadline_ms, bound, 0, retries, wait_store
        )
        batch.messages.append(message)
        if message.deliver_at_ms or message.delay_level:
            batch.delay = delay_of(message)
        return batch

    def claim(self, batch: PendingBatch, lane: Lane | None, topic: TopicLanes) -> Lane | None:
        """Puts a lone message in flight at once, if the buffer ``is_quiet``.

        Args:
            batch: From ``lone_batch``.
            lane: Lane it must go to, or None for the next lane of ``topic``.
            topic: The topic's lanes.

        Returns:
            Its lane; None when the message has to be added, to share a request with others.

        Raises:
            ClientClosed: After ``close``.
        """
        size = message_size(batch.messages[0])
        with self.lock:
            if self.closed:
                raise closed_error()
            if self._admission.bytes or self._has_company:
                return None
            if lane is None:
                lane = next_lane(topic)
            if lane.in_flight or lane.open is not None or lane.closed or lane.returned:
                return None
            # No call in between: Ctrl-C must not strike in the middle of this.
            batch.queue, batch.lane, batch.size = lane.queue, lane, size
            lane.in_flight = 1
            self._admission.bytes += size
        return lane

    def stop_joins(self) -> None:
        """Stop ``join`` and the fast path. Needs no lock: also after a fork."""
        self._admission.admitted_bytes = -1

    def wait_room(self, deadline_ms: int) -> None:
        """Waits until the buffer is below its bound.

        Raises:
            QueueFull, ClientClosed: As ``append``.
        """
        with self.lock:
            self._wait_for_room(deadline_ms)

    def stop_lingering(self) -> None:
        """Let everything leave at once from now on."""
        with self.lock:
            self._linger_ms = 0
            for _, lane, _ in self._lingering:
                lane.lingers = False
                if lane.waits:
                    self._list_ready(lane)
            self._lingering.clear()

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until every message has its outcome; False when that takes too long."""
        with self.lock:
            self._room_wanted += 1
            try:
                return self._room.wait_for(lambda: self._admission.bytes == 0, timeout_s)
            finally:
                self._room_wanted -= 1

    def close(self) -> list[PendingBatch]:
        """Lets nothing in any more, and takes out every batch that is not in flight."""
        with self.lock:
            self.stop_joins()
            self.closed = True
            self._room.notify_all()
            found: list[PendingBatch] = []
            for lane in self._lanes.values():
                lane.close_open()
                found += [*lane.returned, *lane.closed]
                lane.returned.clear()
                lane.closed.clear()
                lane.listed = False
            self._ready.clear()
            self._lingering.clear()
        return found

    # ---- Out ---------------------------------------------------------------------------

    def end_linger(self, now_ms: int) -> int | None:
        """Let batches leave that have waited long enough; return when the next one has."""
        with self.lock:
            while self._lingering:
                due_ms, lane, batch = self._lingering[0]
                if lane.lingers and lane.open is not None and lane.open.pending is batch:
                    if due_ms > now_ms:
                        return due_ms
                    lane.lingers = False
                    self._list_ready(lane)
                self._lingering.popleft()
        return None

    def ready_brokers(self) -> list[str]:
        """Return the brokers that something can be sent to."""
        with self.lock:
            return [name for name, lanes in self._ready.items() if lanes]

    def take(self, broker_name: str, max_bytes: int, max_batches: int) -> list[PendingBatch]:
        """Takes the next batches for a broker, a few of each lane, which is in flight then.

        A broker that refuses one refuses all later ones of its queue in the same request, so
        they keep their order also when some of them must be repeated.
        """
        taken: list[PendingBatch] = []
        size = 0
        with self.lock:
            lanes = self._ready.get(broker_name)
            while lanes and len(taken) < max_batches:
                lane = lanes[0]
                if lane.in_flight:
                    # Listed twice, or too early, by a thread that was interrupted.
                    lanes.popleft()
                    lane.listed = False
                    continue
                room = min(BATCHES_A_FLIGHT, max_batches - len(taken))
                while room and lane.waits:
                    if taken and size + lane.first.size > max_bytes:
                        break
                    batch = lane.pop_first()
                    lane.in_flight += 1
                    batch.lane = lane
                    size += batch.size
                    room -= 1
                    taken.append(batch)
                if not lane.in_flight and lane.waits:
                    break  # the request is full; the lane is first in the next one
                lanes.popleft()
                lane.listed = False
        return taken

    def take_late(self, broker_name: str, now_ms: int) -> list[PendingBatch]:
        """Takes batches that wait for a broker and have passed their deadline."""
        late: list[PendingBatch] = []
        with self.lock:
            for lane in self._ready.get(broker_name, ()):
                while lane.waits and lane.first.deadline_ms <= now_ms:
                    late.append(lane.pop_first())
            self._unlist_empty(broker_name)
        return late

    def take_free(
        self, broker_name: str, others: Callable[[MessageQueue], frozenset[str]], now_ms: int
    ) -> list[tuple[Lane, PendingBatch]]:
        """Takes batches that wait for a broker, each queue's in order, and might go to another one.

        Args:
            broker_name: It is away.
            others: Other brokers that a queue's batches may go to; called with the lock held.
            now_ms: Monotonic time.
        """
        taken: list[tuple[Lane, PendingBatch]] = []
        with self.lock:
            for lane in self._ready.get(broker_name, ()):
                names = others(lane.queue)
                if not names:
                    continue
                lane.close_open()
                for batches in (lane.returned, lane.closed):
                    waiting = list(batches)
                    batches.clear()
                    for batch in waiting:
                        stays = batch.bound or now_ms < batch.stays_until_ms
                        if stays or names <= batch.holders:
                            batches.append(batch)
                        else:
                            taken.append((lane, batch))
            self._unlist_empty(broker_name)
        return taken

    # ---- Back ---------------------------------------------------------------------------

    def end(self, batch: PendingBatch, result: BatchOutcome | MQMeshError) -> bool:
        """Ends a batch with the lock held: its flight, its room, and the wait for its outcome.

        Returns:
            True when it had no result yet; the caller has to ``notify`` it, without the lock.
        """
        is_first = batch.outcome is None and batch.error is None
        if is_first:
            is_outcome = isinstance(result, BatchOutcome)
            # No call in between: Ctrl-C must not strike in the middle of this.
            if is_outcome:
                batch.outcome = result  # type: ignore[assignment]
            else:
                batch.error = result  # type: ignore[assignment]
            self._admission.bytes -= batch.size
            self._has_company = len(batch.messages) > 1
        self._land(batch)
        if self._room_wanted:
            self._room.notify_all()
        return is_first

    def put_back(self, batch: PendingBatch) -> None:
        """Ends a batch's flight: it is sent again before all that were not sent yet.

        Raises:
            ClientClosed: After ``close``; the batch stays in flight, and the caller ends it.
        """
        with self.lock:
            lane = batch.lane
            if lane is None:
                return  # it was ended meanwhile
            if self.closed:
                raise closed_error()
            place = len(lane.returned)
            # Those of the same flight may have come back in another order.
            while place and lane.returned[place - 1].first_sequence > batch.first_sequence:
                place -= 1
            lane.returned.insert(place, batch)
            self._land(batch)

    def move(self, lane: Lane, batch: PendingBatch) -> None:
        """Puts a batch, of another queue perhaps, behind the closed ones of a lane."""
        with self.lock:
            self._land(batch)
            if batch.done:
                return
            if batch.queue != lane.queue:
                batch.queue = lane.queue
                batch.encoded = None  # the queue id is part of it
            lane.closed.append(batch)
            self._list_ready(lane)

    # ---- With the lock held -------------------------------------------------------------

    def _wait_for_room(self, deadline_ms: int) -> None:
        while self._admission.bytes >= self._max_bytes and not self.closed:
            left_ms = deadline_ms - self._loop.clock.monotonic_ms()
            if left_ms <= 0 or self._loop.in_loop_thread:
                raise QueueFull(
                    f"{self._admission.bytes} bytes wait to be sent; the limit is "
                    f"{self._max_bytes} (buffer_memory_bytes)"
                )
            self._room_wanted += 1
            try:
                self._room.wait(left_ms / 1_000)
            finally:
                self._room_wanted -= 1
        if self.closed:
            raise closed_error()

    def _open(
        self,
        lane: Lane,
        deadline_ms: int,
        retries: int,
        wait_store: bool,
        delay: int,
        ttl_ms: int,
    ) -> PlainOpenBatch:
        latest_ms = deadline_ms + DEADLINE_SPREAD_MS
        batch = PendingBatch(
            self.lock, self._transport, lane.queue, latest_ms, False, 0, retries, wait_store
        )
        batch.delay, batch.ttl_ms = delay, ttl_ms
        due_ms = self._due_ms(deadline_ms) if self._linger_ms else 0
        # Listed first: Ctrl-C may strike anywhere, and an empty lane in the list does no harm.
        if not due_ms or lane.open is not None:
            lane.lingers = False
            self._list_ready(lane)
        lane.close_open()
        if due_ms:
            lane.lingers = True
            self._lingering.append((due_ms, lane, batch))
        is_usual = wait_store and retries == self._usual_retries and not (delay or ttl_ms)
        lane.open = self._admission.batch_type(
            batch, batch.messages, deadline_ms, latest_ms, is_usual
        )
        return lane.open

    def _due_ms(self, deadline_ms: int) -> int:
        """Return until when a new batch waits for more messages; 0 where that takes too long."""
        due_ms = self._loop.clock.monotonic_ms() + self._linger_ms
        return due_ms if due_ms + DEADLINE_SPREAD_MS <= deadline_ms else 0

    def _list_ready(self, lane: Lane, *, landing: int = 0) -> None:
        """List a lane in which something waits, or will soon: it can be taken unless it flies.

        Args:
            lane: Lane.
            landing: Flights of it that end now.
        """
        if lane.lingers and not (lane.closed or lane.returned):
            return
        if lane.in_flight <= landing and not lane.listed:
            ready = self._ready.get(lane.queue.broker_name)
            if ready is None:
                ready = self._ready[lane.queue.broker_name] = deque()
            ready.append(lane)
            lane.listed = True

    def _land(self, batch: PendingBatch) -> None:
        """End the flight of a batch, if it is in flight; the next one of its lane is ready then."""
        lane = batch.lane
        if lane is None:
            return
        # First listed and then landed: Ctrl-C in between leaves it in flight, to be ended again.
        if lane.open is not None or lane.closed or lane.returned:
            self._list_ready(lane, landing=1)
        batch.lane = None
        lane.in_flight -= 1

    def _unlist_empty(self, broker_name: str) -> None:
        lanes = self._ready.get(broker_name)
        if lanes:
            for lane in lanes:
                lane.listed = lane.waits
            self._ready[broker_name] = deque(lane for lane in lanes if lane.listed)


def closed_error() -> ClientClosed:
    """Return the error of a closed buffer."""
    return ClientClosed("the producer is closed")


def delay_of(message: Message) -> int:
    """Return the delay that a batch's messages share: the level, ``AT_TIMES``, or 0 for none."""
    return AT_TIMES if message.deliver_at_ms else message.delay_level


def message_size(message: Message) -> int:
    """Return the memory charged for a message, in bytes; about as much as on the wire."""
    size = len(message.body) + MESSAGE_OVERHEAD_BYTES
    texts = [*message.keys] if message.keys else []
    if message.tag is not None:
        texts.append(message.tag)
    if message.sharding_key is not None:
        texts.append(message.sharding_key)
    if message.properties is not None:
        texts += message.properties
        texts += message.properties.values()
    for text in texts:
        length = len(text) if text.isascii() else len(text.encode())
        size += length + STRING_OVERHEAD_BYTES
    return size
