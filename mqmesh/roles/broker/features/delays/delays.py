"""Messages that are not due yet, on their way into ``SCHEDULE_TOPIC_XXXX``.

What producers delay and what consumers send back waits there under its message ids,
with its real topic and queue in the batch's meta, until the schedule service says that
it is due.
"""

from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import (
    ANY_TIME_QUEUE,
    SCHEDULE_QUEUES,
    DelayedMeta,
    check_wish,
    pack_due_times,
    parse_delay_levels,
    scheduled_batch,
)
from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BatchHeader, read_header, read_meta
from mqmesh.batch.redelivery import Change, redeliver
from mqmesh.message import SCHEDULE_TOPIC
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.storing.inner_send import ensure_topic
from mqmesh.storage.interface import BatchToPut

NO_LEVEL: Final = 0


def delayed_copy(
    context: BrokerContext,
    buffer: Buffer,
    header: BatchHeader,
    *,
    position: int = 0,
    first: int = 0,
    count: int | None = None,
    topic: str,
    queue_id: int,
    level: int = NO_LEVEL,
    due_ms: int = 0,
    change: Change | None = None,
) -> bytes:
    """Messages of a stored batch once more, to be written elsewhere when they are due.

    Args:
        context: The broker.
        buffer: Holds the stored batch, which passed ``check_batch``.
        header: Its header.
        position: Where it begins.
        first: Ordinal of the first message wanted.
        count: Consecutive messages wanted; None for all from ``first``.
        topic: Physical topic that they go to when they are due.
        queue_id: Its queue.
        level: Delay level from 1; above the highest counts as the highest. Or 0, and:
        due_ms: Wall-clock time of delivery.
        change: Applied to each message.

    Returns:
        What is to be stored. Layout: record batch, its broker part blank.

    Raises:
        InvalidArgument, CorruptBatch, LocalProtocolError: As ``redeliver``.
        SystemBusy: There are too many topics.
    """
    assert (level > 0) != (due_ms > 0)
    data = redeliver(
        buffer,
        header,
        position=position,
        first=first,
        count=count,
        topic=SCHEDULE_TOPIC,
        queue_id=0,
        change=change,
    )
    header = read_header(data)
    plain = read_meta(data, header)
    wish = DelayedMeta(
        topic,
        plain.tag_hashes,
        plain.born_host,
        level,
        pack_due_times([due_ms]) if due_ms else b"",
    )
    queue, meta = _place(context, wish, queue_id)
    ensure_topic(context, SCHEDULE_TOPIC, SCHEDULE_QUEUES)
    context.schedule.stirred = True
    return scheduled_batch(data, header, meta, queue_id=queue)


def to_schedule(
    context: BrokerContext, header: BatchHeader, data: memoryview, meta: DelayedMeta
) -> BatchToPut:
    """What is stored of a producer's batch of delayed messages.

    The same bytes for the same batch, but after the delay levels were changed: a send that is
    repeated across such a restart is refused as one with other content.

    Raises:
        MessageIllegal: It does not say when it is due.
        LocalProtocolError: It only just does not fit any more.
        SystemBusy: There are too many topics.
    """
    check_wish(meta)
    queue_id, meta = _place(context, meta, header.queue_id)
    ensure_topic(context, SCHEDULE_TOPIC, SCHEDULE_QUEUES)
    stored = scheduled_batch(data, header, meta, queue_id=queue_id)
    context.schedule.stirred = True
    return BatchToPut(SCHEDULE_TOPIC, queue_id, read_header(stored), stored, meta.tag_hashes)


def _place(
    context: BrokerContext, wish: DelayedMeta, real_queue_id: int
) -> tuple[int, DelayedMeta]:
    levels = parse_delay_levels(context.config.message_delay_level)
    level = min(wish.level, len(levels))
    meta = msgspec.structs.replace(
        wish,
        topic=SCHEDULE_TOPIC,
        level=level,
        real_topic=wish.topic,
        real_queue_id=real_queue_id,
        delay_ms=levels[level - 1] if level else 0,
    )
    return (level - 1 if level else ANY_TIME_QUEUE), meta
