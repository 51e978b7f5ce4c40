"""Gives batches their offsets, apart from writing them: the same for every backend.

What a batch gets is decided by the log's end, its queue's end and what is remembered of its
producer. Nothing is written here, and queues stay as they are: the caller writes what was placed,
and then moves their ends; or takes back what is remembered, if that fails.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BROKER_PART_SIZE, Attributes, stamp
from mqmesh.batch.store_check import StoreCheck
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus
from mqmesh.storage.queues.producer_states import ProducerStates, StoredBatch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

# A plain number: operators of enum.Flag take longer than a look-up of the queue.
_REDELIVERED: Final = int(Attributes.REDELIVERED)
_NOWHERE: Final = CommitLogOffset(-1)


class HasEnd(Protocol):
    """A queue, as far as it matters here."""

    end: int


class Places(Protocol):
    """Placement of records, one behind the other.

    Attributes:
        pieces: Buffers of the records placed; read anew after each ``place``.
    """

    pieces: list[Buffer]

    def place(self, size: int) -> int:
        """Return the next record's commit-log offset; raises ``DiskFull`` without room for it."""


Q = TypeVar("Q", bound=HasEnd)
Placed = tuple[BatchToPut, Q, PutResult]
"""New batch, its queue, and the result that its sender will get."""


class InARow:
    """Places without any bounds between them.

    Attributes:
        end: Commit-log offset behind the last one.
        pieces: Two for each record: the broker's part and the rest.
    """

    def __init__(self, end: int) -> None:
        """Begins at a commit-log offset."""
        self.end = end
        self.pieces: list[Buffer] = []

    def place(self, size: int) -> int:
        """Implement ``Places``."""
        position, self.end = self.end, self.end + size
        return position

    def records(self) -> list[bytes]:
        """Return each record in one piece."""
        return [b"".join(pair) for pair in zip(self.pieces[::2], self.pieces[1::2], strict=True)]


class Placement(Generic[Q]):
    """Places batches in one log.

    Attributes:
        duplicates: Batches that were known.
    """

    def __init__(
        self,
        states: ProducerStates,
        queue_of: Callable[[str, int], Q],
        *,
        store_id: int,
        max_batch_bytes: int,
        store_check: StoreCheck | None = None,
    ) -> None:
        """Takes what the offsets depend on.

        Args:
            states: Producers' last batches; get those that are placed.
            queue_of: The queue of a topic with an id, made if need be.
            store_id: Of the store.
            max_batch_bytes: Larger ones are refused.
            store_check: Of the store's key, if it has one.
        """
        self._states = states
        self._queue_of = queue_of
        self._store_id = store_id
        self._max_batch_bytes = max_batch_bytes
        self._store_check = store_check
        self.duplicates = 0

    def place(
        self,
        places: Places,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        epoch: int,
        placed: list[Placed[Q]],
    ) -> list[PutResult]:
        """Gives batches their offsets, and their bytes to ``places``.

        Args:
            places: Where they go.
            batches: As for ``MessageStore.put``.
            store_timestamp: Now, wall clock.
            epoch: Of the log.
            placed: Gets those that are new, before any error.

        Returns:
            One result a batch.

        Raises:
            StorageError: From ``places``; ``take_back`` undoes the rest.
        """
        states, store_id, store_check = self._states, self._store_id, self._store_check
        ends: dict[Q, int] = {}
        results = []
        for batch in batches:
            header, topic, queue_id = batch.header, batch.topic, batch.queue_id
            assert queue_id == header.queue_id
            size, count = header.total_size, header.message_count
            if size > self._max_batch_bytes:
                results.append(_too_large(store_timestamp))
                continue
            if not header.attributes & _REDELIVERED:
                known = states.known(topic, queue_id, header, store_timestamp)
                if known is not None:
                    self.duplicates += known.status is PutStatus.DUPLICATE
                    results.append(known)
                    continue
            queue = self._queue_of(topic, queue_id)
            base = ends.get(queue)
            if base is None:
                base = queue.end
            ends[queue] = base + count
            position = places.place(size)
            places.pieces += (
                stamp(
                    header,
                    commitlog_offset=position,
                    base_queue_offset=base,
                    store_timestamp=store_timestamp,
                    epoch=epoch,
                    store_id=store_id,
                    store_check=store_check,
                ),
                memoryview(batch.data)[BROKER_PART_SIZE:],
            )
            base_offset, start = QueueOffset(base), CommitLogOffset(position)
            end = CommitLogOffset(position + size)
            result = PutResult(PutStatus.PUT_OK, base_offset, start, end, store_timestamp)
            if not header.attributes & _REDELIVERED:
                first = header.first_sequence
                crc = header.producer_crc
                stored = StoredBatch(first, count, base_offset, start, end, store_timestamp, crc)
                states.note(topic, queue_id, header.producer_id, stored)
            placed.append((batch, queue, result))
            results.append(result)
        return results

    def take_back(self, placed: Sequence[Placed[Q]], start: int) -> None:
        """Forgets what was remembered of batches, since they were not written after all.

        Args:
            placed: Them.
            start: Commit-log offset where the first one would have been.
        """
        keys = ((batch.topic, batch.queue_id, batch.header.producer_id) for batch, _, _ in placed)
        self._states.forget_from(keys, start)


def _too_large(store_timestamp: TimestampMs) -> PutResult:
    status = PutStatus.MESSAGE_ILLEGAL
    return PutResult(status, QueueOffset(-1), _NOWHERE, _NOWHERE, store_timestamp)
