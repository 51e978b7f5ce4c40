"""Removes a cut part of the log from queues and from producers' last batches.

Each queue ends where its first batch behind the cut was. For a producer with batches there, older
ones were forgotten in their favour, since only the last few are remembered. The older ones are read
from the log again, so that a repetition is recognised as if the cut part had never existed.
"""

from collections.abc import Iterator
from typing import Final

from mqmesh.batch.record_batch import Attributes
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.log.scan import LogScanner
from mqmesh.storage.queues.consume_queue import (
    ENTRY,
    ENTRY_SIZE,
    OFFSET_MASK,
    VOID_OFFSET,
    ConsumeQueue,
)
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.storage.queues.producer_states import ProducerStates, StoredBatch, stored_batch
from mqmesh.storage.queues.queue_minimum import first_at_or_behind

MOST_LOOKED_AT: Final = 16_384
"""Batches of a queue that are searched for those of its producers."""
ENTRIES_AT_ONCE: Final = 4_096


def shorten(
    queues: ConsumeQueues,
    states: ProducerStates,
    files: OpenFiles,
    scanner: LogScanner,
    *,
    end_offset: int,
) -> None:
    """Restores queues and producers' last batches to their state when the log ended there.

    Args:
        queues: Consume queues, without tails.
        states: Last batches of producers.
        files: Descriptors of consume queue files.
        scanner: Reads the log.
        end_offset: Commit-log offset where the log ends now.

    Raises:
        CorruptRecord: Entries are missing, or a batch is.
        StorageError: The disk reports a read error.
    """
    for queue in queues:
        queue.rewind(first_at_or_behind(queue, files, end_offset))
    wanted: dict[tuple[str, int], set[int]] = {}
    for topic, queue_id, producer_id in states.cut(end_offset):
        wanted.setdefault((topic, queue_id), set()).add(producer_id)
    for (topic, queue_id), producers in wanted.items():
        queue_or_none = queues.find(topic, queue_id)
        if queue_or_none is not None:
            _remember(queue_or_none, producers, states, files, scanner)


def _remember(
    queue: ConsumeQueue,
    producers: set[int],
    states: ProducerStates,
    files: OpenFiles,
    scanner: LogScanner,
) -> None:
    """Notes the last batches of some producers of a queue."""
    missing = {producer_id: states.window_size(queue.topic) for producer_id in producers}
    found: list[tuple[int, StoredBatch]] = []
    for number, place in enumerate(_places(queue, files)):
        if not missing or number == MOST_LOOKED_AT:
            break
        header = scanner.read(place, epoch=0).batch
        if header is None or header.producer_id not in missing:
            continue
        if header.attributes & Attributes.REDELIVERED:
            continue
        found.append((header.producer_id, stored_batch(header)))
        missing[header.producer_id] -= 1
        if not missing[header.producer_id]:
            del missing[header.producer_id]
    for producer_id, batch in reversed(found):
        states.note(queue.topic, queue.queue_id, producer_id, batch)


def _places(queue: ConsumeQueue, files: OpenFiles) -> Iterator[int]:
    """Yield commit-log offsets of a queue's batches, the newest first."""
    stop, before = queue.end, VOID_OFFSET
    while stop > queue.first:
        start = max(queue.first, stop - ENTRIES_AT_ONCE)
        entries = queue.read(files, start, stop)
        for position in range(len(entries) - ENTRY_SIZE, -1, -ENTRY_SIZE):
            place: int = ENTRY.unpack_from(entries, position)[0]
            if place not in (before, VOID_OFFSET):
                before = place
                yield place & OFFSET_MASK
        stop = start
