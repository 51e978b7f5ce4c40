"""PULL_MESSAGE and the words about queue offsets."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.route import Epoch, Name

MAX_PULL_BYTES: Final = 16 * 1024 * 1024
MAX_OFFSETS_PER_REQUEST: Final = 65_536
MAX_SUSPEND_MS: Final = 30_000

QueueId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Offset = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
Zone = Annotated[str, msgspec.Meta(max_length=64)]


class ExpressionType(enum.StrEnum):
    """Languages of a subscription's expression."""

    TAG = "TAG"
    SQL92 = "SQL92"
    PYTHON = "PYTHON"
    """The expression is the id of a filter that was uploaded to the filter servers."""


class PullStatus(enum.IntEnum):
    """Results of a pull; RocketMQ's names. On the wire."""

    FOUND = 0
    NO_NEW_MSG = 1
    NO_MATCHED_MSG = 2
    """Messages were passed over by the filter, or lost to damage: go on at
    ``next_queue_offset``."""
    OFFSET_ILLEGAL = 3
    """Outside of the queue: the answer says where it begins and ends."""
    OFFSET_RESET = 4
    """An administrator moved the group: go on at ``next_queue_offset``, give up what is held."""
    OFFSET_CUT = 5
    """The broker lost messages before the offset, in the epoch of the pull: go on at
    ``next_queue_offset``, give up what is held."""


class PullRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PULL_MESSAGE. The answer's body is whole record batches.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        queue_id: Message queue.
        queue_offset: Next message wanted. The first batch of the answer may begin before it.
        max_bytes: Stop adding batches beyond so many bytes; at least one batch is given. The broker
            may stop sooner.
        suspend_timeout_ms: Wait so long for a message when there is none, 0 to 30,000.
        expression: Subscription expression, ``*`` for all.
        expression_type: ``ExpressionType``.
        generation: In which the queue was claimed; 0 for none.
        verify: The answer before was damaged: check what is read, and pass what is lost.
        apart: Large batches may come in frames of their own, behind that of the response.
        epoch: Of the log when the consumer came to this offset; 0 if it does not know.
        zone: Where the consumer stands; empty if it does not say.
    """

    group: Name
    topic: Name
    queue_id: QueueId
    queue_offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_BYTES)] = 1024 * 1024
    suspend_timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUSPEND_MS)] = 0
    expression: Annotated[str, msgspec.Meta(max_length=16_384)] = "*"
    expression_type: Annotated[str, msgspec.Meta(max_length=16)] = ExpressionType.TAG.value
    generation: int = 0
    verify: bool = False
    apart: bool = False
    epoch: Epoch = 0
    zone: Zone = ""


class PullResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to PULL_MESSAGE.

    Attributes:
        status: ``PullStatus`` as a number.
        next_queue_offset: Where to go on.
        min_queue_offset: First message of the queue.
        max_queue_offset: Behind the last one that consumers may see.
        suggest_broker_id: Of a master: 0, or the slave that the consumer is to read this queue
            from.
        epoch: Of the log now; the next pull carries it. 0 if the store does not know.
    """

    status: int
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    suggest_broker_id: int = 0
    epoch: int = 0


class QueueBoundsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_QUEUE_BOUNDS: where a queue begins and ends."""

    topic: Name
    queue_id: QueueId


class QueueBoundsResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to QUERY_QUEUE_BOUNDS.

    Attributes:
        min_queue_offset: First message.
        max_queue_offset: Behind the last one.
    """

    min_queue_offset: int
    max_queue_offset: int


class SearchOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """SEARCH_OFFSET_BY_TIMESTAMP: the first message stored at or after a time, in ms."""

    topic: Name
    queue_id: QueueId
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class OffsetResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One queue offset; -1 for none."""

    queue_offset: int


class QueueOffsetEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A queue and an offset in it.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        queue_offset: -1 asks, or says that none is known.
        epoch: Of the log when the offset was right; 0 if that is not known.
    """

    topic: Name
    queue_id: QueueId
    queue_offset: Offset = -1
    epoch: Epoch = 0


class QueryConsumerOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_CONSUMER_OFFSET: where a group stands; answered with ``ConsumerOffsets``.

    Attributes:
        group: Consumer group.
        queues: Which.
        client_id: Member that was given these queues and claims them; empty to look only.
    """

    group: Name
    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    client_id: Name = ""


class ConsumerOffsets(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Offsets of a group.

    Attributes:
        queues: In the order asked.
        generation: Of the group at this broker, if the queues were claimed; pulls carry it.
    """

    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    generation: int = 0


class UpdateConsumerOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_CONSUMER_OFFSET: a group commits; answered with an empty header.

    Attributes:
        group: Consumer group.
        client_id: Member that commits.
        queues: Queues and the next offsets to read.
        generation: Newest of this broker that the member knows; 0 if it is no member.
    """

    group: Name
    client_id: Name
    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    generation: int = 0


class ViewMessageRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """VIEW_MESSAGE: the batch at a log offset; the answer's body is that record batch."""

    commitlog_offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
