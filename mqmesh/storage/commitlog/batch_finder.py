"""Finds batches by queue offset: reads consume queue entries and the log.

The entries of a batch are equal in offset and size and stand side by side, and
offsets grow along a queue. So the end of a batch is found by galloping, in a
few steps whatever the number of its messages, and nothing here loops over
messages but the tag filter, which does it in C.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import HEADER_SIZE, MAGIC, check_stored, is_of_topic, topic_mark
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.log.commitlog import VIEW_BYTES, CommitLog
from mqmesh.storage.queues.consume_queue import (
    ENTRY_SIZE,
    MOST_LOOKED_AT_ONCE,
    OFFSET_MASK,
    SIZE_MASK,
    VOID_OFFSET,
    ConsumeQueue,
    check_in,
    check_of,
    count_void,
    hashes_of,
)
from mqmesh.storage.queues.queue_tail import QueueTail

CHUNK_ENTRIES: Final = 2048
"""Entries read by one call, unless a batch has more messages."""
MOST_BATCHES: Final = 1024
"""Batches returned by one read, so that no read takes long."""
MOST_FILTERED_ENTRIES: Final = 32_768
"""Entries examined by one read with a filter."""
MOST_TAIL_ROWS: Final = 4096
"""Batches of a tail examined by one read."""
READ_THROUGH_BYTES: Final = 4096
"""Reading so many bytes of other queues costs less than another system call. Bytes in memory need
no read, so gaps may be larger there."""
MOST_AT_ONCE_BYTES: Final = 4 * 1024 * 1024

_PLACE = struct.Struct("<QI")
_OFFSET = struct.Struct("<Q")
# Magic, own offset, base queue offset, size, message count, queue id of a batch header.
_IDENTITY: Final = "<4s4xQQ28xI4xII"


class BatchPlace(NamedTuple):
    """Place of a batch, as a consume queue records it."""

    commitlog_offset: int
    size: int
    start: int
    """Queue offset of the first entry that was read."""
    stop: int
    """Queue offset behind its last message."""
    doubtful: bool = False
    """Found only because the tag hashes fail their check: damage, or a part of a batch."""


class _Found:
    """Batches found so far, and whether more are wanted."""

    __slots__ = ("max_bytes", "runs", "tag_hashes", "total")

    def __init__(self, max_bytes: int, tag_hashes: frozenset[int] | None) -> None:
        self.runs: list[BatchPlace] = []
        self.total = 0
        self.max_bytes = max_bytes
        self.tag_hashes = tag_hashes

    def add(self, run: BatchPlace) -> bool:
        """Adds a batch if there is room for it."""
        runs = self.runs
        self.total += run.size
        if runs and (self.total > self.max_bytes or len(runs) == MOST_BATCHES):
            return False
        runs.append(run)
        return True


def find_batches(
    queue: ConsumeQueue,
    files: OpenFiles,
    start: int,
    stop: int,
    *,
    max_bytes: int,
    tag_hashes: frozenset[int] | None,
) -> tuple[list[BatchPlace], int]:
    """Finds the batches of a stretch of a queue.

    Args:
        queue: The queue.
        files: Descriptors of its files.
        start: First requested queue offset.
        stop: Queue offset where the stretch ends; a batch ends there too.
        max_bytes: Limit of the size of all batches together; the first may exceed it.
        tag_hashes: Only batches with a message of one of these tags, and those that the queue
            cannot decide: the tag hashes are damaged, or ``start`` is within the batch.
            None for all.

    Returns:
        The batches, and the queue offset to go on from.

    Raises:
        CorruptRecord: Entries are missing.
    """
    found = _Found(max_bytes, tag_hashes)
    # A batch is as a whole either in the files or in the tail.
    in_files = min(stop, queue.written)
    following = start
    if start < in_files:
        following = _find_in_files(queue, files, start, in_files, found)
    if following >= in_files and following < stop:
        following = _find_in_tail(queue.tail, following, stop, found)
    return found.runs, following


def _find_in_tail(tail: QueueTail, start: int, stop: int, found: _Found) -> int:
    """Adds batches of the tail; returns the queue offset to go on from."""
    wanted = found.tag_hashes
    ends = tail.ends
    number = tail.index(start)
    last = min(len(ends), number + MOST_TAIL_ROWS)
    scanned = 0
    index = start
    while number < last and index < stop and scanned < MOST_FILTERED_ENTRIES:
        commitlog_offset, size, shared = tail.row(number)
        end = ends[number]
        fits = wanted is None or shared in wanted
        if wanted is not None and (hashes := tail.hashes(number)) is not None:
            scanned += end - index
            skipped = (index - tail.base(number)) * 8
            fits = not wanted.isdisjoint(memoryview(hashes)[skipped:].cast("Q"))
        if commitlog_offset != VOID_OFFSET and fits:
            if not found.add(BatchPlace(commitlog_offset, size, index, end)):
                break
        index = end
        number += 1
    return index


def _find_in_files(
    queue: ConsumeQueue, files: OpenFiles, start: int, stop: int, found: _Found
) -> int:
    """Adds batches from the files; returns the queue offset to go on from."""
    tag_hashes = found.tag_hashes
    index = origin = start
    available = 0
    guess = 1
    chunk = CHUNK_ENTRIES
    entries = b""
    hashes: memoryview | None = None
    limit = stop if tag_hashes is None else min(stop, start + MOST_FILTERED_ENTRIES)
    while index < limit:
        at = index - origin
        if at >= available:
            origin, at = index, 0
            entries = queue.read(files, origin, min(stop, origin + chunk))
            available = len(entries) // ENTRY_SIZE
            hashes = None if tag_hashes is None else hashes_of(entries)
        place, extent = _PLACE.unpack_from(entries, at * ENTRY_SIZE)
        if place == VOID_OFFSET:
            # No galloping here: messages may be lost before good ones, and behind them again.
            lost = entries[at * ENTRY_SIZE : (at + MOST_LOOKED_AT_ONCE) * ENTRY_SIZE]
            index += max(count_void(lost), 1)  # one, if the entry itself is damaged
            continue
        end = _end_of_run(entries, at, available, place, guess)
        if end == available and origin + end < stop:
            # The batch may go on behind the chunk: look again, from here, and further.
            if at == 0:
                chunk *= 2
            available = 0
            continue
        run_stop = origin + end
        commitlog_offset, size = place & OFFSET_MASK, extent & SIZE_MASK
        fits, doubtful = True, False
        if hashes is not None and tag_hashes is not None:
            some = hashes[at:end]
            fits = not tag_hashes.isdisjoint(some)
            if not fits:
                # If the check fails, the batch itself decides. Queues of older versions have no
                # checks.
                check = check_in(place, extent)
                fits = check_of(commitlog_offset, size, some) != check
                doubtful = fits and check != 0
        if fits and not found.add(BatchPlace(commitlog_offset, size, index, run_stop, doubtful)):
            break
        guess = end - at
        index = run_stop
    return index


def _end_of_run(entries: bytes, start: int, available: int, wanted: int, guess: int) -> int:
    """Return the index behind the last entry with the same offset as entry ``start``, a batch's."""
    unpack = _OFFSET.unpack_from
    low, high = start + 1, available
    bound = start + guess
    step = 1
    # Usually the batch is as long as the one before: two reads show it.
    if bound <= high and unpack(entries, (bound - 1) * ENTRY_SIZE)[0] == wanted:
        low = bound
    else:
        bound = low
    while bound < high:
        if unpack(entries, bound * ENTRY_SIZE)[0] != wanted:
            high = bound
            break
        low = bound + 1
        bound += step
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if unpack(entries, middle * ENTRY_SIZE)[0] == wanted:
            low = middle + 1
        else:
            high = middle
    return low


def read_batches(
    log: CommitLog, topic: str, queue_id: int, runs: list[BatchPlace]
) -> tuple[list[bytes | memoryview], int, int | None]:
    """Reads batches: as views of the log in memory, else neighbours with one call.

    Every batch is checked to be the one that the queue names, of its topic and queue;
    checksums are left to the caller that decodes it.

    Args:
        log: The log.
        topic: Topic of the queue.
        queue_id: Number of the queue.
        runs: The batches, in queue order.

    Returns:
        Buffers of whole batches; the number of runs in them, which is less than all when the next
        run has another batch than the queue names; and the queue offset of damaged tag hashes, or
        None.
    """
    data: list[bytes | memoryview] = []
    damaged = None
    number = 0
    most_gap = MOST_AT_ONCE_BYTES
    while number < len(runs):
        start = runs[number].commitlog_offset
        count, stop, dense = _neighbours(log, runs, number, most_gap)
        buffer: bytes | memoryview | None = log.view_in_memory(start, stop - start)
        if buffer is None:
            if not dense and stop - start >= VIEW_BYTES and most_gap > READ_THROUGH_BYTES:
                most_gap = READ_THROUGH_BYTES  # bytes between the batches would be read, too
                continue
            try:
                buffer = log.read(start, stop - start)
            except CorruptRecord:
                break
        some = runs[number : number + count]
        good, doubted = _count_good(buffer, start, topic, queue_id, some)
        damaged = doubted if damaged is None else damaged
        if dense and good == count:
            data.append(buffer)
        else:
            view = memoryview(buffer)
            data.extend(
                view[run.commitlog_offset - start : run.commitlog_offset - start + run.size]
                for run in some[:good]
            )
        number += good
        if good < count:
            break
    return data, number, damaged


def sound_batches(
    data: Sequence[bytes | memoryview],
) -> tuple[list[bytes | memoryview], int]:
    """Return the data before the first batch that fails its checksums, and its number of batches.

    Args:
        data: Buffers of whole batches.
    """
    sound: list[bytes | memoryview] = []
    number = 0
    for buffer in data:
        position = 0
        while position < len(buffer):
            try:
                header = check_stored(buffer, position)
            except CorruptBatch:
                if position:
                    sound.append(memoryview(buffer)[:position])
                return sound, number
            position += header.total_size
            number += 1
        sound.append(buffer)
    return sound, number


def _neighbours(
    log: CommitLog, runs: list[BatchPlace], first: int, most_gap: int
) -> tuple[int, int, bool]:
    """Return the number of runs to take at once, their end, and if they leave no gap."""
    start = runs[first].commitlog_offset
    stop = start + runs[first].size
    if first + 1 == len(runs):
        return 1, stop, True
    segment_end = log.segment_end(start)
    dense = True
    index = first + 1
    while index < len(runs):
        offset, size, *_ = runs[index]
        gap = offset - stop
        if (
            not 0 <= gap <= most_gap
            or offset + size > segment_end
            or offset + size - start > MOST_AT_ONCE_BYTES
        ):
            break
        if gap:
            dense = False
        stop = offset + size
        index += 1
    return index - first, stop, dense


def _count_good(
    buffer: Buffer, start: int, topic: str, queue_id: int, runs: list[BatchPlace]
) -> tuple[int, int | None]:
    """Count the runs, from the first, that are in the buffer as expected.

    Also return the start of the first of them that is a whole batch and failed its check.
    """
    shape, mark = _shape_of(topic)
    unpack = shape.unpack_from
    good = 0
    damaged = None
    for run in runs:
        if run.size < shape.size:
            break
        position = run.commitlog_offset - start
        magic, offset, base, size, count, number, named = unpack(buffer, position)
        if (
            magic != MAGIC
            or offset != run.commitlog_offset
            or size != run.size
            or number != queue_id
            or not base <= run.start < run.stop == base + count
            or (named != mark and not is_of_topic(buffer, topic, position))
        ):
            break
        good += 1
        if run.doubtful and run.start == base and damaged is None:
            damaged = run.start
    return good, damaged


@lru_cache(4_096)
def _shape_of(topic: str) -> tuple[struct.Struct, bytes]:
    """Return the struct that reads identity and topic of a batch, and the topic as encoded there.

    Pulls do this for each batch: a call more would cost them some percent.
    """
    mark = topic_mark(topic)
    gap = HEADER_SIZE + 1 - struct.calcsize(_IDENTITY)
    return struct.Struct(f"{_IDENTITY}{gap}x{len(mark)}s"), mark
