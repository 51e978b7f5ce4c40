"""Shows a consume queue as it is: its entries, and whether they lead to the right batches."""

from itertools import groupby

from mqmesh.batch.record_batch import HEADER_SIZE, BatchHeader, is_of_topic, read_header
from mqmesh.errors import CorruptBatch, CorruptRecord, StorageError
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.interface import StoredEntry
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.queues.consume_queue import (
    ENTRY,
    OFFSET_MASK,
    SIZE_MASK,
    VOID_OFFSET,
    ConsumeQueue,
    check_in,
    check_of,
)
from mqmesh.storage.queues.consume_queues import ConsumeQueues

_Row = tuple[int, int, int, int]
"""Queue offset, and the three numbers of an entry."""


class QueueInspector:
    """Reads entries one by one, for people.

    Args:
        queues: Consume queues.
        files: Descriptors of their files.
        commitlog: The log that the entries lead to.
    """

    def __init__(self, queues: ConsumeQueues, files: OpenFiles, commitlog: CommitLog) -> None:
        self._queues = queues
        self._files = files
        self._log = commitlog

    def entries(
        self, topic: str, queue_id: int, queue_offset: int, count: int
    ) -> list[StoredEntry]:
        """Implement ``InspectableStore``."""
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return []
        start = max(min(queue_offset, queue.visible), queue.first)
        stop = max(min(start + count, queue.visible), start)
        found: list[StoredEntry] = []
        rows, missing = self._rows(queue, start, stop)
        for _, run in groupby(rows, key=lambda row: row[1:3]):
            found += self._checked(queue, list(run))
        found += [
            StoredEntry(place, -1, 0, 0, "its entry cannot be read, or is missing")
            for place in missing
        ]
        return sorted(found, key=lambda entry: entry.queue_offset)

    def _rows(self, queue: ConsumeQueue, start: int, stop: int) -> tuple[list[_Row], list[int]]:
        try:
            data = queue.read(self._files, start, stop)
            return [(start + at, *row) for at, row in enumerate(ENTRY.iter_unpack(data))], []
        except (CorruptRecord, StorageError):
            pass
        rows: list[_Row] = []
        missing = []
        for place in range(start, stop):
            try:
                data = queue.read(self._files, place, place + 1)
                rows.append((place, *ENTRY.unpack(data)))
            except (CorruptRecord, StorageError):
                missing.append(place)
        return rows, missing

    def _checked(self, queue: ConsumeQueue, run: list[_Row]) -> list[StoredEntry]:
        """Neighbours that lead to the same batch, with their faults."""
        _, place, extent, _ = run[0]
        if place == VOID_OFFSET:
            problem = "lost: the log was damaged where its batch was"
            return [StoredEntry(row[0], -1, 0, 0, problem) for row in run]
        offset, size = place & OFFSET_MASK, extent & SIZE_MASK
        header = self._header(queue, offset)
        if header is None or (header.queue_id, header.total_size) != (queue.queue_id, size):
            problem = "damaged: no such batch begins there in the log"
            return [StoredEntry(row[0], offset, size, row[3], problem) for row in run]
        first, stop = header.base_queue_offset, header.base_queue_offset + header.message_count
        its = [row for row in run if first <= row[0] < stop]
        hashes = b"".join(row[3].to_bytes(8, "little") for row in its)
        # A part of a batch cannot be checked: the check covers all its messages.
        is_whole = len(its) == header.message_count
        is_sound = not is_whole or check_in(place, extent) == check_of(offset, size, hashes)
        own = "" if is_sound else "damaged: its tag hashes fail their check"
        other = "damaged: the batch there has other queue offsets"
        return [
            StoredEntry(row[0], offset, size, row[3], own if first <= row[0] < stop else other)
            for row in run
        ]

    def _header(self, queue: ConsumeQueue, offset: int) -> BatchHeader | None:
        """Return the header of a batch of the queue's topic; None if none begins there."""
        if not self._log.start <= offset <= self._log.end - HEADER_SIZE:
            return None
        try:
            header = read_header(self._log.read(offset, HEADER_SIZE))
            data = self._log.read(offset, HEADER_SIZE + header.meta_size)
            return header if is_of_topic(data, queue.topic) else None
        except (CorruptBatch, CorruptRecord, StorageError):
            return None
