"""What becomes of messages that were sent back: which retry, or dead letter. Pure."""

import msgspec

from mqmesh.errors import CorruptBatch
from mqmesh.message import (
    PROPERTY_LAST_FAILURE,
    PROPERTY_RECONSUME_TIMES,
    RETRY_PREFIX,
    Message,
    StoredMessage,
)
from mqmesh.payload import Buffer
from mqmesh.protocol.retries import FIRST_RETRY_LEVEL, TO_DEAD_LETTERS
from mqmesh.record_batch import BatchHeader, decode_messages
from mqmesh.redelivery import Change


class RetryStep(msgspec.Struct, frozen=True):
    """What becomes of consecutive messages of one batch.

    Attributes:
        first: Ordinal of the first.
        count: How many.
        level: Delay level of their retry; ``TO_DEAD_LETTERS`` when there is none.
        change: Makes the message that is written; None for a batch that cannot be decoded,
            which goes to the dead letters whole and as it is.
    """

    first: int
    count: int
    level: int
    change: Change | None

    @property
    def is_dead(self) -> bool:
        """True when the messages become dead letters."""
        return self.level == TO_DEAD_LETTERS


def plan_retry(
    buffer: Buffer,
    header: BatchHeader,
    *,
    topic: str,
    first: int,
    count: int,
    max_reconsume_times: int,
    delay_level: int = 0,
    reconsume_times: int = 0,
    reason: str = "",
) -> list[RetryStep]:
    """Decides about messages of a stored batch.

    Args:
        buffer: The batch, which passed ``check_batch``.
        header: Its header.
        topic: Physical topic it is stored in.
        first: Ordinal of the first message sent back.
        count: Messages sent back.
        max_reconsume_times: What was sent back as often becomes a dead letter.
        delay_level: 0 for 3 + reconsume times; else this one, or ``TO_DEAD_LETTERS``.
        reconsume_times: Tries that the consumer made by itself.
        reason: What went wrong.

    Returns:
        Steps in order, each for messages that are dealt with alike.
    """
    try:
        stored = decode_messages(buffer, header)[first : first + count]
    except CorruptBatch:
        return [RetryStep(0, header.message_count, TO_DEAD_LETTERS, None)]
    # Only here is it the broker that wrote the number.
    is_retried = topic.startswith(RETRY_PREFIX)
    steps: list[RetryStep] = []
    times_of = [message.reconsume_times if is_retried else 0 for message in stored]
    start = 0
    for at in range(1, len(stored) + 1):
        if at == len(stored) or times_of[at] != times_of[start]:
            times = times_of[start]
            level = delay_level or FIRST_RETRY_LEVEL + times
            if times >= max_reconsume_times:
                level = TO_DEAD_LETTERS
            change = _changer(max(times, reconsume_times) + 1, reason)
            steps.append(RetryStep(first + start, at - start, level, change))
            start = at
    return steps


def halves_of(step: RetryStep) -> tuple[RetryStep, RetryStep]:
    """A step for several messages as two steps."""
    half = step.count // 2
    return (
        msgspec.structs.replace(step, count=half),
        msgspec.structs.replace(step, first=step.first + half, count=step.count - half),
    )


def ordinal_of(header: BatchHeader, queue_offset: int) -> int:
    """Position of a message in its batch, from 0."""
    return queue_offset - header.base_queue_offset


def without_retries(message: Message | StoredMessage, mark: dict[str, str]) -> Message:
    """A dead letter as it was before its first failure, with further properties."""
    properties = dict(message.properties or ())
    properties.pop(PROPERTY_RECONSUME_TIMES, None)
    return _with_properties(message, properties | mark)


def _changer(reconsume_times: int, reason: str) -> Change:
    added = {PROPERTY_RECONSUME_TIMES: str(reconsume_times)}
    if reason:
        added[PROPERTY_LAST_FAILURE] = reason

    def change(message: Message) -> Message:
        return _with_properties(message, (message.properties or {}) | added)

    return change


def _with_properties(message: Message | StoredMessage, properties: dict[str, str]) -> Message:
    plain = message.to_message() if isinstance(message, StoredMessage) else message
    return msgspec.structs.replace(plain, properties=properties or None)
