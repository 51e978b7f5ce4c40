"""The one table of commands: number, structs of request and answer, and right of each.

Dispatch uses it to decode requests, to look up rights, and to count. The reference of the
protocol on the documentation's site is made from it, from the docstrings of ``RequestCode``
where a command has no request of its own, and from those of the structs.

The numbers are RocketMQ's where RocketMQ has the command. They are on the wire and never change.
"""

import enum
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Final

import msgspec

from mqmesh.protocol import (
    admin,
    client_rpc,
    coordination,
    delivery,
    filters,
    gateway,
    groups,
    membership,
    messaging,
    processing,
    pulling,
    queries,
    replay,
    replication,
    replies,
    retries,
    route,
    schedule,
    snapshots,
    tables,
    topic_schema,
    transactions,
)
from mqmesh.protocol.command import decode_header

IN_BODY: Final = "body"
"""Stands in the batches of the body: each is judged for itself."""
LOOKED_UP: Final = "looked-up"
"""Names that are not in the request; known once its object was found."""


class ServedBy(enum.StrEnum):
    """Roles that serve a command."""

    ALL = "every role"
    BROKER = "broker"
    NAMESRV = "name server"
    FILTERSRV = "filter server"
    SCHEDULE = "schedule service"
    INDEXER = "index process"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    CLIENT = "client"


class Right(enum.StrEnum):
    """Rights that a principal needs for a command."""

    NONE = "none"
    """Every connected peer."""
    PUB = "PUB"
    """Right to send to the topics."""
    SUB = "SUB"
    """Right to read the topics, and to do it as the groups."""
    FILTER = "FILTER"
    """Right to upload filters in Python for the groups."""
    VIEW_OWN = "view or SUB"
    """Right to see the state of the topics and groups. Their readers have it, because the data of a
    group belong to its members, and so have users that may see everything."""
    ADMIN_OWN = "admin or SUB"
    """Right to change the state of the group and the topics; their readers have it, too."""
    VIEW = "view"
    """Right to see how everything is; changes nothing."""
    ADMIN = "admin"
    """Right to change topics, groups, offsets, messages and settings."""
    INTERNAL = "internal"
    """Right of the processes of the cluster."""


class CommandSpec(msgspec.Struct, frozen=True):
    """One row: a command.

    Attributes:
        code: Its number and name.
        servers: Roles that serve it.
        right: Right that it needs.
        request: Type of its header; None where there is none, ``fixed`` says how it is read.
        reply: Type of the answer's header; None for an empty one, and for none.
        topics: Where topics stand in the header, as paths: ``config.topic``, ``queues[].topic``;
            or ``IN_BODY``, ``LOOKED_UP``.
        groups: The same of groups.
        topic_names: Gives the topics that a request names in its header; not those left empty.
        group_names: The same of groups.
        word: The right as plain text, which is quicker to look up.
        oneway: Sent without a wish for an answer.
        fixed: Reads a header that is no msgpack array.
        broker: Where the header names the broker group that it speaks for; "" for nowhere.
        scoped: A user that is confined to a namespace may ask without naming anything: the answer
            has only what is in the namespace.
    """

    code: "RequestCode"
    servers: frozenset[ServedBy]
    right: Right
    request: type[msgspec.Struct] | None
    reply: type[msgspec.Struct] | None
    topics: tuple[str, ...]
    groups: tuple[str, ...]
    topic_names: Callable[[Any], list[str]]
    group_names: Callable[[Any], list[str]]
    word: str
    oneway: bool = False
    fixed: Callable[[memoryview], Any] | None = None
    broker: str = ""
    scoped: bool = False

    def decoder(self) -> Callable[[memoryview], Any]:
        """Return the function that decodes the bytes of a request's header.

        It raises ``RemoteProtocolError`` for bytes that are no such header. A header that has no
        fields may be left out.
        """
        if self.fixed is not None:
            return self.fixed
        if self.request is None:
            return _nothing
        if not self.request.__struct_fields__:
            return partial(_decode_empty, self.request, self.request())
        return partial(decode_header, self.request)


def _nothing(data: memoryview) -> None:
    return None


def _decode_empty(
    kind: type[msgspec.Struct], empty: msgspec.Struct, data: memoryview
) -> msgspec.Struct:
    return decode_header(kind, data) if data else empty


def _reader(paths: tuple[str, ...]) -> Callable[[Any], list[str]]:
    """Return a reader of the names at these paths: it runs for each request, so the usual is
    quick."""
    places = [path for path in paths if path not in (IN_BODY, LOOKED_UP)]
    if len(places) == 1 and places[0].isidentifier():
        get = attrgetter(places[0])
        return lambda header: [name] if (name := get(header)) else []
    steps = [path.split(".") for path in places]
    return lambda header: [name for path in steps for name in _walk(header, path) if name]


def _walk(value: Any, steps: list[str]) -> Iterator[str]:
    if not steps:
        yield value
        return
    first, *rest = steps
    inner = getattr(value, first.removesuffix("[]"))
    for one in inner or () if first.endswith("[]") else (inner,):
        yield from _walk(one, rest)


_ROWS: Final[dict[int, partial[CommandSpec]]] = {}


def _row(
    number: int,
    servers: ServedBy | tuple[ServedBy, ...],
    right: Right,
    request: type[msgspec.Struct] | None = None,
    reply: type[msgspec.Struct] | None = None,
    *,
    topics: str = "",
    groups: str = "",
    oneway: bool = False,
    fixed: Callable[[memoryview], Any] | None = None,
    broker: str = "",
    scoped: bool = False,
) -> int:
    """Note the row of a command, and return its number."""
    who = frozenset({servers} if isinstance(servers, ServedBy) else servers)
    where, whose = tuple(topics.split()), tuple(groups.split())
    _ROWS[number] = partial(
        CommandSpec,
        servers=who,
        right=right,
        request=request,
        reply=reply,
        topics=where,
        groups=whose,
        topic_names=_reader(where),
        group_names=_reader(whose),
        word=right.value,
        oneway=oneway,
        fixed=fixed,
        broker=broker,
        scoped=scoped,
    )
    return number


ALL, BROKER, NAMESRV, FILTERSRV, SCHEDULE, INDEXER, COORDINATOR, GATEWAY, CLIENT = ServedBy
NONE, PUB, SUB, FILTER, VIEW_OWN, ADMIN_OWN, VIEW, ADMIN, INTERNAL = Right


# fmt: off
@enum.unique
class RequestCode(enum.IntEnum):
    """Commands: number, roles that serve it, right; types of the headers of request and answer;
    where topics and groups stand in the request."""

    PING = _row(1, ALL, NONE, reply=admin.RoleInfo)
    """The health check: name and state of a process. Answered also while a broker recovers."""
    GET_BROKER_RUNTIME_INFO = _row(28, ALL, VIEW, admin.RuntimeInfoRequest, admin.RuntimeInfo,
        scoped=True)
    GET_ACCESS_LIST = _row(1_080, ALL, VIEW, admin.GetAccessListRequest, admin.AccessListInfo)
    UPDATE_ACCESS_LIST = _row(1_081, ALL, ADMIN, admin.UpdateAccessListRequest)
    PROBE_CLIENT = _row(1_004, CLIENT, INTERNAL, oneway=True)
    """From a server to a client on a local connection that sent nothing for 500 ms after a request;
    oneway. The client's ZeroMQ has to take it; the client itself ignores it."""

    # Name server.
    REGISTER_BROKER = _row(103, NAMESRV, INTERNAL,
        route.RegisterBrokerRequest, route.RegisterBrokerResponse,
        topics="topics[].topic", broker="broker_name")
    UNREGISTER_BROKER = _row(104, NAMESRV, INTERNAL,
        route.UnregisterBrokerRequest, broker="broker_name")
    GET_ROUTEINFO_BY_TOPIC = _row(105, NAMESRV, NONE,
        route.GetRouteRequest, route.TopicRoute, topics="topic")
    GET_ROUTES_OF_TOPICS = _row(1_085, NAMESRV, NONE,
        route.GetRoutesRequest, route.TopicRoutes, topics=LOOKED_UP)
    GET_BROKER_CLUSTER_INFO = _row(106, NAMESRV, NONE, route.GetClusterRequest, route.ClusterInfo)
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = _row(206, NAMESRV, VIEW,
        route.TopicListRequest, route.TopicList, scoped=True)
    DELETE_TOPIC_IN_NAMESRV = _row(216, NAMESRV, ADMIN, route.DeleteTopicRequest, topics="topic")
    """Forgets the routes of a topic, also queues of an ordered topic whose broker will not return.

    Send it to every name server, after DELETE_TOPIC_IN_BROKER to every broker: a broker that still
    has the topic brings it back with its next heartbeat. Deleting an unknown topic is no error.
    """
    WIPE_WRITE_PERM_OF_BROKER = _row(205, NAMESRV, ADMIN,
        route.WipeWritePermRequest, route.WipeWritePermResponse)
    PUT_KV_CONFIG = _row(100, NAMESRV, ADMIN, route.KvRequest)
    """Sets a key of the key/value configuration. Name servers do not share it.

    Errors:
        MESSAGE_ILLEGAL: An empty key.
        SYSTEM_BUSY: ``max_kv_bytes`` is reached.
        DISK_FULL: In force, but not saved.
        SYSTEM_ERROR: In force, but not saved.
    """
    GET_KV_CONFIG = _row(101, NAMESRV, VIEW, route.KvRequest, route.KvResponse)
    """Value of a key.

    Errors:
        QUERY_NOT_FOUND: No such key.
    """
    DELETE_KV_CONFIG = _row(102, NAMESRV, ADMIN, route.KvRequest)
    """Deletes a key; an unknown one is no error.

    Errors:
        DISK_FULL: In force, but not saved.
        SYSTEM_ERROR: In force, but not saved.
    """
    LIST_KV_CONFIG = _row(219, NAMESRV, VIEW, route.KvRequest, route.KvResponse)
    """All keys of a namespace with their values.

    Errors:
        QUERY_NOT_FOUND: No such namespace.
    """
    GET_NAMESRV_CONFIG = _row(319, NAMESRV, VIEW, admin.GetConfigRequest, admin.ConfigEntries)
    """All settings of a name server."""
    UPDATE_NAMESRV_CONFIG = _row(318, NAMESRV, ADMIN,
        admin.UpdateConfigRequest, admin.ConfigChanges)
    """Changes settings while the name server runs, and over restarts if it has a ``data_dir``.

    Send it to every name server. All of a request is done, or nothing; the answer comes once it is
    in force, and on disk.

    Errors:
        MESSAGE_ILLEGAL: A key is unknown or not changeable, or a value is wrong.
        SYSTEM_BUSY: Another change is being written.
        DISK_FULL: Not saved, and not in force.
        SYSTEM_ERROR: Not saved, and not in force.
    """

    # Messages.
    SEND_MESSAGE = _row(10, BROKER, PUB, topics=IN_BODY, fixed=messaging.decode_send)
    """Stores record batches, each for one queue of this broker; they are stored, answered and
    refused one by one. Headers, layouts and the rules for retries: docs/protocol.md.

    Errors:
        MESSAGE_ILLEGAL: Of the request: sizes that do not fit. Of a batch: damaged, no such queue,
            larger than ``max_message_size`` or than a segment, a message that cannot be decoded or
            has another topic.
        SYSTEM_BUSY: ``max_sync_flush_waits``, ``max_producers_per_connection``, ``max_topics`` or
            ``storage.max_producer_states`` is reached.
        TOPIC_NOT_EXIST: No such topic, and it may not be created.
        NO_PERMISSION: The topic is not writable, or the key is not that of the producer id.
        SEQUENCE_CONFLICT: Other messages are stored under these sequences.
        REVISION_CONFLICT: Of a batch for a table: a key has another newest revision than expected.
        NOT_MASTER: The broker is a follower.
        DISK_FULL: No room to write.
        SERVICE_NOT_AVAILABLE: The broker is not ready.
    """
    QUERY_PRODUCER = _row(1_115, BROKER, PUB,
        messaging.ProducerRequest, messaging.ProducerInfo, topics="topic")
    PULL_MESSAGE = _row(11, (BROKER, FILTERSRV), SUB,
        pulling.PullRequest, pulling.PullResponse, topics="topic", groups="group")
    VIEW_MESSAGE = _row(33, BROKER, SUB, pulling.ViewMessageRequest, topics=LOOKED_UP)
    QUERY_MESSAGE = _row(12, (BROKER, INDEXER), SUB,
        queries.QueryMessageRequest, queries.QueryMessageResponse, topics="topic")
    QUERY_MESSAGE_BY_ID = _row(1_001, (BROKER, INDEXER), SUB,
        queries.QueryMessageByIdRequest, queries.QueryMessageResponse, topics=LOOKED_UP)

    # Offsets.
    QUERY_CONSUMER_OFFSET = _row(14, BROKER, SUB,
        pulling.QueryConsumerOffsetRequest, pulling.ConsumerOffsets,
        topics="queues[].topic", groups="group")
    UPDATE_CONSUMER_OFFSET = _row(15, BROKER, SUB,
        pulling.UpdateConsumerOffsetRequest, topics="queues[].topic", groups="group")
    QUERY_QUEUE_BOUNDS = _row(30, BROKER, SUB,
        pulling.QueueBoundsRequest, pulling.QueueBoundsResponse, topics="topic")
    SEARCH_OFFSET_BY_TIMESTAMP = _row(29, BROKER, SUB,
        pulling.SearchOffsetRequest, pulling.OffsetResponse, topics="topic")

    # Failed messages.
    CONSUMER_SEND_MSG_BACK = _row(36, BROKER, SUB,
        retries.SendBackRequest, retries.SendBackResponse, topics="entries[].topic", groups="group")
    RESEND_DEAD_LETTERS = _row(1_003, BROKER, ADMIN_OWN,
        retries.ResendRequest, retries.ResendResponse, topics=LOOKED_UP, groups="group")

    REPLAY_MESSAGES = _row(1_107, BROKER, ADMIN,
        replay.ReplayRequest, replay.ReplayResponse,
        topics="topic into_topic", groups="group")

    # Messages that are acknowledged one by one.
    RECEIVE_MESSAGE = _row(1_110, BROKER, SUB,
        delivery.ReceiveRequest, delivery.ReceiveResponse, topics="topic", groups="group")
    SETTLE_MESSAGES = _row(1_111, BROKER, SUB,
        delivery.SettleRequest, delivery.SettleResponse, topics="topic", groups="group")
    LIST_LEASES = _row(1_112, BROKER, VIEW_OWN,
        delivery.ListLeasesRequest, delivery.LeaseList, topics="topic", groups="group")
    RELEASE_LEASES = _row(1_113, BROKER, ADMIN_OWN,
        delivery.ReleaseLeasesRequest, delivery.ReleasedLeases, groups="group")

    # Messages that are made of others.
    COMMIT_PROCESSED = _row(1_116, BROKER, SUB,
        processing.CommitProcessedRequest, topics="topic", groups="group")

    # Tables.
    READ_TABLE = _row(1_120, BROKER, SUB,
        tables.ReadTableRequest, tables.TableEntries, topics="topic")

    # Clients.
    HEART_BEAT = _row(34, BROKER, SUB,
        membership.HeartbeatRequest, membership.HeartbeatResponse,
        topics="consumers[].subscriptions[].topic", groups="consumers[].group")
    UNREGISTER_CLIENT = _row(35, BROKER, NONE, membership.UnregisterClientRequest)
    GET_CONSUMER_LIST_BY_GROUP = _row(38, BROKER, SUB,
        membership.ConsumerListRequest, membership.ConsumerList, groups="group")
    NOTIFY_CONSUMER_IDS_CHANGED = _row(40, CLIENT, INTERNAL,
        membership.ConsumerIdsChanged, groups="group", oneway=True)
    LOCK_BATCH_MQ = _row(41, BROKER, SUB,
        membership.LockBatchRequest, membership.LockBatchResponse,
        topics="queues[].topic", groups="group")
    UNLOCK_BATCH_MQ = _row(42, BROKER, SUB,
        membership.UnlockBatchRequest, topics="queues[].topic", groups="group")

    # Replies to requests.
    SEND_REPLY_MESSAGE = _row(324, BROKER, NONE,
        replies.SendReplyRequest, replies.SendReplyResponse)
    PUSH_REPLY_MESSAGE_TO_CLIENT = _row(326, CLIENT, INTERNAL, replies.PushReply, oneway=True)
    ACKNOWLEDGE_REPLY = _row(1_010, BROKER, NONE, replies.AcknowledgeReply, oneway=True)

    # Transactions.
    END_TRANSACTION = _row(37, BROKER, PUB,
        transactions.EndTransactionRequest, transactions.EndTransactionResponse,
        topics=LOOKED_UP, groups="group")
    CHECK_TRANSACTION_STATE = _row(39, CLIENT, INTERNAL,
        transactions.CheckTransactionState, groups="group", oneway=True)
    LIST_HALF_MESSAGES = _row(1_040, BROKER, VIEW,
        transactions.ListHalfMessagesRequest, transactions.HalfList,
        topics="topic", groups="group", scoped=True)
    VIEW_HALF_MESSAGE = _row(1_041, BROKER, ADMIN,
        transactions.ViewHalfMessageRequest, transactions.HalfInfo, topics=LOOKED_UP)
    END_HALF_MESSAGE = _row(1_042, BROKER, ADMIN,
        transactions.EndHalfMessageRequest, transactions.EndTransactionResponse, topics=LOOKED_UP)

    # Delayed messages.
    OPEN_SCHEDULE = _row(1_030, BROKER, INTERNAL,
        schedule.OpenScheduleRequest, schedule.OpenScheduleResponse)
    PULL_SCHEDULE = _row(1_031, BROKER, INTERNAL,
        schedule.PullScheduleRequest, schedule.PullScheduleResponse)
    DELIVER_DUE = _row(1_032, BROKER, INTERNAL,
        schedule.DeliverDueRequest, schedule.DeliverDueResponse)
    CANCEL_DELAYED = _row(1_033, BROKER, PUB, schedule.CancelDelayedRequest, topics=LOOKED_UP)
    REFUSE_CANCEL = _row(1_034, BROKER, INTERNAL, schedule.RefuseCancelRequest, oneway=True)
    NOTIFY_SCHEDULE = _row(1_035, SCHEDULE, INTERNAL, schedule.ScheduleNews, oneway=True)

    # RocketMQ's clients.
    GET_GATEWAY_CLIENTS = _row(1_114, GATEWAY, VIEW,
        gateway.GatewayClientsRequest, gateway.GatewayClients, scoped=True)

    # Filters in Python.
    REGISTER_FILTER_SERVER = _row(301, BROKER, INTERNAL, filters.RegisterFilterServerRequest)
    GET_FILTER_SERVER = _row(1_020, BROKER, SUB,
        filters.GetFilterServerRequest, filters.FilterServerInfo, groups="group")
    REGISTER_MESSAGE_FILTER_CLASS = _row(302, FILTERSRV, FILTER,
        filters.UploadFilterRequest, filters.UploadFilterResponse, groups="group")

    # Consumer groups, for administrators.
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = _row(200, BROKER, ADMIN,
        groups.UpdateGroupRequest, groups.GroupConfig, groups="config.group")
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = _row(201, BROKER, VIEW_OWN,
        groups.GetGroupsRequest, groups.GroupSummaries, groups="group", scoped=True)
    DELETE_SUBSCRIPTIONGROUP = _row(207, BROKER, ADMIN, groups.DeleteGroupRequest, groups="group")
    GET_CONSUMER_CONNECTION_LIST = _row(203, BROKER, VIEW_OWN,
        groups.ConsumerConnectionsRequest, groups.ConsumerConnections, groups="group")
    GET_PRODUCER_CONNECTION_LIST = _row(204, BROKER, VIEW,
        groups.ProducerConnectionsRequest, groups.ProducerConnections, groups="group")
    GET_CONSUME_STATS = _row(208, BROKER, VIEW_OWN,
        groups.ConsumeStatsRequest, groups.ConsumeStats, topics="topic", groups="group")
    GET_GROUPS_PROGRESS = _row(1_075, BROKER, VIEW,
        groups.GroupsProgressRequest, groups.GroupsProgress, scoped=True)
    QUERY_TOPIC_CONSUME_BY_WHO = _row(300, BROKER, VIEW,
        groups.TopicConsumersRequest, groups.GroupNames, topics="topic")
    INVOKE_BROKER_TO_RESET_OFFSET = _row(222, BROKER, ADMIN_OWN,
        groups.ResetOffsetRequest, groups.OffsetChanges, topics="topic", groups="group")
    CLONE_GROUP_OFFSET = _row(314, BROKER, ADMIN,
        groups.CloneOffsetRequest, groups.OffsetChanges, topics="topic", groups="source target")
    RESET_CONSUMER_CLIENT_OFFSET = _row(220, CLIENT, INTERNAL,
        groups.ConsumerOffsetReset, topics="queues[].topic", groups="group", oneway=True)

    # One consumer, for administrators.
    GET_CONSUMER_RUNNING_INFO = _row(307, BROKER, ADMIN,
        client_rpc.RunningInfoRequest, client_rpc.RunningInfo, groups="group")
    CONSUME_MESSAGE_DIRECTLY = _row(309, BROKER, ADMIN,
        client_rpc.HandToRequest, client_rpc.HandedOver, topics=LOOKED_UP, groups="group")
    ASK_CLIENT = _row(1_090, CLIENT, INTERNAL, client_rpc.AskClient, oneway=True)
    ANSWER_OF_CLIENT = _row(1_091, BROKER, NONE, client_rpc.ClientAnswer, oneway=True)

    # Topics and the broker, for administrators.
    UPDATE_AND_CREATE_TOPIC = _row(17, BROKER, ADMIN,
        admin.UpdateTopicRequest, route.TopicConfig, topics="config.topic")
    CREATE_TOPICS = _row(1_086, BROKER, ADMIN,
        admin.CreateTopicsRequest, admin.TopicConfigs, topics="configs[].topic")
    GET_TOPIC_CONFIG = _row(21, BROKER, VIEW,
        admin.GetTopicConfigRequest, admin.TopicConfigs, topics="topic", scoped=True)
    PUT_TOPIC_SCHEMA = _row(1_108, BROKER, ADMIN,
        topic_schema.PutTopicSchemaRequest, topics="topic")
    GET_TOPIC_SCHEMA = _row(1_109, BROKER, VIEW_OWN,
        topic_schema.TopicSchemaRequest, topic_schema.TopicSchema, topics="topic")
    DELETE_TOPIC_IN_BROKER = _row(215, BROKER, ADMIN, route.DeleteTopicRequest, topics="topic")
    """Forgets a topic with its messages and all offsets in it; answered with an empty header once
    that is on disk. Held pulls of it end with TOPIC_NOT_EXIST.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        NO_PERMISSION: A reserved name.
        DISK_FULL: No room to write.
    """
    GET_TOPIC_STATS_INFO = _row(202, BROKER, VIEW_OWN,
        admin.TopicStatsRequest, admin.TopicStats, topics="topic")
    GET_BROKER_CONFIG = _row(26, BROKER, VIEW, admin.GetConfigRequest, admin.ConfigEntries)
    """All settings of a replica; followers answer, too."""
    UPDATE_BROKER_CONFIG = _row(25, BROKER, ADMIN, admin.UpdateConfigRequest, admin.ConfigChanges)
    """Changes settings while the broker runs, and over restarts: those that GET_BROKER_CONFIG marks
    as changeable.

    Send it to every replica of the group: each has its own. All of a request is done, or nothing;
    the answer comes once it is in force, and on disk.

    Errors:
        MESSAGE_ILLEGAL: A key is unknown or not changeable, or a value is wrong.
        SYSTEM_BUSY: Another change is being written.
        DISK_FULL: Not saved, and not in force.
        SYSTEM_ERROR: Not saved, and not in force.
    """
    QUERY_CONSUME_QUEUE = _row(321, BROKER, VIEW,
        admin.QueueEntriesRequest, admin.QueueEntries, topics="topic")
    GET_ALL_CLIENTS = _row(328, BROKER, VIEW, groups.AllClientsRequest, groups.AllClients,
        scoped=True)
    DELETE_EXPIRED_COMMITLOG = _row(329, BROKER, ADMIN, admin.CleanRequest, admin.CleanResult)
    CREATE_SNAPSHOT = _row(1_070, BROKER, ADMIN,
        snapshots.CreateSnapshotRequest, snapshots.SnapshotInfo)

    # Between replicas of a broker group.
    OPEN_REPLICATION = _row(1_050, BROKER, INTERNAL,
        replication.OpenReplicationRequest, replication.OpenReplicationResponse)
    REPLICATE_LOG = _row(1_051, CLIENT, INTERNAL, replication.ReplicateLog, oneway=True)
    ACK_REPLICATION = _row(1_052, BROKER, INTERNAL, replication.AckReplication, oneway=True)
    READ_LOG = _row(1_054, BROKER, INTERNAL, replication.ReadLogRequest, replication.ReplicateLog)
    HAND_OVER_COMMITS = _row(1_055, BROKER, INTERNAL, replication.HandOverCommitsRequest)
    FENCE = _row(1_053, BROKER, INTERNAL, replication.FenceRequest, replication.FenceResponse)
    STAND_FOR_ELECTION = _row(1_059, BROKER, INTERNAL, replication.StandRequest)
    HOLD_STILL = _row(1_069, BROKER, INTERNAL, replication.HoldStillRequest)
    PROMOTE_REPLICA = _row(1_057, BROKER, ADMIN,
        replication.PromoteReplicaRequest, replication.PromoteReplicaResponse)
    SWITCH_OVER = _row(1_060, BROKER, ADMIN,
        replication.SwitchOverRequest, replication.SwitchOverResponse)
    ELECT_REPLICA = _row(1_061, BROKER, ADMIN, replication.ElectReplicaRequest)
    INIT_GROUP = _row(1_062, BROKER, ADMIN, replication.InitGroupRequest)
    CHANGE_VOTERS = _row(1_063, BROKER, ADMIN,
        replication.ChangeVotersRequest, replication.ChangeVotersResponse)
    PAUSE_FAILOVER = _row(1_064, BROKER, ADMIN,
        replication.PauseFailoverRequest, replication.PauseFailoverResponse)
    GET_HA_SETTINGS = _row(1_067, BROKER, VIEW,
        replication.HaSettingsRequest, replication.HaSettings)
    PUT_HA_SETTINGS = _row(1_068, BROKER, ADMIN,
        replication.PutHaSettingsRequest, replication.HaSettings)
    GET_EPOCHS = _row(1_065, BROKER, VIEW, replication.EpochsRequest, replication.LogEpochs)
    CHECKSUM_LOG = _row(1_066, BROKER, VIEW,
        replication.ChecksumLogRequest, replication.ChecksumLogResponse)
    GET_HA_STATUS = _row(1_058, BROKER, VIEW, replication.HaStatusRequest, replication.HaStatus)

    # Index process.
    ADVANCE_INDEX = _row(1_002, INDEXER, INTERNAL,
        queries.AdvanceIndexRequest, queries.IndexProgress)
    COPY_INDEX = _row(1_071, INDEXER, INTERNAL,
        snapshots.CopyIndexRequest, snapshots.CopyIndexResponse)

    # Coordinator.
    BEGIN_SESSION = _row(1_100, COORDINATOR, INTERNAL,
        coordination.BeginSessionRequest, coordination.BeginSessionResponse)
    KEEP_SESSION = _row(1_101, COORDINATOR, INTERNAL,
        coordination.KeepSessionRequest, coordination.KeepSessionResponse)
    END_SESSION = _row(1_102, COORDINATOR, INTERNAL, coordination.EndSessionRequest)
    READ_RECORD = _row(1_103, COORDINATOR, INTERNAL,
        coordination.ReadRecordRequest, coordination.RecordView)
    CHANGE_RECORD = _row(1_104, COORDINATOR, INTERNAL,
        coordination.ChangeRecordRequest, coordination.ChangeRecordResponse)
    WATCH_RECORDS = _row(1_105, COORDINATOR, INTERNAL, coordination.WatchRecordsRequest)
    NOTIFY_RECORD = _row(1_106, CLIENT, INTERNAL, coordination.RecordView, oneway=True)
    """From the coordinator to a connection that watches, oneway: a record as it is now. Of many
    changes in a short time only the last is sent."""
# fmt: on


COMMANDS: Final = {code: _ROWS[code](code) for code in RequestCode}
"""Every command, by its code."""


def not_served(code: int) -> str:
    """Returns why a server refuses a request that it has no handler for."""
    if code not in COMMANDS:
        return f"request code {code} is not known to this version"
    spec = COMMANDS[RequestCode(code)]
    servers = " or ".join(sorted(spec.servers))
    return (
        f"request code {code} ({spec.code.name}) is not served here but by a {servers}; is the "
        "address right?"
    )


def served_by(server: ServedBy) -> dict[RequestCode, CommandSpec]:
    """Return the commands that a role serves, those of every role among them."""
    return {code: spec for code, spec in COMMANDS.items() if spec.servers & {server, ServedBy.ALL}}
