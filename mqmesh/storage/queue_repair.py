"""Puts a consume queue right that led to a wrong place, while the broker goes on.

Either an entry of the queue is damaged, or the batch that it leads to. The log
decides: it is read from its start, slice by slice, and every entry of the queue
that differs is written anew. Messages whose batch is gone get void entries, so
that consumers pass them, and the damage is reported.
"""

import logging
from collections.abc import Iterator
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.record_batch import read_meta
from mqmesh.storage.consume_queue import ENTRY_SIZE, VOID_ENTRY, ConsumeQueue, entries_of
from mqmesh.storage.consume_queues import MOST_VOID_ENTRIES, ConsumeQueues
from mqmesh.storage.damage import DamageList
from mqmesh.storage.log_marker import MarkerKind
from mqmesh.storage.log_scan import LogScanner, Record
from mqmesh.storage.segments import Segments
from mqmesh.units import MIB

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 4 * MIB
"""Of the log, read in one step."""


class QueueRepair:
    """The repair of one queue. The queue may be read and appended to meanwhile."""

    def __init__(
        self,
        queue: ConsumeQueue,
        queues: ConsumeQueues,
        segments: Segments,
        damage: DamageList,
        *,
        end: int,
        store_id: int,
        clock: Clock,
    ) -> None:
        """Prepares it.

        Args:
            queue: The queue.
            queues: All queues; writes the entries.
            segments: Files of the log.
            damage: Gets what is damaged.
            end: Where the log ends now; all of it was written by then.
            store_id: Of all records.
            clock: For the labels of damage.
        """
        self._queue = queue
        self._queues = queues
        self._damage = damage
        self._clock = clock
        self._end = end
        self._segments = segments
        self._position = segments.first.start
        self._scanner = LogScanner(segments, store_id=store_id)
        # What is in memory was never on a disk and is right.
        self._limit = queue.written
        self._expected = queue.first
        self._written = 0

    def steps(self) -> Iterator[None]:
        """Does the repair; one step takes some milliseconds.

        Raises:
            StorageError: The log cannot be read, or the queue not be written.
        """
        try:
            paused = self._position
            while self._position < self._end:
                self._step()
                if self._position - paused >= SLICE_BYTES:
                    paused = self._position
                    yield
        finally:
            self._scanner.close()
        self._expected = max(self._expected, self._queue.first)
        self._fill_up_to(self._limit)
        self._damage.save()
        log.warning(
            "queue %d of topic %r is repaired: %d entries were written anew",
            self._queue.queue_id,
            self._queue.topic,
            self._written,
        )

    def _step(self) -> None:
        # Retention may have gone on since the step before.
        self._expected = max(self._expected, self._queue.first)
        position = self._position = max(self._position, self._segments.first.start)
        try:
            record = self._scanner.read(position, epoch=0)
        except CorruptRecord as error:
            beyond = self._scanner.resync(position, self._end, epoch=0) or self._end
            self._damage.add(position, beyond, str(error), self._clock.wall_ms())
            self._position = beyond
            return
        self._position = record.end
        if record.batch is not None:
            self._check_batch(record)
        elif record.marker is not None and record.marker.kind is MarkerKind.TOPIC_DELETED:
            if record.marker.data == self._queue.topic.encode():
                # What came before was of an earlier topic of the same name. A table from
                # before tables told of deletions has not said so.
                self._expected = self._queue.first

    def _check_batch(self, record: Record) -> None:
        header = record.batch
        assert header is not None
        if header.queue_id != self._queue.queue_id:
            return
        try:
            meta = read_meta(record.data, header)
        except CorruptBatch:
            return
        if meta.topic != self._queue.topic or self._queues.is_deleted(meta.topic, record.start):
            return
        base = header.base_queue_offset
        if not self._expected <= base < self._limit:
            return
        self._fill_up_to(base)
        entries = entries_of(record.start, header.total_size, header.message_count, meta.tag_hashes)
        self._put_right(base, entries)
        self._expected = header.next_queue_offset

    def _fill_up_to(self, queue_offset: int) -> None:
        while self._expected < queue_offset:
            count = min(queue_offset - self._expected, MOST_VOID_ENTRIES)
            self._put_right(self._expected, VOID_ENTRY * count)
            self._expected += count

    def _put_right(self, queue_offset: int, entries: bytes) -> None:
        entries = entries[: (self._limit - queue_offset) * ENTRY_SIZE]
        if self._queues.overwrite(self._queue, queue_offset, entries):
            self._written += len(entries) // ENTRY_SIZE
