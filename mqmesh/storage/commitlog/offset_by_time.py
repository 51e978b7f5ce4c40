"""Finds the offset of a time in a queue: a binary search over stored batches."""

from mqmesh.batch.record_batch import HEADER_SIZE, is_of_topic, read_header
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.queues.consume_queue import ConsumeQueue


def find_offset_by_time(
    queue: ConsumeQueue, files: OpenFiles, log: CommitLog, timestamp_ms: int
) -> int:
    """Return the first queue offset of the first batch stored at or after a time.

    Args:
        queue: The queue.
        files: Descriptors of its files.
        log: The log.
        timestamp_ms: Wall-clock time.

    Returns:
        A queue offset; the end of the visible messages if there is no such batch.

    Raises:
        CorruptRecord: The queue leads to a place without its batch.
    """
    low, high = queue.first, queue.visible
    while low < high:
        middle = (low + high) // 2
        # Lost messages have no time: the next good message decides for them. No stretch of lost
        # messages is read twice, because all of it is on one side of the remaining range.
        found = queue.next_place(files, middle, high)
        if found is None:
            high = middle
            continue
        probe, place = found
        base, stop, stored = _batch_times(log, queue, place)
        if not base <= probe < stop:
            raise CorruptRecord(
                f"offset {probe} of queue {queue.queue_id} of {queue.topic!r} leads to a batch "
                f"with offsets {base} to {stop}"
            )
        if stored >= timestamp_ms:
            high = min(middle, base)
        else:
            low = stop
    return max(low, queue.first)


def _batch_times(
    log: CommitLog, queue: ConsumeQueue, commitlog_offset: int
) -> tuple[int, int, int]:
    try:
        header = read_header(log.read(commitlog_offset, HEADER_SIZE))
        data = log.read(commitlog_offset, HEADER_SIZE + header.meta_size)
    except CorruptBatch as error:
        raise CorruptRecord(f"no batch begins at {commitlog_offset}: {error}") from error
    if (header.commitlog_offset, header.queue_id) != (
        commitlog_offset,
        queue.queue_id,
    ) or not is_of_topic(data, queue.topic):
        raise CorruptRecord(f"no batch of this queue begins at {commitlog_offset}")
    return header.base_queue_offset, header.next_queue_offset, header.store_timestamp
