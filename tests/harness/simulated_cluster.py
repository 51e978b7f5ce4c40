"""Name servers and brokers for the simulated network, with faults on demand."""

import enum
from collections import deque
from typing import Final

import msgspec

from harness.batches import split_batches
from harness.simulated_network import Answer, SimulatedNetwork, SimulatedServer
from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages, read_meta
from mqmesh.errors import BrokerNotAvailable, MessageIllegal, MQMeshError, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC, MessageQueue, StoredMessage
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import (
    Command,
    ErrorHeader,
    Reply,
    decode_header,
    encode_header,
    reply_of,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest, HeartbeatResponse
from mqmesh.protocol.messaging import BatchOutcome, decode_send, encode_outcomes
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    GetRouteRequest,
    GetRoutesRequest,
    Perm,
    QueueData,
    RouteHint,
    TopicQueues,
    TopicRoute,
    TopicRoutes,
)
from mqmesh.storage.interface import BatchToPut, GetStatus, PutStatus, StoreConfig
from mqmesh.storage.memory import MemoryStore

MOST_BATCHES: Final = 4_096


class FaultKind(enum.Enum):
    """Faults of a send."""

    NONE = enum.auto()
    """The batch is stored and answered."""
    DROP_ANSWER = enum.auto()
    """The batch is stored, and no answer comes."""
    LOSE = enum.auto()
    """The batch never arrives."""
    CRASH_BEFORE = enum.auto()
    """The broker ends before it stores the batch."""
    CRASH_AFTER = enum.auto()
    """The broker ends between storing and answering."""
    REFUSE = enum.auto()
    """Every batch is refused with a code."""
    REFUSE_REQUEST = enum.auto()
    """The request is refused with a code."""
    LATE = enum.auto()
    """The answer takes so many ms."""
    TWICE = enum.auto()
    """The batch is answered twice."""
    GARBAGE = enum.auto()
    """The batch is stored, and the answer cannot be read."""
    STATUS = enum.auto()
    """The batch is stored, with a send status other than SEND_OK."""
    DEPOSE = enum.auto()
    """The batch is stored, and answered by a master that is deposed meanwhile."""


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        kind: Kind of fault.
        value: Code, ms or status.
        retry_after_ms: Delay that a refusal gives, in ms.
    """

    kind: FaultKind
    value: int = 0
    retry_after_ms: int = 0


class SimulatedBroker(SimulatedServer):
    """A broker master that keeps what it stored over its crashes.

    Args:
        cluster: Cluster where it registers.
        name: Broker group.
        endpoint: Address where it listens.

    Attributes:
        faults: Faults of the next sends, in order; then all is well.
        sends: Queues and sequences of the batches of every send that arrived.
        heartbeats: Contents of clients' heartbeats.
        topics: Queues and permission by name.
        epoch: Epoch of the master; the broker is one with its successors.
        is_elected: True if successors come by themselves.
    """

    def __init__(self, cluster: "SimulatedCluster", name: str, endpoint: str) -> None:
        super().__init__(cluster.network, endpoint)
        self.name = name
        self.faults: deque[Fault] = deque()
        self.sends: list[list[tuple[MessageQueue, int, bytes]]] = []
        self.heartbeats: list[HeartbeatRequest] = []
        self.topics: dict[str, QueueData] = {}
        self.epoch = 0
        self.is_elected = False
        self._cluster = cluster
        self._store = MemoryStore(StoreConfig(), clock=cluster.network.clock)

    @property
    def address(self) -> BrokerAddress:
        """Address of the broker, as it registers at name servers."""
        return BrokerAddress(self.endpoint.removeprefix("tcp://"))

    def add_topic(self, topic: str, queues: int = 4, perm: int = Perm.READ_WRITE.value) -> None:
        """Creates or changes a topic, and says so."""
        self.topics[topic] = QueueData(self.name, queues, queues, perm)
        self._cluster.announce(self.name)

    def move(self, endpoint: str) -> None:
        """Comes back at another place, with the same store."""
        self.crash()
        del self.network.servers[self.endpoint]
        self.endpoint = endpoint
        self.network.servers[endpoint] = self
        self.start()
        self._cluster.announce(self.name)

    def crash(self) -> None:
        """Ends at once; name servers notice."""
        super().crash()
        self._cluster.announce(self.name)

    def start(self) -> None:
        """Listens and registers again."""
        super().start()
        self._cluster.announce(self.name)

    def messages(self, topic: str, queue_id: int) -> list[StoredMessage]:
        """Returns all messages stored in a queue, in order."""
        found: list[StoredMessage] = []
        offset = 0
        while True:
            got = self._store.get(topic, queue_id, offset, max_bytes=1)
            if got.status is not GetStatus.FOUND:
                return found
            header = check_stored(got.data[0])
            found += decode_messages(got.data[0], header, broker_name=self.name)
            offset = got.next_queue_offset

    def serve(self, command: Command, answer: Answer) -> None:
        """Handles a request."""
        if command.code == RequestCode.HEART_BEAT:
            self.heartbeats.append(decode_header(HeartbeatRequest, command.header))
            answer(reply_of(HeartbeatResponse()), 0)
            return
        assert command.code == RequestCode.SEND_MESSAGE
        _, batch_count, key = decode_send(command.header)
        fault = self.faults.popleft() if self.faults else Fault(FaultKind.NONE)
        batches = split_batches(command.body, most=MOST_BATCHES)
        assert len(batches) == batch_count
        assert {header.producer_id for _, header in batches} == {producer_id_of(key)}
        if fault.kind is FaultKind.CRASH_BEFORE:
            self.crash()
            return
        if fault.kind is FaultKind.LOSE:
            return
        if fault.kind is FaultKind.REFUSE_REQUEST:
            reason = ErrorHeader("refused by the test", fault.retry_after_ms)
            answer(Reply(encode_header(reason), code=fault.value), 0)
            return
        self.sends.append([])
        outcomes: list[BatchOutcome] = []
        refused: set[MessageQueue] = set()
        for position, header in batches:
            data = command.body[position : position + header.total_size]
            queue = MessageQueue(read_meta(data, header).topic, self.name, header.queue_id)
            self.sends[-1].append((queue, header.first_sequence, bytes(data)))
            if queue in refused:
                outcome = _refused(BrokerNotAvailable("an earlier batch was refused"))
            else:
                outcome = self._put(queue, data, header, fault)
            if outcome.code:
                refused.add(queue)
            outcomes.append(outcome)
        self._answer(outcomes, fault, answer)

    def _answer(self, outcomes: list[BatchOutcome], fault: Fault, answer: Answer) -> None:
        header, remarks = encode_outcomes(outcomes)
        reply = Reply(header, (remarks,))
        if fault.kind is FaultKind.CRASH_AFTER:
            self.crash()
        elif fault.kind is FaultKind.GARBAGE:
            answer(Reply(b"\xff\xff"), 0)
        elif fault.kind is FaultKind.DEPOSE:
            reason = ErrorHeader("deposed by the test")
            answer(Reply(encode_header(reason), code=ResponseCode.NOT_MASTER), 0)
        elif fault.kind is FaultKind.LATE:
            answer(reply, fault.value)
        elif fault.kind is not FaultKind.DROP_ANSWER:
            answer(reply, 0)
            if fault.kind is FaultKind.TWICE:
                answer(reply, 0)

    def _put(
        self, queue: MessageQueue, data: memoryview, header: BatchHeader, fault: Fault
    ) -> BatchOutcome:
        if fault.kind is FaultKind.REFUSE:
            return BatchOutcome(fault.value, 0, fault.retry_after_ms, remark="refused by the test")
        if queue.topic not in self.topics:
            if not self._cluster.auto_create:
                return _refused(TopicNotFound(f"topic {queue.topic!r} does not exist"))
            self.add_topic(queue.topic)
        topic = self.topics[queue.topic]
        if header.queue_id >= topic.write_queue_nums:
            return _refused(MessageIllegal(f"queue {header.queue_id} does not exist"))
        hashes = read_meta(data, header).tag_hashes
        batch = BatchToPut(queue.topic, header.queue_id, header, data, hashes)
        (result,) = self._store.put([batch], self.network.clock.wall_ms())
        assert result.status in (PutStatus.PUT_OK, PutStatus.DUPLICATE)
        status = fault.value if fault.kind is FaultKind.STATUS else 0
        return BatchOutcome(
            0, status, 0, result.base_queue_offset, result.commitlog_offset, result.store_timestamp
        )


class SimulatedNamesrv(SimulatedServer):
    """A name server.

    Args:
        cluster: Cluster whose routes it serves.
        endpoint: Address where it listens.

    Attributes:
        known: Names of the brokers that have registered.
        topics_asked: Topics whose routes clients asked for, in order.
    """

    def __init__(self, cluster: "SimulatedCluster", endpoint: str) -> None:
        super().__init__(cluster.network, endpoint)
        host, _, port = endpoint.rpartition(":")
        self.hint_endpoint = f"{host}:{int(port) + 1_000}"
        self.known: set[str] = set()
        self.topics_asked: list[str] = []
        self._cluster = cluster

    def serve(self, command: Command, answer: Answer) -> None:
        """Handles a request."""
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            answer(reply_of(ClusterInfo([], self.hint_endpoint)), 0)
            return
        if command.code == RequestCode.GET_ROUTES_OF_TOPICS:
            topics = decode_header(GetRoutesRequest, command.header).topics
            self.topics_asked += topics
            answer(reply_of(self._routes(topics)), 0)
            return
        assert command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC
        topic = decode_header(GetRouteRequest, command.header).topic
        self.topics_asked.append(topic)
        route = self.route(topic)
        if route is None:
            header = ErrorHeader(f"no broker carries topic {topic!r}")
            answer(Reply(encode_header(header), code=ResponseCode.TOPIC_NOT_EXIST), 0)
        else:
            answer(reply_of(route), 0)

    def _routes(self, topics: list[str]) -> TopicRoutes:
        found = {topic: self.route(topic) for topic in topics}
        routes = [one for one in found.values() if one is not None]
        return TopicRoutes(
            [TopicQueues(one.topic, one.queues, one.order) for one in routes],
            list({group.broker_name: group for one in routes for group in one.brokers}.values()),
            [topic for topic, one in found.items() if one is None],
            self.hint_endpoint,
        )

    def route(self, topic: str) -> TopicRoute | None:
        """Returns a topic's route, of the brokers that are known."""
        queues, brokers = [], []
        for broker in self._cluster.brokers.values():
            data = broker.topics.get(topic)
            if topic == AUTO_CREATE_TOPIC and self._cluster.auto_create:
                data = QueueData(broker.name, 4, 4, Perm.READ_WRITE.value)
            if broker.name in self.known and data is not None:
                queues.append(data)
                address = {0: broker.address}
                brokers.append(
                    BrokerData("c", broker.name, address, broker.epoch, broker.is_elected)
                )
        return TopicRoute(topic, queues, brokers, self.hint_endpoint) if queues else None

    def announce(self, hint: RouteHint) -> None:
        """Publishes a hint."""
        data = encode_header(hint)
        for hearer in self.network.hearers:
            if hearer.endpoint == self.hint_endpoint:
                hearer.hear(data)

    def forget(self) -> None:
        """Is started again, empty."""
        self.crash()
        self.known.clear()
        self.start()


class SimulatedCluster:
    """Name servers and brokers of one simulated network.

    Args:
        network: Network of all servers.
        brokers: Names of the brokers; the n-th one listens at port 10911 + n.
        namesrvs: Number of name servers; the n-th one listens at port 9876 + n.
        topics: Created on all brokers.
        auto_create: Brokers create topics by themselves.

    Attributes:
        brokers: Brokers by name.
        namesrvs: Name servers in the order of their ports.
        notices_deaths: Name servers notice when brokers end.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        *,
        brokers: tuple[str, ...] = ("a",),
        namesrvs: int = 1,
        topics: tuple[str, ...] = ("t",),
        auto_create: bool = False,
    ) -> None:
        self.network = network
        self.auto_create = auto_create
        self.notices_deaths = True
        self.brokers: dict[str, SimulatedBroker] = {}
        self.namesrvs = [
            SimulatedNamesrv(self, f"tcp://127.0.0.1:{9876 + number}") for number in range(namesrvs)
        ]
        for number, name in enumerate(brokers):
            broker = SimulatedBroker(self, name, f"tcp://127.0.0.1:{10911 + number}")
            self.brokers[name] = broker
            for topic in topics:
                broker.add_topic(topic)
            self.announce(name)

    @property
    def namesrv_addr(self) -> str:
        """Addresses of the name servers, as clients take them."""
        return ";".join(one.endpoint.removeprefix("tcp://") for one in self.namesrvs)

    def announce(self, broker_name: str) -> None:
        """Reports a changed set of brokers: name servers learn of it and give hints."""
        broker = self.brokers.get(broker_name)
        if broker is None:
            return  # it is just being made
        for namesrv in self.namesrvs:
            if broker.up:
                namesrv.known.add(broker_name)
            elif self.notices_deaths:
                namesrv.known.discard(broker_name)
            if namesrv.up:
                namesrv.announce(RouteHint([broker_name]))

    def messages(self, topic: str) -> list[StoredMessage]:
        """Returns all messages stored of a topic, broker by broker and queue by queue."""
        return [
            message
            for broker in self.brokers.values()
            for queue_id in range(64)
            for message in broker.messages(topic, queue_id)
        ]


def _refused(error: MQMeshError) -> BatchOutcome:
    return BatchOutcome(code_of(error), remark=str(error))
