"""Table of the queues that a producer sends to, and of what can be sent of them now.

A queue is in one request at a time, so a retry can never be overtaken by what was
sent after it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.errors import ClientClosed
from mqmesh.message import MessageQueue
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.producer.lanes import Lane, TopicLanes
from mqmesh.sdk.producer.send_result import PendingBatch, Waits
from mqmesh.transport.interface import Transport

BATCHES_A_FLIGHT: Final = 4
"""Most batches of one queue in a request; brokers recognise more than these as repeated."""


class LaneTable:
    """The lanes of a producer, and which of them are ready. Thread-safe.

    Args:
        transport: The client's; makes the flags of waiting callers.

    Attributes:
        lock: Guards the lanes and everything in them.
        waits: Shared state of the batches; it has the lock, too.
        topics: Lanes of the topics that were sent to before.
        closed: After ``close``.
    """

    def __init__(self, transport: Transport) -> None:
        self.lock = ranked_lock(LockRank.LANES)
        self.waits = Waits(self.lock, transport.flag, transport.clock)
        self.topics: dict[str, TopicLanes] = {}
        self.closed = False
        self._lanes: dict[MessageQueue, Lane] = {}
        self._ready: dict[str, deque[Lane]] = {}

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

    # ---- Past the buffer ----------------------------------------------------------------

    def claim(self, lane: Lane, batch: PendingBatch) -> bool:
        """Takes an idle lane for a batch that goes past the buffer.

        Returns:
            False when something waits or is in flight there.

        Raises:
            ClientClosed: After ``close``.
        """
        with self.lock:
            if self.closed:
                raise closed_error()
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
            return self.land(lane)

    # ---- Out ---------------------------------------------------------------------------

    def ready_brokers(self) -> list[str]:
        """Return the brokers that something can be sent to."""
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
            self._unlist_empty(broker_name)
        return late

    def take_free(
        self, broker_name: str, others: Callable[[MessageQueue], frozenset[str]], now_ms: int
    ) -> list[tuple[Lane, PendingBatch]]:
        """Takes what waits for a broker, each queue's in order, and might go to another one.

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
                    for _ in range(len(batches)):
                        batch = batches.popleft()
                        stays = batch.bound or now_ms < batch.stays_until_ms
                        if stays or names <= batch.holders:
                            batches.append(batch)
                        else:
                            taken.append((lane, batch))
            self._unlist_empty(broker_name)
        return taken

    # ---- Back ---------------------------------------------------------------------------

    def put_back(self, lane: Lane, batch: PendingBatch) -> None:
        """Ends a batch's flight: it is sent again before all that were not sent yet."""
        with self.lock:
            place = len(lane.returned)
            # Those of the same flight may have come back in another order.
            while place and lane.returned[place - 1].first_sequence > batch.first_sequence:
                place -= 1
            lane.returned.insert(place, batch)
            self.land(lane)

    def move(self, lane: Lane, batch: PendingBatch, left: Lane | None = None) -> None:
        """Puts a batch, of another queue perhaps, behind the closed ones of a lane.

        Args:
            lane: Lane to add to.
            batch: The batch.
            left: The lane where it was in flight, if it was.
        """
        with self.lock:
            if left is not None:
                self.land(left)
            if batch.queue != lane.queue:
                batch.queue = lane.queue
                batch.encoded = None  # the queue id is part of it
            lane.closed.append(batch)
            self.list_ready(lane)

    # ---- With the lock held -------------------------------------------------------------

    def list_ready(self, lane: Lane) -> None:
        """List a lane in which something waits, or will soon: it can be taken unless it flies."""
        if not (lane.in_flight or lane.listed):
            lane.listed = True
            self._ready.setdefault(lane.queue.broker_name, deque()).append(lane)

    def land(self, lane: Lane) -> bool:
        """Ends the flight of one of a lane's batches.

        Returns:
            True when more waits there that can be sent now.
        """
        lane.claimant = None
        lane.in_flight -= 1
        if lane.in_flight or not lane.waits:
            return False
        self.list_ready(lane)
        return True

    def close(self) -> list[PendingBatch]:
        """Takes out every batch that is not in flight; nothing is claimed any more."""
        self.closed = True
        found: list[PendingBatch] = []
        for lane in self._lanes.values():
            lane.close_open()
            found += [*lane.returned, *lane.closed]
            lane.returned.clear()
            lane.closed.clear()
            lane.listed = False
        self._ready.clear()
        return found

    def _unlist_empty(self, broker_name: str) -> None:
        lanes = self._ready.get(broker_name)
        if lanes:
            for lane in lanes:
                lane.listed = lane.waits
            self._ready[broker_name] = deque(lane for lane in lanes if lane.listed)


def closed_error() -> ClientClosed:
    """Return the error of a closed table."""
    return ClientClosed("the producer is closed")
