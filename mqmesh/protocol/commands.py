"""The one table of commands: what each is asked with, answered with, and needs.

Dispatch decodes requests by it, looks up the right by it, and counts by it. The reference of the
protocol on the documentation's site is made from it, from the docstrings of ``RequestCode``
where a command has no request of its own, and from those of the structs. A request code
without a row fails a test.
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
    filters,
    groups,
    membership,
    messaging,
    pulling,
    queries,
    replication,
    replies,
    retries,
    route,
    schedule,
    snapshots,
    transactions,
)
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import decode_header

IN_BODY: Final = "body"
"""Stands in the batches of the body: each is judged for itself."""
LOOKED_UP: Final = "looked-up"
"""Names that are not in the request; known once what it refers to was found."""


class ServedBy(enum.StrEnum):
    """Roles that serve a command."""

    ALL = "every role"
    BROKER = "broker"
    NAMESRV = "name server"
    FILTERSRV = "filter server"
    SCHEDULE = "schedule service"
    INDEXER = "index process"
    COORDINATOR = "coordinator"
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
    """Right to see how the topics and groups are, of readers as well as of those that may see
    everything: what belongs to a group is its members'."""
    ADMIN_OWN = "admin or SUB"
    """Right to change what belongs to the group and the topics, of their readers, too."""
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
    """

    code: RequestCode
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


def _row(
    code: RequestCode,
    servers: ServedBy | tuple[ServedBy, ...],
    right: Right,
    topics: str,
    groups: str,
    request: type[msgspec.Struct] | None = None,
    reply: type[msgspec.Struct] | None = None,
    *,
    oneway: bool = False,
    fixed: Callable[[memoryview], Any] | None = None,
    broker: str = "",
) -> CommandSpec:
    who = frozenset({servers} if isinstance(servers, ServedBy) else servers)
    where, whose = tuple(topics.split()), tuple(groups.split())
    return CommandSpec(
        code,
        who,
        right,
        request,
        reply,
        where,
        whose,
        _reader(where),
        _reader(whose),
        right.value,
        oneway,
        fixed,
        broker,
    )


C = RequestCode
ALL, BROKER, NAMESRV, FILTERSRV, SCHEDULE, INDEXER, COORDINATOR, CLIENT = ServedBy
NONE, PUB, SUB, FILTER, VIEW_OWN, ADMIN_OWN, VIEW, ADMIN, INTERNAL = Right

# fmt: off
_ROWS: Final = (
    # code, roles that serve it, right, where topics and groups stand; types of the headers.
    _row(C.PING, ALL, NONE, "", "", None, admin.RoleInfo),
    _row(C.GET_BROKER_RUNTIME_INFO, ALL, VIEW, "", "",
         admin.RuntimeInfoRequest, admin.RuntimeInfo),
    _row(C.GET_ACCESS_LIST, ALL, VIEW, "", "",
         admin.GetAccessListRequest, admin.AccessListInfo),
    _row(C.UPDATE_ACCESS_LIST, ALL, ADMIN, "", "", admin.UpdateAccessListRequest),
    _row(C.PROBE_CLIENT, CLIENT, INTERNAL, "", "", oneway=True),
    # Name server.
    _row(C.REGISTER_BROKER, NAMESRV, INTERNAL, "topics[].topic", "",
         route.RegisterBrokerRequest, route.RegisterBrokerResponse, broker="broker_name"),
    _row(C.UNREGISTER_BROKER, NAMESRV, INTERNAL, "", "", route.UnregisterBrokerRequest,
         broker="broker_name"),
    _row(C.GET_ROUTEINFO_BY_TOPIC, NAMESRV, NONE, "topic", "",
         route.GetRouteRequest, route.TopicRoute),
    _row(C.GET_ROUTES_OF_TOPICS, NAMESRV, NONE, LOOKED_UP, "",
         route.GetRoutesRequest, route.TopicRoutes),
    _row(C.GET_BROKER_CLUSTER_INFO, NAMESRV, NONE, "", "",
         route.GetClusterRequest, route.ClusterInfo),
    _row(C.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, NAMESRV, VIEW, "", "",
         route.TopicListRequest, route.TopicList),
    _row(C.DELETE_TOPIC_IN_NAMESRV, NAMESRV, ADMIN, "topic", "", route.DeleteTopicRequest),
    _row(C.WIPE_WRITE_PERM_OF_BROKER, NAMESRV, ADMIN, "", "",
         route.WipeWritePermRequest, route.WipeWritePermResponse),
    _row(C.PUT_KV_CONFIG, NAMESRV, ADMIN, "", "", route.KvRequest),
    _row(C.GET_KV_CONFIG, NAMESRV, VIEW, "", "", route.KvRequest, route.KvResponse),
    _row(C.DELETE_KV_CONFIG, NAMESRV, ADMIN, "", "", route.KvRequest),
    _row(C.LIST_KV_CONFIG, NAMESRV, VIEW, "", "", route.KvRequest, route.KvResponse),
    _row(C.GET_NAMESRV_CONFIG, NAMESRV, VIEW, "", "",
         admin.GetConfigRequest, admin.ConfigEntries),
    _row(C.UPDATE_NAMESRV_CONFIG, NAMESRV, ADMIN, "", "",
         admin.UpdateConfigRequest, admin.ConfigChanges),
    # Messages.
    _row(C.SEND_MESSAGE, BROKER, PUB, IN_BODY, "", fixed=messaging.decode_send),
    _row(C.PULL_MESSAGE, (BROKER, FILTERSRV), SUB, "topic", "group",
         pulling.PullRequest, pulling.PullResponse),
    _row(C.VIEW_MESSAGE, BROKER, SUB, LOOKED_UP, "", pulling.ViewMessageRequest),
    _row(C.QUERY_MESSAGE, (BROKER, INDEXER), SUB, "topic", "",
         queries.QueryMessageRequest, queries.QueryMessageResponse),
    _row(C.QUERY_MESSAGE_BY_ID, (BROKER, INDEXER), SUB, LOOKED_UP, "",
         queries.QueryMessageByIdRequest, queries.QueryMessageResponse),
    # Offsets.
    _row(C.QUERY_CONSUMER_OFFSET, BROKER, SUB, "queues[].topic", "group",
         pulling.QueryConsumerOffsetRequest, pulling.ConsumerOffsets),
    _row(C.UPDATE_CONSUMER_OFFSET, BROKER, SUB, "queues[].topic", "group",
         pulling.UpdateConsumerOffsetRequest),
    _row(C.QUERY_QUEUE_BOUNDS, BROKER, SUB, "topic", "",
         pulling.QueueBoundsRequest, pulling.QueueBoundsResponse),
    _row(C.SEARCH_OFFSET_BY_TIMESTAMP, BROKER, SUB, "topic", "",
         pulling.SearchOffsetRequest, pulling.OffsetResponse),
    # Failed messages.
    _row(C.CONSUMER_SEND_MSG_BACK, BROKER, SUB, "entries[].topic", "group",
         retries.SendBackRequest, retries.SendBackResponse),
    _row(C.RESEND_DEAD_LETTERS, BROKER, ADMIN_OWN, LOOKED_UP, "group",
         retries.ResendRequest, retries.ResendResponse),
    # Clients.
    _row(C.HEART_BEAT, BROKER, SUB, "consumers[].subscriptions[].topic", "consumers[].group",
         membership.HeartbeatRequest, membership.HeartbeatResponse),
    _row(C.UNREGISTER_CLIENT, BROKER, NONE, "", "", membership.UnregisterClientRequest),
    _row(C.GET_CONSUMER_LIST_BY_GROUP, BROKER, SUB, "", "group",
         membership.ConsumerListRequest, membership.ConsumerList),
    _row(C.NOTIFY_CONSUMER_IDS_CHANGED, CLIENT, INTERNAL, "", "group",
         membership.ConsumerIdsChanged, oneway=True),
    _row(C.LOCK_BATCH_MQ, BROKER, SUB, "queues[].topic", "group",
         membership.LockBatchRequest, membership.LockBatchResponse),
    _row(C.UNLOCK_BATCH_MQ, BROKER, SUB, "queues[].topic", "group", membership.UnlockBatchRequest),
    # Replies to requests.
    _row(C.SEND_REPLY_MESSAGE, BROKER, NONE, "", "",
         replies.SendReplyRequest, replies.SendReplyResponse),
    _row(C.PUSH_REPLY_MESSAGE_TO_CLIENT, CLIENT, INTERNAL, "", "", replies.PushReply, oneway=True),
    _row(C.ACKNOWLEDGE_REPLY, BROKER, NONE, "", "", replies.AcknowledgeReply, oneway=True),
    # Transactions.
    _row(C.END_TRANSACTION, BROKER, PUB, LOOKED_UP, "group",
         transactions.EndTransactionRequest, transactions.EndTransactionResponse),
    _row(C.CHECK_TRANSACTION_STATE, CLIENT, INTERNAL, "", "group",
         transactions.CheckTransactionState, oneway=True),
    _row(C.LIST_HALF_MESSAGES, BROKER, VIEW, "topic", "group",
         transactions.ListHalfMessagesRequest, transactions.HalfList),
    _row(C.VIEW_HALF_MESSAGE, BROKER, ADMIN, LOOKED_UP, "",
         transactions.ViewHalfMessageRequest, transactions.HalfInfo),
    _row(C.END_HALF_MESSAGE, BROKER, ADMIN, LOOKED_UP, "",
         transactions.EndHalfMessageRequest, transactions.EndTransactionResponse),
    # Delayed messages.
    _row(C.OPEN_SCHEDULE, BROKER, INTERNAL, "", "",
         schedule.OpenScheduleRequest, schedule.OpenScheduleResponse),
    _row(C.PULL_SCHEDULE, BROKER, INTERNAL, "", "",
         schedule.PullScheduleRequest, schedule.PullScheduleResponse),
    _row(C.DELIVER_DUE, BROKER, INTERNAL, "", "",
         schedule.DeliverDueRequest, schedule.DeliverDueResponse),
    _row(C.CANCEL_DELAYED, BROKER, PUB, LOOKED_UP, "", schedule.CancelDelayedRequest),
    _row(C.REFUSE_CANCEL, BROKER, INTERNAL, "", "", schedule.RefuseCancelRequest, oneway=True),
    _row(C.NOTIFY_SCHEDULE, SCHEDULE, INTERNAL, "", "", schedule.ScheduleNews, oneway=True),
    # Filters in Python.
    _row(C.REGISTER_FILTER_SERVER, BROKER, INTERNAL, "", "", filters.RegisterFilterServerRequest),
    _row(C.GET_FILTER_SERVER, BROKER, SUB, "", "group",
         filters.GetFilterServerRequest, filters.FilterServerInfo),
    _row(C.REGISTER_MESSAGE_FILTER_CLASS, FILTERSRV, FILTER, "", "group",
         filters.UploadFilterRequest, filters.UploadFilterResponse),
    # Consumer groups, for administrators.
    _row(C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, BROKER, ADMIN, "", "config.group",
         groups.UpdateGroupRequest, groups.GroupConfig),
    _row(C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, BROKER, VIEW_OWN, "", "group",
         groups.GetGroupsRequest, groups.GroupSummaries),
    _row(C.DELETE_SUBSCRIPTIONGROUP, BROKER, ADMIN, "", "group", groups.DeleteGroupRequest),
    _row(C.GET_CONSUMER_CONNECTION_LIST, BROKER, VIEW_OWN, "", "group",
         groups.ConsumerConnectionsRequest, groups.ConsumerConnections),
    _row(C.GET_PRODUCER_CONNECTION_LIST, BROKER, VIEW, "", "group",
         groups.ProducerConnectionsRequest, groups.ProducerConnections),
    _row(C.GET_CONSUME_STATS, BROKER, VIEW_OWN, "topic", "group",
         groups.ConsumeStatsRequest, groups.ConsumeStats),
    _row(C.GET_GROUPS_PROGRESS, BROKER, VIEW, "", "",
         groups.GroupsProgressRequest, groups.GroupsProgress),
    _row(C.QUERY_TOPIC_CONSUME_BY_WHO, BROKER, VIEW, "topic", "",
         groups.TopicConsumersRequest, groups.GroupNames),
    _row(C.INVOKE_BROKER_TO_RESET_OFFSET, BROKER, ADMIN_OWN, "topic", "group",
         groups.ResetOffsetRequest, groups.OffsetChanges),
    _row(C.CLONE_GROUP_OFFSET, BROKER, ADMIN, "topic", "source target",
         groups.CloneOffsetRequest, groups.OffsetChanges),
    _row(C.RESET_CONSUMER_CLIENT_OFFSET, CLIENT, INTERNAL, "queues[].topic", "group",
         groups.ConsumerOffsetReset, oneway=True),
    # One consumer, for administrators.
    _row(C.GET_CONSUMER_RUNNING_INFO, BROKER, ADMIN, "", "group",
         client_rpc.RunningInfoRequest, client_rpc.RunningInfo),
    _row(C.CONSUME_MESSAGE_DIRECTLY, BROKER, ADMIN, LOOKED_UP, "group",
         client_rpc.HandToRequest, client_rpc.HandedOver),
    _row(C.ASK_CLIENT, CLIENT, INTERNAL, "", "", client_rpc.AskClient, oneway=True),
    _row(C.ANSWER_OF_CLIENT, BROKER, NONE, "", "", client_rpc.ClientAnswer, oneway=True),
    # Topics and the broker, for administrators.
    _row(C.UPDATE_AND_CREATE_TOPIC, BROKER, ADMIN, "config.topic", "",
         admin.UpdateTopicRequest, route.TopicConfig),
    _row(C.CREATE_TOPICS, BROKER, ADMIN, "configs[].topic", "",
         admin.CreateTopicsRequest, admin.TopicConfigs),
    _row(C.GET_TOPIC_CONFIG, BROKER, VIEW, "topic", "",
         admin.GetTopicConfigRequest, admin.TopicConfigs),
    _row(C.DELETE_TOPIC_IN_BROKER, BROKER, ADMIN, "topic", "", route.DeleteTopicRequest),
    _row(C.GET_TOPIC_STATS_INFO, BROKER, VIEW_OWN, "topic", "",
         admin.TopicStatsRequest, admin.TopicStats),
    _row(C.GET_BROKER_CONFIG, BROKER, VIEW, "", "",
         admin.GetConfigRequest, admin.ConfigEntries),
    _row(C.UPDATE_BROKER_CONFIG, BROKER, ADMIN, "", "",
         admin.UpdateConfigRequest, admin.ConfigChanges),
    _row(C.QUERY_CONSUME_QUEUE, BROKER, VIEW, "topic", "",
         admin.QueueEntriesRequest, admin.QueueEntries),
    _row(C.GET_ALL_CLIENTS, BROKER, VIEW, "", "", groups.AllClientsRequest, groups.AllClients),
    _row(C.DELETE_EXPIRED_COMMITLOG, BROKER, ADMIN, "", "",
         admin.CleanRequest, admin.CleanResult),
    _row(C.CREATE_SNAPSHOT, BROKER, ADMIN, "", "",
         snapshots.CreateSnapshotRequest, snapshots.SnapshotInfo),
    # Between replicas of a broker group.
    _row(C.OPEN_REPLICATION, BROKER, INTERNAL, "", "",
         replication.OpenReplicationRequest, replication.OpenReplicationResponse),
    _row(C.REPLICATE_LOG, CLIENT, INTERNAL, "", "", replication.ReplicateLog, oneway=True),
    _row(C.ACK_REPLICATION, BROKER, INTERNAL, "", "", replication.AckReplication, oneway=True),
    _row(C.READ_LOG, BROKER, INTERNAL, "", "",
         replication.ReadLogRequest, replication.ReplicateLog),
    _row(C.HAND_OVER_COMMITS, BROKER, INTERNAL, "", "", replication.HandOverCommitsRequest),
    _row(C.FENCE, BROKER, INTERNAL, "", "",
         replication.FenceRequest, replication.FenceResponse),
    _row(C.STAND_FOR_ELECTION, BROKER, INTERNAL, "", "", replication.StandRequest),
    _row(C.HOLD_STILL, BROKER, INTERNAL, "", "", replication.HoldStillRequest),
    _row(C.PROMOTE_REPLICA, BROKER, ADMIN, "", "",
         replication.PromoteReplicaRequest, replication.PromoteReplicaResponse),
    _row(C.SWITCH_OVER, BROKER, ADMIN, "", "",
         replication.SwitchOverRequest, replication.SwitchOverResponse),
    _row(C.ELECT_REPLICA, BROKER, ADMIN, "", "", replication.ElectReplicaRequest),
    _row(C.INIT_GROUP, BROKER, ADMIN, "", "", replication.InitGroupRequest),
    _row(C.CHANGE_VOTERS, BROKER, ADMIN, "", "",
         replication.ChangeVotersRequest, replication.ChangeVotersResponse),
    _row(C.PAUSE_FAILOVER, BROKER, ADMIN, "", "",
         replication.PauseFailoverRequest, replication.PauseFailoverResponse),
    _row(C.GET_HA_SETTINGS, BROKER, VIEW, "", "",
         replication.HaSettingsRequest, replication.HaSettings),
    _row(C.PUT_HA_SETTINGS, BROKER, ADMIN, "", "",
         replication.PutHaSettingsRequest, replication.HaSettings),
    _row(C.GET_EPOCHS, BROKER, VIEW, "", "",
         replication.EpochsRequest, replication.LogEpochs),
    _row(C.CHECKSUM_LOG, BROKER, VIEW, "", "",
         replication.ChecksumLogRequest, replication.ChecksumLogResponse),
    _row(C.GET_HA_STATUS, BROKER, VIEW, "", "",
         replication.HaStatusRequest, replication.HaStatus),
    # Index process.
    _row(C.ADVANCE_INDEX, INDEXER, INTERNAL, "", "",
         queries.AdvanceIndexRequest, queries.IndexProgress),
    _row(C.COPY_INDEX, INDEXER, INTERNAL, "", "",
         snapshots.CopyIndexRequest, snapshots.CopyIndexResponse),
    # Coordinator.
    _row(C.BEGIN_SESSION, COORDINATOR, INTERNAL, "", "",
         coordination.BeginSessionRequest, coordination.BeginSessionResponse),
    _row(C.KEEP_SESSION, COORDINATOR, INTERNAL, "", "",
         coordination.KeepSessionRequest, coordination.KeepSessionResponse),
    _row(C.END_SESSION, COORDINATOR, INTERNAL, "", "", coordination.EndSessionRequest),
    _row(C.READ_RECORD, COORDINATOR, INTERNAL, "", "",
         coordination.ReadRecordRequest, coordination.RecordView),
    _row(C.CHANGE_RECORD, COORDINATOR, INTERNAL, "", "",
         coordination.ChangeRecordRequest, coordination.ChangeRecordResponse),
    _row(C.WATCH_RECORDS, COORDINATOR, INTERNAL, "", "", coordination.WatchRecordsRequest),
    _row(C.NOTIFY_RECORD, CLIENT, INTERNAL, "", "", coordination.RecordView, oneway=True),
)
# fmt: on

COMMANDS: Final[dict[RequestCode, CommandSpec]] = {row.code: row for row in _ROWS}
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
