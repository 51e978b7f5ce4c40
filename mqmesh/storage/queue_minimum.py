"""Moves the beginning of consume queues behind what was removed from the log."""

import os
from collections.abc import Iterable, Mapping

from mqmesh.storage.consume_queue import ENTRY_SIZE, ConsumeQueue
from mqmesh.storage.open_files import OpenFiles


def advance(queue: ConsumeQueue, files: OpenFiles, log_start: int) -> bool:
    """Has a queue begin at its first message that is still in the log.

    Args:
        queue: The queue; nothing of it in front of ``log_start`` is yet to become visible.
        files: Descriptors of its files.
        log_start: Commit-log offset; all before is gone or will be.

    Returns:
        True if it begins somewhere else now.

    Raises:
        CorruptRecord: Entries are missing.
        StorageError: The disk refuses to read.
    """
    before = queue.first
    in_files = max(queue.first, queue.written)
    first = _first_kept(queue, files, queue.first, in_files, log_start)
    if first == in_files:
        first = _first_kept_of_tail(queue, first, log_start)
    queue.first = first
    queue.visible = max(queue.visible, first)
    return first != before


def _first_kept(queue: ConsumeQueue, files: OpenFiles, low: int, high: int, log_start: int) -> int:
    """Binary search over the entries in files; ``high`` if none of them leads to what is kept."""
    if low < high and _is_kept(queue, files, low, low + 1, log_start):
        return low
    while low < high:
        middle = (low + high) // 2
        if _is_kept(queue, files, middle, high, log_start):
            high = middle
        else:
            low = middle + 1
    return low


def _is_kept(
    queue: ConsumeQueue, files: OpenFiles, queue_offset: int, stop: int, log_start: int
) -> bool:
    """Whether a message, or the next one that is not lost, is still in the log."""
    found = queue.next_place(files, queue_offset, stop)
    # Nothing but lost messages: they may as well count as kept.
    return found is None or found[1] >= log_start


def _first_kept_of_tail(queue: ConsumeQueue, first: int, log_start: int) -> int:
    tail = queue.tail
    number = tail.index(first) if first < tail.end else len(tail)
    while number < len(tail) and tail.row(number)[0] < log_start:
        first = tail.ends[number]
        number += 1
    return first


def unused_names(names: Iterable[str], firsts: Mapping[int, int], file_entries: int) -> list[str]:
    """Consume queue files with nothing but entries before the first ones of their queues.

    Args:
        names: Of the files of a topic's directory.
        firsts: First queue offset of queues; files of others are left alone.
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
    """Removes those files; takes over the descriptor.

    By descriptor, because the directory may be renamed meanwhile, and another of the same
    name be there instead: the topic was deleted and made anew.

    Args:
        directory_fd: The topic's directory.
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
