"""The one suite, run on every backend."""

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mqmesh.storage.backends import open_store
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import BatchToPut, FlushDiskType, MessageStore, PutResult, StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import StoreContract
from mqmesh.units import TimestampMs


class TestMemoryStore(StoreContract):
    """The plain twin."""

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        return open_store(
            "memory",
            directory,
            config,
            clock=ManualClock(),
            wake=lambda: None,
            on_progress=lambda progress: None,
        )


class TestCommitLogStore(StoreContract):
    """The default backend, with the flush type whose batches are seen at once."""

    durable = True

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        assert config.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        return open_store(
            "commitlog",
            directory,
            config,
            clock=ManualClock(),
            wake=lambda: None,
            on_progress=lambda progress: None,
        )


class TestLmdbStore(StoreContract):
    """Everything in one LMDB environment, synced now and then."""

    durable = True

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        return open_store(
            "lmdb",
            directory,
            config,
            clock=ManualClock(),
            wake=lambda: None,
            on_progress=lambda progress: None,
        )


class TestLmdbStoreSyncFlush(TestLmdbStore):
    """The same, where every commit is synced."""

    config = msgspec.structs.replace(StoreContract.config, flush_disk_type=FlushDiskType.SYNC_FLUSH)


class PatientStore(CommitLogStore):
    """Waits in every put until consumers may see it."""

    woken: threading.Event

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        """Puts, and waits for the disk."""
        results = super().put(batches, store_timestamp)
        end = max((result.end_offset for result in results), default=0)
        while self.durable_offset() < end:
            assert self.woken.wait(10)
            self.woken.clear()
        return results


class TestSyncFlush(StoreContract):
    """The default backend, where every answer waits for the disk."""

    durable = True
    config = msgspec.structs.replace(StoreContract.config, flush_disk_type=FlushDiskType.SYNC_FLUSH)

    def open_store(self, directory: Path, config: StoreConfig) -> MessageStore:
        woken = threading.Event()
        store = PatientStore.open(
            directory,
            config,
            clock=ManualClock(),
            wake=woken.set,
            on_progress=lambda progress: None,
        )
        assert isinstance(store, PatientStore)
        store.woken = woken
        return store
