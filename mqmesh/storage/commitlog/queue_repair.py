"""Repairs a consume queue that led to a wrong place, while the broker goes on.

Either an entry of the queue is damaged, or the batch that it leads to. The log
decides: it is read from its start, slice by slice, and every entry of the queue
that differs is written anew. Messages whose batch is lost get void entries, so
that consumers skip them, and the damage is reported. Queues are repaired one
after the other; a queue whose repair changed nothing rests for a while.
"""

import logging
from collections.abc import Iterator
from typing import Final

from mqmesh.batch.record_batch import BatchHeader, read_meta
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, StorageError
from mqmesh.storage.commitlog.damage import DamageList
from mqmesh.storage.log.record import Record
from mqmesh.storage.log.scan import Damaged, LogScanner
from mqmesh.storage.log.segments import Segments
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_ENTRY, ConsumeQueue, entries_of
from mqmesh.storage.queues.consume_queues import MOST_VOID_ENTRIES, ConsumeQueues
from mqmesh.units import MIB

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 4 * MIB
"""Part of the log that is read in one step."""
MIN_REST_MS: Final = 60_000
"""Shortest rest of a queue whose repair changed nothing, or was not possible."""
RESTS: Final = 10
"""Such a rest lasts at least so many times as long as the repair took."""


class QueueRepairs:
    """The repairs of a store.

    Args:
        queues: All queues; writes the entries.
        segments: Files of the log.
        damage: List to which damage is added.
        key: Key of the store.
        store_id: Store id of all records.
        clock: Clock for the labels of damage, and rests.
    """

    def __init__(
        self,
        queues: ConsumeQueues,
        segments: Segments,
        damage: DamageList,
        *,
        key: StoreKey,
        store_id: int,
        clock: Clock,
    ) -> None:
        self._queues = queues
        self._segments = segments
        self._damage = damage
        self._key = key
        self._store_id = store_id
        self._clock = clock
        self._waiting: dict[ConsumeQueue, QueueRepair] = {}
        self._steps: Iterator[None] | None = None
        self._began_ms = 0
        self._rests: dict[ConsumeQueue, int] = {}

    def begin(self, queue: ConsumeQueue, queue_offset: int, reason: str, *, log_end: int) -> None:
        """Requests that a queue is compared with the log, unless it waits for that, or rests.

        Args:
            queue: The queue.
            queue_offset: Queue offset of the fault.
            reason: Fault that a reader found.
            log_end: Commit-log offset of the log's present end.
        """
        now_ms = self._clock.monotonic_ms()
        self._rests = {one: until for one, until in self._rests.items() if now_ms < until}
        if queue in self._waiting or queue in self._rests:
            return
        log.error(
            "offset %d of queue %d of %r is damaged, the queue is compared with the log: %s",
            queue_offset,
            queue.queue_id,
            queue.topic,
            reason,
        )
        if queue.tail:
            try:
                self._queues.write(queue)  # only entries in files are repaired
            except StorageError as error:
                self._stays(queue, error, 0)
                return
        self._waiting[queue] = QueueRepair(
            queue,
            self._queues,
            self._segments,
            self._damage,
            end=log_end,
            key=self._key,
            store_id=self._store_id,
            clock=self._clock,
        )

    def is_under_way(self, queue: ConsumeQueue) -> bool:
        """Return whether a queue is, or will be, compared with the log."""
        return queue in self._waiting

    def step(self) -> bool:
        """Does a step of some milliseconds; True if there is more to do."""
        if not self._waiting:
            return False
        queue, repair = next(iter(self._waiting.items()))
        if self._queues.find(queue.topic, queue.queue_id) is not queue:
            self._end(queue)  # its topic was deleted
            return bool(self._waiting)
        now_ms = self._clock.monotonic_ms()
        if self._steps is None:
            self._steps, self._began_ms = repair.steps(), now_ms
        try:
            next(self._steps)
        except StopIteration:
            self._end(queue)
            if not repair.written:
                self._rest(queue, now_ms - self._began_ms)
        except StorageError as error:
            self._end(queue)
            self._stays(queue, error, now_ms - self._began_ms)
        return bool(self._waiting)

    def _end(self, queue: ConsumeQueue) -> None:
        if self._waiting and queue is next(iter(self._waiting)):
            self._steps = None
        self._waiting.pop(queue, None)

    def _stays(self, queue: ConsumeQueue, error: StorageError, took_ms: int) -> None:
        log.error("queue %d of %r stays damaged: %s", queue.queue_id, queue.topic, error)
        self._rest(queue, took_ms)

    def _rest(self, queue: ConsumeQueue, took_ms: int) -> None:
        rest_ms = max(MIN_REST_MS, RESTS * took_ms)
        self._rests[queue] = self._clock.monotonic_ms() + rest_ms


class QueueRepair:
    """The repair of one queue. The queue may be read and appended to meanwhile.

    Attributes:
        written: Number of entries that were written anew.
    """

    def __init__(
        self,
        queue: ConsumeQueue,
        queues: ConsumeQueues,
        segments: Segments,
        damage: DamageList,
        *,
        end: int,
        key: StoreKey,
        store_id: int,
        clock: Clock,
    ) -> None:
        """Prepares the repair.

        Args:
            queue: The queue.
            queues: All queues; writes the entries.
            segments: Files of the log.
            damage: List to which damage is added.
            end: Commit-log offset of the log's present end; everything before it is written.
            key: Key of the store.
            store_id: Store id of all records.
            clock: Clock for the labels of damage.
        """
        self._queue = queue
        self._queues = queues
        self._damage = damage
        self._clock = clock
        self._end = end
        self._segments = segments
        self._position = segments.first.start
        self._scanner = LogScanner(segments, key=key, store_id=store_id)
        self._epoch = 0
        # Entries in memory were never on a disk and are right.
        self._limit = queue.written
        self._expected = queue.first
        self.written = 0

    def steps(self) -> Iterator[None]:
        """Does the repair; one step takes some milliseconds.

        Raises:
            StorageError: The log cannot be read, or the queue cannot be written.
        """
        try:
            while self._position < self._end:
                self._read_slice()
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
            self.written,
        )

    def _read_slice(self) -> None:
        # Retention may have removed segments since the slice before.
        self._expected = max(self._expected, self._queue.first)
        start = max(self._position, self._segments.first.start)
        stop = min(start + SLICE_BYTES, self._end)
        for found in self._scanner.walk(
            start,
            epoch=self._epoch,
            beyond=self._beyond,
            stop=stop,
            is_lost=self._damage.begins_at,
        ):
            self._position = found.end
            if isinstance(found, Damaged):
                self._damage.add(found.start, found.end, found.reason, self._clock.wall_ms())
                continue
            self._epoch = found.epoch
            if found.batch is not None:
                self._check_batch(found, found.batch)

    def _beyond(self, position: int, epoch: int) -> int:
        return self._scanner.resync(position, self._end, epoch=epoch) or self._end

    def _check_batch(self, record: Record, header: BatchHeader) -> None:
        if header.queue_id != self._queue.queue_id:
            return
        try:
            meta = read_meta(record.data, header)
        except CorruptBatch:
            return
        if meta.topic != self._queue.topic or self._queues.is_deleted(meta.topic, record.start):
            return
        base, following = header.base_queue_offset, header.next_queue_offset
        if following <= self._expected or base >= self._limit:
            return
        self._fill_up_to(base)
        entries = entries_of(record.start, header.total_size, header.message_count, meta.tag_hashes)
        # The queue may begin within the batch.
        begin = max(base, self._expected)
        self._put_right(begin, entries[(begin - base) * ENTRY_SIZE :])
        self._expected = following

    def _fill_up_to(self, queue_offset: int) -> None:
        while self._expected < queue_offset:
            count = min(queue_offset - self._expected, MOST_VOID_ENTRIES)
            self._put_right(self._expected, VOID_ENTRY * count)
            self._expected += count

    def _put_right(self, queue_offset: int, entries: bytes) -> None:
        entries = entries[: (self._limit - queue_offset) * ENTRY_SIZE]
        if self._queues.overwrite(self._queue, queue_offset, entries):
            self.written += len(entries) // ENTRY_SIZE
