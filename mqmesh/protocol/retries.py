"""CONSUMER_SEND_MSG_BACK and RESEND_DEAD_LETTERS: retries and dead letters of failed messages."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.message import MAX_DELAY_MS
from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import QueueId

MAX_SEND_BACK_ENTRIES: Final = 256
MAX_RESENT_LETTERS: Final = 256
MAX_REASON_CHARACTERS: Final = 1_024
MAX_BATCH_MESSAGES: Final = 65_536
DEFAULT_MAX_RECONSUME_TIMES: Final = 16
FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry; each further one waits a level longer."""
TO_DEAD_LETTERS: Final = -1
"""Value in place of a delay level: no retry, but ``%DLQ%<group>``."""

_Place = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SendBackEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that stand behind one another and failed alike.

    Attributes:
        topic: Physical topic they were pulled from.
        queue_id: Message queue.
        queue_offset: First one.
        count: Number of messages, one behind the other.
        reason: Reason of the failure; it travels with the messages.
        delay_level: 0 for 3 + the number of tries; -1 for dead letters at once; else this level.
        reconsume_times: Number of retries within the consumer, which brokers cannot know.
        delay_ms: With level 0: delay until the redelivery, ms; 0 for the group's schedule.
    """

    topic: TopicName
    queue_id: QueueId
    queue_offset: _Place
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_MESSAGES)] = 1
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""
    delay_level: Annotated[int, msgspec.Meta(ge=TO_DEAD_LETTERS, le=2**31)] = 0
    reconsume_times: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DELAY_MS)] = 0


class SendBackRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CONSUMER_SEND_MSG_BACK: messages that a consumer could not handle, to be consumed again
    later.

    The request names messages that the broker has. It stores them once more, under their ids and
    with the number of tries and the reason as properties (RECONSUME_TIMES, LAST_FAILURE), for
    delivery to ``%RETRY%<group>`` at delay level 3 + the number of tries so far. After
    ``max_reconsume_times`` they go to ``%DLQ%<group>`` instead; so does, whole and unchanged, a
    batch that the broker cannot decode either.

    The answer comes when everything is stored. An entry that the group sent back from the same
    place before is answered as it was then, and not stored again; the broker remembers the last
    200,000 messages, also after a restart, until the group's offsets are moved. So a request may be
    repeated.

    Attributes:
        group: Consumer group.
        entries: Which messages.
        max_reconsume_times: A message that was sent back as often becomes a dead letter.

    Errors:
        MESSAGE_ILLEGAL: The name of the group, or it only looks at messages.
        CONSUMER_GROUP_NOT_EXIST: The group has no settings, and gets none by itself.
        TOPIC_NOT_EXIST: Of an entry: no such topic.
        OFFSET_ILLEGAL: Of an entry: the message is not there, or not any more.
        DISK_FULL: Of an entry: no room to write.
        SYSTEM_BUSY: Too many groups are made; or, of an entry: flow control.
        SERVICE_NOT_AVAILABLE: Of an entry: the same is being written just now.
    """

    group: GroupName
    entries: Annotated[list[SendBackEntry], msgspec.Meta(max_length=MAX_SEND_BACK_ENTRIES)]
    max_reconsume_times: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = DEFAULT_MAX_RECONSUME_TIMES


class SendBackResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result of an entry.

    Attributes:
        code: Response code; unless it is SUCCESS, the entry must be sent back again.
        remark: Why not.
        dead_letters: How many of its messages are dead letters now.
    """

    code: int
    remark: str = ""
    dead_letters: int = 0


class SendBackResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to CONSUMER_SEND_MSG_BACK, when the messages are stored.

    Attributes:
        results: One an entry, in order.
    """

    results: list[SendBackResult]


class ResendTarget(enum.StrEnum):
    """Targets of resent dead letters."""

    RETRY = "RETRY"
    """The group's retry topic: only this group gets them."""
    TOPIC = "TOPIC"
    """The topic they were sent to at first: all its groups get them once more."""


class ResendStatus(enum.IntEnum):
    """Outcomes of a dead letter that is resent. On the wire."""

    RESENT = 0
    """The dead letter was sent; with ``dry_run``, it would have been."""
    ALREADY_RESENT = 1
    """It was sent again before, and ``force`` was not set."""
    GONE = 2
    """The queue has no such message any more."""
    REFUSED = 3
    """The remark says why; nothing was written."""


class ResendRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RESEND_DEAD_LETTERS: sends dead letters of a group again, with their number of tries set
    back.

    The broker writes a mark together with each (topic RMQ_SYS_DLQ_RESENT_TOPIC), so that none is
    sent twice without ``force``. The answer comes when everything is stored.

    Attributes:
        group: Consumer group whose dead letters they are.
        queue_offsets: Offsets of the dead letters in queue 0 of ``%DLQ%<group>``.
        target: ``ResendTarget``.
        force: Also those that were resent before.
        dry_run: Only report the outcomes.

    Errors:
        TOPIC_NOT_EXIST: The group has no dead letters here.
        MESSAGE_ILLEGAL: The name of the group, or the target.
    """

    group: GroupName
    queue_offsets: Annotated[list[_Place], msgspec.Meta(max_length=MAX_RESENT_LETTERS)]
    target: Annotated[str, msgspec.Meta(max_length=16)] = ResendTarget.RETRY.value
    force: bool = False
    dry_run: bool = False


class ResendResult(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Result of one dead letter.

    Attributes:
        status: ``ResendStatus``.
        resent_ms: When it was resent before, wall clock; 0 if it was not.
        remark: Why it was refused.
    """

    status: int
    resent_ms: int = 0
    remark: str = ""


class ResendResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to RESEND_DEAD_LETTERS, when everything is stored.

    Attributes:
        results: One a queue offset, in order.
    """

    results: list[ResendResult]
