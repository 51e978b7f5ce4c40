"""Damage of the log at rest: found by reading all of it, and repaired from another replica.

Disks change bits of data that is not read for months. So the log is read slice by slice beside all
other work, and every record is checked. Damage is noted, see ``damage.py``; a replica with the same
log may give the bytes, which are checked like all bytes from others before they are written.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.batch.record_batch import BatchHeader, read_meta
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetOutOfRange, StorageError
from mqmesh.storage.commitlog.damage import DamageList
from mqmesh.storage.commitlog.log_applier import LogApplier
from mqmesh.storage.files.atomic_file import storage_error
from mqmesh.storage.interface import DamagedRange, LogChunk
from mqmesh.storage.log.commitlog import CommitLog, write_pieces
from mqmesh.storage.log.raw import records_of
from mqmesh.storage.log.record import Record
from mqmesh.storage.log.scan import Damaged, LogScanner
from mqmesh.storage.log.segments import Segment
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, entries_of
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.units import MIB

SLICE_BYTES: Final = 1 * MIB
"""Bytes of the log checked in one step: some milliseconds."""
REST_MS: Final = 24 * 3_600_000
"""Time from the end of one pass over the whole log to the next."""

log = logging.getLogger(__name__)


class LogRepair:
    """The damage of one log; see ``mqmesh.storage.interface.RepairableLog``.

    Args:
        commitlog: The log.
        queues: Consume queues of the log.
        applier: Adds batches to queues that never had them.
        damage: Known damage.
        clock: Clock for rests and the labels of damage.
        sync: Makes a descriptor's data durable.
    """

    def __init__(
        self,
        commitlog: CommitLog,
        queues: ConsumeQueues,
        applier: LogApplier,
        damage: DamageList,
        *,
        clock: Clock,
        sync: Callable[[int], None],
    ) -> None:
        self._log = commitlog
        self._queues = queues
        self._applier = applier
        self._damage = damage
        self._clock = clock
        self._sync = sync
        self._scanner: LogScanner | None = None
        self._rest_until_ms = 0
        self._position = self._end = self._epoch = 0

    def damaged(self) -> Sequence[DamagedRange]:
        """Implement ``RepairableLog.damaged``."""
        found = self._damage.ranges
        if not found:
            return found
        start, end = self._log.start, self._log.end
        return [one for one in found if start <= one.start_offset and one.end_offset <= end]

    def look(self) -> None:
        """Implement ``RepairableLog.look``."""
        if self._scanner is None:
            if self._clock.monotonic_ms() < self._rest_until_ms:
                return
            self._scanner = LogScanner(
                self._log.segments, key=self._log.key, store_id=self._log.store_id
            )
            self._position, self._end, self._epoch = self._log.start, self._log.end, 0
        try:
            self._look_on(self._scanner)
        except StorageError as error:
            log.error("the log cannot be looked through at %d: %s", self._position, error)
            self._position = self._end
        if self._position >= self._end:
            self.close()
            self._rest_until_ms = self._clock.monotonic_ms() + REST_MS

    def put_back(self, chunk: LogChunk) -> None:
        """Implement ``RepairableLog.put_back``."""
        segment = self._log.segments.find(chunk.start)
        known = {one.start_offset for one in self.damaged()}
        if chunk.start not in known or segment is None or chunk.end > self._log.end:
            raise OffsetOutOfRange(f"bytes {chunk.start} to {chunk.end} of the log are not damaged")
        if chunk.segment_end != segment.end:
            raise StorageError(
                f"the segment of offset {chunk.start} ends at {chunk.segment_end} there, and at "
                f"{segment.end} here"
            )
        # The other records of a group that lost one are there.
        records = records_of(chunk, self._log.check, epoch=0, whole_groups=False)
        if not records:
            raise CorruptRecord(f"the other replica sent no record at {chunk.start}")
        self._write(segment, chunk)
        for record in records:
            if record.batch is not None:
                self._put_in_queue(record, record.batch)
        self._damage.mend(chunk.start, chunk.end)
        self._damage.save()

    def close(self) -> None:
        """Closes the file that is being read."""
        if self._scanner is not None:
            self._scanner.close()
            self._scanner = None

    def _look_on(self, scanner: LogScanner) -> None:
        if self._position < self._log.start:  # retention has removed segments since
            self._position, self._epoch = self._log.start, 0
        stop = min(self._position + SLICE_BYTES, self._end)

        def beyond(position: int, epoch: int) -> int:
            return scanner.resync(position, self._end, epoch=epoch) or self._end

        for found in scanner.walk(
            self._position,
            epoch=self._epoch,
            beyond=beyond,
            stop=stop,
            is_lost=self._damage.begins_at,
        ):
            self._position = found.end
            if isinstance(found, Damaged):
                self._damage.add(found.start, found.end, found.reason, self._clock.wall_ms())
                self._damage.save()
            else:
                self._epoch = found.epoch
        if self._position < stop:
            self._position = stop  # retention has removed the next segment

    def _write(self, segment: Segment, chunk: LogChunk) -> None:
        try:
            fd = os.open(segment.path, os.O_RDWR)
            try:
                write_pieces(fd, [chunk.data], chunk.start - segment.start)
                self._sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, f"{segment.path} cannot be repaired") from error

    def _put_in_queue(self, record: Record, header: BatchHeader) -> None:
        """Make the void entries of a lost batch lead to the batch again."""
        try:
            meta = read_meta(record.data, header)
        except CorruptBatch:
            return
        if self._queues.is_deleted(meta.topic, record.start):
            return
        queue = self._queues.find(meta.topic, header.queue_id)
        base = header.base_queue_offset
        if queue is None or queue.end <= base:
            self._applier.apply(record)
            return
        if queue.tail:
            self._queues.write(queue)
        begin, end = max(base, queue.first), min(header.next_queue_offset, queue.written)
        if begin < end:
            size, count = header.total_size, header.message_count
            entries = entries_of(record.start, size, count, meta.tag_hashes)
            kept = slice((begin - base) * ENTRY_SIZE, (end - base) * ENTRY_SIZE)
            self._queues.overwrite(queue, begin, entries[kept])
