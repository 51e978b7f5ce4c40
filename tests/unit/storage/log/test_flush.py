"""The flush thread."""

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.storage.log.flush import Flusher

PATIENCE = 10


class Disk:
    """Syncs only when the test lets it."""

    def __init__(self) -> None:
        self.syncs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.gate = threading.Semaphore(0)
        self.error: OSError | None = None

    def sync(self, fd: int) -> None:
        self.syncs.put(fd)
        assert self.gate.acquire(timeout=PATIENCE)
        if self.error is not None:
            raise self.error


class Waker:
    """Counts calls, and lets the test wait for one."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self) -> None:
        self.calls.put(None)

    def wait(self) -> None:
        self.calls.get(timeout=PATIENCE)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def waker() -> Waker:
    return Waker()


def make(disk: Disk, waker: Waker, *, at_once: bool = True, interval_ms: int = 60_000) -> Flusher:
    return Flusher(
        durable_offset=100, at_once=at_once, interval_ms=interval_ms, wake=waker, sync=disk.sync
    )


def test_many_writes_share_one_sync(disk: Disk, waker: Waker) -> None:
    flusher = make(disk, waker)
    flusher.written(200, [7])
    assert disk.syncs.get(timeout=PATIENCE) == 7
    # The disk is busy; meanwhile more is written.
    for end in range(300, 1000, 100):
        flusher.written(end, [7, 8])
    assert flusher.durable_offset == 100
    disk.gate.release()
    waker.wait()
    assert flusher.durable_offset == 200
    disk.gate.release(2)
    waker.wait()
    assert flusher.durable_offset == 900
    assert flusher.flushes == 2
    flusher.close()


def test_without_hurry_a_sync_waits_for_the_interval(disk: Disk, waker: Waker) -> None:
    flusher = make(disk, waker, at_once=False)
    flusher.written(200, [7])
    flusher.written(300, [7])
    assert disk.syncs.empty()
    flusher.written(400, [7], urgent=True)
    disk.gate.release()
    waker.wait()
    assert (flusher.durable_offset, flusher.flushes) == (400, 1)
    flusher.close()


def test_a_short_interval_ends_by_itself(disk: Disk, waker: Waker) -> None:
    flusher = make(disk, waker, at_once=False, interval_ms=10)
    disk.gate.release(100)
    flusher.written(200, [7])
    waker.wait()
    assert flusher.durable_offset == 200
    flusher.close()


def test_closing_syncs_what_is_left(disk: Disk, waker: Waker) -> None:
    flusher = make(disk, waker, at_once=False)
    disk.gate.release(100)
    flusher.written(200, [7])
    flusher.close()
    assert flusher.durable_offset == 200
    flusher.close()


def test_a_failed_sync_is_the_last_one(disk: Disk, waker: Waker) -> None:
    flusher = make(disk, waker)
    disk.error = OSError(5, "refused")
    disk.gate.release(100)
    flusher.written(200, [7, 8])
    waker.wait()
    assert flusher.error is disk.error
    assert flusher.durable_offset == 100
    flusher.written(300, [7, 8], urgent=True)
    flusher.close()
    assert disk.syncs.get(timeout=PATIENCE) == 7
    assert disk.syncs.empty()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_an_idle_thread_is_woken_by_every_write(waker: Waker, fd: int) -> None:
    flusher = Flusher(
        durable_offset=0, at_once=True, interval_ms=60_000, wake=waker, sync=os.fdatasync
    )
    for end in range(1, 200):
        flusher.written(end, [fd])
        waker.wait()
        assert flusher.durable_offset == end
    flusher.close()
