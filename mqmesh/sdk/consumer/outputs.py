"""Outputs: messages that were made of others, and the batches that they become. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.message import Message, MessageQueue, describe
from mqmesh.message_checks import check_messages
from mqmesh.protocol.processing import (
    MAX_BATCHES_PER_QUEUE,
    MAX_COMMIT_BATCHES,
    MAX_COMMIT_BYTES,
    MAX_DELAYED_BATCHES,
)
from mqmesh.sdk.producer.admission import MESSAGE_OVERHEAD_BYTES
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.producer import checked_ttl
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.sdk.producer.send_buffer import delay_of

_ZERO: Final = 0
"""Defaults are recognized by identity, since 0 == False; any other number takes the longer way."""


class MadeMessage(NamedTuple):
    """A message that goes to a queue of its own choice.

    Attributes:
        message: The message.
        priority: Its priority; None for the lowest.
        ttl_ms: Time that it lives; 0 for no limit.
    """

    message: Message
    priority: int | None
    ttl_ms: int


class Made(NamedTuple):
    """Messages that a block has made.

    Attributes:
        plain: Messages without such a choice, by topic: those of a topic go together.
        others: All others.
    """

    plain: dict[str, list[Message]]
    others: list[MadeMessage]

    @property
    def topics(self) -> set[str]:
        """Topics of all of them."""
        return {*self.plain, *(one.message.topic for one in self.others)}


class Outputs:
    """Messages that a block makes of others; they are stored when the block has ended well.

    From one thread at a time.
    """

    def __init__(self) -> None:
        self._plain: dict[str, list[Message]] = {}
        self._others: list[MadeMessage] = []
        self._size = 0
        self._is_open = True

    def send(
        self, message: Message, *, priority: int | None = None, ttl_ms: int | None = None
    ) -> None:
        """Adds a message, to any topic of the broker group that was consumed from.

        Messages with a sharding key go to its queue among those of that broker group; all others of
        a topic to one of them.

        Args:
            message: The message; it may be delayed.
            priority: As for ``Producer.send``.
            ttl_ms: As for ``Producer.send``.

        Raises:
            InvalidArgument: All together have more than 4 MiB, the block has ended, or the message
                is illegal; the end of the block says so if another one of its topic came before.
        """
        if (
            type(message) is Message
            and type(message.body) is bytes
            and type(message.topic) is str
            and priority is None
            and ttl_ms is None
            and message.sharding_key is None
            and message.delay_level is _ZERO
            and message.deliver_at_ms is _ZERO
            and (plain := self._plain.get(message.topic)) is not None
            and (size := self._size + len(message.body) + MESSAGE_OVERHEAD_BYTES)
            <= MAX_COMMIT_BYTES
        ):
            self._size = size  # as below, without calls
            plain.append(message)
            return
        (message,) = check_messages((message,), max_message_size=MAX_COMMIT_BYTES)
        ttl_ms = checked_ttl(ttl_ms)
        self._grow(message)
        is_bound = message.sharding_key is not None or priority is not None
        if is_bound or ttl_ms or delay_of(message):
            self._others.append(MadeMessage(message, priority, ttl_ms))
        else:
            self._plain.setdefault(message.topic, []).append(message)

    def end(self) -> Made:
        """Return the messages; nothing more is taken."""
        self._is_open = False
        plain, self._plain = self._plain, {}
        return Made(plain, self._others)

    def _grow(self, message: Message) -> None:
        if not self._is_open:
            raise InvalidArgument("the block of these outputs has ended")
        size = self._size + len(message.body) + MESSAGE_OVERHEAD_BYTES
        if size > MAX_COMMIT_BYTES:
            raise InvalidArgument(
                f"outputs of {size} bytes: what is stored together may have {MAX_COMMIT_BYTES}; "
                "process fewer messages at once"
            )
        self._size = size


class PlacesOfTopic(msgspec.Struct, frozen=True):
    """Queues of a topic at one broker group.

    Attributes:
        queues: Those that may be written to, by queue id; at least one.
        priorities: Number of priorities, each the id of a queue; 0 for none.
    """

    queues: Sequence[MessageQueue]
    priorities: int = 0


def batches_of(
    made: Made,
    places_of: Callable[[str], PlacesOfTopic],
    turn: int,
    make: Callable[[MessageQueue], PendingBatch],
) -> list[PendingBatch]:
    """Return the batches of messages; those of a sharding key are in order,
    but for delayed ones.

    Args:
        made: The messages.
        places_of: Returns the queues of a topic.
        turn: Number that chooses the queue of messages without a sharding key.
        make: Makes the batch for a queue.

    Raises:
        InvalidArgument: A topic has no such priority, or there are too many batches.
    """
    batches: list[PendingBatch] = []
    last: dict[MessageQueue, PendingBatch] = {}
    delayed: dict[tuple[MessageQueue, int, int], PendingBatch] = {}
    for topic, messages in made.plain.items():
        batch = make(_queue_of(messages[0], None, places_of(topic), turn))
        batch.messages = messages
        batches.append(batch)
    for message, priority, ttl_ms in made.others:
        queue = _queue_of(message, priority, places_of(message.topic), turn)
        delay = delay_of(message)
        known = delayed.get((queue, delay, ttl_ms)) if delay else last.get(queue)
        if known is None or known.ttl_ms != ttl_ms:
            known = make(queue)
            known.delay, known.ttl_ms = delay, ttl_ms
            batches.append(known)
            if delay:
                delayed[queue, delay, ttl_ms] = known
            else:
                last[queue] = known
        known.messages.append(message)
    _check_counts(batches, len(delayed))
    return batches


def _check_counts(batches: Sequence[PendingBatch], delayed: int) -> None:
    counts = Counter(one.queue for one in batches if not one.delay)
    limits = (
        ("batches", len(batches), MAX_COMMIT_BATCHES),
        ("batches of delayed messages", delayed, MAX_DELAYED_BATCHES),
        ("batches for one queue", max(counts.values(), default=0), MAX_BATCHES_PER_QUEUE),
    )
    for what, count, limit in limits:
        if count > limit:
            raise InvalidArgument(
                f"outputs in {count} {what}, since they go to as many queues, or their delays or "
                f"times to live are so many; what is stored together may have {limit}"
            )


def _queue_of(
    message: Message, priority: int | None, places: PlacesOfTopic, turn: int
) -> MessageQueue:
    queues = places.queues
    if priority is not None and not 0 <= priority < places.priorities:
        raise InvalidArgument(
            f"priority = {describe(priority)}: topic {message.topic!r} has {places.priorities} "
            "priorities"
        )
    if places.priorities:
        level = [queue for queue in queues if queue.queue_id == (priority or 0)]
        if not level:
            raise InvalidArgument(
                f"topic {message.topic!r} has no queue of priority {priority or 0} there"
            )
        return level[0]
    if message.sharding_key is not None:
        return queues[queue_index(message.sharding_key, len(queues))]
    return queues[turn % len(queues)]
