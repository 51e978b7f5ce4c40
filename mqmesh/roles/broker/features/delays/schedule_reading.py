"""Reading of new entries in the schedule topic for its service, without the bodies."""

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import (
    RECORD_QUEUE,
    SCHEDULE_QUEUES,
    due_times,
    pack_due_times,
    read_delayed_meta,
)
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader, decode_messages
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetIllegal
from mqmesh.message import RETRY_PREFIX, SCHEDULE_TOPIC
from mqmesh.protocol.schedule import ScheduledEntry
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

QUEUE_BYTES: Final = 1 * MIB
"""Read from one queue for one pull."""

_log = logging.getLogger(__name__)


class ScheduleNewsRead(msgspec.Struct):
    """Result of a pull; see ``PullScheduleResponse``."""

    cursors: list[int]
    entries: list[ScheduledEntry]
    records: list[bytes]
    more: bool


def check_cursors(store: MessageStore, cursors: Sequence[int], settled: int, epoch: int) -> None:
    """Checks that the log still has what a timetable knows of.

    Args:
        store: Where the messages are.
        cursors: Next offset of each queue.
        settled: Next offset of the record queue, if that is higher.
        epoch: Of the log when these were right, from 1.

    Raises:
        OffsetIllegal: The log lost the end of a queue since, and other messages may stand there.
    """
    for queue_id, cursor in enumerate(cursors[:SCHEDULE_QUEUES]):
        known = max(cursor, settled) if queue_id == RECORD_QUEUE else cursor
        try:
            cut = store.cut_offset(SCHEDULE_TOPIC, queue_id, epoch)
        except CorruptRecord as error:
            raise OffsetIllegal(
                f"queue {queue_id} of the schedule topic cannot be compared: {error}"
            ) from error
        if cut is not None and cut < known:
            raise OffsetIllegal(
                f"queue {queue_id} of the schedule topic lost its messages from {cut} on"
            )


def read_schedule(store: MessageStore, cursors: Sequence[int]) -> ScheduleNewsRead:
    """Reads on in all queues of the schedule topic.

    Records are read only when all entries before were handed out: what a record speaks of
    is always known before it.

    Args:
        store: Where they are.
        cursors: Next offset of each queue; missing ones count as 0.

    Raises:
        OffsetIllegal: A queue ends before its cursor: this is another log.
    """
    found = ScheduleNewsRead([*cursors, *([0] * SCHEDULE_QUEUES)][:SCHEDULE_QUEUES], [], [], False)
    ends = [store.queue_bounds(SCHEDULE_TOPIC, queue_id)[1] for queue_id in range(SCHEDULE_QUEUES)]
    for queue_id in range(RECORD_QUEUE):
        if found.cursors[queue_id] != ends[queue_id]:
            for header, data in _read(store, queue_id, found):
                _add_entry(found, header, data)
            if found.cursors[queue_id] < ends[queue_id]:
                found.more = True
    if not found.more and found.cursors[RECORD_QUEUE] != ends[RECORD_QUEUE]:
        for header, data in _read(store, RECORD_QUEUE, found):
            messages = decode_messages(data, header)
            found.records += [message.body for message in messages]
        found.more = found.cursors[RECORD_QUEUE] < ends[RECORD_QUEUE]
    return found


def _read(
    store: MessageStore, queue_id: int, found: ScheduleNewsRead
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Batches of a queue from its cursor on, which is moved behind them."""
    cursor = found.cursors[queue_id]
    try:
        result = store.get(SCHEDULE_TOPIC, queue_id, cursor, max_bytes=QUEUE_BYTES)
        if result.status is GetStatus.OFFSET_TOO_SMALL:
            # Retention has passed: what waited there was rolled forward before.
            cursor = result.next_queue_offset
            found.cursors[queue_id] = cursor
            result = store.get(SCHEDULE_TOPIC, queue_id, cursor, max_bytes=QUEUE_BYTES)
    except CorruptRecord as error:
        # The store repairs the queue; until then the other queues must go on.
        _log.error("queue %d of the schedule topic: %s", queue_id, error)
        return
    if result.status is GetStatus.OFFSET_OVERFLOW:
        raise OffsetIllegal(f"queue {queue_id} of the schedule topic ends before {cursor}")
    if result.status is not GetStatus.FOUND:
        return
    for data in result.data:
        for header, batch in iter_batches(data):
            if header.base_queue_offset >= cursor:
                yield header, batch
    found.cursors[queue_id] = result.next_queue_offset


def _add_entry(found: ScheduleNewsRead, header: BatchHeader, data: memoryview) -> None:
    try:
        meta = read_delayed_meta(data, header)
    except CorruptBatch as error:
        _log.error("delayed messages at %d are lost: %s", header.commitlog_offset, error)
        return
    is_retry = meta.real_topic.startswith(RETRY_PREFIX)
    found.entries.append(
        ScheduledEntry(
            header.commitlog_offset,
            header.message_count,
            header.producer_id,
            header.first_sequence,
            pack_due_times(due_times(meta, header)),
            meta.real_topic.removeprefix(RETRY_PREFIX) if is_retry else "",
        )
    )
