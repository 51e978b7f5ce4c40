"""The search for a time, where messages are lost."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch
from mqmesh.units import MIB, TimestampMs

LOST = 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CommitLogStore]:
    config = StoreConfig(
        mapped_file_size_commit_log=MIB, mapped_file_size_consume_queue=LOST, disk_reserve_bytes=0
    )
    store = CommitLogStore.open(
        tmp_path,
        config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )
    yield store
    store.close()


def put(store: CommitLogStore, number: int) -> None:
    batch = make_batch(["x"] * 3, first_sequence=3 * number)
    store.put([batch], TimestampMs(NOW + number))


@pytest.mark.parametrize("in_files", [False, True])
def test_many_lost_messages_are_passed_with_few_reads(
    store: CommitLogStore, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    for number in range(5):
        put(store, number)
    (queue,) = store._queues
    store._queues.skip_to(queue, 15 + LOST)
    for number in range(5, 10):
        put(store, number)
    if in_files:
        store._queues.write(queue)
    reads = 0
    system_pread = os.pread

    def counted_pread(fd: int, size: int, position: int) -> bytes:
        nonlocal reads
        reads += 1
        return system_pread(fd, size, position)

    monkeypatch.setattr(os, "pread", counted_pread)
    for number in range(11):
        reads = 0
        # The first batch behind the lost ones decides for them.
        wanted = 3 * number if number <= 5 else LOST + 3 * number
        assert store.offset_by_time("topic", 0, TimestampMs(NOW + number)) == wanted
        assert reads < 100
