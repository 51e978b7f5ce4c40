"""A storage backend of a package of its own: one file beside the store in memory.

What is stored is appended to a journal as it is, and read again at the start;
reading is the memory store's. So it fits what fits into memory. The package's
``entry_points.txt`` makes it known under the name ``journal``.
"""

import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_stored, read_meta
from mqmesh.clock import Clock
from mqmesh.errors import CorruptBatch, StorageError, StoreLocked
from mqmesh.storage.interface import (
    BatchToPut,
    FlushDiskType,
    MessageStore,
    OnProgress,
    PutResult,
    PutStatus,
    RecoveryProgress,
    StoreConfig,
    StoreStats,
    Wake,
)
from mqmesh.storage.memory import MemoryStore
from mqmesh.units import CommitLogOffset, TimestampMs

# Magic, and length of what follows: all batches of a put, of which a crash leaves all or none, or
# the name of a deleted topic.
_HEAD = struct.Struct("<4sI")
_PUT_MAGIC = b"JPUT"
_DELETED_MAGIC = b"JDEL"


class JournalStore(MemoryStore):
    """Batches in memory, and in a journal."""

    def __init__(self, fd: int, config: StoreConfig, *, clock: Clock, wake: Wake) -> None:
        """Takes over the locked journal; see ``open``."""
        super().__init__(config, clock=clock)
        self._fd = fd
        self._wake = wake
        self._sync_flush = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self._durable = CommitLogOffset(0)
        self._flushes = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        config: StoreConfig,
        *,
        clock: Clock,
        wake: Wake,
        on_progress: OnProgress,
    ) -> MessageStore:
        """What the entry point names: called as ``mqmesh.storage.backends.open_store`` says."""
        path = directory / "journal"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StoreLocked(f"{path} is open in another process") from error
        store = cls(fd, config, clock=clock, wake=wake)
        store._replay(path.read_bytes(), on_progress)
        return store

    def _replay(self, journal: bytes, on_progress: OnProgress) -> None:
        """Stores everything again: the same batches get the same offsets."""
        position = 0
        while position < len(journal):
            on_progress(RecoveryProgress("reading the journal", position, len(journal)))
            size = self._replay_one(memoryview(journal)[position:])
            if not size:
                # A crash has torn the last record: nobody was told that it is stored.
                os.ftruncate(self._fd, position)
                break
            position += size
        os.lseek(self._fd, 0, os.SEEK_END)
        self._sync()

    def _replay_one(self, rest: memoryview) -> int:
        if len(rest) < _HEAD.size:
            return 0
        magic, size = _HEAD.unpack_from(rest)
        end: int = _HEAD.size + size
        if end > len(rest):
            return 0
        content = rest[_HEAD.size : end]
        if magic == _DELETED_MAGIC:
            super().delete_topic(str(content, "utf-8"))
            return end
        if magic != _PUT_MAGIC:
            return 0
        try:
            batches = list(iter_batches(content, check_stored))
        except CorruptBatch:
            return 0
        for header, data in batches:
            meta = read_meta(data, header)
            batch = BatchToPut(meta.topic, header.queue_id, header, data, meta.tag_hashes)
            super().put([batch], header.store_timestamp)
        return end

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """See ``MessageStore.put``."""
        results = super().put(batches, store_timestamp)
        new = [one.commitlog_offset for one in results if one.status is PutStatus.PUT_OK]
        if new:
            self._append(_PUT_MAGIC, b"".join(map(self.read_at, new)))
        return results

    def delete_topic(self, topic: str) -> None:
        """See ``MessageStore.delete_topic``."""
        super().delete_topic(topic)
        self._append(_DELETED_MAGIC, topic.encode())

    def _append(self, magic: bytes, content: bytes) -> None:
        data = _HEAD.pack(magic, len(content)) + content
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError("only a part could be written")
            if self._sync_flush:
                self._sync()
        except OSError as error:
            # Memory has what the file lacks. Nobody may read that: the store is closed, and
            # whoever opens it again cuts off the torn record.
            self.close()
            raise StorageError(f"the journal cannot be written: {error}") from error

    def _sync(self) -> None:
        os.fdatasync(self._fd)
        self._flushes += 1
        self._durable = super().durable_offset()
        self._wake()

    def durable_offset(self) -> CommitLogOffset:
        """See ``MessageStore.durable_offset``."""
        super().durable_offset()  # raises if the store was closed
        return self._durable

    def tick(self, now_ms: int) -> bool:
        """Syncs the file; ten times a second is more often than a broker asks for."""
        super().tick(now_ms)
        if self._durable != super().durable_offset():
            self._sync()
        return False

    def stats(self) -> StoreStats:
        """See ``MessageStore.stats``."""
        return msgspec.structs.replace(
            super().stats(),
            backend="journal",
            disk_bytes=os.fstat(self._fd).st_size,
            durable_offset=self._durable,
            flushes=self._flushes,
        )

    def close(self) -> None:
        """See ``MessageStore.close``."""
        if self._fd >= 0:
            super().close()
            os.close(self._fd)  # releases the lock
            self._fd = -1
