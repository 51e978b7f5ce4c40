"""The one suite, run on every backend."""

from pathlib import Path

from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import FlushDiskType, MessageStore, StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import StoreContract


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
