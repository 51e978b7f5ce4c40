"""Producer states, the last batches of each producer: they make a repeated send harmless.

For every producer and queue the last few batches are remembered with the offsets they got. A
producer has at most four batches in flight per queue, so a batch that it repeats is always among
them. A repetition has the same sequences and the same checksum. Other content under known sequences
is refused, because its sender would otherwise get offsets that are not its own.

No producer can make the store forget batches that another one may still repeat. Each producer takes
up room for ``QUEUES_OF_PRODUCER`` queues at most, beyond which its own oldest queue is forgotten.
When all room is taken, only pairs without a batch for some time are forgotten. While there is no
such pair, new producers are refused.

Pure: the store reports the batches that it stored, and queries them.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from mqmesh.batch.record_batch import BatchHeader
from mqmesh.message import SCHEDULE_TOPIC, TRANS_HALF_TOPIC
from mqmesh.storage.interface import PutResult, PutStatus
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

WINDOW: Final = 5
"""Batches remembered per producer and queue."""
WINDOW_OF_SHARED: Final = 256
"""The same for queues that a producer's batches for many queues share: of delays and halves."""
SHARED_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TRANS_HALF_TOPIC})
QUEUES_OF_PRODUCER: Final = 8_192
"""Queues remembered for one producer: two requests of the largest number of batches each."""

Key = tuple[str, int, int]
"""Topic, queue id, producer id."""
Forgotten = list[tuple[Key, "StoredBatch"]]
"""Batches that are not remembered any more, in the order in which they were forgotten."""


class StoredBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A batch that is in the log. Array positions are on disk and never change."""

    first_sequence: int
    message_count: int
    base_queue_offset: QueueOffset
    commitlog_offset: CommitLogOffset
    end_offset: CommitLogOffset
    store_timestamp: TimestampMs
    producer_crc: int


def stored_batch(header: BatchHeader) -> StoredBatch:
    """Return the remembered part of a batch that is in the log.

    Args:
        header: Header of the stored batch.
    """
    return StoredBatch(
        header.first_sequence,
        header.message_count,
        header.base_queue_offset,
        header.commitlog_offset,
        CommitLogOffset(header.end_offset),
        header.store_timestamp,
        header.producer_crc,
    )


class _Window:
    """The batches remembered for one producer and queue, in log order, newest last."""

    __slots__ = ("batches", "end")

    def __init__(self, batch: StoredBatch) -> None:
        self.batches = [batch]
        # No sequence from here on was ever among them, so most batches are recognised as new.
        self.end = batch.first_sequence + batch.message_count

    def look(self, header: BatchHeader, now: TimestampMs) -> PutResult | None:
        first, count = header.first_sequence, header.message_count
        for batch in self.batches:
            if batch.first_sequence < first + count and first < (
                batch.first_sequence + batch.message_count
            ):
                if (
                    batch.first_sequence == first
                    and batch.message_count == count
                    and batch.producer_crc == header.producer_crc
                ):
                    return PutResult(
                        PutStatus.DUPLICATE,
                        batch.base_queue_offset,
                        batch.commitlog_offset,
                        batch.end_offset,
                        batch.store_timestamp,
                    )
                return _refused(PutStatus.SEQUENCE_CONFLICT, now)
        return None


class ProducerStates:
    """The batches whose repetitions are recognised."""

    def __init__(self, most: int, min_age_ms: int = 0) -> None:
        """Starts empty.

        Args:
            most: Pairs of producer and queue to remember; those unused for longest are forgotten
                first.
            min_age_ms: Time after its last use in which a pair is not forgotten, ms.
        """
        assert most > 0
        self._most = most
        self._min_age_ms = min_age_ms
        # In order of use, both.
        self._windows: dict[Key, _Window] = {}
        # Ordered ones: the search for the first of a plain dict walks over removed keys.
        self._keys_of: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def known(
        self, topic: str, queue_id: int, header: BatchHeader, now: TimestampMs
    ) -> PutResult | None:
        """Return the answer about a batch that must not be stored; None for one to store.

        Args:
            topic: Physical topic of the batch.
            queue_id: Number of its queue.
            header: Header of the batch, from ``check_batch``.
            now: Wall clock. A batch stored later than that counts as old.
        """
        window = self._windows.get((topic, queue_id, header.producer_id))
        if window is not None:
            return None if header.first_sequence >= window.end else window.look(header, now)
        if len(self._windows) < self._most or self._is_at_its_limit(header.producer_id):
            return None
        oldest = next(iter(self._windows.values())).batches[-1]
        if 0 <= now - oldest.store_timestamp < self._min_age_ms:
            return _refused(PutStatus.TOO_MANY_PRODUCERS, now)
        return None

    def make_room(self, keys: Collection[Key], now: TimestampMs) -> bool:
        """Return whether batches may be noted together without forgetting a young pair.

        Pairs of these batches that are known become the youngest, so that none of them displaces
        another.

        Args:
            keys: Pairs of the batches, all of them new by ``known``.
            now: As for ``known``.
        """
        windows = self._windows
        if len(windows) + len(keys) <= self._most:
            return True
        fresh: Counter[int] = Counter()
        known = 0
        for key in dict.fromkeys(keys):
            window = windows.pop(key, None)
            if window is None:
                fresh[key[2]] += 1
            else:
                windows[key] = window
                known += 1
        more = sum(
            min(count, QUEUES_OF_PRODUCER - len(self._keys_of.get(producer_id, ())))
            for producer_id, count in fresh.items()
        )
        gone = max(len(windows) + more - self._most, 0)
        return gone <= len(windows) - known and not any(
            0 <= now - window.batches[-1].store_timestamp < self._min_age_ms
            for window in islice(windows.values(), gone)
        )

    def has_forgotten(self, topic: str, queue_id: int, header: BatchHeader) -> bool:
        """Return whether a batch may have been stored before all remembered ones of its queue.

        Args:
            topic: Physical topic of the batch.
            queue_id: Number of its queue.
            header: Header of the batch.
        """
        batches = self.window((topic, queue_id, header.producer_id))
        oldest = min((one.first_sequence for one in batches), default=0)
        return len(batches) == self.window_size(topic) and header.first_sequence < oldest

    def window(self, key: Key) -> list[StoredBatch]:
        """Return the batches remembered for a producer and queue, newest last; do not change it."""
        window = self._windows.get(key)
        return [] if window is None else window.batches

    @staticmethod
    def window_size(topic: str) -> int:
        """Return the number of batches remembered of a producer in a queue of a topic."""
        return WINDOW_OF_SHARED if topic in SHARED_TOPICS else WINDOW

    def note(
        self,
        topic: str,
        queue_id: int,
        producer_id: int,
        batch: StoredBatch,
        forgotten: Forgotten | None = None,
    ) -> None:
        """Remembers a batch; one that is not behind the newest of its window is known already.

        So a stretch of the log may be noted again, as recovery does. This method refuses no batch:
        ``known`` has to do that before.

        Args:
            topic, queue_id, producer_id: Pair of the batch.
            batch: The batch.
            forgotten: List to which batches forgotten in its favour are added, for ``forget_from``.
        """
        key = (topic, queue_id, producer_id)
        windows = self._windows
        window = windows.pop(key, None)
        if window is None:
            oldest = None
            if self._is_at_its_limit(producer_id):
                oldest = next(iter(self._keys_of[producer_id]))
            elif len(windows) >= self._most:
                oldest = next(iter(windows))
            if oldest is not None:
                if forgotten is not None:
                    forgotten += [(oldest, one) for one in windows[oldest].batches]
                self._drop(oldest)
            windows[key] = _Window(batch)
            self._keys_of.setdefault(producer_id, OrderedDict())[key] = None
            return
        windows[key] = window
        own = self._keys_of[producer_id]
        if len(own) > 1:
            own.move_to_end(key)
        batches = window.batches
        if batch.commitlog_offset > batches[-1].commitlog_offset:
            batches.append(batch)
            if len(batches) > (WINDOW_OF_SHARED if topic in SHARED_TOPICS else WINDOW):
                if forgotten is not None:
                    forgotten.append((key, batches[0]))
                del batches[0]
            end = batch.first_sequence + batch.message_count
            if end > window.end:
                window.end = end

    def forget_from(self, keys: Iterable[Key], commitlog_offset: int, forgotten: Forgotten) -> None:
        """Takes back batches noted at or behind an offset, after a write that failed.

        Args:
            keys: Pairs of these batches.
            commitlog_offset: The offset.
            forgotten: Batches that ``note`` has forgotten; they are remembered again.
        """
        front: dict[Key, _Window] = {}
        for key, batch in reversed(forgotten):
            window = front.get(key) or self._windows.get(key)
            if batch.commitlog_offset >= commitlog_offset:
                continue
            if window is not None:
                window.batches.insert(0, batch)
                continue
            front[key] = _Window(batch)
            own = self._keys_of.setdefault(key[2], OrderedDict())
            own[key] = None
            own.move_to_end(key, last=False)
        if front:
            self._windows = {**dict(reversed(front.items())), **self._windows}
        for key in keys:
            window = self._windows.get(key)
            if window is None:
                continue
            batches = window.batches
            while batches and batches[-1].commitlog_offset >= commitlog_offset:
                batches.pop()
            if not batches:
                self._drop(key)

    def cut(self, end_offset: int) -> list[Key]:
        """Forgets producers and queues of which a batch was at or behind an offset.

        Args:
            end_offset: Commit-log offset where the log was cut.

        Returns:
            These pairs: their older batches are to be noted again.
        """
        keys = [
            key
            for key, window in self._windows.items()
            if window.batches[-1].commitlog_offset >= end_offset
        ]
        for key in keys:
            self._drop(key)
        return keys

    def forget_topic(self, topic: str) -> None:
        """Forgets all queues of a topic."""
        for key in [key for key in self._windows if key[0] == topic]:
            self._drop(key)

    def dump(self) -> Iterator[tuple[Key, list[StoredBatch]]]:
        """Yield all windows, the one unused for longest first.

        The iterator may be used in steps while batches are noted: windows that it has not
        reached yet come out in their state by then, new windows do not come out.
        """
        for key in list(self._windows):
            window = self._windows.get(key)
            if window is not None:
                yield key, list(window.batches)

    def load(self, windows: Iterable[tuple[Key, list[StoredBatch]]]) -> None:
        """Replaces all windows by those from ``dump``."""
        self._windows, self._keys_of = {}, {}
        for key, window in windows:
            for batch in window:
                self.note(*key, batch)

    def _is_at_its_limit(self, producer_id: int) -> bool:
        own = self._keys_of.get(producer_id)
        return own is not None and len(own) >= QUEUES_OF_PRODUCER

    def _drop(self, key: Key) -> None:
        del self._windows[key]
        own = self._keys_of[key[2]]
        del own[key]
        if not own:
            del self._keys_of[key[2]]


def _refused(status: PutStatus, now: TimestampMs) -> PutResult:
    return PutResult(status, QueueOffset(-1), CommitLogOffset(-1), CommitLogOffset(-1), now)
