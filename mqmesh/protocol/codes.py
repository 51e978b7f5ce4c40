"""Response codes, and the one table between errors and codes.

The numbers are RocketMQ's where RocketMQ has the code. They are on the wire and never change.
"""

import enum
from typing import Final

from mqmesh import errors
from mqmesh.protocol.command import Command, ErrorHeader, decode_header


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
    """Starting, recovering, stopping, or the store was stopped by an error; or a change is in the
    log, but not safe yet. Try again: yes, elsewhere first."""
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
    """The requested object does not exist. Try again: no."""
    SUBSCRIPTION_NOT_EXIST = 24
    """A filter server does not have this filter, or not any more. Try again: after an upload."""
    CONSUMER_GROUP_NOT_EXIST = 26
    """No member of the group is connected to this broker; or it has no settings, and they are not
    made by themselves. Try again: after a heartbeat."""
    OFFSET_ILLEGAL = 27
    """An offset outside of the queue's bounds. Try again: no."""
    DISK_FULL = 28
    """No room to write; reads, commits and deletes go on. Try again: yes, elsewhere first."""
    STALE_GENERATION = 29
    """The member was removed from its group, or another one has the queue. Try again: after asking
    for the members again."""
    SEQUENCE_CONFLICT = 30
    """Other messages are stored under these sequences of this producer; nothing was stored. Try
    again: no, make a new producer."""
    NOT_MASTER = 31
    """A follower got a request that only the master of its group serves. Try again: at the master
    that the header names, or after a new route."""
    STALE_EPOCH = 32
    """A master of an epoch that is over: another replica is the master now. Try again: no."""
    STALE_RECEIPT = 33
    """Another member has received the message meanwhile, or the group's offset was moved. Try
    again: no."""
    REVISION_CONFLICT = 34
    """The key of a table has another newest revision than expected; nothing was stored. Try again:
    no, after reading the value again."""
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
    ResponseCode.STALE_RECEIPT: errors.StaleReceipt,
    ResponseCode.CANCEL_REFUSED: errors.CancelRefused,
    ResponseCode.SEQUENCE_CONFLICT: errors.SequenceConflict,
    ResponseCode.REVISION_CONFLICT: errors.RevisionConflict,
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
    (errors.StaleReceipt, ResponseCode.STALE_RECEIPT),
    (errors.FilterFailed, ResponseCode.FILTER_FAILED),
    (errors.FilterUnknown, ResponseCode.SUBSCRIPTION_NOT_EXIST),
    (errors.CancelRefused, ResponseCode.CANCEL_REFUSED),
    (errors.SequenceConflict, ResponseCode.SEQUENCE_CONFLICT),
    (errors.RevisionConflict, ResponseCode.REVISION_CONFLICT),
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
        error: Error to report.
        remark: Its sentence, cut to the length that the wire allows.
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
