"""CONSUMER_SEND_MSG_BACK and RESEND_DEAD_LETTERS: messages that failed, and what is done then."""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.pulling import QueueId
from mqmesh.protocol.route import Name

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
        count: How many.
        reason: What went wrong; it travels with the messages.
        delay_level: 0 for 3 + reconsume times; else this level, or ``TO_DEAD_LETTERS``.
        reconsume_times: How often the consumer itself tried them again, which brokers cannot
            know.
    """

    topic: Name
    queue_id: QueueId
    queue_offset: _Place
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_MESSAGES)] = 1
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""
    delay_level: Annotated[int, msgspec.Meta(ge=TO_DEAD_LETTERS, le=2**31)] = 0
    reconsume_times: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class SendBackRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CONSUMER_SEND_MSG_BACK: messages to be consumed again later.

    Attributes:
        group: Consumer group.
        entries: Which messages.
        max_reconsume_times: A message that was sent back as often becomes a dead letter.
    """

    group: Name
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
    """The group's retry topic: nobody but the group gets them."""
    TOPIC = "TOPIC"
    """The topic they were sent to at first: all its groups get them once more."""


class ResendStatus(enum.IntEnum):
    """Outcomes of a dead letter that is resent. On the wire."""

    RESENT = 0
    """The dead letter was sent; with ``dry_run``, it would have been."""
    ALREADY_RESENT = 1
    GONE = 2
    """The queue has no such message any more."""
    REFUSED = 3


class ResendRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """RESEND_DEAD_LETTERS, answered with ``ResendResponse``.

    Attributes:
        group: Consumer group whose dead letters they are.
        queue_offsets: Which ones, in queue 0 of ``%DLQ%<group>``.
        target: ``ResendTarget``.
        force: Also those that were resent before.
        dry_run: Only report what would be done.
    """

    group: Name
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
