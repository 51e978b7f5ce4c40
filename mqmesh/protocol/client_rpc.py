"""Structs of administrators' requests to one consumer, by way of a broker that it is connected to.

The broker hands the question on as it came, and the consumer's answer likewise: both are the
headers that stand here. The broker answers for a consumer that does not.
"""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.membership import Subscription, TopicConsumption
from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import Offset, QueueId
from mqmesh.protocol.route import Name

MAX_ANSWER_BYTES: Final = 1_048_576
"""A consumer's answer, encoded."""
MAX_STACKS_LENGTH: Final = 262_144
MAX_IN_FLIGHT: Final = 100
"""Messages that are with listeners, as far as an answer names them."""
NEVER: Final = -1
"""Value in place of a time since something that has not happened yet."""

_Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RunningInfoRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_CONSUMER_RUNNING_INFO: state of a running consumer, as it reports it: the broker passes
    the question to the connection of the member's last heartbeat by ASK_CLIENT, and the answer
    back.

    Attributes:
        group: Consumer group.
        client_id: Member.
        with_stacks: Also where its threads and tasks stand.

    Errors:
        CONSUMER_GROUP_NOT_EXIST: No member is connected here.
        CLIENT_NOT_ONLINE: No such member here, its connection broke, or no answer within 12 s.
        NO_PERMISSION: The consumer has ``admin_introspection`` off.
        SYSTEM_BUSY: 1,000 questions are under way.
    """

    group: GroupName
    client_id: Name
    with_stacks: bool = False


class RunningQueue(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A queue of a running consumer.

    Attributes:
        topic: Physical topic.
        broker_name: Broker group.
        queue_id: From 0.
        state: ``pulling``, ``full`` (undone messages), ``paused``, ``damaged``, ``starting``.
        next_offset: Queue offset that it pulls next.
        done_offset: All before it is done.
        committed_offset: Offset that the broker took last, -1 for none yet.
        cached_messages: Pulled and not done; of a pull consumer, not polled.
        cached_bytes: About how many bytes these have, as stored.
        in_flight: Messages with listeners; of a pull consumer, polled and not committed.
        since_pull_ms: Since the last answer to a pull, -1 for none.
        since_commit_ms: Since ``committed_offset`` became it, -1 for never.
    """

    topic: TopicName
    broker_name: str
    queue_id: QueueId
    state: str
    next_offset: int = 0
    done_offset: int = 0
    committed_offset: int = -1
    cached_messages: int = 0
    cached_bytes: int = 0
    in_flight: int = 0
    since_pull_ms: int = NEVER
    since_commit_ms: int = NEVER


class InFlightMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that is with a listener.

    Attributes:
        message_id: Of the message.
        topic: Physical topic of its queue.
        broker_name: Broker group.
        queue_id: From 0.
        queue_offset: In the queue.
        since_ms: How long it has been there, to the second; -1 for less than a second.
    """

    message_id: str
    topic: TopicName
    broker_name: str
    queue_id: QueueId
    queue_offset: Offset
    since_ms: int = NEVER


class RunningInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """State of a running consumer, by its own account.

    Attributes:
        client_id: Member.
        group: Consumer group.
        kind: ``push`` or ``pull``.
        started_ms: When it was started, ms since 1970.
        properties: Its settings, by name.
        subscriptions: Its subscriptions.
        queues: Those that it has.
        topics: Its metrics of late, by topic.
        in_flight: Messages that are with listeners now, the first 100.
        stacks: Stacks of its threads and tasks, at most 256 KiB; empty unless requested.
    """

    client_id: str
    group: GroupName
    kind: str
    started_ms: int
    properties: dict[str, str]
    subscriptions: list[Subscription]
    queues: list[RunningQueue]
    topics: list[TopicConsumption]
    in_flight: Annotated[list[InFlightMessage], msgspec.Meta(max_length=MAX_IN_FLIGHT)] = []
    stacks: Annotated[str, msgspec.Meta(max_length=MAX_STACKS_LENGTH)] = ""


class HandToRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CONSUME_MESSAGE_DIRECTLY: has one member of a group consume one message at once.

    The broker reads the batch and sends it to the member as the body of ASK_CLIENT; its listener is
    called with the one message, which has the property HANDED_OVER. Offsets do not move, nothing is
    sent back. The member answers within 10 s.

    Attributes:
        group: Consumer group, which neither broadcasts nor consumes in order.
        client_id: Member.
        commitlog_offset: Where the message's batch begins in the broker's log.
        ordinal: Which message of the batch, from 0.

    Errors:
        CONSUMER_GROUP_NOT_EXIST: No member is connected here.
        CLIENT_NOT_ONLINE: No such member here, its connection broke, or no answer within 12 s.
        MESSAGE_ILLEGAL: The group broadcasts or consumes in order, the batch is delayed or half or
            has no such message, or the member has no listener for its topic.
        OFFSET_ILLEGAL: No batch there.
        NO_PERMISSION: Of the topic, or the consumer has ``admin_introspection`` off.
        SYSTEM_BUSY: 1,000 questions are under way.
    """

    group: GroupName
    client_id: Name
    commitlog_offset: Offset
    ordinal: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


class HandedResult(enum.StrEnum):
    """Outcomes of a message that was handed to a member."""

    SUCCESS = "SUCCESS"
    """The listener consumed it."""
    RECONSUME_LATER = "RECONSUME_LATER"
    """The listener wants it again later."""
    EXCEPTION = "EXCEPTION"
    """The listener raised."""
    TIMEOUT = "TIMEOUT"
    """No worker began it, or its listener did not return in time; it may go on."""


class HandedOver(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result of a message that was handed to a member.

    Attributes:
        result: ``HandedResult``.
        text: Error that the listener raised, or the reason of a timeout; else "".
        took_ms: How long it took.
    """

    result: Annotated[str, msgspec.Meta(max_length=32)]
    text: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    took_ms: int = 0


class AskClient(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ASK_CLIENT: from a broker to a member, oneway: an administrator's GET_CONSUMER_RUNNING_INFO
    or CONSUME_MESSAGE_DIRECTLY, whose body it has.

    A client that does not know the question need not answer; the administrator gets an error after
    12 s.

    Attributes:
        token: To be repeated in the answer.
        code: Request code of the question.
        question: Its header.
    """

    token: _Token
    code: int
    question: Annotated[bytes, msgspec.Meta(max_length=4_096)]


class ClientAnswer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ANSWER_OF_CLIENT: answer to ASK_CLIENT, oneway. The body is the header of the answer to the
    question, at most 1 MiB. An unknown token is ignored.

    Attributes:
        token: Of the question.
        code: Response code.
        remark: Why not, if that is another one than SUCCESS.
    """

    token: _Token
    code: int = 0
    remark: Annotated[str, msgspec.Meta(max_length=1_024)] = ""
