"""Which batches were stored lately: what makes a repeated send harmless.

For every producer and queue the last few batches are remembered with the
offsets they got. A producer has at most four batches in flight per queue, so what
it repeats is always among them. Pure: the store tells what it stored, and asks.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from mqmesh.message import SCHEDULE_TOPIC, TRANS_HALF_TOPIC
from mqmesh.record_batch import BatchHeader
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

WINDOW: Final = 5
"""Batches remembered per producer and queue."""
WINDOW_OF_SHARED: Final = 256
"""The same for queues that a producer's batches for many queues share: delayed and half ones."""
SHARED_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TRANS_HALF_TOPIC})

Key = tuple[str, int, int]
"""Topic, queue id, producer id."""


class StoredBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A batch that is in the log. Array positions are on disk and never change."""

    first_sequence: int
    message_count: int
    base_queue_offset: QueueOffset
    commitlog_offset: CommitLogOffset
    end_offset: CommitLogOffset
    store_timestamp: TimestampMs


class ProducerStates:
    """The batches that a repetition would be recognised for."""

    def __init__(self, most: int) -> None:
        """Starts empty.

        Args:
            most: Pairs of producer and queue to remember; those unused for longest go first.
        """
        assert most > 0
        self._most = most
        # In order of use. Windows are in log order, newest last.
        self._windows: dict[Key, list[StoredBatch]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def find(self, topic: str, queue_id: int, header: BatchHeader) -> StoredBatch | None:
        """The stored twin of a batch, or None if it is new."""
        window = self._windows.get((topic, queue_id, header.producer_id))
        if window is not None:
            first, count = header.first_sequence, header.message_count
            for batch in window:
                if batch.first_sequence == first and batch.message_count == count:
                    return batch
        return None

    def window(self, key: Key) -> list[StoredBatch]:
        """The batches remembered for a producer and queue, newest last; do not change it."""
        return self._windows.get(key, [])

    def note(self, topic: str, queue_id: int, producer_id: int, batch: StoredBatch) -> None:
        """Remembers a batch; one that is not behind the newest of its window is known already.

        So a stretch of the log may be noted again, as recovery does.
        """
        key = (topic, queue_id, producer_id)
        windows = self._windows
        window = windows.pop(key, None)
        if window is None:
            if len(windows) >= self._most:
                del windows[next(iter(windows))]
            windows[key] = [batch]
            return
        windows[key] = window
        if batch.commitlog_offset > window[-1].commitlog_offset:
            window.append(batch)
            if len(window) > (WINDOW_OF_SHARED if topic in SHARED_TOPICS else WINDOW):
                del window[0]

    def forget_from(self, keys: Iterable[Key], commitlog_offset: int) -> None:
        """Takes back what was noted at or behind an offset, after a write that failed."""
        for key in keys:
            window = self._windows.get(key)
            if window is None:
                continue
            while window and window[-1].commitlog_offset >= commitlog_offset:
                window.pop()
            if not window:
                del self._windows[key]

    def forget_topic(self, topic: str) -> None:
        """Forgets all queues of a topic."""
        for key in [key for key in self._windows if key[0] == topic]:
            del self._windows[key]

    def dump(self) -> Iterator[tuple[Key, list[StoredBatch]]]:
        """All windows, the one unused for longest first.

        The iterator may be used up bit by bit while batches are noted: what it has not
        reached yet comes out as it is by then, what is new does not come out.
        """
        for key in list(self._windows):
            window = self._windows.get(key)
            if window is not None:
                yield key, list(window)

    def load(self, windows: Iterable[tuple[Key, list[StoredBatch]]]) -> None:
        """Replaces everything by what ``dump`` gave."""
        self._windows = {}
        for key, window in windows:
            for batch in window:
                self.note(*key, batch)
