"""Structs of brokers, name servers and clients about routes: which broker carries which topic."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.hosts import MAX_PORT, is_address
from mqmesh.log_identity import MAX_EPOCH

MAX_QUEUES_PER_TOPIC: Final = 65_536
MAX_TOPICS_PER_BROKER: Final = 100_000
MAX_TOPICS_PER_REQUEST: Final = 1_000
"""Topics of one GET_ROUTES_OF_TOPICS."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
QueueCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_QUEUES_PER_TOPIC)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER)]


class Perm(enum.IntFlag):
    """Permission bits of a topic or broker; RocketMQ's values."""

    NONE = 0
    WRITE = 2
    READ = 4
    READ_WRITE = 6


class TopicConfig(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Configuration of a topic on a broker.

    Attributes:
        topic: Name.
        read_queue_nums: Queues that consumers are given, 0 to 65,536.
        write_queue_nums: Queues that producers are given, 0 to 65,536.
        perm: ``Perm`` bits.
        order: Ordered topic: the route keeps its queues while a broker is down.
    """

    topic: Name
    read_queue_nums: QueueCount = 4
    write_queue_nums: QueueCount = 4
    perm: Annotated[int, msgspec.Meta(ge=0, le=7)] = Perm.READ_WRITE.value
    order: bool = False


TopicConfigList = Annotated[list[TopicConfig], msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER)]


class DataVersion(msgspec.Struct, array_like=True, frozen=True, order=True, gc=False):
    """Version of a broker's topic table: grows with every change.

    Attributes:
        timestamp_ms: When the table changed last; distinguishes two lives of a broker.
        counter: Number of changes.
    """

    timestamp_ms: int = 0
    counter: int = 0


class BrokerAddress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Address of one broker process.

    Attributes:
        tcp: ``host:port``.
        ipc: Path of its Unix socket, "" for none.
        host_id: Identifies the machine; equal ids may use ``ipc``.
        server_key: Public key that it proves to clients; "" where nothing is encrypted. The
            name server says the one that the broker has proved to it, whatever the broker says.
    """

    tcp: Name
    ipc: Name = ""
    host_id: Name = ""
    server_key: Annotated[str, msgspec.Meta(max_length=40)] = ""


def check_address(address: BrokerAddress) -> None:
    """Check that clients can connect to an address.

    Raises:
        InvalidArgument: ``tcp`` is not ``host:port`` with a port of 1 to 65,535, or ``ipc`` is no
            absolute path, or a text has characters that cannot be printed.
    """
    if not is_address(address.tcp):
        raise InvalidArgument(
            f"address {address.tcp[:255]!r} is not host:port with a port of 1 to {MAX_PORT}"
        )
    if address.ipc and not (address.ipc.startswith("/") and address.ipc.isprintable()):
        raise InvalidArgument(f"ipc {address.ipc[:255]!r} is no absolute path of a socket")
    if not address.host_id.isprintable():
        raise InvalidArgument(f"host_id {address.host_id[:255]!r} cannot be printed")


class RegisterBrokerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REGISTER_BROKER: a broker's heartbeat to a name server.

    Attributes:
        cluster_name: Cluster.
        broker_name: Broker group.
        broker_id: 0 for the master.
        address: Where it listens.
        data_version: Version of its topic table.
        topics: The whole table, or None while the name server should have this version.
        perm: Broker-wide permission; without WRITE it is drained.
        instance_id: Random number of this life of the process.
        epoch: Of its log. Of two masters the one with the higher epoch is the group's.
        is_elected: The replicas of its group elect their master.
        since: With ``topics`` None: the version that ``changed`` and ``deleted`` start from. A name
            server that has another version asks for the whole table.
        changed: Topics that were created or changed since that version.
        deleted: Names of topics that were deleted since that version.
    """

    cluster_name: Name
    broker_name: Name
    broker_id: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    address: BrokerAddress
    data_version: DataVersion
    topics: TopicConfigList | None = None
    perm: Annotated[int, msgspec.Meta(ge=0, le=7)] = Perm.READ_WRITE.value
    instance_id: int = 0
    epoch: Epoch = 0
    is_elected: bool = False
    since: DataVersion | None = None
    changed: TopicConfigList = []
    deleted: Names = []


class RegisterBrokerResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to REGISTER_BROKER.

    Attributes:
        need_topics: The name server has another version: register again with the topics.
        wiped_write_perm: An administrator drains this broker.
        access_version: Of the name server's access list, 0 for none; a broker with an older one
            asks for it by GET_ACCESS_LIST.
    """

    need_topics: bool = False
    wiped_write_perm: bool = False
    access_version: int = 0


class UnregisterBrokerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNREGISTER_BROKER: a broker closes cleanly. Answered with an empty header."""

    cluster_name: Name
    broker_name: Name
    broker_id: int
    instance_id: int = 0


class GetRouteRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ROUTEINFO_BY_TOPIC, answered with ``TopicRoute`` or TOPIC_NOT_EXIST."""

    topic: Name


class QueueData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A topic on one broker group."""

    broker_name: Name
    read_queue_nums: QueueCount
    write_queue_nums: QueueCount
    perm: int


class BrokerData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One broker group.

    Attributes:
        cluster_name: Cluster.
        broker_name: Broker group.
        addresses: By broker id; 0 is the master.
        epoch: The highest of its masters so far. Data with a lower one is older.
        is_elected: Its replicas elect another master when this one is gone.
    """

    cluster_name: Name
    broker_name: Name
    addresses: dict[int, BrokerAddress]
    epoch: Epoch = 0
    is_elected: bool = False


class TopicRoute(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_ROUTEINFO_BY_TOPIC.

    Attributes:
        topic: Name.
        queues: Per broker group.
        brokers: The groups named in ``queues``.
        hint_endpoint: PUB endpoint of the name server that announces route changes.
        order: The topic is ordered.
    """

    topic: Name
    queues: list[QueueData]
    brokers: list[BrokerData]
    hint_endpoint: str = ""
    order: bool = False


class GetRoutesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ROUTES_OF_TOPICS, answered with ``TopicRoutes``.

    Attributes:
        topics: 0 to 1,000 names.
    """

    topics: Annotated[list[Name], msgspec.Meta(max_length=MAX_TOPICS_PER_REQUEST)]


class TopicQueues(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The queues of one topic; fields as in ``TopicRoute``."""

    topic: Name
    queues: list[QueueData]
    order: bool = False


class TopicRoutes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_ROUTES_OF_TOPICS.

    A topic that is neither in ``routes`` nor in ``missing`` had no room; ask for it again.

    Attributes:
        routes: Topics that were found.
        brokers: The groups named in ``routes``, each once.
        missing: Topics that no broker carries, or that the client has no right to.
        hint_endpoint: As in ``TopicRoute``.
    """

    routes: list[TopicQueues]
    brokers: list[BrokerData]
    missing: list[Name] = []
    hint_endpoint: str = ""

    def of_topics(self) -> dict[str, TopicRoute]:
        """Return the routes of the topics found, by topic, as GET_ROUTEINFO_BY_TOPIC gives them."""
        groups = {one.broker_name: one for one in self.brokers}
        return {
            one.topic: TopicRoute(
                one.topic,
                one.queues,
                [groups[data.broker_name] for data in one.queues if data.broker_name in groups],
                self.hint_endpoint,
                one.order,
            )
            for one in self.routes
        }


class RouteHint(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Hint that a name server publishes when routes change: ask again if concerned.

    A hint may be lost; the 30 s poll of clients is the safety net.

    Attributes:
        brokers: Broker groups that came, went or changed.
        topics: Topics that changed; empty when too many to list.
    """

    brokers: Names
    topics: Names = []


class GetClusterRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_BROKER_CLUSTER_INFO, answered with ``ClusterInfo``."""


class ClusterInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All broker groups that a name server knows, and where it announces changes."""

    brokers: list[BrokerData]
    hint_endpoint: str = ""


class TopicListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ALL_TOPIC_LIST_FROM_NAMESERVER, answered with ``TopicList``."""


class TopicList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Names of topics, sorted."""

    topics: Names


class DeleteTopicRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """DELETE_TOPIC_IN_BROKER and DELETE_TOPIC_IN_NAMESRV; answered with an empty header."""

    topic: Name


class WipeWritePermRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """WIPE_WRITE_PERM_OF_BROKER: drains a broker, or with ``restore`` ends that."""

    broker_name: Name
    restore: bool = False


class WipeWritePermResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to WIPE_WRITE_PERM_OF_BROKER: number of topics that the broker carries."""

    topic_count: int


class KvRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PUT, GET, DELETE and LIST of a name server's key/value configuration.

    Attributes:
        namespace: 1 to 255 characters; LIST with an empty one is answered with all namespaces.
        key: Empty for LIST.
        value: For PUT, up to 64 KiB.
    """

    namespace: Annotated[str, msgspec.Meta(max_length=255)]
    key: Annotated[str, msgspec.Meta(max_length=255)] = ""
    value: Annotated[str, msgspec.Meta(max_length=65_536)] = ""


class KvResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to requests of the key/value configuration.

    Attributes:
        pairs: By key.
        namespaces: Those that have keys, where they were asked for.
    """

    pairs: dict[str, str]
    namespaces: list[str] = []
