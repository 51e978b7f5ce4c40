"""Request and response codes, and the one table between errors and codes.

The numbers are RocketMQ's where RocketMQ has the command. They are on the wire
and never change.
"""

import enum
from typing import Final

from mqmesh import errors
from mqmesh.protocol.command import Command, ErrorHeader, decode_header


class RequestCode(enum.IntEnum):
    """Codes of requests."""

    # Broker: messages and offsets.
    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    QUERY_QUEUE_BOUNDS = 30
    VIEW_MESSAGE = 33
    CONSUMER_SEND_MSG_BACK = 36
    QUERY_MESSAGE_BY_ID = 1_001
    RESEND_DEAD_LETTERS = 1_003

    # Index process of a broker.
    ADVANCE_INDEX = 1_002
    """From the broker, which alone can reach it; it answers the broker's queries as well."""
    COPY_INDEX = 1_071
    """Copy of the index for a snapshot."""

    # Broker: clients and groups.
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    GET_CONSUMER_LIST_BY_GROUP = 38
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    """From the broker to a client: the members of a group changed."""
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42

    # Transactions; see ``protocol/transactions.py``.
    END_TRANSACTION = 37
    CHECK_TRANSACTION_STATE = 39
    """From the broker to one member of a producer group."""
    LIST_HALF_MESSAGES = 1_040
    VIEW_HALF_MESSAGE = 1_041
    END_HALF_MESSAGE = 1_042
    """An administrator decides."""

    # Replies to requests; see ``protocol/replies.py``.
    SEND_REPLY_MESSAGE = 324
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    """From the broker to the client that asked."""
    ACKNOWLEDGE_REPLY = 1_010
    # Broker: consumer groups, for administrators.
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    RESET_CONSUMER_CLIENT_OFFSET = 220
    """From the broker to a client: an administrator moved the offsets of its group."""
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    CLONE_GROUP_OFFSET = 314

    # Broker: one consumer, for administrators; see ``protocol/client_rpc.py``.
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309
    ASK_CLIENT = 1_090
    """From the broker to the consumer."""
    ANSWER_OF_CLIENT = 1_091

    # Broker: its filter servers.
    REGISTER_FILTER_SERVER = 301
    """From a filter server, again and again while it is there."""
    GET_FILTER_SERVER = 1_020
    """From a consumer: where the filters of this broker run."""

    # Filter server; it answers PULL_MESSAGE as well.
    REGISTER_MESSAGE_FILTER_CLASS = 302

    # Broker: delayed messages; see ``protocol/schedule.py``.
    OPEN_SCHEDULE = 1_030
    PULL_SCHEDULE = 1_031
    DELIVER_DUE = 1_032
    CANCEL_DELAYED = 1_033
    REFUSE_CANCEL = 1_034
    NOTIFY_SCHEDULE = 1_035
    """From the broker to its schedule service."""

    # Broker: administration.
    UPDATE_AND_CREATE_TOPIC = 17
    CREATE_TOPICS = 1_086
    GET_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    GET_TOPIC_STATS_INFO = 202
    DELETE_TOPIC_IN_BROKER = 215
    QUERY_CONSUME_QUEUE = 321
    GET_ALL_CLIENTS = 328
    DELETE_EXPIRED_COMMITLOG = 329
    CREATE_SNAPSHOT = 1_070
    GET_GROUPS_PROGRESS = 1_075

    # Between replicas of a broker group; see ``protocol/replication.py``.
    OPEN_REPLICATION = 1_050
    REPLICATE_LOG = 1_051
    """From the leader to a follower."""
    ACK_REPLICATION = 1_052
    FENCE = 1_053
    READ_LOG = 1_054
    HAND_OVER_COMMITS = 1_055
    STAND_FOR_ELECTION = 1_059
    SWITCH_OVER = 1_060
    ELECT_REPLICA = 1_061
    INIT_GROUP = 1_062
    CHANGE_VOTERS = 1_063
    PAUSE_FAILOVER = 1_064
    GET_EPOCHS = 1_065
    CHECKSUM_LOG = 1_066
    GET_HA_SETTINGS = 1_067
    PUT_HA_SETTINGS = 1_068
    HOLD_STILL = 1_069
    PROMOTE_REPLICA = 1_057
    GET_HA_STATUS = 1_058

    # Name server.
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ROUTES_OF_TOPICS = 1_085
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_TOPIC_IN_NAMESRV = 216
    LIST_KV_CONFIG = 219
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319

    # Every role that others connect to, if security is on; see ``protocol/admin.py``.
    GET_ACCESS_LIST = 1_080
    UPDATE_ACCESS_LIST = 1_081

    # Coordinator; see ``protocol/coordination.py``.
    BEGIN_SESSION = 1_100
    KEEP_SESSION = 1_101
    END_SESSION = 1_102
    READ_RECORD = 1_103
    CHANGE_RECORD = 1_104
    WATCH_RECORDS = 1_105
    NOTIFY_RECORD = 1_106
    """From the coordinator to a connection that watches."""

    # Every role.
    PING = 1
    """Answered at once with ``RoleInfo``; the health check."""
    PROBE_CLIENT = 1_004
    """From a server to a client: its ZeroMQ has to take it, nothing else."""


class ResponseCode(enum.IntEnum):
    """Codes of responses."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_NOT_EXIST = 24
    CONSUMER_GROUP_NOT_EXIST = 26
    OFFSET_ILLEGAL = 27
    DISK_FULL = 28
    STALE_GENERATION = 29
    SEQUENCE_CONFLICT = 30
    NOT_MASTER = 31
    STALE_EPOCH = 32
    CANCEL_REFUSED = 40
    CLIENT_NOT_ONLINE = 206
    FILTER_FAILED = 1_020


_CLASS_OF_CODE: Final[dict[int, type[errors.BrokerError]]] = {
    ResponseCode.SYSTEM_BUSY: errors.SystemBusy,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: errors.UnsupportedCommand,
    ResponseCode.VERSION_NOT_SUPPORTED: errors.UnsupportedCommand,
    ResponseCode.MESSAGE_ILLEGAL: errors.MessageIllegal,
    ResponseCode.SERVICE_NOT_AVAILABLE: errors.BrokerNotAvailable,
    ResponseCode.DISK_FULL: errors.BrokerNotAvailable,
    ResponseCode.NOT_MASTER: errors.NotMaster,
    ResponseCode.STALE_EPOCH: errors.StaleEpoch,
    ResponseCode.NO_PERMISSION: errors.NoPermission,
    ResponseCode.TOPIC_NOT_EXIST: errors.TopicNotFound,
    ResponseCode.CONSUMER_GROUP_NOT_EXIST: errors.GroupNotFound,
    ResponseCode.OFFSET_ILLEGAL: errors.OffsetIllegal,
    ResponseCode.STALE_GENERATION: errors.StaleGeneration,
    ResponseCode.CANCEL_REFUSED: errors.CancelRefused,
    ResponseCode.SEQUENCE_CONFLICT: errors.SequenceConflict,
    ResponseCode.CLIENT_NOT_ONLINE: errors.ClientNotOnline,
    ResponseCode.FILTER_FAILED: errors.FilterFailed,
    ResponseCode.SUBSCRIPTION_NOT_EXIST: errors.FilterUnknown,
}

# The first class of the table that fits wins, so special classes stand before general ones.
_CODE_OF_CLASS: Final[tuple[tuple[type[Exception], ResponseCode], ...]] = (
    (errors.TopicNotFound, ResponseCode.TOPIC_NOT_EXIST),
    (errors.GroupNotFound, ResponseCode.CONSUMER_GROUP_NOT_EXIST),
    (errors.NoPermission, ResponseCode.NO_PERMISSION),
    (errors.MessageIllegal, ResponseCode.MESSAGE_ILLEGAL),
    (errors.UnsupportedCommand, ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
    (errors.OffsetIllegal, ResponseCode.OFFSET_ILLEGAL),
    (errors.StaleGeneration, ResponseCode.STALE_GENERATION),
    (errors.FilterFailed, ResponseCode.FILTER_FAILED),
    (errors.FilterUnknown, ResponseCode.SUBSCRIPTION_NOT_EXIST),
    (errors.CancelRefused, ResponseCode.CANCEL_REFUSED),
    (errors.SequenceConflict, ResponseCode.SEQUENCE_CONFLICT),
    (errors.SystemBusy, ResponseCode.SYSTEM_BUSY),
    (errors.NotMaster, ResponseCode.NOT_MASTER),
    (errors.StaleEpoch, ResponseCode.STALE_EPOCH),
    (errors.BrokerNotAvailable, ResponseCode.SERVICE_NOT_AVAILABLE),
    (errors.ClientNotOnline, ResponseCode.CLIENT_NOT_ONLINE),
    (errors.DiskFull, ResponseCode.DISK_FULL),
    (errors.TooManyOpenFiles, ResponseCode.SYSTEM_BUSY),
    (errors.StoreClosed, ResponseCode.SERVICE_NOT_AVAILABLE),
    (errors.OffsetOutOfRange, ResponseCode.OFFSET_ILLEGAL),
    (errors.QueueFull, ResponseCode.SYSTEM_BUSY),
    (errors.InvalidArgument, ResponseCode.MESSAGE_ILLEGAL),
    (errors.ProtocolError, ResponseCode.MESSAGE_ILLEGAL),
)


def code_of(error: BaseException) -> ResponseCode:
    """Return the response code of an error; ``SYSTEM_ERROR`` for unexpected ones."""
    for kind, code in _CODE_OF_CLASS:
        if isinstance(error, kind):
            return code
    return ResponseCode.SYSTEM_ERROR


def error_of(code: int, remark: str, retry_after_ms: int = 0) -> errors.BrokerError:
    """Return the error that a response code stands for.

    Args:
        code: Any response code but ``SUCCESS``; unknown ones are allowed.
        remark: The server's sentence.
        retry_after_ms: The server's wish, 0 for none.
    """
    kind = _CLASS_OF_CODE.get(code, errors.BrokerError)
    return kind(remark, code=code, retry_after_ms=retry_after_ms)


def error_header(error: Exception, remark: str) -> ErrorHeader:
    """Return the header that reports an error to a peer.

    Args:
        error: What went wrong.
        remark: Its sentence, as short as the wire wants it.
    """
    retry_after_ms = getattr(error, "retry_after_ms", 0)
    if isinstance(error, errors.NotMaster):
        return ErrorHeader(remark, retry_after_ms, error.epoch, error.master)
    return ErrorHeader(remark, retry_after_ms)


def response_error(command: Command) -> errors.MQMeshError:
    """Return the error that an unsuccessful response reports."""
    try:
        header = decode_header(ErrorHeader, command.header)
    except errors.RemoteProtocolError as error:
        return error
    found = error_of(command.code, header.remark, header.retry_after_ms)
    if isinstance(found, errors.NotMaster):
        found.epoch, found.master = header.epoch, header.master
    return found
