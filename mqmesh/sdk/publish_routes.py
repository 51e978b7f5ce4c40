"""Where a producer's messages may go: the queues of each topic, and which one is next."""

import secrets
import time
from typing import Any

from mqmesh.errors import (
    EndpointUnreachable,
    InvalidArgument,
    NoRoute,
    RequestTimeout,
    TopicNotFound,
)
from mqmesh.message import AUTO_CREATE_TOPIC, Message, MessageQueue
from mqmesh.sdk.client import ClientEngine
from mqmesh.sdk.fault_table import FaultTable
from mqmesh.sdk.queue_selector import QueueSelector, queue_index
from mqmesh.sdk.send_buffer import Lane, SendBuffer, TopicLanes

POLL_MS = 50
"""Between looks for a route that is not there yet."""


class PublishRoutes:
    """Topics of one producer and the lanes of their queues.

    Args:
        engine: The client's engine.
        buffer: Holds the lanes.
        avoid_slow: Keep away from brokers that were slow or failed, for a while.
    """

    def __init__(self, engine: ClientEngine, buffer: SendBuffer, *, avoid_slow: bool) -> None:
        self._engine = engine
        self._buffer = buffer
        self._faults = FaultTable() if avoid_slow else None
        self._topics: dict[str, TopicLanes] = {}

    def known(self, topic: str) -> TopicLanes | None:
        """A topic's lanes, if it was sent to before."""
        return self._topics.get(topic)

    def lanes(self, topic: str, deadline_ms: int) -> TopicLanes:
        """A topic's lanes; waits for its route if need be.

        Raises:
            NoRoute: No broker is known that would take messages of the topic; at once in the
                engine's thread, which cannot wait.
        """
        lanes = self._topics.get(topic)
        if lanes is not None:
            return lanes
        if self._engine.loop.in_loop_thread:
            raise NoRoute(f"no route for topic {topic!r} yet, and a callback cannot wait for it")
        queues = self._find_queues(topic, deadline_ms)
        lanes = self._buffer.topic_lanes(queues, secrets.randbits(16))
        return self._topics.setdefault(topic, lanes)

    def bound_lane(
        self,
        topic: TopicLanes,
        message: Message,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
    ) -> Lane | None:
        """The lane of the one queue a message must go to, or None if any will do.

        Raises:
            InvalidArgument: The chosen queue is none of the topic's.
        """
        if selector is not None:
            queue = selector(topic.queues, message, arg)
        if queue is not None:
            if queue not in topic.members:
                raise InvalidArgument(
                    f"{queue} is no writable queue of topic {message.topic!r}, which has "
                    f"{len(topic.queues)}"
                )
            return self._buffer.lane(queue)
        if message.sharding_key is not None:
            return topic.lanes[queue_index(message.sharding_key, len(topic.lanes))]
        return None

    def next_lane(self, topic: TopicLanes) -> Lane:
        """The lane of the next queue by round robin, not of a broker that fails."""
        return self._buffer.next_lane(topic, self._avoided(topic))

    def another_lane(self, topic: str, avoid: frozenset[str]) -> Lane | None:
        """A lane that leads to another broker than those named, if there is one."""
        lanes = self._topics.get(topic)
        if lanes is None or lanes.brokers <= avoid:
            return None
        lane = self._buffer.next_lane(lanes, avoid | self._avoided(lanes))
        return None if lane.queue.broker_name in avoid else lane

    def on_routes(self, topics: set[str]) -> None:
        """Takes changed routes of the engine."""
        for topic in topics & self._topics.keys():
            queues = self._engine.routes.publish_queues(topic)
            # A topic without any queue left keeps the old ones: its broker may be restarting.
            if queues and queues != self._topics[topic].queues:
                start = self._topics[topic].index
                self._topics[topic] = self._buffer.topic_lanes(queues, start)

    def on_sent(self, broker_name: str, latency_ms: int, answered: bool) -> None:
        """Takes note of how a broker did."""
        if self._faults is None:
            return
        now_ms = self._engine.loop.clock.monotonic_ms()
        if answered:
            self._faults.on_sent(broker_name, latency_ms, now_ms)
        else:
            self._faults.on_failed(broker_name, now_ms)

    def _avoided(self, topic: TopicLanes) -> frozenset[str]:
        if len(topic.brokers) == 1:
            return frozenset()
        now_ms = self._engine.loop.clock.monotonic_ms()
        faults = self._faults
        return frozenset(
            name
            for name in topic.brokers
            if self._engine.is_unreachable(name)
            or (faults is not None and not faults.is_available(name, now_ms))
        )

    def _find_queues(self, topic: str, deadline_ms: int) -> tuple[MessageQueue, ...]:
        # A cluster that is starting or restarting has no route for a moment; a send may wait
        # for the route as long as for its broker.
        clock = self._engine.loop.clock
        why: Exception = NoRoute(f"no route for topic {topic!r} within the time given")
        while (left_ms := deadline_ms - clock.monotonic_ms()) > 0:
            queues, problem = self._look(topic, left_ms)
            if queues:
                return queues
            if not isinstance(problem.__cause__, RequestTimeout):
                why = problem  # says more than that the time is over
            left_ms = deadline_ms - clock.monotonic_ms()
            time.sleep(max(min(left_ms, POLL_MS), 0) / 1_000)
        raise NoRoute(str(why)) from why

    def _look(self, topic: str, timeout_ms: int) -> tuple[tuple[MessageQueue, ...], Exception]:
        try:
            self._engine.wait_route(topic, timeout_ms)
        except NoRoute as error:
            if isinstance(error.__cause__, TopicNotFound):
                return self._pattern_queues(topic, timeout_ms), error
            return (), error
        except EndpointUnreachable as error:
            return (), error
        queues = self._engine.routes.publish_queues(topic)
        return queues, NoRoute(f"topic {topic!r} has no queue that may be written to")

    def _pattern_queues(self, topic: str, timeout_ms: int) -> tuple[MessageQueue, ...]:
        # Brokers that create topics by themselves announce this topic as the pattern.
        try:
            self._engine.wait_route(AUTO_CREATE_TOPIC, timeout_ms)
        except (NoRoute, EndpointUnreachable):
            return ()
        pattern = self._engine.routes.publish_queues(AUTO_CREATE_TOPIC)
        return tuple(MessageQueue(topic, one.broker_name, one.queue_id) for one in pattern)
