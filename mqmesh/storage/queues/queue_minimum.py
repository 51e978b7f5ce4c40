"""Moves the beginning of consume queues behind the removed part of the log.

The beginning is found by bisection, and one flipped bit could send that far astray. So the batches
on both sides of the result must have good checks; otherwise the search is repeated among batches
that have them.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

from mqmesh.batch.payload import MAX_MESSAGES, Buffer
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.consume_queue import (
    ENTRY_SIZE,
    OFFSET_MASK,
    SIZE_MASK,
    VOID_OFFSET,
    ConsumeQueue,
    check_in,
    check_of,
    hashes_of,
)

FIRST_LOOK: Final = 64
"""Entries read on either side of one, to find its batch; then twice as many, and so on."""
MOST_DAMAGED: Final = 256
"""Damaged batches that are skipped; with more next to each other nothing is moved."""

_PLACE = struct.Struct("<QI")

_Place = Callable[[int, int], tuple[int, int] | None]


def advance(queue: ConsumeQueue, files: OpenFiles, log_start: int) -> bool:
    """Moves a queue's beginning to its first message that is still in the log.

    Args:
        queue: The queue; nothing of it in front of ``log_start`` is yet to become visible.
        files: Descriptors of its files.
        log_start: Commit-log offset; everything before it is removed or will be.

    Returns:
        True if the queue begins somewhere else now.

    Raises:
        CorruptRecord: Entries are missing, or too many are damaged.
        StorageError: The disk reports a read error.
    """
    before = queue.first
    in_files = max(queue.first, queue.written)
    first = _first_kept(partial(queue.next_place, files), queue.first, in_files, log_start)
    if not _is_sure(queue, files, first, in_files):
        first = _first_kept(partial(_sound_place, queue, files), before, in_files, log_start)
    if first == in_files:
        first = _first_kept_of_tail(queue, first, log_start)
    queue.first = first
    queue.visible = max(queue.visible, first)
    return first != before


def first_at_or_behind(queue: ConsumeQueue, files: OpenFiles, commitlog_offset: int) -> int:
    """Return the offset of the first message whose batch begins at or behind a log offset.

    Args:
        queue: The queue; not changed.
        files: Descriptors of its files.
        commitlog_offset: Commit-log offset, such as that of a cut.

    Returns:
        Queue offset of the message; the queue's end if there is none.

    Raises:
        CorruptRecord: Entries are missing.
        StorageError: The disk reports a read error.
    """
    in_files = max(queue.first, queue.written)
    first = _first_kept(partial(queue.next_place, files), queue.first, in_files, commitlog_offset)
    return _first_kept_of_tail(queue, first, commitlog_offset) if first == in_files else first


def _first_kept(next_place: _Place, low: int, high: int, log_start: int) -> int:
    """Search the entries in files by halves; ``high`` if none of them leads to a kept batch."""

    def is_kept(queue_offset: int, stop: int) -> bool:
        found = next_place(queue_offset, stop)
        # All messages there are lost: they may as well count as kept.
        return found is None or found[1] >= log_start

    if low < high and is_kept(low, high):
        return low
    while low < high:
        middle = (low + high) // 2
        if is_kept(middle, high):
            high = middle
        else:
            low = middle + 1
    return low


class _Run(NamedTuple):
    """Neighbouring entries that lead to the same place."""

    start: int
    stop: int
    is_sound: bool
    """True for a whole batch with a good check, for lost messages, and where no check is sure."""


def _is_sure(queue: ConsumeQueue, files: OpenFiles, first: int, in_files: int) -> bool:
    """Return True if batches end and begin at an offset, and both are sound."""
    if first > queue.first:
        run = _run_around(queue, files, first - 1, in_files)
        if run.stop != first or not run.is_sound:
            return False
    return first >= in_files or _run_around(queue, files, first, in_files).is_sound


def _sound_place(
    queue: ConsumeQueue, files: OpenFiles, start: int, stop: int
) -> tuple[int, int] | None:
    """Find a place like ``ConsumeQueue.next_place``, but skip damaged entries, too."""
    for _ in range(MOST_DAMAGED):
        found = queue.next_place(files, start, stop)
        if found is None:
            return None
        run = _run_around(queue, files, found[0], queue.written)
        if run.is_sound:
            return found
        start = run.stop
        if start >= stop:
            return None
    raise CorruptRecord(f"{MOST_DAMAGED} damaged entries stand before offset {start}")


def _run_around(queue: ConsumeQueue, files: OpenFiles, queue_offset: int, in_files: int) -> _Run:
    """Return the entries around one that lead to the same place."""
    width = FIRST_LOOK
    while True:
        low = max(queue.first, queue_offset - width)
        high = min(in_files, queue_offset + width)
        entries = queue.read(files, low, high)
        at = queue_offset - low
        place, extent = both = _PLACE.unpack_from(entries, at * ENTRY_SIZE)
        start, stop = at, at + 1
        while start and _PLACE.unpack_from(entries, (start - 1) * ENTRY_SIZE) == both:
            start -= 1
        while stop < high - low and _PLACE.unpack_from(entries, stop * ENTRY_SIZE) == both:
            stop += 1
        is_open = (start == 0 and low > queue.first) or (low + stop == high < in_files)
        if place == VOID_OFFSET or not is_open or width >= MAX_MESSAGES:
            break
        width *= 2
    hashes = hashes_of(entries[start * ENTRY_SIZE : stop * ENTRY_SIZE])
    return _Run(low + start, low + stop, _is_sound(place, extent, hashes))


def _is_sound(place: int, extent: int, hashes: Buffer) -> bool:
    if place == VOID_OFFSET:
        return True
    size = extent & SIZE_MASK
    if not size or len(hashes) > MAX_MESSAGES:
        return False  # a disk returns zeros for lost data
    check = check_in(place, extent)
    # Queues of older versions have no checks.
    return check in (0, check_of(place & OFFSET_MASK, size, hashes))


def _first_kept_of_tail(queue: ConsumeQueue, first: int, log_start: int) -> int:
    tail = queue.tail
    number = tail.index(first) if first < tail.end else len(tail)
    while number < len(tail) and tail.row(number)[0] < log_start:
        first = tail.ends[number]
        number += 1
    return first


def unused_names(names: Iterable[str], firsts: Mapping[int, int], file_entries: int) -> list[str]:
    """Return consume queue files with nothing but entries before the first of their queues.

    Args:
        names: Names of the files of a topic's directory.
        firsts: First queue offset of each queue; files of other queues are left alone.
        file_entries: Entries in one file.
    """
    unused = []
    for name in names:
        queue_id, _, position = name.partition("-")
        if not (queue_id.isdecimal() and position.isdecimal()) or int(queue_id) not in firsts:
            continue
        if int(position) + file_entries * ENTRY_SIZE <= firsts[int(queue_id)] * ENTRY_SIZE:
            unused.append(name)
    return unused


def remove_unused(directory_fd: int, firsts: Mapping[int, int], file_entries: int) -> list[str]:
    """Removes such files; takes over the descriptor.

    It uses a descriptor, because the directory may be renamed meanwhile, and another with the
    same name be there instead: the topic was deleted and made anew.

    Args:
        directory_fd: Directory of the topic.
        firsts: As for ``unused_names``.
        file_entries: Entries in one file.

    Returns:
        Names of the files removed.

    Raises:
        OSError: A file cannot be removed.
    """
    try:
        unused = unused_names(os.listdir(directory_fd), firsts, file_entries)
        for name in unused:
            os.unlink(name, dir_fd=directory_fd)
        return unused
    finally:
        os.close(directory_fd)
