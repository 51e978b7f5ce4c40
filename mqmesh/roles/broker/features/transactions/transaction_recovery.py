"""Half messages after a start: read again from the log."""

import heapq
import logging
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.batch.half_batch import HALF_QUEUE, immunity_ms, is_half, read_half_meta
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import Attributes, BatchHeader, decode_messages
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.message import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from mqmesh.roles.broker.features.transactions.check_timetable import CheckedMessages
from mqmesh.roles.broker.features.transactions.half_batches import PARKED, HalfBatch
from mqmesh.roles.broker.features.transactions.half_checkpoint import HalfCheckpoint
from mqmesh.roles.broker.features.transactions.op_records import OP_QUEUE, Op, OpKind, decode_ops
from mqmesh.roles.broker.features.transactions.transaction_table import Transactions
from mqmesh.storage.interface import GetStatus, MessageStore
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB

_log = logging.getLogger(__name__)


class HalfRecovery:
    """Fills a table from a store.

    Args:
        store: The store, open.
        table: Empty.
        wall_ms: Now, wall clock.
        now_ms: Now, monotonic.
    """

    def __init__(
        self, store: MessageStore, table: Transactions, *, wall_ms: int, now_ms: int
    ) -> None:
        self._store = store
        self._table = table
        self._wall_ms = wall_ms
        self._now_ms = now_ms
        self.read_batches = 0

    def run(self, checkpoint: HalfCheckpoint | None) -> None:
        """Reads what the checkpoint does not say.

        Args:
            checkpoint: The last one, None if there is none.
        """
        store, table = self._store, self._table
        half_min, half_max = store.queue_bounds(TRANS_HALF_TOPIC, HALF_QUEUE)
        op_min, op_max = store.queue_bounds(TRANS_OP_HALF_TOPIC, OP_QUEUE)
        half_from, op_from = int(half_min), int(op_min)
        checked: dict[int, list[CheckedMessages]] = {}
        if checkpoint is not None and self._fits(checkpoint, half_max, op_max):
            half_from = max(half_from, checkpoint.half_queue_offset)
            op_from = max(op_from, checkpoint.op_queue_offset)
            table.op_end = op_from
            self._take_note(checkpoint, half_min, checked)
        table.op_end = op_from
        table.half_end = half_from
        # In the order of the log: what has ended leaves the table before the next one comes, so
        # that it never holds more than waited at a time.
        halves = self._batches(TRANS_HALF_TOPIC, HALF_QUEUE, half_from)
        ops = self._batches(TRANS_OP_HALF_TOPIC, OP_QUEUE, op_from)
        for header, data in heapq.merge(halves, ops, key=_place):
            if is_half(header):
                self._take_half(header, data)
            else:
                self._take_ops(header, data, checked)
                table.op_end = int(header.next_queue_offset)
        table.half_end = max(table.half_end, int(half_max))
        table.op_end = int(op_max)
        table.timetable.replay(checked)
        if table.batches or self.read_batches:
            _log.info(
                "%d half messages wait for their decisions, %d are parked; %d batches were read",
                table.pending_count,
                table.parked_count,
                self.read_batches,
            )

    # ---- Reading ------------------------------------------------------------------------

    def _fits(self, checkpoint: HalfCheckpoint, half_max: int, op_max: int) -> bool:
        read = (
            (TRANS_HALF_TOPIC, HALF_QUEUE, checkpoint.half_queue_offset, half_max),
            (TRANS_OP_HALF_TOPIC, OP_QUEUE, checkpoint.op_queue_offset, op_max),
        )
        fits = checkpoint.store_id == self._store.stats().store_id
        try:
            for topic, queue_id, offset, end in read:
                # Behind a cut stand others' records by now, however many they are.
                cut = self._store.cut_offset(topic, queue_id, checkpoint.epoch)
                fits = fits and offset <= (end if cut is None else min(cut, end))
        except CorruptRecord as error:
            _log.error("where the half checkpoint ends cannot be found: %s", error)
            fits = False
        if not fits:
            _log.warning("the half checkpoint does not fit the log; all are read again")
        return fits

    def _take_note(
        self, checkpoint: HalfCheckpoint, half_min: int, checked: dict[int, list[CheckedMessages]]
    ) -> None:
        table, interval_ms = self._table, self._table.settings.check_interval_ms
        for noted in checkpoint.batches:
            if noted.base < half_min:
                _log.error("half messages at %d are not in the log any more", noted.base)
                continue
            found = next(self._batches(TRANS_HALF_TOPIC, HALF_QUEUE, noted.base, 1), None)
            if found is None or found[0].base_queue_offset != noted.base:
                _log.error("half messages at %d cannot be read any more", noted.base)
                continue
            batch = self._take_half(*found)
            if batch is None:
                continue
            for ordinal, state in enumerate(noted.states[: batch.count]):
                if state in "12":
                    table.replay(batch.base, ordinal, 1, int(state))
                elif state == str(PARKED):
                    table.parked(batch, [ordinal])
            if noted.checks:
                due_ms = self._now_ms + interval_ms
                checked[batch.base] = [CheckedMessages(0, batch.count, noted.checks, due_ms)]

    def _batches(
        self, topic: str, queue_id: int, queue_offset: int, most: int = 1 << 62
    ) -> Iterator[tuple[BatchHeader, memoryview]]:
        """The batches of a queue from an offset on; unreadable ones are logged, and left out."""
        found = 0
        while found < most:
            try:
                result = self._store.get(topic, queue_id, queue_offset, max_bytes=READ_BYTES)
            except StorageError as error:
                _log.error("%s at %d cannot be read: %s", topic, queue_offset, error)
                queue_offset += 1
                continue
            if result.status is not GetStatus.FOUND:
                return
            for data in result.data:
                for header, batch in iter_batches(data):
                    if found == most:
                        break
                    yield header, batch
                    found += 1
            queue_offset = result.next_queue_offset

    def _take_half(self, header: BatchHeader, data: memoryview) -> HalfBatch | None:
        self.read_batches += 1
        try:
            batch, immunities_ms = half_batch_of(header, data)
        except CorruptBatch as error:
            _log.error("half messages at %d are lost: %s", header.base_queue_offset, error)
            return None
        age_ms = self._wall_ms - header.store_timestamp
        self._table.on_half(batch, age_ms, self._now_ms, immunities_ms)
        return batch

    def _take_ops(
        self, header: BatchHeader, data: memoryview, checked: dict[int, list[CheckedMessages]]
    ) -> None:
        self.read_batches += 1
        table = self._table
        interval_ms = table.settings.check_interval_ms
        try:
            ops = decode_ops(data, header)
        except CorruptBatch as error:
            _log.error("op records at %d are lost: %s", header.base_queue_offset, error)
            return
        for op in ops:
            if op.kind in (OpKind.COMMIT, OpKind.ROLLBACK):
                table.replay(op.base, op.first, op.count, op.kind)
                if op.base not in table.batches:
                    checked.pop(op.base, None)
                continue
            batch = table.batches.get(op.base)
            if batch is None or op.first + op.count > batch.count:
                continue
            if op.kind == OpKind.PARK:
                table.parked(batch, range(op.first, op.first + op.count))
            elif op.kind == OpKind.CHECK:
                since_ms = max(self._wall_ms - header.store_timestamp, 0)
                due_ms = self._now_ms + max(interval_ms - since_ms, 0)
                again = CheckedMessages(op.first, op.count, op.checks, due_ms)
                checked.setdefault(op.base, []).append(again)


def _place(found: tuple[BatchHeader, memoryview]) -> int:
    return found[0].commitlog_offset


def copy_of(
    op: Op, header: BatchHeader, data: Buffer, raws: Sequence[msgspec.Raw] | None = None
) -> bytes | None:
    """Return the copy written beside an op record: messages committed or parked, None for others.

    Args:
        op: The record.
        header: Of the half batch, as stored.
        data: The half batch.
        raws: Its messages, if somebody has taken them apart.
    """
    topic, queue_id, attributes, prepared = TRANS_CHECK_MAX_TIME_TOPIC, 0, 0, None
    if op.kind == OpKind.COMMIT:
        meta = read_half_meta(data, header)
        topic, queue_id = meta.real_topic, meta.real_queue_id
        attributes = int(Attributes.TRANSACTION_COMMIT)
        prepared = int(header.commitlog_offset)
    elif op.kind != OpKind.PARK:
        return None
    return redeliver(
        data,
        header,
        first=op.first,
        count=op.count,
        topic=topic,
        queue_id=queue_id,
        attributes=attributes,
        prepared_offset=prepared,
        raws=raws,
    )


def half_batch_of(
    header: BatchHeader, data: memoryview
) -> tuple[HalfBatch, list[int | None] | None]:
    """The facts of a stored half batch, and when its messages may be asked about if they say so.

    Raises:
        CorruptBatch: It is none.
    """
    meta = read_half_meta(data, header)
    immunities_ms = None
    if meta.has_immunity:
        immunities_ms = [immunity_ms(message) for message in decode_messages(data, header)]
    batch = HalfBatch(
        header.base_queue_offset,
        header.message_count,
        header.commitlog_offset,
        header.end_offset,
        header.total_size,
        header.store_timestamp,
        header.producer_id,
        header.first_sequence,
        meta.producer_group,
        meta.real_topic,
        meta.real_queue_id,
        header.producer_crc,
    )
    return batch, immunities_ms
