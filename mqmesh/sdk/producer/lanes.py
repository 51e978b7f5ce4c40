"""Lanes: batches of each message queue, and the order of queues. Guarded by the buffer's lock."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.batch.payload import Payload
from mqmesh.errors import MQMeshError, RequestTimeout
from mqmesh.failure_text import error_to_log
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.transport.interface import Flag, Transport

LANES_LOOKED_AT: Final = 8
"""Most queues looked at for an idle one."""
GRACE_MS: Final = 1_000
"""Time after its deadline that an outcome may come, on a machine that is stuck."""

_log = logging.getLogger(__name__)


class PendingBatch(msgspec.Struct, eq=False):
    """Messages that travel together, from the call of send to their outcome.

    Attributes:
        lock: Its producer's: guards messages until their batch is taken for sending, and outcomes
            with those who wait for them.
        transport: Its producer's: makes something to wait for, and has the clock of deadlines.
        queue: Queue it goes to.
        deadline_ms: Deadline of its youngest message; the latest possible while it is open.
        bound: It must go to this queue and no other.
        explicit_count: Messages of a batch that its sender made, 0 for one that grew by itself.
        retries: Times it may be sent again.
        wait_store: It wants to be on disk and at the slave, as the broker's mode says.
        size: Memory charged for its messages, in bytes.
        payload: Its messages encoded, as soon as none is added any more.
        delay: Delay level of its messages, ``AT_TIMES`` for points in time, 0 for no delay.
        due_times: Those points in time; see ``delayed_batch.DelayedMeta``.
        ttl_ms: Time that its messages live, 0 for no limit.
        lane: Lane where it is in flight, None while it is in no request and waits for no retry.
        attempts: Number of sends that count.
        producer_id, first_sequence: Of its first message; -1 for none yet.
        born_timestamp: Time when it got these. All three stay if the batch goes to another queue,
            so that the same ids never stand for different bytes in one queue.
        encoded: All of it, as it goes to ``queue``.
        cause: Why it had to be sent again last.
        doubt: The error that left it unknown whether a broker has stored the batch.
        accepted: Outcome of a broker that has it, though not as safely as it should be.
        holders: Brokers that may have stored it.
        stays_until_ms: Monotonic time before which it is repeated at its broker group only.
        outcome, error: Result of the batch; one of them when it is done.
        event: Set when it is done, if a thread waits for it.
        callbacks: To be called then.
    """

    lock: threading.Lock
    transport: Transport
    queue: MessageQueue
    deadline_ms: int
    bound: bool
    explicit_count: int
    retries: int
    wait_store: bool
    messages: list[Message] = []
    size: int = 0
    payload: Payload | None = None
    delay: int = 0
    due_times: bytes = b""
    ttl_ms: int = 0
    lane: "Lane | None" = None
    attempts: int = 0
    producer_id: int = 0
    first_sequence: int = -1
    born_timestamp: int = 0
    encoded: tuple[bytes, ...] | None = None
    cause: MQMeshError | None = None
    doubt: MQMeshError | None = None
    accepted: tuple[MessageQueue, BatchOutcome] | None = None
    holders: frozenset[str] = frozenset()
    stays_until_ms: int = 0
    outcome: BatchOutcome | None = None
    error: MQMeshError | None = None
    event: Flag | None = None
    callbacks: list[Callable[[], object]] = []

    @property
    def message_count(self) -> int:
        """Number of its messages, until its outcome is reported."""
        return self.explicit_count or len(self.messages)

    @property
    def done(self) -> bool:
        """True once there is an outcome or an error."""
        return self.outcome is not None or self.error is not None

    def wait(self, timeout_s: float | None) -> None:
        """Waits until it is done; None for as long as its send can take.

        Raises:
            RequestTimeout: It is not done in time.
        """
        with self.lock:
            if self.done:
                return
            event = self.event = self.event or self.transport.flag()
        if timeout_s is None:
            # Also for waits in a callback, where no outcome comes.
            left_ms = self.deadline_ms + GRACE_MS - self.transport.clock.monotonic_ms()
            timeout_s = max(left_ms, 0) / 1_000
        if not event.wait(timeout_s):
            raise RequestTimeout(
                f"no outcome of the send within {timeout_s:.3f} s; whether the message was stored "
                "is unknown"
            )

    def notify(self) -> None:
        """Wakes and calls everybody who waits for the outcome, without the lock."""
        # Programs may hold futures for long; sent messages need not stay with them.
        self.messages, self.payload, self.encoded = [], None, None
        if self.event is not None:
            self.event.set()
        if not self.callbacks:
            return
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            try:
                callback()
            except BaseException:
                # After any error, SystemExit too, the other callbacks must be called.
                _log.error("a callback of a send failed", exc_info=error_to_log())


class PlainOpenBatch:
    """The open batch of a lane, which messages may join. Guarded by the buffer's lock.

    Args:
        pending: The batch that it is to be.
        messages: Messages of ``pending``.
        deadline_ms: Of its first message, monotonic.
        deadline_max_ms: Messages with later deadlines belong into another batch.
        usual: An asynchronous send without options of its own may join it.

    Attributes:
        size: Memory charged for its messages, in bytes.
        deadline_ms: Of its youngest message.
        bound: It must go to its lane's queue and no other.
    """

    __slots__ = (
        "bound",
        "deadline_max_ms",
        "deadline_ms",
        "messages",
        "pending",
        "size",
        "usual",
    )

    def __init__(
        self,
        pending: PendingBatch,
        messages: list[Message],
        deadline_ms: int,
        deadline_max_ms: int,
        usual: bool,
    ) -> None:
        self.pending = pending
        self.messages = messages
        self.size = 0
        self.deadline_ms = deadline_ms
        self.deadline_max_ms = deadline_max_ms
        self.usual = usual
        self.bound = False


class Lane:
    """Batches that wait for one message queue; guarded by the buffer's lock.

    Attributes:
        open: The batch that takes further messages.
        closed: Batches before it, not sent to this queue yet.
        returned: Batches before those, to be sent again; in the order of their first tries.
        in_flight: Batches of the queue that are at the broker, or wait for their next try.
        lingers: The open batch waits for more messages before it may leave.
        listed: The lane stands among those that something can be taken from.
    """

    __slots__ = ("closed", "in_flight", "lingers", "listed", "open", "queue", "returned")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.open: PlainOpenBatch | None = None
        self.closed: deque[PendingBatch] = deque()
        self.returned: list[PendingBatch] = []  # a flight's at most, and seldom any
        self.in_flight = 0
        self.lingers = False
        self.listed = False

    @property
    def waits(self) -> bool:
        """Something waits to be sent."""
        return self.open is not None or bool(self.closed) or bool(self.returned)

    @property
    def idle(self) -> bool:
        """True when nothing waits, and nothing is in flight."""
        return not (self.in_flight or self.open is not None or self.closed or self.returned)

    def close_open(self) -> None:
        """Close the open batch: nothing more joins it."""
        if self.open is not None:
            self.closed.append(self._end_open(self.open))
        self.lingers = False

    @property
    def first(self) -> PendingBatch | PlainOpenBatch:
        """The batch that is sent next, while something waits."""
        if self.returned:
            return self.returned[0]
        if self.closed:
            return self.closed[0]
        assert self.open is not None
        return self.open

    def pop_first(self) -> PendingBatch:
        """Take out the batch that is sent next, which nothing joins any more."""
        if self.returned:
            return self.returned.pop(0)
        if self.closed:
            return self.closed.popleft()
        assert self.open is not None
        self.lingers = False
        return self._end_open(self.open)

    def _end_open(self, found: PlainOpenBatch) -> PendingBatch:
        self.open = None
        batch = found.pending
        batch.size, batch.deadline_ms, batch.bound = found.size, found.deadline_ms, found.bound
        return batch


class TopicLanes:
    """The lanes of a topic's writable queues, and the one that keyless messages stick to.

    Args:
        queues: At least one.
        lanes: Theirs.
        index: Start of the round robin.
        avoid: Names of brokers to keep away from just now; called with the lock held.

    Attributes:
        brokers: Names of the queues' brokers.
        lane_of: The lane of each queue.
        sticky: The lane that keyless messages go to now.
        levels: Lanes of each priority, the lowest first; () for a topic without priorities. Of
            one with them ``lanes`` are those of the lowest, since messages without a priority go
            there.
    """

    __slots__ = ("avoid", "brokers", "index", "lane_of", "lanes", "levels", "queues", "sticky")

    def __init__(
        self,
        queues: tuple[MessageQueue, ...],
        lanes: tuple[Lane, ...],
        index: int,
        avoid: Callable[["TopicLanes"], frozenset[str]],
    ) -> None:
        self.queues = queues
        self.lane_of = dict(zip(queues, lanes, strict=True))
        self.brokers = frozenset(queue.broker_name for queue in queues)
        self.lanes = lanes
        self.index = index
        self.sticky = lanes[index % len(lanes)]
        self.avoid = avoid
        self.levels: tuple[TopicLanes, ...] = ()

    def divide(self) -> None:
        """Divide the lanes by priority, the id of their queue."""
        levels: dict[int, list[Lane]] = {}
        for queue, lane in self.lane_of.items():
            levels.setdefault(queue.queue_id, []).append(lane)
        self.levels = tuple(
            TopicLanes(tuple(one.queue for one in lanes), tuple(lanes), self.index, self.avoid)
            for _, lanes in sorted(levels.items())
        )
        self.lanes, self.sticky = self.levels[0].lanes, self.levels[0].sticky


def next_lane(topic: TopicLanes, avoid: frozenset[str] | None = None) -> Lane:
    """Chooses the next lane of a topic by round robin, and makes it the sticky one.

    Args:
        topic: The topic's lanes.
        avoid: Names of brokers to avoid; if there are no others, the lane is one of theirs all the
            same. By default those of ``topic.avoid``.

    Returns:
        Rather an idle lane, if there is one among the next few.
    """
    if avoid is None and len(topic.brokers) > 1:
        avoid = topic.avoid(topic)
    lanes, count = topic.lanes, len(topic.lanes)
    index = (topic.index + 1) % count
    lane = lanes[index]
    # As ``idle``, without a call: this is the way of nearly all lone sends.
    if not (avoid or lane.in_flight or lane.open is not None or lane.closed or lane.returned):
        topic.index, topic.sticky = index, lane
        return lane
    chosen: int | None = None
    # A bounded look-round: with 10,000 queues the choice must not cost more than with 4.
    for step in range(1, min(count, LANES_LOOKED_AT) + 1):
        index = (topic.index + step) % count
        lane = lanes[index]
        if avoid and lane.queue.broker_name in avoid:
            continue
        if chosen is None:
            chosen = index
        if lane.idle:
            chosen = index
            break
    if chosen is None:
        # Rare: all of the next ones belong to brokers to avoid.
        following = ((topic.index + step) % count for step in range(1, count + 1))
        chosen = next(
            (i for i in following if lanes[i].queue.broker_name not in (avoid or ())),
            (topic.index + 1) % count,
        )
    topic.index = chosen
    topic.sticky = lanes[chosen]
    return topic.sticky
