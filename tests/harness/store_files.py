"""A commit log store's files, and verbs of damage for them: for crash tests."""

import shutil
import time
from pathlib import Path
from typing import Final

from mqmesh.batch.record_batch import decode_messages, read_header
from mqmesh.clock import Clock
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.disk_space import SpaceOf, system_space
from mqmesh.storage.interface import GetStatus, MessageStore, RecoveryProgress, StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, batches_in, make_batch
from mqmesh.units import KIB

SEGMENT_BYTES: Final = 64 * KIB
PATIENCE_SECONDS: Final = 50


class StoreFiles:
    """A store's directory, and verbs of damage for it."""

    def __init__(self, directory: Path, config: StoreConfig | None = None) -> None:
        """Names the directory; nothing is made yet.

        Args:
            directory: The store's.
            config: Settings of the store; with segments of ``SEGMENT_BYTES``.
        """
        self.directory = directory
        self.config = config or StoreConfig(
            mapped_file_size_commit_log=SEGMENT_BYTES,
            mapped_file_size_consume_queue=64,
            checkpoint_interval_ms=1000,
            # Syncs come by checkpoints only, so that a test knows what is synced.
            flush_interval_commitlog_ms=600_000,
        )
        self.progress: list[RecoveryProgress] = []
        self._copies = 0
        self._stores: list[CommitLogStore] = []

    def open(
        self, *, clock: Clock | None = None, space_of: SpaceOf = system_space
    ) -> CommitLogStore:
        """Opens the store, recovered.

        Args:
            clock: Source of time; one that stands still by default.
            space_of: Looks at the disk.
        """
        store = CommitLogStore.open(
            self.directory,
            self.config,
            clock=clock or ManualClock(),
            wake=lambda: None,
            on_progress=self.progress.append,
            machine=Machine(space_of=space_of),
        )
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Closes all stores that a test has left open."""
        for store in self._stores:
            store.close()

    def copy(self, *, at_rest: bool = True) -> "StoreFiles":
        """Copies the files as they are now: the state after the death of the process.

        Args:
            at_rest: Wait until the helper threads of the stores that were opened here change
                nothing; else the caller stops them.
        """
        if at_rest:
            for store in self._stores:
                store.wait_for_chores()
        self._copies += 1
        name = f"{self.directory.name}-{self._copies}"
        copy = StoreFiles(self.directory.with_name(name), self.config)
        shutil.copytree(self.directory, copy.directory)
        return copy

    def segment(self, number: int = 0) -> Path:
        """Returns the file of a segment of the log."""
        return self.directory / "commitlog" / f"{number * SEGMENT_BYTES:020d}"

    def queue_files(self) -> dict[str, bytes]:
        """Returns the content of all consume queue files by their path."""
        root = self.directory / "consumequeue"
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def write(self, commitlog_offset: int, data: bytes) -> None:
        """Puts bytes into the log."""
        number, position = divmod(commitlog_offset, SEGMENT_BYTES)
        assert position + len(data) <= SEGMENT_BYTES
        with open(self.segment(number), "r+b") as file:
            file.seek(position)
            file.write(data)

    def read(self, commitlog_offset: int, size: int) -> bytes:
        """Reads bytes of the log, of one segment."""
        number, position = divmod(commitlog_offset, SEGMENT_BYTES)
        return self.segment(number).read_bytes()[position : position + size]

    def flip(self, commitlog_offset: int, bit: int = 0) -> None:
        """Flips a bit of the log."""
        byte = self.read(commitlog_offset, 1)[0] ^ (1 << bit)
        self.write(commitlog_offset, bytes([byte]))


def settle(store: CommitLogStore, start_ms: int = 0) -> int:
    """Ticks until everything stored so far is in a checkpoint and synced.

    Returns:
        The monotonic time of the last tick, in ms.
    """
    end = store.stats().max_commitlog_offset
    now_ms = start_ms
    deadline = time.monotonic() + PATIENCE_SECONDS
    while store.checkpointed_through() < end:
        assert time.monotonic() < deadline, "the checkpoint never comes"
        now_ms += 1
        if not store.tick(now_ms):
            store.wait_for_chores()
    return now_ms


def put_bodies(
    store: MessageStore, bodies: list[str], *, topic: str = "topic", queue_id: int = 0
) -> list[int]:
    """Stores one batch a body, in puts of one; returns their commit-log offsets."""
    _, end = store.queue_bounds(topic, queue_id)
    offsets: list[int] = []
    for number, body in enumerate(bodies):
        (result,) = store.put(
            [make_batch([body], topic=topic, queue_id=queue_id, first_sequence=end + number)], NOW
        )
        offsets.append(result.commitlog_offset)
    return offsets


def deliverable(store: MessageStore, topic: str = "topic", queue_id: int = 0) -> dict[int, str]:
    """Reads what a patient consumer gets: bodies by queue offset, past everything damaged."""
    found: dict[int, str] = {}
    queue_offset, end = store.queue_bounds(topic, queue_id)
    while queue_offset < end:
        result = store.get(topic, queue_id, queue_offset, max_bytes=100_000)
        assert result.status in (GetStatus.FOUND, GetStatus.NO_MATCHED_MESSAGE)
        for batch in batches_in(result):
            for message in decode_messages(batch, read_header(batch)):
                found[message.queue_offset] = message.body.decode()
        queue_offset = result.next_queue_offset
    return found
