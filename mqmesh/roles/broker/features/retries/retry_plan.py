"""Retries: what becomes of messages that were sent back, which delay, or dead letter. Pure."""

from collections.abc import Callable, Sequence

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, ExpiringMeta, pack_due_times
from mqmesh.batch.payload import COMPRESS_OVER_BYTES, encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, read_header
from mqmesh.message import (
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_LAST_FAILURE,
    PROPERTY_RECONSUME_TIMES,
    RETRY_PREFIX,
    Message,
    StoredMessage,
    as_plain,
    is_system_topic,
)
from mqmesh.protocol.policies import RetryDelays
from mqmesh.protocol.retries import FIRST_RETRY_LEVEL, TO_DEAD_LETTERS
from mqmesh.storage.interface import BatchToPut

Place = Callable[[DelayedMeta, int], tuple[int, DelayedMeta]]
"""Implement ``delays.place_delayed``."""


class RetryStep(msgspec.Struct, frozen=True):
    """Next step of consecutive messages of one batch: a retry, or the dead letter queue.

    Attributes:
        messages: As they are stored.
        level: Delay level of their retry; ``TO_DEAD_LETTERS`` when there is none.
        properties: Properties that are added to each message.
        due_times: With level 0, when each of them comes again, wall clock, ms.
        expires_ms: From then on nobody gets them, wall clock; 0 for never.
    """

    messages: Sequence[StoredMessage]
    level: int
    properties: dict[str, str]
    due_times: tuple[int, ...] = ()
    expires_ms: int = 0

    @property
    def is_dead(self) -> bool:
        """True when the messages become dead letters."""
        return self.level == TO_DEAD_LETTERS

    def halves(self) -> tuple["RetryStep", "RetryStep"]:
        """A step for several messages as two steps."""
        half = len(self.messages) // 2
        return self._part(slice(half)), self._part(slice(half, None))

    def _part(self, part: slice) -> "RetryStep":
        return msgspec.structs.replace(
            self, messages=self.messages[part], due_times=self.due_times[part]
        )

    def batch(self, topic: str, queue_id: int, place: Place) -> BatchToPut:
        """The messages as they are written.

        Args:
            topic: Physical topic of the retry or dead letter.
            queue_id: Its queue.
            place: Where a retry waits until it is due.

        Raises:
            LocalProtocolError: They are too many for one batch, with what is added.
        """
        changed = [with_properties(message, self.properties) for message in self.messages]
        first = self.messages[0]
        if self.is_dead:
            if not is_system_topic(topic):  # there a message keeps no other topic
                changed = [
                    with_properties(message, {PROPERTY_DLQ_ORIGIN_TOPIC: message.topic})
                    for message in changed
                ]
            return moved(first, changed, topic, queue_id)
        due_times = pack_due_times(self.due_times) if self.due_times else b""
        return moved(
            first,
            changed,
            topic,
            queue_id,
            level=self.level,
            due_times=due_times,
            expires_ms=self.expires_ms,
            place=place,
        )


def plan_retry(
    messages: Sequence[StoredMessage],
    *,
    topic: str,
    max_reconsume_times: int,
    delay_level: int = 0,
    delay_ms: int = 0,
    reconsume_times: int = 0,
    reason: str = "",
    delays: RetryDelays | None = None,
    now_ms: int = 0,
) -> list[RetryStep]:
    """Decides about messages of a stored batch.

    Args:
        messages: Those sent back, in order.
        topic: Physical topic they are stored in.
        max_reconsume_times: A message that was sent back as often becomes a dead letter.
        delay_level: 0 for 3 + reconsume times; else this one, or ``TO_DEAD_LETTERS``.
        delay_ms: With level 0, after so long; 0 for what ``delays`` say.
        reconsume_times: Tries that the consumer made by itself.
        reason: Reason of the failure, from the consumer.
        delays: Of the group, in place of delay levels that depend on reconsume times.
        now_ms: Wall clock.

    Returns:
        Steps in order, each for messages that are dealt with alike.
    """
    # Only there is it the broker that wrote the number.
    is_retried = topic.startswith(RETRY_PREFIX)
    steps: list[RetryStep] = []
    times_of = [message.reconsume_times if is_retried else 0 for message in messages]
    start = 0
    for at in range(1, len(messages) + 1):
        if at == len(messages) or times_of[at] != times_of[start]:
            times = times_of[start]
            level = delay_level or FIRST_RETRY_LEVEL + times
            if times >= max_reconsume_times:
                level = TO_DEAD_LETTERS
            added = {PROPERTY_RECONSUME_TIMES: str(max(times, reconsume_times) + 1)}
            if reason:
                added[PROPERTY_LAST_FAILURE] = reason
            group = messages[start:at]
            due_times: tuple[int, ...] = ()
            is_scheduled = not delay_level and level != TO_DEAD_LETTERS
            if is_scheduled and delay_ms:
                level, due_times = 0, (now_ms + delay_ms,) * len(group)
            elif is_scheduled and delays is not None:
                level = 0
                due_times = tuple(now_ms + delays.delay_ms(times, one.message_id) for one in group)
            steps.append(RetryStep(group, level, added, due_times))
            start = at
    return steps


def moved(
    first: StoredMessage,
    messages: Sequence[Message],
    topic: str,
    queue_id: int,
    *,
    level: int = 0,
    due_times: bytes = b"",
    expires_ms: int = 0,
    place: Place | None = None,
) -> BatchToPut:
    """A batch for another topic or queue, under the ids that its messages have.

    Args:
        first: The first message as it is stored.
        messages: Messages to write, from this one on, as they are written.
        topic: Physical topic of the new batch.
        queue_id: Queue it is for.
        level: Delay level after which it goes there; 0 for at once, or at ``due_times``.
        due_times: Of its messages, as in ``DelayedMeta``.
        expires_ms: Wall clock from which on nobody gets them, 0 for never.
        place: Where it waits meanwhile.

    Raises:
        LocalProtocolError: They are too many for one batch.
    """
    info = first.info
    payload = encode_payload(messages, compress_over_bytes=COMPRESS_OVER_BYTES)
    attributes = Attributes.REDELIVERED
    meta: DelayedMeta | None = None
    wish = DelayedMeta(topic, payload.tag_hashes, info.born_host, level, due_times)
    if expires_ms:
        attributes |= Attributes.HAS_EXPIRY
        wish = meta = ExpiringMeta(
            topic, payload.tag_hashes, info.born_host, level, due_times, expires_ms=expires_ms
        )
    if level or due_times:
        assert place is not None
        queue_id, meta = place(wish, queue_id)
        topic, attributes = meta.topic, attributes | Attributes.HAS_DELAY
    parts = batch_parts(
        payload,
        topic=topic,
        queue_id=queue_id,
        producer_id=info.producer_id,
        first_sequence=info.first_sequence + first.ordinal,
        born_timestamp=info.born_timestamp,
        born_host=info.born_host,
        attributes=attributes,
        meta=meta,
    )
    data = b"".join(parts)
    return BatchToPut(topic, queue_id, read_header(data), data, payload.tag_hashes)


def with_properties(message: Message, added: dict[str, str]) -> Message:
    """A message as a plain one, with further properties."""
    return msgspec.structs.replace(
        as_plain(message), properties={**(message.properties or {}), **added}
    )


def without_retries(message: StoredMessage, mark: dict[str, str]) -> Message:
    """A dead letter as it was before its first failure, with further properties."""
    plain = with_properties(message, mark)
    assert plain.properties is not None
    plain.properties.pop(PROPERTY_RECONSUME_TIMES, None)
    return plain
