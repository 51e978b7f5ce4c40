"""Structs of brokers, name servers and clients about routes: which broker carries which topic."""

import enum
import hashlib
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.hosts import MAX_PORT, is_address
from mqmesh.log_identity import MAX_EPOCH
from mqmesh.message import MAX_DELAY_MS
from mqmesh.protocol.names import TopicName

MAX_QUEUES_PER_TOPIC: Final = 65_536
MAX_TOPICS_PER_BROKER: Final = 100_000
MAX_PRIORITIES: Final = 32
MAX_HISTORY: Final = 64
MAX_TOPICS_PER_REQUEST: Final = 1_000
"""Topics of one GET_ROUTES_OF_TOPICS."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
QueueCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_QUEUES_PER_TOPIC)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Names = Annotated[list[Name], msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER)]
TopicHashes = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]],
    msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER),
]
TopicNames = Annotated[list[TopicName], msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER)]


class Perm(enum.IntFlag):
    """Permission bits of a topic or broker; RocketMQ's values."""

    NONE = 0
    """Neither."""
    WRITE = 2
    """Producers may send."""
    READ = 4
    """Consumers may pull."""
    READ_WRITE = 6
    """Both."""


class TopicConfig(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Configuration of a topic on a broker.

    Attributes:
        topic: Name.
        read_queue_nums: Queues that consumers are given, 0 to 65,536.
        write_queue_nums: Queues that producers are given, 0 to 65,536.
        perm: ``Perm`` bits.
        order: Ordered topic: the route keeps its queues while a broker is down.
        retention_ms: Messages that were stored longer ago are not shown to readers; 0 for no limit
            but that of the log. Looked at each 10 s.
        retention_messages: Readers see so many of a queue, the newest; 0 for no limit.
        priorities: A queue a priority, the id of the queue, 0 the lowest; 2 to 32, and as many
            queues. They never change. 0 for a topic without priorities.
        message_ttl: Messages may have a time to live of their own.
        on_expired: ``drop``, or ``dead-letter``: where each message is acknowledged, one whose time
            is over becomes a dead letter of the group that meets it.
        history: The topic is a table, which keeps so many revisions of each key, 1 to 64, however
            old they are. It has one queue. A topic never becomes a table, nor a table a topic. 0
            for a topic that is none.
    """

    topic: TopicName
    read_queue_nums: QueueCount = 4
    write_queue_nums: QueueCount = 4
    perm: Annotated[int, msgspec.Meta(ge=0, le=7)] = Perm.READ_WRITE.value
    order: bool = False
    retention_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DELAY_MS)] = 0
    retention_messages: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    priorities: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITIES)] = 0
    message_ttl: bool = False
    on_expired: Annotated[str, msgspec.Meta(max_length=16)] = "drop"
    history: Annotated[int, msgspec.Meta(ge=0, le=MAX_HISTORY)] = 0


class OnExpired(enum.StrEnum):
    """Outcomes of messages whose time to live is over."""

    DROP = "drop"
    """They are passed over."""
    DEAD_LETTER = "dead-letter"
    """They are dead letters of each group that acknowledges each message; others pass them over."""


TopicConfigList = Annotated[list[TopicConfig], msgspec.Meta(max_length=MAX_TOPICS_PER_BROKER)]


class DataVersion(msgspec.Struct, array_like=True, frozen=True, order=True, gc=False):
    """Version of a broker's topic table: grows with every change.

    Attributes:
        timestamp_ms: When the table changed last; distinguishes two lives of a broker.
        counter: Number of changes; -1 is never used by a broker.
    """

    timestamp_ms: int = 0
    counter: int = 0


class BrokerAddress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Address of one broker process.

    Attributes:
        tcp: ``host:port``.
        ipc: Path of its Unix socket, "" for none.
        host_id: Identifies the machine; equal ids may use ``ipc``.
        server_key: Public key that the broker proves to clients; "" where nothing is encrypted. The
            name server announces the key that the broker has proved to it, not the one that the
            broker names.
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

    The first one after a connect may leave the topics out: a name server that has the same
    ``data_version`` of the same ``instance_id`` needs no more; another one answers ``need_topics``,
    and the broker registers again with its topics. After a change the broker sends what changed
    since the version that the name server has, one request at a time. The registration lasts as
    long as the connection it came by. A process with the same broker name and id, but another
    ``instance_id``, is refused while the first one lives, and tries again after ``retry_after_ms``.

    Attributes:
        cluster_name: Cluster.
        broker_name: Broker group.
        broker_id: 0 for the master.
        address: Where it listens.
        data_version: Version of its topic table.
        topics: The whole table, or None while the name server should have this version.
        perm: ``Perm`` bits of the whole broker; without WRITE it is drained.
        instance_id: Random number of this life of the process, so that the end of an earlier one
            does not remove it.
        epoch: Of its log. Of two masters the one with the higher epoch is the group's.
        is_elected: The replicas of its group elect their master.
        since: With ``topics`` None: the version that ``changed`` and ``deleted`` start from. A name
            server that has another version requests the whole table.
        changed: Topics that were created or changed since that version.
        deleted: Names of topics that were deleted since that version.

    Errors:
        NO_PERMISSION: Another live process has this name and id, or the group is in another
            cluster.
        STALE_EPOCH: Another master of the group has a higher epoch.
        SYSTEM_BUSY: ``max_brokers`` or ``max_topic_entries`` is reached.
        MESSAGE_ILLEGAL: A wrong name, a topic named twice, an address that is not ``host:port``, an
            ``ipc`` that is no absolute path.
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
    deleted: TopicNames = []


class RegisterBrokerResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to REGISTER_BROKER.

    Attributes:
        need_topics: The name server has another version: register again with the topics.
        wiped_write_perm: An administrator drains this broker.
        access_version: Of the name server's access list, 0 for none; a broker with an older one
            requests it by GET_ACCESS_LIST.
    """

    need_topics: bool = False
    wiped_write_perm: bool = False
    access_version: int = 0


class UnregisterBrokerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UNREGISTER_BROKER: a broker closes; answered with an empty header. Unknown brokers and
    another ``instance_id`` are ignored, without an error.

    Attributes:
        cluster_name: Cluster.
        broker_name: Broker group.
        broker_id: 0 for the master.
        instance_id: As registered; another one is ignored.
    """

    cluster_name: Name
    broker_name: Name
    broker_id: int
    instance_id: int = 0


class GetRouteRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ROUTEINFO_BY_TOPIC: queues of a topic, and the addresses of their brokers.

    A broker group that is gone is in no route. A group with slaves and no master is listed without
    the WRITE bit. Queues of an ordered topic stay listed, with their permission, while their broker
    is gone, so that a sharding key keeps its queue; sends to such a queue fail until the broker is
    back.

    A broker with ``auto_create_topic_enable`` announces the topic TBW102 as the pattern: a producer
    whose topic has no route asks for the route of TBW102 and sends to those queues under its own
    topic's name, and the first message creates the topic.

    Attributes:
        topic: Topic wanted.

    Errors:
        TOPIC_NOT_EXIST: No broker carries the topic. A name server that was just restarted knows no
            topics until the brokers have registered: keep a route that was known.
    """

    topic: TopicName


class QueueData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A topic on one broker group.

    Attributes:
        broker_name: Broker group.
        read_queue_nums: Consumers are given queue ids below this.
        write_queue_nums: Producers are given queue ids below this.
        perm: ``Perm`` bits that hold now: of topic, broker, draining and a missing master together.
        priorities: Its queues are priorities, so many; 0 for a topic without.
    """

    broker_name: Name
    read_queue_nums: QueueCount
    write_queue_nums: QueueCount
    perm: int
    priorities: int = 0


class BrokerData(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One broker group.

    Attributes:
        cluster_name: Cluster.
        broker_name: Broker group.
        addresses: By broker id; 0 is the master.
        epoch: The highest of its masters so far. Data with a lower one is older.
        is_elected: Its replicas elect another master when this one is gone; producers wait for it
            with what may be stored.
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
        queues: One for each broker group that carries the topic, sorted by broker name.
        brokers: Groups of ``queues`` that are there; one of an ordered topic may be missing.
        hint_endpoint: PUB endpoint of the name server that announces route changes.
        order: The topic is ordered: queues of absent brokers are listed, too.
    """

    topic: TopicName
    queues: list[QueueData]
    brokers: list[BrokerData]
    hint_endpoint: str = ""
    order: bool = False


class GetRoutesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ROUTES_OF_TOPICS: routes of many topics in one answer; each as GET_ROUTEINFO_BY_TOPIC
    gives it.

    A topic that is neither in ``routes`` nor in ``missing`` had no room in the answer, which holds
    50,000 pairs of topic and broker group: ask for it again.

    Attributes:
        topics: 0 to 1,000 names.
    """

    topics: Annotated[list[TopicName], msgspec.Meta(max_length=MAX_TOPICS_PER_REQUEST)]


class TopicQueues(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The queues of one topic; fields as in ``TopicRoute``.

    Attributes:
        topic: Name.
        queues: One for each broker group that carries the topic, sorted by broker name.
        order: The topic is ordered.
    """

    topic: TopicName
    queues: list[QueueData]
    order: bool = False


class TopicRoutes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_ROUTES_OF_TOPICS.

    A topic that is neither in ``routes`` nor in ``missing`` had no room; ask for it again.

    Attributes:
        routes: Topics that were found.
        brokers: Groups of all ``queues`` that are there, each once.
        missing: Topics that no broker carries, or that the client has no right to.
        hint_endpoint: PUB endpoint of the name server that announces route changes.
    """

    routes: list[TopicQueues]
    brokers: list[BrokerData]
    missing: list[TopicName] = []
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
        topics: Hashes of the topics that changed, see ``topic_hash``; empty when too many to list,
            then any topic may be.
    """

    brokers: Names
    topics: TopicHashes = []


@lru_cache(maxsize=8192)
def topic_hash(topic: str) -> int:
    """Return the hash of a topic in hints, which all users get: it does not reveal the name.

    Returns:
        The first 8 bytes of BLAKE2b of the name, little endian, without their lowest bit.
    """
    return int.from_bytes(hashlib.blake2b(topic.encode(), digest_size=8).digest(), "little") >> 1


class GetClusterRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_BROKER_CLUSTER_INFO: all broker groups that are registered, and the endpoint of
    route-change hints."""


class ClusterInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All broker groups that a name server knows, and where it announces changes.

    Attributes:
        brokers: Sorted by name.
        hint_endpoint: PUB endpoint of the name server that announces route changes.
    """

    brokers: list[BrokerData]
    hint_endpoint: str = ""


class TopicListRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_ALL_TOPIC_LIST_FROM_NAMESERVER: names of all topics."""


class TopicList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Names of topics, sorted.

    Attributes:
        topics: Sorted.
    """

    topics: TopicNames


class DeleteTopicRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """DELETE_TOPIC_IN_BROKER and DELETE_TOPIC_IN_NAMESRV; answered with an empty header.

    Attributes:
        topic: Topic to forget.
    """

    topic: TopicName


class WipeWritePermRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """WIPE_WRITE_PERM_OF_BROKER: drains a broker group, or ends that.

    The queues of a drained group are listed without the WRITE bit, so producers leave it and
    consumers empty it. That lasts until restored, over restarts of the broker, and of the name
    server if it has a ``data_dir``. Send it to every name server.

    Attributes:
        broker_name: Broker group.
        restore: True ends the draining.

    Errors:
        QUERY_NOT_FOUND: No such broker group.
        DISK_FULL: In force, but not saved.
        SYSTEM_ERROR: In force, but not saved.
    """

    broker_name: Name
    restore: bool = False


class WipeWritePermResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to WIPE_WRITE_PERM_OF_BROKER: number of topics that the broker carries.

    Attributes:
        topic_count: Topics of the group, 0 while it is down.
    """

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
        namespaces: Namespaces that have keys, if they were requested.
    """

    pairs: dict[str, str]
    namespaces: list[str] = []
