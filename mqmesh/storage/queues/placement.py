"""Gives batches their offsets, apart from writing them: the same for every backend.

The offsets of a batch follow from the log's end, its queue's end and the remembered batches of its
producer. Nothing is written here, and queues stay as they are: the caller writes the placed
batches, and then moves the ends of the queues; if the write fails, it takes the remembered batches
back.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BROKER_PART_SIZE, Attributes, stamp
from mqmesh.batch.store_check import StoreCheck
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus, StoreConfig
from mqmesh.storage.queues.producer_states import Forgotten, Key, ProducerStates, StoredBatch
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

# A plain number: operators of enum.Flag take longer than a look-up of the queue.
_REDELIVERED: Final = int(Attributes.REDELIVERED)
_NOWHERE: Final = CommitLogOffset(-1)


class HasEnd(Protocol):
    """A queue, reduced to its end."""

    end: int


class Places(Protocol):
    """Placement of records, one behind the other.

    Attributes:
        pieces: Buffers of the placed records; read anew after each ``place``.
    """

    pieces: list[Buffer]

    def begin_group(self, size: int, count: int) -> None:
        """Make the next records count all or none.

        Args:
            size: Size of all of them together, in bytes.
            count: Number of records.

        Raises:
            DiskFull: No room for them.
        """

    def place(self, size: int) -> int:
        """Return the next record's commit-log offset; raises ``DiskFull`` without room for it."""


Q = TypeVar("Q", bound=HasEnd)
Placed = tuple[BatchToPut, Q, PutResult]
"""New batch, its queue, and the result that its sender will get."""


class InARow:
    """Places without any bounds between them, of which all are written or none.

    Attributes:
        end: Commit-log offset behind the last record.
        pieces: Two buffers for each record: the broker's part and the rest.
    """

    def __init__(self, end: int) -> None:
        """Begins at a commit-log offset."""
        self.end = end
        self.pieces: list[Buffer] = []

    def place(self, size: int) -> int:
        """Implement ``Places``."""
        position, self.end = self.end, self.end + size
        return position

    def begin_group(self, size: int, count: int) -> None:
        """Implement ``Places``."""

    def records(self) -> list[bytes]:
        """Return each record in one piece."""
        return [b"".join(pair) for pair in zip(self.pieces[::2], self.pieces[1::2], strict=True)]


class Placement(Generic[Q]):
    """Places batches in one log.

    Attributes:
        duplicates: Number of batches that were stored before.
    """

    def __init__(
        self,
        states: ProducerStates,
        queue_of: Callable[[str, int], Q],
        *,
        store_id: int,
        config: StoreConfig,
        store_check: StoreCheck | None = None,
    ) -> None:
        """Takes the parts that offsets depend on.

        Args:
            states: Last batches of producers; placed batches are added.
            queue_of: Returns the queue of a topic with an id, made if need be.
            store_id: Identity of the store.
            config: Settings of the store: batches and groups larger than its limits are refused.
            store_check: Check of the store's key, if it has one.
        """
        self._states = states
        self._queue_of = queue_of
        self._store_id = store_id
        self._max_batch_bytes = config.max_batch_bytes
        self._max_group_bytes = config.max_group_bytes
        self._store_check = store_check
        self.duplicates = 0
        self._forgotten: Forgotten = []

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
            places: Placement that gives the offsets.
            batches: As for ``MessageStore.put``.
            store_timestamp: Current time, wall clock.
            epoch: Epoch of the log.
            placed: List to which new batches are added, before any error.

        Returns:
            One result a batch.

        Raises:
            StorageError: From ``places``; ``take_back`` undoes the rest.
        """
        states, store_id, store_check = self._states, self._store_id, self._store_check
        forgotten = self._forgotten = []
        ends: dict[Q, int] = {}
        results: list[PutResult] = []
        group, is_placed = 0, True
        for batch in batches:
            header, topic, queue_id = batch.header, batch.topic, batch.queue_id
            assert queue_id == header.queue_id
            size, count = header.total_size, header.message_count
            if batch.group != group:
                group = batch.group
                judged = self._begin_group(places, batches, len(results), store_timestamp)
                is_placed = not judged
                results += judged
            if group:
                if not is_placed:
                    continue
            elif size > self._max_batch_bytes:
                results.append(_refused(PutStatus.MESSAGE_ILLEGAL, store_timestamp))
                continue
            elif not header.attributes & _REDELIVERED:
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
                states.note(topic, queue_id, header.producer_id, stored, forgotten)
            placed.append((batch, queue, result))
            results.append(result)
        return results

    def _begin_group(
        self, places: Places, batches: Sequence[BatchToPut], at: int, now: TimestampMs
    ) -> list[PutResult]:
        """Judges the group that begins at an index, and places the marker of one to be stored.

        Returns:
            Results of its batches if it is not to be stored; none if it is, or is no group.
        """
        number = batches[at].group
        if not number:
            return []
        end = at + 1
        while end < len(batches) and batches[end].group == number:
            end += 1
        group = batches[at:end]
        sizes = [one.header.total_size for one in group]
        if max(sizes) > self._max_batch_bytes or sum(sizes) > self._max_group_bytes:
            return [_refused(PutStatus.MESSAGE_ILLEGAL, now)] * len(group)
        known: list[PutResult | None] = []
        ends: dict[Key, int] = {}
        new_count = 0
        for one in group:
            header, result = one.header, None
            if not header.attributes & _REDELIVERED:
                result = self._states.known(one.topic, one.queue_id, header, now)
                key, first = (one.topic, one.queue_id, header.producer_id), header.first_sequence
                if first < ends.get(key, 0):
                    result = _refused(PutStatus.SEQUENCE_CONFLICT, now)
                ends[key] = first + header.message_count
                # The group may have more batches of a queue than are remembered.
                new_count += result is None and not self._states.has_forgotten(*key[:2], header)
            known.append(result)
        found = [result for result in known if result is not None]
        if not found and not self._states.make_room(ends, now):
            return [_refused(PutStatus.TOO_MANY_PRODUCERS, now)] * len(group)
        if not found:
            if len(group) > 1:
                places.begin_group(sum(sizes), len(group))
            return []
        statuses = {result.status for result in found}
        if PutStatus.TOO_MANY_PRODUCERS in statuses:
            return [_refused(PutStatus.TOO_MANY_PRODUCERS, now)] * len(group)
        if new_count or statuses != {PutStatus.DUPLICATE}:
            return [_refused(PutStatus.SEQUENCE_CONFLICT, now)] * len(group)
        self.duplicates += len(group)
        return [result or found[0] for result in known]

    def take_back(self, placed: Sequence[Placed[Q]], start: int) -> None:
        """Forgets batches that ``place`` has noted, since they were not written after all.

        Args:
            placed: These batches.
            start: Commit-log offset at which the first one would have been.
        """
        keys = ((batch.topic, batch.queue_id, batch.header.producer_id) for batch, _, _ in placed)
        self._states.forget_from(keys, start, self._forgotten)


def _refused(status: PutStatus, store_timestamp: TimestampMs) -> PutResult:
    return PutResult(status, QueueOffset(-1), _NOWHERE, _NOWHERE, store_timestamp)
