"""Reads queues of an ``lmdb`` store: from a queue offset to entries and batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from mqmesh.batch.record_batch import check_stored, read_header
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import LmdbEnv
from mqmesh.storage.lmdb.layout import Entry
from mqmesh.storage.lmdb.opening import Queue, pairs

MOST_ENTRIES: Final = 512
"""Batches of a queue looked at by one read."""
ENTRIES_AT_ONCE: Final = 64


def read_batches(
    env: LmdbEnv,
    queue: Queue,
    queue_offset: int,
    *,
    max_bytes: int,
    tag_hashes: frozenset[int] | None,
    verify: bool = False,
) -> tuple[list[bytes | memoryview], int, int]:
    """Reads batches of a queue.

    Args:
        env: The environment.
        queue: The queue.
        queue_offset: First message wanted; there is one.
        max_bytes: Limit of the size of all batches together; the first may exceed it.
        tag_hashes: Only batches with a message of one of these tags; None for all.
        verify: True to check the checksums of the batches.

    Returns:
        The batches, the queue offset to go on from, and the number of messages wanted.

    Raises:
        CorruptRecord: The first batch is not at the place that its entry names, or is damaged.
    """
    data: list[bytes | memoryview] = []
    size = count = 0
    position = queue_offset
    try:
        for entry in islice(entries(env, queue, queue_offset), MOST_ENTRIES):
            if tag_hashes is None or entry.fits(tag_hashes, position):
                size += entry.size
                if data and size > max_bytes:
                    break
                data.append(_batch(env, queue, entry, verify))
                count += entry.end - position
            position = entry.end
    except CorruptRecord as error:
        if not data:
            where = f"offset {position} of queue {queue.queue_id} of {queue.topic!r}"
            raise CorruptRecord(f"{where} is damaged: {error}") from error
    return data, position, count


def entry_at(env: LmdbEnv, queue: Queue, queue_offset: int) -> Entry:
    """Return the entry of the batch that holds an offset.

    Raises:
        CorruptRecord: The entry is missing.
    """
    found = env.at_or_before(layout.entry_key(queue.topic_id, queue.queue_id, queue_offset))
    if found is not None and found[0].startswith(layout.ENTRY):
        place = layout.split_entry_key(found[0])[:2]
        entry = layout.decode_entry(*found)
        if place == (queue.topic_id, queue.queue_id) and queue_offset < entry.end:
            return entry
    raise CorruptRecord("its entry is missing")


def entries(env: LmdbEnv, queue: Queue, queue_offset: int) -> Iterator[Entry]:
    """Entries from the one that holds an offset to the end of the queue, with no gaps.

    Raises:
        CorruptRecord: An entry is missing.
    """
    entry = entry_at(env, queue, queue_offset)
    yield entry
    place = queue.topic_id, queue.queue_id
    start, stop = layout.entry_key(*place, entry.end), layout.entry_key(*place, queue.end)
    for pair in pairs(env, start, stop, at_once=ENTRIES_AT_ONCE):
        expected = entry.end
        entry = layout.decode_entry(*pair)
        if entry.base != expected:
            raise CorruptRecord("its entry is missing")
        yield entry


def _batch(env: LmdbEnv, queue: Queue, entry: Entry, verify: bool) -> bytes:
    """Return the batch that an entry leads to; usually its reader checks the checksums."""
    data = env.get(layout.log_key(entry.commitlog_offset))
    read = check_stored if verify else read_header
    try:
        header = None if data is None else read(data)
    except CorruptBatch as error:
        raise CorruptRecord(str(error)) from error
    if (
        data is None
        or header is None
        or header.commitlog_offset != entry.commitlog_offset
        or (header.base_queue_offset, header.message_count) != (entry.base, entry.message_count)
        or header.queue_id != queue.queue_id
        or not len(data) == header.total_size == entry.size
    ):
        raise CorruptRecord(f"it leads to {entry.commitlog_offset}, where its batch is not")
    return data
