"""Messages on their way out join batches here, as long as there is room for them.

While batches of a queue are in flight, what comes next for it gathers in the
next batch; so batches grow with the load by themselves and cost no waiting.
"""

from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.batch.payload import Payload
from mqmesh.errors import QueueFull
from mqmesh.message import Message
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.admission import (
    MESSAGE_OVERHEAD_BYTES,
    STRING_OVERHEAD_BYTES,
    make_admission,
)
from mqmesh.sdk.producer.lane_table import LaneTable, closed_error
from mqmesh.sdk.producer.lanes import Lane, PlainOpenBatch, TopicLanes, next_lane
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_result import OnDone, PendingBatch, SendFuture, Waits
from mqmesh.transport.interface import Transport

DEADLINE_SPREAD_MS: Final = 250
"""Messages share a batch only if their deadlines are no further from the first one's."""
AT_TIMES: Final = -1
"""Value in place of a delay level: each message says when it is due."""


class SendBuffer:
    """Buffer of a producer's messages, and its capacity. Thread-safe.

    Args:
        options: The producer's: its room, and what batches may grow to. A message is let in while
            there is any room, so the last one may go beyond.
        transport: The client's; the thread of its loop must not wait for room.
        give_way: See ``SendPace.give_way``.

    Attributes:
        lanes: Table of waiting messages; its lock guards the room, too, and the batches' outcomes.
        join: See ``PlainAdmission.join``.
    """

    def __init__(
        self, options: ProducerOptions, transport: Transport, give_way: Callable[[int], None]
    ) -> None:
        loop = transport.loop
        self.lanes = LaneTable(transport)
        self.lock = self.lanes.lock
        self._room = transport.condition(self.lock)
        self._max_bytes = options.buffer_memory_bytes
        self._usual_retries = options.retry_times_when_send_async_failed
        self._max_batch_bytes = options.batch_size_bytes
        self._max_batch_messages = options.batch_messages
        self._loop = loop
        self._admission = make_admission(
            self.lanes.topics, self.lock, loop.clock.monotonic_ns, give_way, options
        )
        self.join = self._admission.join

    @property
    def pending_bytes(self) -> int:
        """Bytes of all messages without an outcome."""
        return self._admission.bytes

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
            lane: Lane, or None for the sticky lane of ``topic``.
            topic: The topic's lanes; needed without a lane.
            message: Checked.
            size: Its ``message_size``.
            deadline_ms: Monotonic; also for waiting until there is room.
            on_done: Called with the future when it is done.
            retries: Times its batch may be sent again.
            bound: It may go to this lane's queue only.
            wait_store: It wants to be on disk and at the slave, as the broker's mode says.

        Returns:
            The message's future, and the lane it went to.

        Raises:
            QueueFull: There is no room in time.
            ClientClosed: After ``close``.
        """
        with self.lock:
            if self._admission.bytes >= self._max_bytes or self.lanes.closed:
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
            lane: Lane it must go to, or None for the next lane of ``topic``.
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
            if self._admission.bytes >= self._max_bytes or self.lanes.closed:
                self._wait_for_room(deadline_ms)
            if lane is None:
                lane = next_lane(topic, topic.avoid(topic))
            batch = PendingBatch(
                self.lanes.waits,
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
            future = SendFuture(batch, 0)
            if on_done is not None:
                batch.callbacks.append((on_done, future))
            self.lanes.list_ready(lane)
            self._admission.bytes += size
            lane.close_open()
            lane.closed.append(batch)
        return future, lane

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

    def end_stored(
        self, items: Sequence[tuple[Lane, PendingBatch]], outcomes: Sequence[BatchOutcome]
    ) -> list[PendingBatch]:
        """Ends the flights of batches that are stored: ``settle`` and ``finish``.

        All at once, since the lock is dear while many threads send.

        Returns:
            Batches that the caller has to ``tell``.
        """
        first = []
        with self.lock:
            for (lane, batch), outcome in zip(items, outcomes, strict=True):
                self.lanes.land(lane)
                self._admission.bytes -= batch.size
                if batch.conclude(outcome, None):
                    first.append(batch)
            self._room.notify_all()
        return first

    def settle(self, batch: PendingBatch, lane: Lane | None = None) -> None:
        """Gives back the room of a batch that has its outcome, and ends its flight.

        Args:
            batch: In the account.
            lane: Lane where it is in flight, if it is.
        """
        with self.lock:
            if lane is not None:
                self.lanes.land(lane)
            self._admission.bytes -= batch.size
            self._room.notify_all()

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

    def wait_empty(self, timeout_s: float) -> bool:
        """Waits until every message has its outcome; False when that takes too long."""
        with self.lock:
            return self._room.wait_for(lambda: self._admission.bytes == 0, timeout_s)

    def close(self) -> list[PendingBatch]:
        """Lets nothing in any more, and takes out every batch that is not in flight."""
        with self.lock:
            self.stop_joins()
            self._room.notify_all()
            return self.lanes.close()

    # ---- With the lock held -------------------------------------------------------------

    def _wait_for_room(self, deadline_ms: int) -> None:
        while self._admission.bytes >= self._max_bytes and not self.lanes.closed:
            left_ms = deadline_ms - self._loop.clock.monotonic_ms()
            if left_ms <= 0 or self._loop.in_loop_thread:
                raise QueueFull(
                    f"{self._admission.bytes} bytes wait to be sent; the limit is "
                    f"{self._max_bytes} (buffer_memory_bytes)"
                )
            self._room.wait(left_ms / 1_000)
        if self.lanes.closed:
            raise closed_error()

    def _open(
        self, lane: Lane, deadline_ms: int, retries: int, wait_store: bool, delay: int
    ) -> PlainOpenBatch:
        # Listed first: Ctrl-C may strike anywhere, and an empty lane in the list does no harm.
        self.lanes.list_ready(lane)
        lane.close_open()
        latest_ms = deadline_ms + DEADLINE_SPREAD_MS
        batch = PendingBatch(self.lanes.waits, lane.queue, latest_ms, False, 0, retries, wait_store)
        batch.delay = delay
        is_usual = wait_store and retries == self._usual_retries and not delay
        lane.open = self._admission.batch_type(
            batch, batch.messages, deadline_ms, latest_ms, is_usual
        )
        return lane.open


def lone_batch(
    waits: Waits,
    lane: Lane,
    message: Message,
    deadline_ms: int,
    *,
    bound: bool,
    retries: int,
    wait_store: bool,
) -> PendingBatch:
    """Return a batch of one message for a lane to be claimed; not in the buffer's account."""
    batch = PendingBatch(waits, lane.queue, deadline_ms, bound, 0, retries, wait_store)
    batch.messages.append(message)
    batch.size = message_size(message)
    batch.delay = delay_of(message)
    return batch


def delay_of(message: Message) -> int:
    """Return the delay that a batch's messages share: the level, ``AT_TIMES``, or 0 for none."""
    return AT_TIMES if message.deliver_at_ms else message.delay_level


def message_size(message: Message) -> int:
    """Return the memory charged for a message, in bytes; about as much as on the wire."""
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
