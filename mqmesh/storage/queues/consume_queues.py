"""All consume queues of a store: found by topic and queue id, written bit by bit.

Work here grows with the queues that got messages lately, never with the number
of all queues. Names of topics never become paths: a topic's directory is named
by a hash of its name.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_OFFSET, ConsumeQueue
from mqmesh.storage.queues.queue_minimum import advance, unused_names

log = logging.getLogger(__name__)

LARGE_TAIL_ENTRIES: Final = 16_384
"""Size from which on a tail is written at the next tick: a larger one would take long."""


MOST_WRITING_NS: Final = 2_000_000
"""Limit of a step that makes files, in ns; the caller has other work to do."""
MOST_VOID_ENTRIES: Final = 1_000_000
"""Void entries made by one step, to bound memory."""

_DIRECTORY_NAME: Final = re.compile(r"[0-9a-f]{32}(\.deleted-\d+)?")
_FILE_NAME: Final = re.compile(r"\d+-\d{20}")


class ConsumeQueues:
    """The queues and their unwritten tails.

    Attributes:
        by_topic: Queues by topic and queue id.
        deletions: Commit-log offset by topic: batches before it are of an earlier topic of
            that name, which was deleted.
        unwritten_bytes: Memory of all tails.
        most_unwritten_bytes: Limit of ``unwritten_bytes``.
        changed: Paths written to since the set was last taken to sync them.
    """

    def __init__(
        self,
        root: Path,
        files: OpenFiles,
        *,
        file_entries: int,
        most_unwritten_bytes: int,
        clock: Clock,
    ) -> None:
        """Starts with no queue.

        Args:
            root: Directory of all consume queues; it exists.
            files: Descriptors of their files.
            file_entries: Entries in one file.
            most_unwritten_bytes: Limit of the memory of all tails.
            clock: Clock that measures how long work takes.
        """
        self._root = root
        self._files = files
        self._clock = clock
        self._file_entries = file_entries
        self.most_unwritten_bytes = most_unwritten_bytes
        self.by_topic: dict[str, dict[int, ConsumeQueue]] = {}
        self._count = 0  # each turn reads it, and must not count all queues for that
        self.deletions: dict[str, int] = {}
        self.unwritten_bytes = 0
        self.changed: set[str] = set()
        # In the order in which their tails began.
        self._dirty: dict[ConsumeQueue, None] = {}
        self._large: list[ConsumeQueue] = []

    def __iter__(self) -> Iterator[ConsumeQueue]:
        for queues in self.by_topic.values():
            yield from queues.values()

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """True when no more entries may be added before some are written."""
        return self.unwritten_bytes >= self.most_unwritten_bytes

    @property
    def crowded(self) -> bool:
        """True when ticks should write tails."""
        return self.unwritten_bytes * 2 >= self.most_unwritten_bytes

    @property
    def dirty_count(self) -> int:
        """Queues with a tail."""
        return len(self._dirty)

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the queue, or None."""
        queues = self.by_topic.get(topic)
        return None if queues is None else queues.get(queue_id)

    def add(self, topic: str, queue_id: int, *, first: int = 0, end: int = 0) -> ConsumeQueue:
        """Adds a queue that is not there yet; its entries, if any, are in files."""
        queues = self.by_topic.setdefault(topic, {})
        assert queue_id not in queues
        sibling = next(iter(queues.values()), None)
        queue = ConsumeQueue(
            topic,
            queue_id,
            self.topic_directory(topic) if sibling is None else sibling.directory,
            first=first,
            end=end,
            file_entries=self._file_entries,
        )
        queues[queue_id] = queue
        self._count += 1
        return queue

    def find_or_add(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue; an empty one if there was none."""
        queues = self.by_topic.get(topic)
        queue = None if queues is None else queues.get(queue_id)
        return self.add(topic, queue_id) if queue is None else queue

    def append(
        self,
        queue: ConsumeQueue,
        commitlog_offset: int,
        size: int,
        message_count: int,
        tag_hashes: bytes,
    ) -> None:
        """Adds a batch to a queue's tail and moves its end."""
        unwritten = queue.end - queue.written
        if not unwritten:
            self._dirty[queue] = None
        queue.end += message_count
        self.unwritten_bytes += queue.tail.append(commitlog_offset, size, message_count, tag_hashes)
        if unwritten < LARGE_TAIL_ENTRIES <= unwritten + message_count:
            self._large.append(queue)

    def skip_to(self, queue: ConsumeQueue, queue_offset: int) -> None:
        """Fills a queue with void entries up to an offset: their messages are lost."""
        while queue.end < queue_offset:
            count = min(queue_offset - queue.end, MOST_VOID_ENTRIES)
            self.append(queue, VOID_OFFSET, 0, count, b"")
            if queue.end < queue_offset:
                self.write(queue)

    def advance(self, queue: ConsumeQueue, log_start: int) -> bool:
        """Moves a queue's beginning behind the removed part of the log; see ``queue_minimum``."""
        return advance(queue, self._files, log_start)

    def advance_all(self, log_start: int) -> int:
        """Moves the beginnings of all queues there; queues with missing entries stay as they are.

        Returns:
            Number of queues that begin somewhere else now.
        """
        moved = 0
        for queue in self:
            try:
                moved += self.advance(queue, log_start)
            except CorruptRecord as error:
                # A read there makes the store repair the queue.
                log.error("queue %d of %r: %s", queue.queue_id, queue.topic, error)
        return moved

    def clear(self) -> None:
        """Forgets all queues; their files stay, and deletions are still known."""
        self.by_topic.clear()
        self._count = 0
        self._dirty.clear()
        self._large.clear()
        self.unwritten_bytes = 0

    def write(self, queue: ConsumeQueue) -> None:
        """Writes one queue's tail.

        Raises:
            DiskFull: No room.
            StorageError: The disk reports an error.
        """
        memory = queue.tail.bytes
        queue.write_tail(self._files, self.changed)
        self.unwritten_bytes -= memory
        self._dirty.pop(queue, None)

    def overwrite(self, queue: ConsumeQueue, queue_offset: int, entries: bytes) -> bool:
        """Replaces entries that are in files.

        Returns:
            True if they were not the same.

        Raises:
            DiskFull: No room.
            StorageError: The disk reports an error.
        """
        stop = queue_offset + len(entries) // ENTRY_SIZE
        assert stop <= queue.written
        try:
            if queue.read(self._files, queue_offset, stop) == entries:
                return False
        except CorruptRecord:
            pass  # The files do not have these entries at all.
        queue.write_at(self._files, queue_offset, entries, self.changed)
        return True

    def write_large(self) -> bool:
        """Writes tails that have become large.

        Returns:
            True when no large tail is left.

        Raises:
            DiskFull: No room.
            StorageError: The disk reports an error.
        """
        end_ns = self._clock.monotonic_ns() + MOST_WRITING_NS
        while self._large and self._clock.monotonic_ns() < end_ns:
            self.write(self._large[-1])
            self._large.pop()
        return not self._large

    def write_oldest(self, most: int) -> bool:
        """Writes the oldest tails.

        Args:
            most: Number of tails, if that takes no longer than ``MOST_WRITING_NS``.

        Returns:
            True when the tails take less than half of their limit.

        Raises:
            DiskFull: No room.
            StorageError: The disk reports an error.
        """
        end_ns = self._clock.monotonic_ns() + MOST_WRITING_NS
        for queue in list(islice(self._dirty, most)):
            self.write(queue)
            if self._clock.monotonic_ns() > end_ns:
                break
        return not self.crowded

    def is_deleted(self, topic: str, commitlog_offset: int) -> bool:
        """Return True if a batch of a topic was deleted with it."""
        return commitlog_offset < self.deletions.get(topic, 0)

    def live_deletions(self, log_start: int) -> list[tuple[str, int]]:
        """Deletions of which the log may still have batches; this forgets the others."""
        for topic in [topic for topic, at in self.deletions.items() if at <= log_start]:
            del self.deletions[topic]
        return list(self.deletions.items())

    def drop_topic(self, topic: str, commitlog_offset: int) -> str | None:
        """Forgets a topic's queues, and notes the deletion.

        Args:
            topic: Physical topic.
            commitlog_offset: Commit-log offset of the control record of the deletion.

        Returns:
            An unused directory that is to be removed, or None.

        Raises:
            OSError: The directory cannot be renamed.
        """
        self.deletions[topic] = commitlog_offset
        queues = self.by_topic.pop(topic, {})
        self._count -= len(queues)
        for queue in queues.values():
            self.unwritten_bytes -= queue.tail.bytes
            self._dirty.pop(queue, None)
            if queue in self._large:
                self._large.remove(queue)
        directory = self.topic_directory(topic)
        self._files.close_under(directory)
        number = 1
        while os.path.exists(aside := f"{directory}.deleted-{number}"):
            number += 1
        try:
            os.rename(directory, aside)
        except FileNotFoundError:
            return None
        return aside

    def topic_directory(self, topic: str) -> str:
        """Return the directory of a topic's queues."""
        return f"{self._root}/{hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()}"

    def lost(self) -> ConsumeQueue | None:
        """Return a queue whose files lack written entries, None if there is none.

        Only sizes are compared. Costs one ``stat`` a queue.
        """
        for queue in self:
            if queue.written <= queue.first:
                continue
            last = queue.written - 1
            size = (last % self._file_entries + 1) * ENTRY_SIZE
            try:
                if os.stat(queue.file_path(queue.file_number(last))).st_size < size:
                    return queue
            except FileNotFoundError:
                return queue
            for number in range(queue.file_number(queue.first), queue.file_number(last)):
                if not os.path.exists(queue.file_path(number)):
                    return queue
        return None

    def trim(self) -> int:
        """Removes leftovers: entries before the beginnings and behind the ends of queues, and
        directories of other topics. Files whose names this class does not give stay.

        It serves a start after a crash, when files may be ahead of the log. Entries of tails may
        be in files, too.

        Returns:
            Number of removed bytes.
        """
        removed = 0
        names = list(filter(_DIRECTORY_NAME.fullmatch, os.listdir(self._root)))
        if not names:
            return 0
        topics = {self.topic_directory(topic): queues for topic, queues in self.by_topic.items()}
        for name in names:
            directory = f"{self._root}/{name}"
            queues = topics.get(directory)
            if queues is None:
                self._files.close_under(directory)
                shutil.rmtree(directory)
                continue
            firsts = {queue_id: queue.first for queue_id, queue in queues.items()}
            files = os.listdir(directory)
            unused = set(unused_names(files, firsts, self._file_entries))
            for file_name in unused:
                removed += os.path.getsize(f"{directory}/{file_name}")
                self._files.close_path(f"{directory}/{file_name}")
                os.unlink(f"{directory}/{file_name}")
            for file_name in filter(_FILE_NAME.fullmatch, files):
                if file_name not in unused:
                    removed += self._trim_file(f"{directory}/{file_name}", queues)
        return removed

    def _trim_file(self, path: str, queues: dict[int, ConsumeQueue]) -> int:
        """Removes from a file all but the queue's entries; returns the number of removed bytes."""
        queue_id, _, position = os.path.basename(path).partition("-")
        queue = queues.get(int(queue_id))
        known = 0 if queue is None else queue.end * ENTRY_SIZE - int(position)
        size = os.path.getsize(path)
        if size <= known:
            return 0
        if known > 0:
            os.truncate(path, known)
        else:
            self._files.close_path(path)
            os.unlink(path)
        return size - max(0, known)


def doubt_files(queues: ConsumeQueues) -> None:
    """Add all files to ``changed``, to be synced: it is unknown which of them were synced."""
    for queue in queues:
        if queue.written > queue.first:
            last = queue.file_number(queue.written - 1)
            numbers = range(queue.file_number(queue.first), last + 1)
            queues.changed.update(map(queue.file_path, numbers))
            queues.changed.update((queue.directory, os.path.dirname(queue.directory)))
