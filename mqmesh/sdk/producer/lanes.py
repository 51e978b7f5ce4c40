"""Lanes: batches of each message queue, and the order of queues. Guarded by the table's lock."""

from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.producer.send_result import PendingBatch

LANES_LOOKED_AT: Final = 8
"""Most queues looked at for an idle one."""


class PlainOpenBatch:
    """The open batch of a lane: what may join it. Guarded by the table's lock.

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
    """Batches that wait for one message queue; guarded by the table's lock.

    Attributes:
        open: The batch that takes further messages.
        closed: Batches before it, not sent to this queue yet.
        returned: Batches before those, to be sent again; in the order of their first tries.
        in_flight: Batches of the queue that are at the broker, or wait for their next try.
        listed: The lane stands among those that something can be taken from.
        claimant: The batch that goes past the buffer just now.
    """

    __slots__ = ("claimant", "closed", "in_flight", "listed", "open", "queue", "returned")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.open: PlainOpenBatch | None = None
        self.closed: deque[PendingBatch] = deque()
        self.returned: deque[PendingBatch] = deque()
        self.in_flight = 0
        self.listed = False
        self.claimant: PendingBatch | None = None

    @property
    def waits(self) -> bool:
        """Something waits to be sent."""
        return self.open is not None or bool(self.closed) or bool(self.returned)

    @property
    def idle(self) -> bool:
        """True when nothing waits, and nothing is in flight."""
        return not self.in_flight and not self.waits

    def close_open(self) -> None:
        """Close the open batch: nothing more joins it."""
        found, self.open = self.open, None
        if found is not None:
            batch = found.pending
            batch.size, batch.deadline_ms, batch.bound = found.size, found.deadline_ms, found.bound
            self.closed.append(batch)

    def first(self) -> PendingBatch | None:
        """Return the batch to be sent next, which nothing joins any more."""
        if self.returned:
            return self.returned[0]
        if not self.closed:
            self.close_open()
        return self.closed[0] if self.closed else None

    def pop_first(self) -> None:
        """Takes it out."""
        if self.returned:
            self.returned.popleft()
        else:
            self.closed.popleft()


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
    """

    __slots__ = ("avoid", "brokers", "index", "lane_of", "lanes", "queues", "sticky")

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


def next_lane(topic: TopicLanes, avoid: frozenset[str]) -> Lane:
    """Chooses the next lane of a topic by round robin, and makes it the sticky one.

    Args:
        topic: The topic's lanes.
        avoid: Names of brokers; if there are no others, it is one of theirs all the same.

    Returns:
        Rather an idle lane, if there is one among the next few.
    """
    lanes, count = topic.lanes, len(topic.lanes)
    chosen: int | None = None
    # A bounded look-round: with 10,000 queues the choice must not cost more than with 4.
    for step in range(1, min(count, LANES_LOOKED_AT) + 1):
        index = (topic.index + step) % count
        lane = lanes[index]
        if avoid and lane.queue.broker_name in avoid:
            continue
        if chosen is None:
            chosen = index
        if not lane.in_flight and lane.idle:
            chosen = index
            break
    if chosen is None:
        # Rare: all of the next ones belong to brokers to avoid.
        following = ((topic.index + step) % count for step in range(1, count + 1))
        chosen = next(
            (i for i in following if lanes[i].queue.broker_name not in avoid),
            (topic.index + 1) % count,
        )
    topic.index = chosen
    topic.sticky = lanes[chosen]
    return topic.sticky
