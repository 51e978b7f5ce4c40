"""A store of one node, and the disk below it, which outlives the process.

Records are kept in the order of the log. Writes of a killed process are there for the next one;
after a loss of power only what was synced is, and some of what followed, the last of it torn.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, DiskFull, StoreClosed
from mqmesh.message import StoredMessage
from mqmesh.storage.interface import (
    BatchToPut,
    FlushDiskType,
    GetResult,
    GetStatus,
    MessageStore,
    OnProgress,
    PutResult,
    PutStatus,
    StoreConfig,
    StoreStats,
    Wake,
)
from mqmesh.storage.memory import MemoryStore
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

SLOWEST_SYNCS_MS: Final = (3, 30, 300)
"""A sync takes 1 to so many ms; a disk has one of these."""


class LogRecord(msgspec.Struct):
    """One batch in the log, or a deletion of its topic when there are no bytes.

    Attributes:
        goes_on: The next one is of the same group.
    """

    topic: str
    queue_id: int
    data: bytes
    tag_hashes: bytes
    end: int
    goes_on: bool = False


class Disk:
    """Disk of a broker, which outlives its processes.

    Attributes:
        records: The log.
        durable_offset: End of the synced part of the log.
        epoch: Number of times that a store was opened on it.
        slowest_sync_ms: Longest time of a sync, in ms.
        full: True if no byte more fits.
        sync_fails: True if the next sync fails.
        on_write: Called after a write.
        on_failure: Called when a sync failed.
        opener: Opens the store; planted bugs have another one.
    """

    def __init__(self) -> None:
        self.records: list[LogRecord] = []
        self.durable_offset = 0
        self.epoch = 0
        self.slowest_sync_ms = SLOWEST_SYNCS_MS[0]
        self.full = False
        self.sync_fails = False
        self.on_write: Callable[[], None] | None = None
        self.on_failure: Callable[[], None] = _nothing
        self.opener: Callable[..., LoggedStore] = LoggedStore

    def opener_for(self, node: SimulatedNode) -> Callable[..., MessageStore]:
        """Returns the opener of a broker's store; see ``mqmesh.storage.backends.open_store``."""

        def open_it(
            backend: str,
            directory: Path,
            config: StoreConfig,
            *,
            clock: Clock,
            wake: Wake,
            on_progress: OnProgress,
        ) -> MessageStore:
            return self.opener(self, node, config, clock=clock, wake=wake)

        return open_it

    def release(self) -> None:
        """Does nothing: the disk holds no resources."""

    def lose_power(self, chance: Callable[[int], int]) -> None:
        """Keeps what was synced, and a part of the rest; the record behind it may be torn.

        Args:
            chance: A number from 0 to below its argument.
        """
        kept = [record for record in self.records if record.end <= self.durable_offset]
        rest = self.records[len(kept) :]
        survivors = rest[: chance(len(rest) + 1)]
        torn = rest[len(survivors) : len(survivors) + 1]
        for record in torn:
            cut = chance(len(record.data)) if record.data else 0
            if cut:
                record.data = record.data[:cut] + bytes(len(record.data) - cut)
                survivors.append(record)
        self.records = kept + survivors

    def messages(self, topic: str, broker_name: str) -> list[StoredMessage]:
        """Returns all messages of a topic, in the order of the log."""
        found: list[StoredMessage] = []
        for record in self.records:
            if record.topic == topic and record.data:
                header = check_stored(record.data)
                found += decode_messages(record.data, header, broker_name=broker_name)
        return found


class LoggedStore(MemoryStore):
    """A memory store over a ``Disk``; its syncs are steps of the simulation.

    Args:
        disk: Disk with what is stored already.
        node: The process.
        config: Settings of the broker.
        clock: Clock of the node.
        wake: Called when ``durable_offset`` has moved.
    """

    def __init__(
        self, disk: Disk, node: SimulatedNode, config: StoreConfig, *, clock: Clock, wake: Wake
    ) -> None:
        super().__init__(config, clock=clock)
        self._disk = disk
        disk.epoch += 1
        self._node = node
        self._wake = wake
        self._at_once = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._interval_ms = config.flush_interval_commitlog_ms
        self._syncing = False
        self._failed = False
        self._unseen: deque[tuple[int, tuple[str, int], int]] = deque()
        self._hidden: dict[tuple[str, int], int] = {}
        self._recover()

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Implement ``MessageStore.put``."""
        self._check_writable()
        if self._disk.full:
            raise DiskFull("the simulated disk is full")
        results = super().put(batches, store_timestamp)
        for number, (batch, result) in enumerate(zip(batches, results, strict=True), 1):
            if result.status is PutStatus.PUT_OK:
                following = batches[number].group if number < len(batches) else 0
                self._append(batch, result, goes_on=0 < batch.group == following)
        if results:
            self._plan_sync()
            if self._disk.on_write is not None:
                self._disk.on_write()
        return results

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
        """Implement ``MessageStore.get``."""
        found = super().get(
            topic, queue_id, queue_offset, max_bytes=max_bytes, tag_hashes=tag_hashes
        )
        end = self._hidden.get((topic, queue_id))
        if end is None or queue_offset < 0 or queue_offset > end:
            return found
        if queue_offset == end:
            none = GetStatus.NO_NEW_MESSAGE
            return GetResult(none, QueueOffset(end), QueueOffset(0), QueueOffset(end))
        if found.next_queue_offset <= end:
            return msgspec.structs.replace(found, max_queue_offset=QueueOffset(end))
        data = [one for one in found.data if check_stored(one).next_queue_offset <= end]
        count = sum(check_stored(one).message_count for one in data)
        status = GetStatus.FOUND if data else GetStatus.NO_MATCHED_MESSAGE
        return GetResult(
            status, QueueOffset(end), QueueOffset(0), QueueOffset(end), list(data), count
        )

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        """Implement ``MessageStore.queue_bounds``."""
        bounds = super().queue_bounds(topic, queue_id)
        hidden = self._hidden.get((topic, queue_id))
        return bounds if hidden is None else (bounds[0], QueueOffset(hidden))

    def delete_topic(self, topic: str) -> None:
        """Implement ``MessageStore.delete_topic``."""
        self._check_writable()
        super().delete_topic(topic)
        self._disk.records.append(LogRecord(topic, 0, b"", b"", self._end))

    def stats(self) -> StoreStats:
        """Implement ``MessageStore.stats``."""
        return msgspec.structs.replace(super().stats(), epoch=self._disk.epoch)

    def durable_offset(self) -> CommitLogOffset:
        """Implement ``MessageStore.durable_offset``."""
        self._check_open()
        return CommitLogOffset(self._disk.durable_offset)

    def tick(self, now_ms: int) -> bool:
        """Does nothing, but raises if the store has failed."""
        self._check_writable()
        return False

    def close(self) -> None:
        """Syncs, and forgets everything but the disk."""
        if not self._closed and not self._failed:
            self._disk.durable_offset = self._end
        super().close()

    # ---- The disk ----------------------------------------------------------------------

    def _append(self, batch: BatchToPut, result: PutResult, *, goes_on: bool) -> None:
        queue = batch.topic, batch.queue_id
        data = self._log[result.commitlog_offset]
        self._disk.records.append(
            LogRecord(*queue, data, bytes(batch.tag_hashes), self._end, goes_on)
        )
        if self._at_once:
            self._hidden.setdefault(queue, result.base_queue_offset)
            end = result.base_queue_offset + batch.header.message_count
            self._unseen.append((result.end_offset, queue, end))

    def _plan_sync(self) -> None:
        if self._syncing or self._closed:
            return
        self._syncing = True
        delay_ms = 0 if self._at_once else self._interval_ms
        end = self._end
        self._node.after(
            delay_ms + self._node.random.randint(1, self._disk.slowest_sync_ms),
            lambda: self._sync(end),
        )

    def _sync(self, end: int) -> None:
        self._syncing = False
        if self._closed or self._failed:
            return
        if self._disk.sync_fails:
            self._failed = True  # what it left unsynced may or may not be there
            self._disk.on_failure()
            self._wake()
            return
        self._disk.durable_offset = max(self._disk.durable_offset, end)
        while self._unseen and self._unseen[0][0] <= end:
            _, queue, seen = self._unseen.popleft()
            self._hidden[queue] = seen
            if seen == self._queues[queue].end:
                del self._hidden[queue]
        self._wake()
        if self._end > end:
            self._plan_sync()

    def _check_writable(self) -> None:
        self._check_open()
        if self._failed:
            raise StoreClosed("a sync of the simulated disk failed")

    def _recover(self) -> None:
        records = list(takewhile(self.takes, self._disk.records))
        while records and records[-1].goes_on:  # the log does not end inside of a group
            records.pop()
        self._disk.records = records
        for record in records:
            if record.data:
                self._restore(record)
            else:
                MemoryStore.delete_topic(self, record.topic)
        self._disk.durable_offset = self._end
        self._disk.sync_fails = False

    def takes(self, record: LogRecord) -> bool:
        """Returns True if a record is whole; the log is cut before one that is not."""
        try:
            return not record.data or bool(check_stored(record.data))
        except CorruptBatch:
            return False

    def _restore(self, record: LogRecord) -> None:
        header: BatchHeader = check_stored(record.data)
        plain = BatchToPut(record.topic, record.queue_id, header, record.data, record.tag_hashes)
        MemoryStore.put(self, [plain], header.store_timestamp)


def _nothing() -> None:
    """Ignores the call."""
