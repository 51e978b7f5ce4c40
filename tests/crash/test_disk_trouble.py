"""The disk is full, refuses, or fails to sync: nothing is acknowledged that is not so."""

import builtins
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from harness.store_files import (
    PATIENCE_SECONDS,
    SEGMENT_BYTES,
    StoreFiles,
    deliverable,
    put_bodies,
    settle,
)

from mqmesh.errors import DiskFull, StorageError, StoreClosed, TooManyOpenFiles
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import FlushDiskType, StoreConfig
from mqmesh.storage.queues.queue_tail import ROW_BYTES
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue

LARGE = "x" * 20_000


class FailingCalls:
    """Makes a call of ``os`` fail for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def fail(self, name: str, error_number: int, *, after_bytes: int = 0) -> Callable[[], None]:
        """The call writes so many bytes and fails when it is made again; returns the cure."""
        real = getattr(os, name)
        room = after_bytes

        def failing(fd: int, *arguments: Any) -> int:
            nonlocal room
            if room <= 0:
                raise OSError(error_number, os.strerror(error_number))
            data, position = arguments
            joined = b"".join(data) if name == "pwritev" else bytes(data)
            count = os.pwrite(fd, joined[:room], position)
            room -= count
            return count

        self._monkeypatch.setattr(os, name, failing)
        return lambda: self._monkeypatch.setattr(os, name, real)


@pytest.fixture
def calls(files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> FailingCalls:
    """No pages are ready, so that everything is written by calls."""
    files.config = msgspec.structs.replace(files.config, commit_log_window_bytes=0)
    return FailingCalls(monkeypatch)


def full_disk(files: StoreFiles) -> CommitLogStore:
    """A store whose segment is nearly full, and that may take no blocks for another one."""
    files.config = msgspec.structs.replace(files.config, disk_reserve_bytes=0)
    store = files.open()
    store._log._room._keep_free_bytes = 1 << 60
    put_bodies(store, [LARGE] * 3)
    # The next one gets its name, and no blocks.
    store.wait_for_chores()
    store.tick(0)
    assert files.segment(1).stat().st_blocks == 0
    return store


def test_a_full_disk_refuses_and_changes_nothing(files: StoreFiles) -> None:
    store = full_disk(files)
    before = store.stats()
    for _ in range(3):
        with pytest.raises(DiskFull):
            store.put(
                [make_batch(["small"], first_sequence=3), make_batch([LARGE], first_sequence=4)],
                NOW,
            )
    assert store.stats() == msgspec.structs.replace(before, disk_full=True)
    assert read_queue(store) == [LARGE] * 3
    # What still fits is stored, and reading goes on.
    put_bodies(store, ["small"])
    assert read_queue(store) == [LARGE] * 3 + ["small"]


def test_writing_resumes_when_there_is_room_again(files: StoreFiles) -> None:
    store = full_disk(files)
    with pytest.raises(DiskFull):
        put_bodies(store, [LARGE])
    store.tick(0)
    store._log._room._keep_free_bytes = 0
    put_bodies(store, [LARGE])
    assert read_queue(store) == [LARGE] * 4
    store.close()
    assert read_queue(files.open()) == [LARGE] * 4


def test_a_refused_batch_may_be_sent_again(files: StoreFiles) -> None:
    store = full_disk(files)
    batch = make_batch([LARGE], first_sequence=3)
    with pytest.raises(DiskFull):
        store.put([batch], NOW)
    store._log._room._keep_free_bytes = 0
    (result,) = store.put([batch], NOW)
    assert result.base_queue_offset == 3
    assert result.status.name == "PUT_OK"


def test_a_store_opens_on_a_full_disk_and_deletes_nothing(files: StoreFiles) -> None:
    store = full_disk(files)
    crashed = files.copy()
    # A copy has blocks where the original has none.
    os.truncate(crashed.segment(1), 0)
    os.truncate(crashed.segment(1), SEGMENT_BYTES)
    store.close()
    crashed.config = msgspec.structs.replace(crashed.config, disk_reserve_bytes=1 << 60)
    recovered = crashed.open()
    assert read_queue(recovered) == [LARGE] * 3
    with pytest.raises(DiskFull):
        put_bodies(recovered, [LARGE])
    put_bodies(recovered, ["small"])
    crashed.close()
    assert len(read_queue(crashed.open())) == 4
    crashed.close()


@pytest.mark.parametrize("after_bytes", [0, 10, 150, 5000, 12_000])
@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_no_trace(
    files: StoreFiles, calls: FailingCalls, after_bytes: int, error_number: int
) -> None:
    store = files.open()
    put_bodies(store, ["a", "b"])
    cures = [
        calls.fail("pwritev", error_number, after_bytes=after_bytes),
        calls.fail("pwrite", error_number),
    ]
    with pytest.raises(DiskFull if error_number == errno.ENOSPC else StorageError):
        store.put([make_batch(["c" * 5000], first_sequence=n) for n in range(2, 5)], NOW)
    for cure in cures:
        cure()
    assert read_queue(store) == ["a", "b"]
    crashed = files.copy()
    found = deliverable(crashed.open())
    assert list(found.values())[:2] == ["a", "b"]
    crashed.close()
    # What is stored now ends where a batch of the failed write begins.
    put_bodies(store, ["c" * 4960])
    put_bodies(store, ["d"])
    good = read_queue(store)
    assert good == ["a", "b", "c" * 4960, "d"]
    crashed = files.copy()
    assert deliverable(crashed.open()) == dict(enumerate(good))
    crashed.close()


def test_queues_that_cannot_be_written_stay_in_memory(
    files: StoreFiles, calls: FailingCalls
) -> None:
    store = files.open()
    put_bodies(store, [f"{number}" for number in range(50)])
    cure = calls.fail("pwrite", errno.ENOSPC)
    for now_ms in range(0, 20_000, 500):
        store.tick(now_ms)
    assert store.stats().unwritten_queue_bytes == 50 * ROW_BYTES
    assert len(read_queue(store)) == 50
    cure()
    settle(store, 30_000)
    assert store.stats().unwritten_queue_bytes == 0


def test_memory_for_queues_is_bounded_on_a_full_disk(
    files: StoreFiles, calls: FailingCalls
) -> None:
    files.config = msgspec.structs.replace(files.config, consume_queue_tail_bytes=65_536)
    store = files.open()
    cure = calls.fail("pwrite", errno.ENOSPC)
    stored = 0
    with pytest.raises(DiskFull):
        for number in range(10_000):
            store.put([make_batch(first_sequence=number)], NOW)
            stored += 1
    assert stored == 65_536 // ROW_BYTES + 1
    cure()
    store.put([make_batch(first_sequence=100_000)], NOW)
    assert store.queue_bounds("topic", 0)[1] == stored + 1


def open_with_failing_sync(
    files: StoreFiles, flush_disk_type: FlushDiskType, name: str
) -> tuple[CommitLogStore, list[bool]]:
    """A store whose syncs of files with a name in their path fail once the list says so."""
    broken = [False]
    failed: set[int] = set()

    def sync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        inode = os.fstat(fd).st_ino
        assert inode not in failed, f"{path} is synced again after it failed"
        if broken[0] and name in path:
            failed.add(inode)
            raise OSError(errno.EIO, "Input/output error")
        os.fdatasync(fd)

    config = StoreConfig(
        flush_disk_type=flush_disk_type,
        flush_interval_commitlog_ms=10,
        mapped_file_size_commit_log=SEGMENT_BYTES,
        checkpoint_interval_ms=100,
    )
    store = CommitLogStore.open(
        files.directory,
        config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
        machine=Machine(sync=sync),
    )
    return store, broken


@pytest.mark.parametrize("flush_disk_type", list(FlushDiskType))
@pytest.mark.parametrize("name", ["commitlog", "consumequeue", "checkpoint"])
def test_a_failed_sync_stops_the_store(
    files: StoreFiles, flush_disk_type: FlushDiskType, name: str
) -> None:
    store, broken = open_with_failing_sync(files, flush_disk_type, name)
    put_bodies(store, ["a"])
    settle(store)
    durable = store.durable_offset()
    broken[0] = True
    store.put([make_batch(["b"], first_sequence=7)], NOW)
    with pytest.raises(StoreClosed, match="Input/output error"):
        settle(store, 10_000)
    with pytest.raises(StoreClosed):
        put_bodies(store, ["c"])
    with pytest.raises(StoreClosed):
        store.delete_topic("topic")
    if name == "commitlog":
        assert store.durable_offset() == durable
    # Reading goes on, but for what SYNC_FLUSH has not made durable.
    assert read_queue(store)[0] == "a"
    assert store.stats().flush_errors == 1
    assert not store.stats().writable
    store.close()
    recovered = files.open()
    assert read_queue(recovered)[0] == "a"
    assert not recovered.stats().started_clean
    recovered.close()


def test_a_sync_that_fails_is_not_acknowledged(files: StoreFiles) -> None:
    store, broken = open_with_failing_sync(files, FlushDiskType.SYNC_FLUSH, "commitlog")
    broken[0] = True
    (result,) = store.put([make_batch(["a"])], NOW)
    with pytest.raises(StoreClosed):
        settle(store)
    assert store.durable_offset() < result.end_offset
    assert store.queue_bounds("topic", 0) == (0, 0)
    store.close()


@pytest.mark.parametrize("name", ["consumequeue", "queue-table", "commitlog"])
def test_want_of_descriptors_only_delays(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Connections took all descriptors: the store waits, goes on, and leaves out no file."""
    synced: set[str] = set()

    def sync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        os.fdatasync(fd)

    files.config = msgspec.structs.replace(files.config, checkpoint_interval_ms=100)
    store = CommitLogStore.open(
        files.directory,
        files.config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
        machine=Machine(sync=sync),
    )
    for queue_id in range(3):
        store.put([make_batch(["a"], queue_id=queue_id)], NOW)
    real_open, refused = os.open, 0

    def scarce(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        nonlocal refused
        if name in str(path):
            refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, flags, *arguments, **keywords)

    real_io_open = builtins.open

    def scarce_io(path: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal refused
        if name in str(path):
            refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_io_open(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", scarce)
        patch.setattr(builtins, "open", scarce_io)
        now_ms = 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        # The log is refused by what is put below.
        while now_ms < 5_000 or not (refused or name == "commitlog"):
            assert time.monotonic() < deadline, "nothing is opened"
            now_ms += 50
            store.tick(now_ms)
            store.wait_for_chores()
        with suppress(TooManyOpenFiles):
            for number in range(1, 5):
                store.put([make_batch([LARGE], first_sequence=number)], NOW)
    assert refused
    assert store.stats().writable
    put_bodies(store, ["afterwards"])
    settle(store, now_ms)
    queue_files = {str(files.directory / "consumequeue" / path) for path in files.queue_files()}
    assert len(queue_files) == 3
    assert queue_files <= synced
    assert read_queue(store)[-1] == "afterwards"
    store.close()
