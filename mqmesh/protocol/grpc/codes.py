"""Numbers of RocketMQ 5's gRPC protocol; on the wire, they never change."""

import enum
from typing import Final

from mqmesh.errors import (
    BrokerNotAvailable,
    CancelRefused,
    DiskFull,
    EndpointUnreachable,
    GroupNotFound,
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    NoRoute,
    ProtocolError,
    QueueFull,
    RequestTimeout,
    StaleReceipt,
    SystemBusy,
    TopicNotFound,
    UnsupportedCommand,
)


class ReplyCode(enum.IntEnum):
    """Outcome of a call, in ``Status.code`` of its answer; ``Code`` of RocketMQ."""

    OK = 20_000
    MULTIPLE_RESULTS = 30_000
    BAD_REQUEST = 40_000
    ILLEGAL_TOPIC = 40_002
    ILLEGAL_CONSUMER_GROUP = 40_003
    ILLEGAL_MESSAGE_GROUP = 40_006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40_007
    INVALID_TRANSACTION_ID = 40_008
    ILLEGAL_MESSAGE_ID = 40_009
    ILLEGAL_FILTER_EXPRESSION = 40_010
    ILLEGAL_INVISIBLE_TIME = 40_011
    ILLEGAL_DELIVERY_TIME = 40_012
    INVALID_RECEIPT_HANDLE = 40_013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40_014
    CLIENT_ID_REQUIRED = 40_017
    ILLEGAL_OFFSET = 40_019
    FORBIDDEN = 40_300
    NOT_FOUND = 40_400
    MESSAGE_NOT_FOUND = 40_401
    TOPIC_NOT_FOUND = 40_402
    CONSUMER_GROUP_NOT_FOUND = 40_403
    OFFSET_NOT_FOUND = 40_404
    MESSAGE_BODY_TOO_LARGE = 41_301
    MESSAGE_BODY_EMPTY = 41_302
    TOO_MANY_REQUESTS = 42_900
    INTERNAL_SERVER_ERROR = 50_001
    HA_NOT_AVAILABLE = 50_002
    NOT_IMPLEMENTED = 50_100
    PROXY_TIMEOUT = 50_400
    MASTER_PERSISTENCE_TIMEOUT = 50_401
    SLAVE_PERSISTENCE_TIMEOUT = 50_402
    FAILED_TO_CONSUME_MESSAGE = 60_000


class QueuePermission(enum.IntEnum):
    """Uses of a queue; ``Permission`` of RocketMQ."""

    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4


class MessageType(enum.IntEnum):
    """Kinds of messages."""

    UNSPECIFIED = 0
    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6


class ClientType(enum.IntEnum):
    """Kinds of clients."""

    UNSPECIFIED = 0
    PRODUCER = 1
    PUSH_CONSUMER = 2
    SIMPLE_CONSUMER = 3
    PULL_CONSUMER = 4


class FilterType(enum.IntEnum):
    """Languages of filter expressions."""

    UNSPECIFIED = 0
    TAG = 1
    SQL = 2


class OffsetPolicy(enum.IntEnum):
    """Places in a queue; ``QueryOffsetPolicy`` of RocketMQ."""

    BEGINNING = 0
    END = 1
    TIMESTAMP = 2


class BodyEncoding(enum.IntEnum):
    """Forms of a body; ``Encoding`` of RocketMQ."""

    UNSPECIFIED = 0
    IDENTITY = 1
    GZIP = 2


class Resolution(enum.IntEnum):
    """Decisions of a producer; ``TransactionResolution`` of RocketMQ."""

    UNSPECIFIED = 0
    COMMIT = 1
    ROLLBACK = 2


MD5: Final = 2
"""``DigestType`` of bodies."""
IPV4: Final = 1
"""``AddressScheme`` of IPv4 addresses."""


class RefusedCall(ProtocolError):
    """Error of a call that has a code of its own.

    Args:
        code: Of the answer.
        message: Sentence for people.
    """

    def __init__(self, code: ReplyCode, message: str) -> None:
        super().__init__(message)
        self.code = code


_CODE_OF: Final = (
    (TopicNotFound, ReplyCode.TOPIC_NOT_FOUND),
    (NoRoute, ReplyCode.TOPIC_NOT_FOUND),
    (GroupNotFound, ReplyCode.CONSUMER_GROUP_NOT_FOUND),
    (NoPermission, ReplyCode.FORBIDDEN),
    (StaleReceipt, ReplyCode.INVALID_RECEIPT_HANDLE),
    (SystemBusy, ReplyCode.TOO_MANY_REQUESTS),
    (QueueFull, ReplyCode.TOO_MANY_REQUESTS),
    (UnsupportedCommand, ReplyCode.NOT_IMPLEMENTED),
    (CancelRefused, ReplyCode.BAD_REQUEST),
    (MessageIllegal, ReplyCode.BAD_REQUEST),
    (InvalidArgument, ReplyCode.BAD_REQUEST),
    (ProtocolError, ReplyCode.BAD_REQUEST),
    (RequestTimeout, ReplyCode.PROXY_TIMEOUT),
    (EndpointUnreachable, ReplyCode.HA_NOT_AVAILABLE),
    (BrokerNotAvailable, ReplyCode.HA_NOT_AVAILABLE),
    (DiskFull, ReplyCode.HA_NOT_AVAILABLE),
)
"""The first that fits wins. HA_NOT_AVAILABLE is tried again by clients, BAD_REQUEST is not."""


def reply_code(error: BaseException) -> ReplyCode:
    """Return the answer to a client for an error."""
    if isinstance(error, RefusedCall):
        return error.code
    for kind, code in _CODE_OF:
        if isinstance(error, kind):
            return code
    return ReplyCode.INTERNAL_SERVER_ERROR
