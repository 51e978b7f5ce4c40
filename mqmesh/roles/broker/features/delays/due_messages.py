"""Messages of the schedule topic that are due, cancelled or to be rolled forward.

Deliveries and the record of them are stored all or none: no crash repeats or loses one. Of a
batch that becomes more than a group of the log may have, a crash may repeat the first parts.
"""

import logging
from itertools import groupby
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import (
    RECORD_QUEUE,
    DelayedMeta,
    ExpiringMeta,
    pack_due_times,
    read_delayed_meta,
    scheduled_batch,
)
from mqmesh.batch.record_batch import Attributes, encode_batch, read_header
from mqmesh.batch.redelivery import redeliver
from mqmesh.batch.schedule_record import Run, ScheduleAction, encode_record
from mqmesh.errors import (
    CorruptBatch,
    CorruptRecord,
    LocalProtocolError,
    OffsetOutOfRange,
    SystemBusy,
)
from mqmesh.message import RETRY_PREFIX, SCHEDULE_TOPIC, Message
from mqmesh.protocol.schedule import DueStatus
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.delays.opened_batches import OpenedBatch, OpenedBatches
from mqmesh.roles.broker.writing.writes import Writes, batch_to_put, divided
from mqmesh.storage.interface import BatchToPut

SLICE_NS: Final = 5_000_000
"""One turn; then others have theirs."""
RUN_BYTES: Final = 16
_LOST: Final = (CorruptBatch, CorruptRecord, LocalProtocolError, OffsetOutOfRange, SystemBusy)
"""Bytes of a run in its record."""
RECORD_ROOM: Final = 512
"""Upper bound of the bytes that the batch of a record takes beside its runs."""

_log = logging.getLogger(__name__)


class Prepared(msgspec.Struct):
    """Outcome of one DELIVER_DUE.

    Attributes:
        statuses: ``DueStatus`` of each run looked at.
        groups: To be stored, each all or none, the record last; empty when nothing is to be done.
            More than one if the batches of one run are too many for a group.
        message_count: Messages that they deliver, cancel or roll forward.
        gone: Messages that cannot be read any more.
    """

    statuses: bytearray
    groups: list[list[BatchToPut]]
    message_count: int = 0
    gone: int = 0


class DueMessages:
    """Batches of messages of the schedule topic that are due, cancelled or to be rolled forward."""

    def __init__(self, core: Core, writes: Writes, opened: OpenedBatches) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._instance_id = core.instance_id
        self._writes = writes
        self._opened = opened

    def prepare(self, action: ScheduleAction, runs: list[Run]) -> Prepared:
        """Makes the batches that a request of the schedule service wants stored.

        Args:
            action: Action on the messages.
            runs: Best in the order of the log. Those that do not fit into one turn are left.

        Raises:
            SystemBusy: A topic is missing, and there are more than a broker may have at all.
        """
        prepared, done = Prepared(bytearray(), []), []
        batches: list[bytes] = []
        most_bytes = self._writes.group_bytes - RECORD_ROOM
        opened = self._opened
        now_ms = self._clock.wall_ms()
        until_ns, size = self._clock.monotonic_ns() + SLICE_NS, 0
        for run in runs:
            offset, _, count = run
            if prepared.statuses and self._clock.monotonic_ns() >= until_ns:
                break
            try:
                status = DueStatus.DONE
                if action is not ScheduleAction.CANCEL:
                    found = self._batches(opened, action, run, now_ms)
                    if not found:
                        status = DueStatus.NOT_DUE
                    size += RUN_BYTES + sum(map(len, found))
                    if batches and size > most_bytes:
                        break
                    batches += found
            except _LOST as error:
                # For ever: the log does not come back, and no batch may be larger. Nor may it hold
                # up the others where its topic was deleted and there is no room for it again.
                _log.error("%d delayed messages at %d are lost: %s", count, offset, error)
                prepared.gone += count
                status = DueStatus.GONE
            prepared.statuses.append(status)
            if status == DueStatus.DONE:
                prepared.message_count += count
                done.append(run)
        if done:
            groups = list(divided(batches, len, most_bytes)) or [[]]
            groups[-1].append(self._record(action, done))
            prepared.groups = [[batch_to_put(one) for one in group] for group in groups]
        return prepared

    def _batches(
        self, opened: OpenedBatches, action: ScheduleAction, run: Run, now_ms: int
    ) -> list[bytes]:
        """Return the batches that a run is written as; none when it is not due yet.

        All messages of a batch expire together: those that live on from their delivery, and are due
        at different times, become batches of their own.
        """
        offset, first, count = run
        batch = opened.open(self._store, offset)
        header = batch.header
        if not 0 < count <= header.message_count - first:
            raise CorruptRecord(f"the batch at {offset} has no messages {first} to {first + count}")
        meta, times = batch.meta, batch.due_times
        if count == header.message_count:
            opened.drop(offset)
        else:
            batch.split()
        times = times if len(times) == 1 else times[first : first + count]
        if action is ScheduleAction.ROLL:
            return [_rolled(batch, run, times)]
        if max(times) > now_ms:
            return []
        config = self._settings.now
        # It was there when the message was acknowledged, and may have been deleted.
        queues = meta.real_queue_id + 1
        if not meta.real_topic.startswith(RETRY_PREFIX):
            queues = max(config.default_topic_queue_nums, queues)
        topic = self._writes.ensure_topic(meta.real_topic, queues)
        # A queue may be gone by now; nobody would read there.
        queue_id = meta.real_queue_id % max(topic.config.read_queue_nums, 1)
        parts = [(times[0], count)]
        if isinstance(meta, ExpiringMeta) and meta.expires_ms <= 0 and len(times) > 1:
            parts = [(due_ms, len(list(same))) for due_ms, same in groupby(times)]
        found: list[bytes] = []
        for due_ms, size in parts:
            found.append(
                redeliver(
                    batch.data,
                    header,
                    first=first,
                    count=size,
                    topic=meta.real_topic,
                    queue_id=queue_id,
                    expires_ms=_expires_ms(meta, due_ms),
                    raws=batch.raws if len(parts) == 1 else batch.split(),
                )
            )
            first += size
        return found

    def _record(self, action: ScheduleAction, runs: list[Run]) -> bytes:
        return encode_batch(
            [Message(SCHEDULE_TOPIC, encode_record(action, runs))],
            topic=SCHEDULE_TOPIC,
            queue_id=RECORD_QUEUE,
            producer_id=self._instance_id,
            first_sequence=0,
            born_timestamp=self._clock.wall_ms(),
            attributes=Attributes.REDELIVERED,
        )


def _expires_ms(meta: DelayedMeta, due_ms: int) -> int:
    """Return when delivered messages expire: so long after their delivery, or when a retry does."""
    if not isinstance(meta, ExpiringMeta):
        return 0
    return meta.expires_ms if meta.expires_ms > 0 else due_ms - meta.expires_ms


def _rolled(batch: OpenedBatch, run: Run, times: tuple[int, ...]) -> bytes:
    _, first, count = run
    header = batch.header
    part = redeliver(
        batch.data,
        header,
        first=first,
        count=count,
        topic=SCHEDULE_TOPIC,
        queue_id=header.queue_id,
        raws=batch.raws,
    )
    inner = read_header(part)
    wanted = msgspec.structs.replace(
        batch.meta,
        tag_hashes=read_delayed_meta(part, inner).tag_hashes,
        due_times=pack_due_times(times),
        delay_ms=0,
    )
    return scheduled_batch(part, inner, wanted, queue_id=header.queue_id)
