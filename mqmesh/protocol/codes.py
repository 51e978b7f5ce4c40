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
        NOT_MASTER: The broker is a follower.
        DISK_FULL: No room to write.
        SERVICE_NOT_AVAILABLE: The broker is not ready.
    """
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
    COPY_INDEX = 1_071

    # Broker: clients and groups.
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    GET_CONSUMER_LIST_BY_GROUP = 38
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42

    # Transactions; see ``protocol/transactions.py``.
    END_TRANSACTION = 37
    CHECK_TRANSACTION_STATE = 39
    LIST_HALF_MESSAGES = 1_040
    VIEW_HALF_MESSAGE = 1_041
    END_HALF_MESSAGE = 1_042

    # Replies to requests; see ``protocol/replies.py``.
    SEND_REPLY_MESSAGE = 324
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ACKNOWLEDGE_REPLY = 1_010
    # Broker: consumer groups, for administrators.
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    RESET_CONSUMER_CLIENT_OFFSET = 220
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    CLONE_GROUP_OFFSET = 314

    # Broker: one consumer, for administrators; see ``protocol/client_rpc.py``.
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309
    ASK_CLIENT = 1_090
    ANSWER_OF_CLIENT = 1_091

    # Broker: its filter servers.
    REGISTER_FILTER_SERVER = 301
    GET_FILTER_SERVER = 1_020

    # Filter server; it answers PULL_MESSAGE as well.
    REGISTER_MESSAGE_FILTER_CLASS = 302

    # Broker: delayed messages; see ``protocol/schedule.py``.
    OPEN_SCHEDULE = 1_030
    PULL_SCHEDULE = 1_031
    DELIVER_DUE = 1_032
    CANCEL_DELAYED = 1_033
    REFUSE_CANCEL = 1_034
    NOTIFY_SCHEDULE = 1_035

    # Broker: administration.
    UPDATE_AND_CREATE_TOPIC = 17
    CREATE_TOPICS = 1_086
    GET_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
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
    GET_BROKER_CONFIG = 26
    """All settings of a replica; followers answer, too."""
    GET_BROKER_RUNTIME_INFO = 28
    GET_TOPIC_STATS_INFO = 202
    DELETE_TOPIC_IN_BROKER = 215
    """Forgets a topic with its messages and all offsets in it; answered with an empty header once
    that is on disk. Held pulls of it end with TOPIC_NOT_EXIST.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        NO_PERMISSION: A reserved name.
        DISK_FULL: No room to write.
    """
    QUERY_CONSUME_QUEUE = 321
    GET_ALL_CLIENTS = 328
    DELETE_EXPIRED_COMMITLOG = 329
    CREATE_SNAPSHOT = 1_070
    GET_GROUPS_PROGRESS = 1_075

    # Between replicas of a broker group; see ``protocol/replication.py``.
    OPEN_REPLICATION = 1_050
    REPLICATE_LOG = 1_051
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
    """Sets a key of the key/value configuration. Name servers do not share it.

    Errors:
        MESSAGE_ILLEGAL: An empty key.
        SYSTEM_BUSY: ``max_kv_bytes`` is reached.
        DISK_FULL: In force, but not saved.
        SYSTEM_ERROR: In force, but not saved.
    """
    GET_KV_CONFIG = 101
    """Value of a key.

    Errors:
        QUERY_NOT_FOUND: No such key.
    """
    DELETE_KV_CONFIG = 102
    """Deletes a key; an unknown one is no error.

    Errors:
        DISK_FULL: In force, but not saved.
        SYSTEM_ERROR: In force, but not saved.
    """
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    GET_ROUTES_OF_TOPICS = 1_085
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_TOPIC_IN_NAMESRV = 216
    """Forgets the routes of a topic, also queues of an ordered topic whose broker will not return.

    Send it to every name server, after DELETE_TOPIC_IN_BROKER to every broker: a broker that still
    has the topic brings it back with its next heartbeat. Deleting an unknown topic is no error.
    """
    LIST_KV_CONFIG = 219
    """All keys of a namespace with their values.

    Errors:
        QUERY_NOT_FOUND: No such namespace.
    """
    UPDATE_NAMESRV_CONFIG = 318
    """Changes settings while the name server runs, and over restarts if it has a ``data_dir``.

    Send it to every name server. All of a request is done, or nothing; the answer comes once it is
    in force, and on disk.

    Errors:
        MESSAGE_ILLEGAL: A key is unknown or not changeable, or a value is wrong.
        SYSTEM_BUSY: Another change is being written.
        DISK_FULL: Not saved, and not in force.
        SYSTEM_ERROR: Not saved, and not in force.
    """
    GET_NAMESRV_CONFIG = 319
    """All settings of a name server."""

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
    """From the coordinator to a connection that watches, oneway: a record as it is now. Of many
    changes in a short time only the last is sent."""

    # Every role.
    PING = 1
    """Asks a process what it is; the health check. Answered also while a broker recovers."""
    PROBE_CLIENT = 1_004
    """From a server to a client on a local connection that sent nothing for 500 ms after a request;
    oneway. The client's ZeroMQ has to take it; the client itself ignores it."""


class ResponseCode(enum.IntEnum):
    """Codes of responses."""

    SUCCESS = 0
    """Done; the header is the answer."""
    SYSTEM_ERROR = 1
    """A fault inside the server; its log has the traceback. Try again: no."""
    SYSTEM_BUSY = 2
    """Flow control: refused before anything was done. Try again: after ``retry_after_ms``; the SDK
    raises and does not repeat a send by itself."""
    REQUEST_CODE_NOT_SUPPORTED = 3
    """Unknown command, or a feature that this server has not. Try again: no."""
    FLUSH_DISK_TIMEOUT = 10
    """RocketMQ's code; here a send is answered with ``SendStatus``."""
    SLAVE_NOT_AVAILABLE = 11
    """RocketMQ's code; here a send is answered with ``SendStatus``."""
    FLUSH_SLAVE_TIMEOUT = 12
    """RocketMQ's code; here a send is answered with ``SendStatus``."""
    MESSAGE_ILLEGAL = 13
    """A frame, header, name, number or batch out of bounds. Try again: no."""
    SERVICE_NOT_AVAILABLE = 14
    """Starting, recovering, stopping, or the store was stopped by an error. Try again: yes,
    elsewhere first."""
    VERSION_NOT_SUPPORTED = 15
    """The command exists, but not in this version. Try again: no."""
    NO_PERMISSION = 16
    """A topic, group, broker or name does not permit it, or the user has no right to it. Try again:
    no."""
    TOPIC_NOT_EXIST = 17
    """No such topic here. Try again: after a new route."""
    PULL_NOT_FOUND = 19
    """RocketMQ's code; here a pull is answered with ``PullStatus``."""
    PULL_RETRY_IMMEDIATELY = 20
    """RocketMQ's code; here a pull is answered with ``PullStatus``."""
    PULL_OFFSET_MOVED = 21
    """RocketMQ's code; here a pull is answered with ``PullStatus``."""
    QUERY_NOT_FOUND = 22
    """The thing asked for does not exist. Try again: no."""
    SUBSCRIPTION_NOT_EXIST = 24
    """A filter server does not have this filter, or not any more. Try again: after an upload."""
    CONSUMER_GROUP_NOT_EXIST = 26
    """No member of the group is connected to this broker; or it has no settings, and they are not
    made by themselves. Try again: after a heartbeat."""
    OFFSET_ILLEGAL = 27
    """An offset outside of what is there. Try again: no."""
    DISK_FULL = 28
    """No room to write; reads, commits and deletes go on. Try again: yes, elsewhere first."""
    STALE_GENERATION = 29
    """The member was removed from its group, or another one has the queue. Try again: after asking
    for the members again."""
    SEQUENCE_CONFLICT = 30
    """Other messages are stored under these sequences of this producer; nothing was stored. Try
    again: no, make a new producer."""
    NOT_MASTER = 31
    """A follower was asked for what only the master of its group does. Try again: at the master
    that the header names, or after a new route."""
    STALE_EPOCH = 32
    """A master of an epoch that is over: another replica is the master now. Try again: no."""
    CANCEL_REFUSED = 40
    """The delayed message was delivered or cancelled before, or is leaving. Try again: no."""
    CLIENT_NOT_ONLINE = 206
    """The client that should get a reply is not connected here, or did not acknowledge it. Try
    again: yes, it may come back."""
    FILTER_FAILED = 1_020
    """A filter in Python raised, or its process ended; no offset moved. Try again: after
    ``retry_after_ms``."""


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
