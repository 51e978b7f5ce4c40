"""Probes: test messages that measure whether all brokers and all queues are served."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, NoRoute
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.route_cache import RouteCache, why_not_writable
from mqmesh.sdk.producer.producer import Producer

SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
"""RocketMQ's; made with one queue on each broker when it is needed first."""
GROUP: Final = "SELF_TEST_P_GROUP"
BODY: Final = b"mqmesh probe"
_NS_PER_MS: Final = 1_000_000


class Probe(msgspec.Struct, frozen=True):
    """Test message with its outcome.

    Attributes:
        message_queue: Queue it went to, or was to go to.
        took_ms: Until its answer, or its error.
        status: The answer; None where there was an error.
        problem: Text of the error.
    """

    message_queue: MessageQueue
    took_ms: float
    status: SendStatus | None
    problem: str = ""


class ProbeClient(AdminClient):
    """Client that sends test messages singly, each tried once; arguments as for ``AdminClient``."""

    def probe_topic(self, topic: str, count: int) -> Iterator[Probe]:
        """Sends to the queues of a topic in turn; the topic's consumers get the messages.

        Args:
            topic: Its name.
            count: Number of messages.

        Raises:
            TopicNotFound: The topic does not exist.
            NoRoute: It has no queue that may be written to.
            TransportError: No name server answers.
        """
        routes = RouteCache()
        route = self.route(topic)
        routes.update(route)
        queues = [
            queue
            for queue in routes.publish_queues(topic)
            if self._broker_name in ("", queue.broker_name)
        ]
        if not queues:
            raise NoRoute(
                why_not_writable(route) or f"topic {topic!r} has no queue that may be written to"
            )
        with closing(self._producer()) as producer:
            producer.start()
            for queue in itertools.islice(itertools.cycle(queues), count):
                yield self._probe(producer, queue)

    def probe_brokers(self, count: int) -> Iterator[Probe]:
        """Sends to the master of each broker group in turn, to ``SELF_TEST_TOPIC``.

        Args:
            count: Number of messages each.

        Raises:
            NoRoute: No broker is known, or none of the client's group.
            TransportError: No name server answers.
        """
        masters = self._masters()
        with closing(self._producer()) as producer:
            producer.start()
            missing = {name: self._make_test_topic(name, masters[name]) for name in masters}
            for name in itertools.islice(itertools.cycle(masters), count * len(masters)):
                queue = MessageQueue(SELF_TEST_TOPIC, name, 0)
                problem = missing[name]
                yield Probe(queue, 0, None, problem) if problem else self._probe(producer, queue)

    def _producer(self) -> Producer:
        return Producer(
            GROUP,
            namesrv_addr=self._namesrvs,
            credentials=None if self._transport.ring is None else self._transport.ring.own,
            namespace=self.namespace,
            send_msg_timeout_ms=self._timeout_ms,
            retry_times_when_send_failed=0,
        )

    def _make_test_topic(self, broker_name: str, endpoint: str) -> str:
        """Returns the error, or nothing."""
        config = TopicConfig(SELF_TEST_TOPIC, 1, 1)
        header = encode_header(UpdateTopicRequest(config))
        try:
            self._request(endpoint, RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        except MQMeshError as error:
            return str(error)
        self._wait_announced({broker_name: config})
        return ""

    def _probe(self, producer: Producer, queue: MessageQueue) -> Probe:
        clock = self._transport.clock
        began_ns = clock.monotonic_ns()

        def took_ms() -> float:
            return (clock.monotonic_ns() - began_ns) / _NS_PER_MS

        try:
            result = producer.send(Message(queue.topic, BODY), queue=queue)
        except MQMeshError as error:
            return Probe(queue, took_ms(), None, str(error))
        return Probe(queue, took_ms(), result.status)
