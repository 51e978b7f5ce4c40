"""Routes of a producer's messages: the queues of each topic, and the next one."""

import logging
from collections.abc import Sequence
from typing import Any, Final

from mqmesh.errors import (
    AuthenticationFailed,
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    RequestTimeout,
    TopicNotFound,
)
from mqmesh.message import AUTO_CREATE_TOPIC, TRACE_TOPIC, Message, MessageQueue, describe
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.route_cache import why_not_writable
from mqmesh.sdk.producer.lanes import Lane, TopicLanes, next_lane
from mqmesh.sdk.producer.queue_selector import QueueSelector, queue_index
from mqmesh.sdk.producer.send_buffer import SendBuffer

POLL_MS = 50
"""Interval of looks for a route that is not there yet."""

LATENCY_MS: Final = (50, 100, 550, 1_000, 2_000, 3_000, 15_000)
NOT_AVAILABLE_MS: Final = (0, 0, 30_000, 60_000, 120_000, 180_000, 600_000)
ISOLATION_MS: Final = 30_000
"""Time for which an exception keeps a broker away."""

_NONE: Final[frozenset[str]] = frozenset()
_log = logging.getLogger(__name__)


def not_available_ms(latency_ms: float) -> int:
    """Return how long a broker that took so long for a send should be avoided, in ms."""
    for limit_ms, duration_ms in zip(reversed(LATENCY_MS), reversed(NOT_AVAILABLE_MS), strict=True):
        if latency_ms >= limit_ms:
            return duration_ms
    return 0


class FaultTable:
    """Latency fault tolerance: until when each broker is to be avoided. Pure."""

    def __init__(self) -> None:
        self._until_ms: dict[str, int] = {}
        self._epochs: dict[str, int] = {}

    def on_sent(self, broker_name: str, latency_ms: float, now_ms: int) -> None:
        """Takes note of an answered send."""
        duration_ms = not_available_ms(latency_ms)
        if duration_ms:
            self._until_ms[broker_name] = now_ms + duration_ms
        else:
            self._until_ms.pop(broker_name, None)

    def on_failed(self, broker_name: str, now_ms: int) -> None:
        """Takes note of a send that failed."""
        self._until_ms[broker_name] = now_ms + ISOLATION_MS

    def on_epoch(self, broker_name: str, epoch: int) -> None:
        """Note the epoch of a broker group's master: of a new one nothing bad is known."""
        if epoch > self._epochs.get(broker_name, 0):
            self._epochs[broker_name] = epoch
            self._until_ms.pop(broker_name, None)

    def is_available(self, broker_name: str, now_ms: int) -> bool:
        """Return False while the broker is to be avoided."""
        return self._until_ms.get(broker_name, 0) <= now_ms


class PublishRoutes:
    """Topics of one producer and the lanes of their queues.

    Args:
        engine: The client's engine.
        buffer: Holds the lanes.
        avoid_slow: Keep away from brokers that were slow or failed, for a while.

    Attributes:
        topics: Lanes of the topics that were sent to before; read it, never change it.
    """

    def __init__(self, engine: ClientEngine, buffer: SendBuffer, *, avoid_slow: bool) -> None:
        self._engine = engine
        self._buffer = buffer
        self._faults = FaultTable() if avoid_slow else None
        self.topics = buffer.topics
        self._lock = ranked_lock(LockRank.ROUTES)

    def lanes(self, topic: str, deadline_ms: int) -> TopicLanes:
        """Return the lanes of a topic; wait for its route if need be.

        Raises:
            NoRoute: No broker is known that would take messages of the topic; at once where none
                may be written to, and in the client loop, which cannot wait.
        """
        lanes = self.topics.get(topic)
        if lanes is not None:
            return lanes
        if self._engine.loop.in_loop_thread:
            raise NoRoute(f"no route for topic {topic!r} yet, and a callback cannot wait for it")
        queues = self._find_queues(topic, deadline_ms)
        with self._lock:
            lanes = self.topics.get(topic)
            if lanes is None:
                # A change of routes before these lanes exist does not reach them: so look again.
                queues = self._engine.routes.publish_queues(topic) or queues
                index = self._engine.transport.random.getrandbits(16)
                lanes = self.topics[topic] = self._make_lanes(queues, index)
        return lanes

    def level(self, topic: TopicLanes, priority: int) -> TopicLanes:
        """Return the lanes of a priority.

        Raises:
            InvalidArgument: The topic has no such priority.
        """
        if type(priority) is int and 0 <= priority < len(topic.levels):
            return topic.levels[priority]
        name = topic.queues[0].topic
        if not topic.levels:
            raise InvalidArgument(
                f"priority = {describe(priority)}: topic {name!r} has no priorities; "
                "`mqmesh topic create --priorities` makes topics that have some"
            )
        raise InvalidArgument(
            f"priority must be an int of 0 to {len(topic.levels) - 1}, the priorities of topic "
            f"{name!r}, not {describe(priority)}"
        )

    def bound_lane(
        self,
        topic: TopicLanes,
        message: Message,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
    ) -> Lane | None:
        """Return the lane of the one queue a message must go to, or None if any will do.

        Raises:
            InvalidArgument: The chosen queue is none of the topic's.
        """
        if selector is not None:
            queue = selector(topic.queues, message, arg)
        if queue is not None:
            lane = topic.lane_of.get(queue)
            if lane is None:
                raise InvalidArgument(
                    f"{queue} is no writable queue of topic {message.topic!r}, which has "
                    f"{len(topic.queues)}"
                )
            return lane
        if message.sharding_key is not None:
            return topic.lanes[queue_index(message.sharding_key, len(topic.lanes))]
        return None

    def another_lane(self, queue: MessageQueue, never: frozenset[str]) -> Lane | None:
        """Return a lane for a batch that cannot be sent to a queue just now.

        Args:
            queue: That queue.
            never: Brokers that must not get it.

        Returns:
            One of another broker, rather of one that is neither away nor slow; of the same
            broker only when the queue is gone; None if there is none.
        """
        topic = self.topics.get(queue.topic)
        if topic is None:
            return None
        if queue.queue_id < len(topic.levels):
            topic = topic.levels[queue.queue_id]
        others = never | {queue.broker_name}
        for avoid in (self._avoided(topic) | others, self._away(topic) | others):
            if not topic.brokers <= avoid:
                return self._next(topic, avoid)
        if queue not in topic.lane_of and not topic.brokers <= never:
            return self._next(topic, never)
        return None

    def other_brokers(self, queue: MessageQueue) -> frozenset[str]:
        """Return brokers, but the queue's own, that messages of its topic may go to just now."""
        topic = self.topics.get(queue.topic)
        if topic is None:
            return frozenset()
        return topic.brokers - self._away(topic) - {queue.broker_name}

    def on_routes(self, topics: set[str]) -> None:
        """Takes changed routes of the engine."""
        if self._faults is not None:
            routes = self._engine.routes
            for name in {name for topic in topics for name in routes.brokers_of(topic)}:
                self._faults.on_epoch(name, routes.epoch(name))
        with self._lock:
            for topic in topics & self.topics.keys():
                queues = self._engine.routes.publish_queues(topic)
                old = self.topics[topic]
                # A topic without any queue left keeps the old ones: its broker may be restarting.
                if queues and queues != old.queues:
                    self.topics[topic] = self._make_lanes(queues, old.index)

    def on_sent(self, broker_name: str, latency_ms: float, answered: bool) -> None:
        """Takes note of how a broker did."""
        if self._faults is None:
            return
        now_ms = self._engine.loop.clock.monotonic_ms()
        if answered:
            self._faults.on_sent(broker_name, latency_ms, now_ms)
        else:
            self._faults.on_failed(broker_name, now_ms)

    def _make_lanes(self, queues: tuple[MessageQueue, ...], index: int) -> TopicLanes:
        lanes = self._buffer.topic_lanes(queues, index, self._avoided)
        if self._engine.routes.priorities(queues[0].topic):
            lanes.divide()
        return lanes

    def _next(self, topic: TopicLanes, avoid: frozenset[str]) -> Lane:
        with self._buffer.lock:
            return next_lane(topic, avoid)

    def _avoided(self, topic: TopicLanes) -> frozenset[str]:
        # Called with the buffer locked; takes no lock.
        if len(topic.brokers) == 1:
            return _NONE
        away = self._away(topic)
        if self._faults is None:
            return away
        now_ms, faults = self._engine.loop.clock.monotonic_ms(), self._faults
        return away.union(name for name in topic.brokers if not faults.is_available(name, now_ms))

    def _away(self, topic: TopicLanes) -> frozenset[str]:
        if len(topic.brokers) == 1:
            return _NONE
        return frozenset(name for name in topic.brokers if not self._engine.brokers.may_come(name))

    def _find_queues(self, topic: str, deadline_ms: int) -> tuple[MessageQueue, ...]:
        # A cluster that is starting or restarting has no route for a moment; a send may wait
        # for the route as long as for its broker.
        clock = self._engine.loop.clock
        addresses = self._engine.options.namesrv_addr
        why: MQMeshError = NoRoute(
            f"no route for topic {topic!r} from {addresses}: no answer within the time given"
        )
        while clock.monotonic_ms() < deadline_ms:
            queues, problem = self._look(topic, deadline_ms)
            if queues:
                return queues
            if not isinstance(problem.__cause__, RequestTimeout):
                why = problem  # says more than that the time is over
            left_ms = deadline_ms - clock.monotonic_ms()
            self._engine.transport.pause(max(min(left_ms, POLL_MS), 0) / 1_000)
        if isinstance(why.__cause__, TopicNotFound):
            # Else the client would request the route of a mistyped name each second, for ever.
            self._engine.post(lambda: self._forget(topic))
        raise NoRoute(str(why)) from why

    def _forget(self, topic: str) -> None:
        for name in (topic, AUTO_CREATE_TOPIC):
            if name not in self.topics and self._engine.routes.route(name) is None:
                self._engine.finder.forget(name)

    def _wait_queues(self, topic: str, deadline_ms: int) -> None:
        if not self._engine.routes.publish_queues(topic):
            left_ms = max(deadline_ms - self._engine.loop.clock.monotonic_ms(), 1)
            self._engine.wait_route(topic, left_ms, fresh=True)

    def _look(self, topic: str, deadline_ms: int) -> tuple[tuple[MessageQueue, ...], MQMeshError]:
        try:
            self._wait_queues(topic, deadline_ms)
        except (AuthenticationFailed, ClientClosed):
            raise
        except MQMeshError as error:
            if isinstance(error.__cause__, TopicNotFound):
                return self._pattern_queues(topic, deadline_ms), error
            return (), error
        queues = self._engine.routes.publish_queues(topic)
        route = self._engine.routes.route(topic)
        forbidden = "" if queues or route is None else why_not_writable(route)
        if forbidden:
            raise NoRoute(forbidden)  # the route is fresh; to wait changes nothing
        return queues, NoRoute(f"topic {topic!r} has no queue that may be written to")

    def _pattern_queues(self, topic: str, deadline_ms: int) -> tuple[MessageQueue, ...]:
        # Brokers that create topics by themselves announce this topic as the pattern.
        try:
            self._wait_queues(AUTO_CREATE_TOPIC, deadline_ms)
        except ClientClosed:
            raise
        except MQMeshError as error:
            _log.debug("topic %s: no pattern to create it by: %s", topic, error)
        pattern: Sequence[MessageQueue] = self._engine.routes.publish_queues(AUTO_CREATE_TOPIC)
        if topic == TRACE_TOPIC:
            pattern = [one for one in pattern if one.queue_id == 0]  # it is made with one queue
        return tuple(MessageQueue(topic, one.broker_name, one.queue_id) for one in pattern)
