"""Finds the offset of a time in a queue: a binary search over stored batches."""

import struct
from typing import Final

from mqmesh.batch.record_batch import MAGIC
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.queues.consume_queue import ConsumeQueue

# Magic, own offset, base queue offset, store timestamp, message count of a batch header.
_TIMES: Final = struct.Struct("<4s4xQQq28xI")


def find_offset_by_time(
    queue: ConsumeQueue, files: OpenFiles, log: CommitLog, timestamp_ms: int
) -> int:
    """The first queue offset of the first batch stored at or after a time.

    Args:
        queue: The queue.
        files: Descriptors of its files.
        log: The log.
        timestamp_ms: Wall-clock time.

    Returns:
        A queue offset; the end of what is visible if there is no such batch.

    Raises:
        CorruptRecord: The queue leads to a place where its batch is not.
    """
    low, high = queue.first, queue.visible
    while low < high:
        middle = (low + high) // 2
        # Lost messages have no time: the next one that has decides for them. No stretch of
        # them is looked at twice, because all of it is on one side of what is left.
        found = queue.next_place(files, middle, high)
        if found is None:
            high = middle
            continue
        probe, place = found
        base, stop, stored = _batch_times(log, place)
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


def _batch_times(log: CommitLog, commitlog_offset: int) -> tuple[int, int, int]:
    magic, offset, base, stored, count = _TIMES.unpack(log.read(commitlog_offset, _TIMES.size))
    if magic != MAGIC or offset != commitlog_offset:
        raise CorruptRecord(f"no batch begins at {commitlog_offset}")
    return base, base + count, stored
