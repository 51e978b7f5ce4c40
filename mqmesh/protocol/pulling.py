"""PULL_MESSAGE and the words about queue offsets."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName, TopicName
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
    """Tags as ``A || B``, or ``*`` for all."""
    SQL92 = "SQL92"
    """A condition on tag and properties; see docs/filters.md."""
    PYTHON = "PYTHON"
    """The expression is the id of a filter that was uploaded to the filter servers."""


class PullStatus(enum.IntEnum):
    """Results of a pull; RocketMQ's names. On the wire."""

    FOUND = 0
    """The body has batches; go on at ``next_queue_offset``."""
    NO_NEW_MSG = 1
    """The queue ends here; ask again."""
    NO_MATCHED_MSG = 2
    """Messages were passed over, since the filter does not want them or they have expired: go on
    at ``next_queue_offset``. With a filter also for messages that were lost to damage."""
    OFFSET_ILLEGAL = 3
    """Before the first message or behind the end: the client decides by ``min_queue_offset`` and
    ``max_queue_offset`` where to go on."""
    OFFSET_RESET = 4
    """An administrator moved the group: go on at ``next_queue_offset``, give up what is held."""
    OFFSET_CUT = 5
    """The broker lost messages before the offset, in the epoch of the pull: go on at
    ``next_queue_offset``, give up what is held."""
    MESSAGES_LOST = 6
    """Without a filter: messages were lost to damage, go on at ``next_queue_offset``."""


class PullRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PULL_MESSAGE: messages of a queue from an offset on, or a wait for some.

    The answer's body is whole record batches, one behind the other, as stored or cut down to what
    the expression wants (docs/storage-format.md, cut batches). The broker compares hashes of tags,
    so the client compares the tags again; other expressions are evaluated by the broker alone. With
    an expression a broker looks at a bounded number of messages for each answer: NO_MATCHED_MSG
    does not say that the queue has ended.

    A pull that finds nothing waits up to ``suspend_timeout_ms`` and is answered the moment a
    message comes; the client's deadline should be some seconds later. One with an expression is
    answered within a second of messages that were passed over. A broker may give less than
    ``max_bytes``: as much as there is room for while earlier answers wait to be read, and about
    4 MiB while requests of other peers wait. A waiting pull whose ``epoch`` is below the log's, and
    not 0, is answered NO_NEW_MSG at once.

    With ``apart``, pieces of the answer of 131,072 bytes and more may be frames of their own, of
    whole batches each, and all together no longer than one frame may be; a client that leaves one
    untaken for a minute is disconnected.

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
        epoch: Of the log when the consumer came to this offset: that of the last answer, or the one
            saved beside the offset; 0 if it does not know.
        zone: Where the consumer stands; empty if it does not say.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        NO_PERMISSION: The topic is not readable, or the settings of the group forbid it.
        CONSUMER_GROUP_NOT_EXIST: The group has no settings, and they are not made by themselves.
        MESSAGE_ILLEGAL: No such queue, or an expression that cannot be parsed.
        REQUEST_CODE_NOT_SUPPORTED: The type of expression is not served here.
        SYSTEM_BUSY: ``max_held_pulls`` or ``max_pending_bytes`` is reached, or at a filter server
            ``max_pulls_per_filter``.
        STALE_GENERATION: The queue was given to another member since that generation.
        SUBSCRIPTION_NOT_EXIST: From a filter server: it does not have the filter; upload it.
        FILTER_FAILED: From a filter server: the filter raised, or its process ended; no offset
            moves.
    """

    group: GroupName
    topic: TopicName
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
        suggest_broker_id: Of a master: 0, or the slave to read this queue from. The next pulls go
            there, and to the master again after 30 s, or when the slave refuses, does not answer,
            or answers anything but FOUND and NO_NEW_MSG (with an expression: NO_MATCHED_MSG); such
            advice is then ignored for 30 s.
        epoch: Of the log now; the next pull carries it. 0 if the store does not know.
    """

    status: int
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    suggest_broker_id: int = 0
    epoch: int = 0


class QueueBoundsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_QUEUE_BOUNDS: first and last offset of a queue.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        MESSAGE_ILLEGAL: No such queue.
    """

    topic: TopicName
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
    """SEARCH_OFFSET_BY_TIMESTAMP: the first message of a queue that was stored at or after a time.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        timestamp_ms: Wall clock, ms since 1970 UTC.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        MESSAGE_ILLEGAL: No such queue.
    """

    topic: TopicName
    queue_id: QueueId
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class OffsetResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One queue offset; -1 for none.

    Attributes:
        queue_offset: First message stored at or after the time; the end of the queue when there is
            none.
    """

    queue_offset: int


class QueueOffsetEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A queue and an offset in it.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        queue_offset: Next message to read; -1 in a request for it, and in an answer if the group
            never committed.
        epoch: Epoch of the log when the offset was right; 0 if that is not known.
    """

    topic: TopicName
    queue_id: QueueId
    queue_offset: Offset = -1
    epoch: Epoch = 0


class QueryConsumerOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_CONSUMER_OFFSET: committed offsets of a group in queues of this broker, and the claim
    of a member to them.

    A member that was given queues queries with its ``client_id`` and so claims them. A claim of an
    earlier generation ends, and commits and pulls of the earlier member are refused from then on.
    Within one generation a queue has one member, until it gives the queue back by UNLOCK_BATCH_MQ.
    A claim outlives the membership: a member that was removed and came back may commit, under its
    new generation, until another one claims the queue.

    Attributes:
        group: Consumer group.
        queues: Queues wanted, with the offset -1.
        client_id: Member that was given these queues and claims them; empty to look only.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
        STALE_GENERATION: Of claims: no member here, or another member has one of the queues in this
            generation; ask for the members again.
    """

    group: GroupName
    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    client_id: Name = ""


class ConsumerOffsets(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Offsets of a group.

    Attributes:
        queues: Offsets in the order of the request.
        generation: Generation of the group at this broker, if the queues were claimed; pulls carry
            it.
    """

    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    generation: int = 0


class UpdateConsumerOffsetRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """UPDATE_CONSUMER_OFFSET: commits the next offsets to read; answered with an empty header.

    Legal entries are committed even if another one is refused; the answer reports the first
    refusal. An offset may go backward.

    Attributes:
        group: Consumer group.
        client_id: Member that commits.
        queues: Queues and the next offsets to read.
        generation: Newest of this broker that the member knows; 0 if it is no member.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        OFFSET_ILLEGAL: Below 0, beyond the end of the queue, or behind a reset or a cut of the log
            that this consumer has not followed yet.
        MESSAGE_ILLEGAL: The name of the group, or no such queue.
        SYSTEM_BUSY: ``max_consumer_offsets`` is reached.
        STALE_GENERATION: No member here, removed since that generation, or the queue was given to
            another member.
        DISK_FULL: Nothing was committed.
        SYSTEM_ERROR: Committed in memory, but not saved: a crash would put the group back.
    """

    group: GroupName
    client_id: Name
    queues: Annotated[list[QueueOffsetEntry], msgspec.Meta(max_length=MAX_OFFSETS_PER_REQUEST)]
    generation: int = 0


class ViewMessageRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """VIEW_MESSAGE: the batch at an offset of the broker's log; the answer's body is that record
    batch.

    With the ordinal in an offset message id (``host:port#OFFSET#ORDINAL``, both hexadecimal) this
    finds a message without an index.

    Attributes:
        commitlog_offset: Where the batch begins, from the answer to a send or a pull.

    Errors:
        OFFSET_ILLEGAL: Outside of the log.
        NO_PERMISSION: The topic, or that of the delayed or half messages, is not readable.
        SYSTEM_ERROR: The record is damaged.
    """

    commitlog_offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
