"""MemoryStore: the interface's plain twin, for tests and for throw-away brokers."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from mqmesh.batch.record_batch import (
    BatchHeader,
    check_stored,
    read_header,
)
from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, OffsetOutOfRange, StoreClosed
from mqmesh.storage.interface import (
    BatchToPut,
    GetResult,
    GetStatus,
    MessageStore,
    PutResult,
    StoreConfig,
    StoreStats,
)
from mqmesh.storage.queues.placement import InARow, Placed, Placement
from mqmesh.storage.queues.producer_states import ProducerStates, StoredBatch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

STORE_ID: Final = 1
"""All memory stores have the same id: none outlives its process."""


class _Queue:
    """Batches of one queue; the lists run side by side."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.batches: list[bytes] = []
        self.headers: list[BatchHeader] = []
        self.hashes: list[tuple[int, ...]] = []
        self.end = 0


class MemoryStore(MessageStore):
    """Keeps batches in lists. Everything is durable at once, until the process ends."""

    def __init__(self, config: StoreConfig, *, clock: Clock) -> None:
        """Starts empty.

        Args:
            config: Settings, of which only those of producers and the segment size, the limit of a
                batch, matter.
            clock: Not used: the caller gives the time at which a batch is stored.
        """
        del clock
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._log: dict[int, bytes] = {}
        self._end = 0
        self._states = ProducerStates(config.max_producer_states, config.producer_state_min_age_ms)
        self._placement = Placement(
            self._states,
            self._find_or_add,
            store_id=STORE_ID,
            config=config,
        )
        self._put_batches = 0
        self._put_messages = 0
        self._closed = False

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Implement ``MessageStore.put``."""
        self._check_open()
        places = InARow(self._end)
        placed: list[Placed[_Queue]] = []
        results = self._placement.place(places, batches, store_timestamp, 1, placed)
        for (batch, queue, result), data in zip(placed, places.records(), strict=True):
            count = batch.header.message_count
            queue.bases.append(queue.end)
            queue.batches.append(data)
            queue.headers.append(read_header(data))
            queue.hashes.append(_hashes(batch.tag_hashes, count))
            queue.end += count
            self._log[result.commitlog_offset] = data
            self._put_messages += count
        self._put_batches += len(placed)
        self._end = places.end
        return results

    def _find_or_add(self, topic: str, queue_id: int) -> _Queue:
        return self._queues.setdefault((topic, queue_id), _Queue())

    def get(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_bytes: int,
        tag_hashes: frozenset[int] | None = None,
        verify: bool = False,
    ) -> GetResult:
        """Implement ``MessageStore.get``; bytes in memory need no check."""
        self._check_open()
        queue = self._queues.get((topic, queue_id)) or _Queue()
        end = QueueOffset(queue.end)
        if queue_offset < 0:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, QueueOffset(0), QueueOffset(0), end)
        if queue_offset >= end:
            status = GetStatus.NO_NEW_MESSAGE if queue_offset == end else GetStatus.OFFSET_OVERFLOW
            return GetResult(status, end, QueueOffset(0), end)
        data: list[bytes] = []
        size = count = 0
        position = queue_offset
        for number in range(bisect_right(queue.bases, queue_offset) - 1, len(queue.bases)):
            batch, header = queue.batches[number], queue.headers[number]
            hashes = queue.hashes[number][position - header.base_queue_offset :]
            if tag_hashes is None or not tag_hashes.isdisjoint(hashes):
                if data and size + len(batch) > max_bytes:
                    break
                data.append(batch)
                size += len(batch)
                count += header.next_queue_offset - position
            position = header.next_queue_offset
        status = GetStatus.FOUND if data else GetStatus.NO_MATCHED_MESSAGE
        return GetResult(status, QueueOffset(position), QueueOffset(0), end, data, count)

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Implement ``MessageStore.queue_bounds``."""
        self._check_open()
        queue = self._queues.get((topic, queue_id))
        return QueueOffset(0), QueueOffset(0 if queue is None else queue.end)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: TimestampMs) -> QueueOffset:
        """Implement ``MessageStore.offset_by_time``."""
        self._check_open()
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return QueueOffset(0)
        number = bisect_left(queue.headers, timestamp_ms, key=lambda h: h.store_timestamp)
        return QueueOffset(queue.bases[number] if number < len(queue.bases) else queue.end)

    def read_at(self, commitlog_offset: CommitLogOffset) -> bytes:
        """Implement ``MessageStore.read_at``."""
        self._check_open()
        if not 0 <= commitlog_offset < self._end:
            raise OffsetOutOfRange(f"{commitlog_offset} is not between 0 and {self._end}")
        data = self._log.get(commitlog_offset)
        if data is None:
            raise CorruptRecord(f"no batch begins at {commitlog_offset}")
        check_stored(data)
        return data

    def producer_window(self, topic: str, queue_id: int, producer_id: int) -> list[StoredBatch]:
        """Implement ``MessageStore.producer_window``."""
        self._check_open()
        return self._states.window((topic, queue_id, producer_id))

    def queues(self, topic: str) -> list[int]:
        """Implement ``MessageStore.queues``."""
        self._check_open()
        return sorted(queue_id for name, queue_id in self._queues if name == topic)

    def topics(self) -> list[str]:
        """Implement ``MessageStore.topics``."""
        self._check_open()
        return list({name for name, _ in self._queues})

    def delete_topic(self, topic: str) -> None:
        """Implement ``MessageStore.delete_topic``."""
        self._check_open()
        for queue_id in self.queues(topic):
            del self._queues[topic, queue_id]
        self._states.forget_topic(topic)

    def durable_offset(self) -> CommitLogOffset:
        """Implement ``MessageStore.durable_offset``."""
        self._check_open()
        return CommitLogOffset(self._end)

    def tick(self, now_ms: int) -> bool:
        """Do nothing but check that the store is open."""
        self._check_open()
        return False

    def stats(self) -> StoreStats:
        """Implement ``MessageStore.stats``."""
        self._check_open()
        return StoreStats(
            backend="memory",
            max_commitlog_offset=self._end,
            durable_offset=self.durable_offset(),
            topics=len({name for name, _ in self._queues}),
            queues=len(self._queues),
            put_batches=self._put_batches,
            put_messages=self._put_messages,
            duplicates=self._placement.duplicates,
            epoch=1,
            store_id=STORE_ID,
        )

    def close(self) -> None:
        """Forgets everything."""
        self._closed = True
        self._queues.clear()
        self._log.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the memory store was closed")


def _hashes(tag_hashes: bytes, message_count: int) -> tuple[int, ...]:
    if len(tag_hashes) <= 8:
        return (int.from_bytes(tag_hashes, "little"),) * message_count
    return tuple(memoryview(tag_hashes).cast("Q"))
