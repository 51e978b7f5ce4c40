"""RECEIVE_MESSAGE, SETTLE_MESSAGES and leases: messages that are acknowledged one by one."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import MAX_PULL_BYTES, MAX_SUSPEND_MS, ExpressionType, QueueId
from mqmesh.protocol.retries import MAX_REASON_CHARACTERS
from mqmesh.protocol.route import Name

MAX_RECEIVED: Final = 1_024
"""Messages of one receive, and of one lease."""
MAX_SETTLEMENTS: Final = 4_096
MAX_LEASES_PER_ANSWER: Final = 1_000
MIN_INVISIBLE_MS: Final = 1_000
MAX_INVISIBLE_MS: Final = 12 * 3_600_000
MAX_NACK_MS: Final = 24 * 3_600_000
BY_SCHEDULE: Final = -1
"""Delay of a message that failed: that of the group's retries."""

LeaseNumber = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Place = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class DeliveryMode(enum.StrEnum):
    """Ways in which the members of a group share messages."""

    QUEUE = "queue"
    """Queues are divided among members, who commit offsets."""
    MESSAGE = "message"
    """Each message goes to any member, who acknowledges it."""
    FIFO = "fifo"
    """The same, but those of one sharding key to one member at a time, in order."""


class SettleAction(enum.IntEnum):
    """Outcomes of a member's work on messages. On the wire."""

    ACK = 0
    """Done: they never come again."""
    NACK = 1
    """Failed: they come again after ``delay_ms``."""
    REJECT = 2
    """Failed for good: they become dead letters now."""
    EXTEND = 3
    """The member works on; the lease lasts ``delay_ms`` more from now on."""
    RETURN = 4
    """Not worked on: they come again at once, and the attempt does not count."""


class Settlement(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Outcome of the work on messages of one lease.

    Attributes:
        lease: Number.
        queue_id: Message queue.
        first: Queue offset of the lowest bit of the first byte.
        bits: Messages, a bit each; 1 to 128 bytes.
        action: ``SettleAction``.
        delay_ms: Of NACK: -1 for the group's schedule, up to 24 h; of EXTEND: up to 12 h.
        reason: Of NACK and REJECT: reason of the failure; it travels with the messages.
        is_retry: The messages are of the retry topic of the group.
    """

    lease: LeaseNumber
    queue_id: QueueId
    first: Place
    bits: Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIVED // 8)]
    action: Annotated[int, msgspec.Meta(ge=0, le=4)] = SettleAction.ACK.value
    delay_ms: Annotated[int, msgspec.Meta(ge=BY_SCHEDULE, le=MAX_NACK_MS)] = BY_SCHEDULE
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""
    is_retry: bool = False


class ReceiveRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RECEIVE_MESSAGE: leases messages of a topic to a member of a group, or waits for some.

    Messages come from all queues of the topic at this broker, and from the group's retry topic, in
    turn. No other member gets them until the lease ends. The answer's body is record batches, whole
    or cut, in the order of the leases.

    Attributes:
        group: Consumer group, with ``delivery`` "message".
        topic: Physical topic.
        member: Client id; its heartbeat comes before.
        max_messages: Most messages of the answer, 1 to 1,024.
        max_bytes: Most bytes of the answer; at least one message is given.
        invisible_ms: Length of the leases, 1,000 to 43,200,000; 0 for the group's.
        suspend_timeout_ms: Wait so long for a message when there is none, 0 to 30,000.
        expression: Subscription expression, ``*`` for all; the same for all members of the group.
        expression_type: ``ExpressionType``.
        verify: The answer before was damaged: check what is read, and pass what is lost.
        settle: Report on messages of the topic, as SETTLE_MESSAGES takes it, at most 4,096. With
            it the answer does not wait for messages, and comes once the report is safe.
        attempt_id: Chosen by the member. The same number as before says that the answer was lost:
            it gets the same leases, as far as it has them. 0 for none.
        is_earlier: The member subscribed before the topic was here: a group without an offset
            begins at its first message, also with ``LAST_OFFSET``.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        NO_PERMISSION: The topic is not readable, or the group may not consume.
        MESSAGE_ILLEGAL: An expression that cannot be parsed, or another one than the group's; or
            the group is in another delivery mode.
        STALE_GENERATION: No member here.
        SYSTEM_BUSY: All that the group may hold is held (``max_unsettled``), the broker has too
            many leases, or ``max_held_pulls`` is reached.
    """

    group: GroupName
    topic: TopicName
    member: Name
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=MAX_RECEIVED)] = 32
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_BYTES)] = 1024 * 1024
    invisible_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_INVISIBLE_MS)] = 0
    suspend_timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUSPEND_MS)] = 0
    expression: Annotated[str, msgspec.Meta(max_length=16_384)] = "*"
    expression_type: Annotated[str, msgspec.Meta(max_length=16)] = ExpressionType.TAG.value
    verify: bool = False
    settle: Annotated[list[Settlement], msgspec.Meta(max_length=MAX_SETTLEMENTS)] = []
    attempt_id: LeaseNumber = 0
    is_earlier: bool = False


class MessageLease(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that a member got together.

    Attributes:
        lease: Number.
        queue_id: Message queue.
        first: Queue offset of the first one.
        end: Queue offset behind the last one; between them others may be missing.
        count: Number of messages.
        attempt: How often they were handed out from this queue, this time included.
        length_ms: The lease ends so long after the answer was made.
        is_retry: They are of the retry topic of the group.
    """

    lease: LeaseNumber
    queue_id: QueueId
    first: Place
    end: Place
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_RECEIVED)]
    attempt: int
    length_ms: int
    is_retry: bool = False


class ReceiveResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to RECEIVE_MESSAGE.

    Attributes:
        leases: Leases that the member got; none if no message came in time.
        settled: Response code of each settlement, as in ``SettleResponse``. With any, an error of
            the receive itself is left to the next one.
    """

    leases: Annotated[list[MessageLease], msgspec.Meta(max_length=MAX_RECEIVED)] = []
    settled: Annotated[list[int], msgspec.Meta(max_length=MAX_SETTLEMENTS)] = []


class SettleRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """SETTLE_MESSAGES: a member reports on messages that it holds; answered once the report is in
    the log, and as safe as an acknowledged message.

    A settlement counts if its lease holds the messages, or if no lease holds them. So it may be
    repeated, and late work is not lost. After a failover members extend their leases within 3 s,
    so that no other member gets the messages.

    Attributes:
        group: Consumer group.
        topic: Physical topic that was received from.
        member: Client id.
        settlements: At most 4,096.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        MESSAGE_ILLEGAL: The group is in another delivery mode.
        DISK_FULL, SYSTEM_ERROR: Not in the log; repeat it.
    """

    group: GroupName
    topic: TopicName
    member: Name
    settlements: Annotated[list[Settlement], msgspec.Meta(max_length=MAX_SETTLEMENTS)]


class SettleResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to SETTLE_MESSAGES.

    Attributes:
        codes: Response code of each settlement: SUCCESS; STALE_RECEIPT, if another member has
            received a message meanwhile; after any other code it must be repeated.
    """

    codes: Annotated[list[int], msgspec.Meta(max_length=MAX_SETTLEMENTS)]


class ListLeasesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """LIST_LEASES: leases of a group's messages, and messages that wait to be handed out again.

    Attributes:
        group: Consumer group.
        topic: Only of this topic; empty for all.
        after_topic: In pages: leases behind this topic, queue and offset.
        after_queue_id: See ``after_topic``.
        after_first: See ``after_topic``.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName
    topic: TopicName = ""
    after_topic: TopicName = ""
    after_queue_id: int = -1
    after_first: int = -1


class LeaseInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that a member holds, or that wait.

    Attributes:
        topic: Physical topic.
        queue_id: Message queue.
        first: Queue offset of the first message.
        count: Number of messages.
        attempt: Number of times that they were handed out.
        state: ``leased``, ``waiting``, or ``leaving``: they are being sent back.
        member: Client id of the holder; empty if no member has shown that it holds them.
        held_ms: Time since they were handed out, ms; 0 if that is not known.
        left_ms: Time until the lease, or the wait, ends, ms.
    """

    topic: TopicName
    queue_id: QueueId
    first: Place
    count: int
    attempt: int
    state: str
    member: str = ""
    held_ms: int = 0
    left_ms: int = 0


class LeaseList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to LIST_LEASES.

    Attributes:
        leases: By topic, queue and offset.
        more: Ask again, after the last one.
    """

    leases: Annotated[list[LeaseInfo], msgspec.Meta(max_length=MAX_LEASES_PER_ANSWER)] = []
    more: bool = False


class ReleaseLeasesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RELEASE_LEASES: ends the leases of a member; other members get the messages at once.

    Attributes:
        group: Consumer group.
        member: Client id.

    Errors:
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName
    member: Name


class ReleasedLeases(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to RELEASE_LEASES.

    Attributes:
        messages: How many messages were released.
    """

    messages: int
