"""A sync fails once: the page cache then shows, as clean, what the disk does not have."""

import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from mqmesh.errors import StorageError
from mqmesh.storage.interface import FlushDiskType, PutStatus
from mqmesh.storage.store import CommitLogStore
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch
from mqmesh.testing.store_files import (
    PATIENCE_SECONDS,
    SEGMENT_BYTES,
    StoreFiles,
    deliverable,
    put_bodies,
    settle,
)

PAGE = 4096
BODIES = [f"{number} " + "x" * 9_000 for number in range(9)]


class Disk:
    """What the device has of the log's segments, beside what the page cache shows.

    A sync takes the dirty pages to the device. One that fails forgets that they are dirty, as
    Linux does. Pages that are written again with the same bytes are dirty again.
    """

    def __init__(self, files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files = files
        self._device: dict[str, bytearray] = {}
        self._shown: dict[str, bytes] = {}
        self._dirty: dict[str, set[int]] = {}
        self.is_failing = False
        real_write = os.pwrite

        def pwrite(fd: int, data: bytes, position: int) -> int:
            count = real_write(fd, data, position)
            pages = range(position // PAGE, (position + count - 1) // PAGE + 1)
            self._dirty.setdefault(_path_of(fd), set()).update(pages)
            return count

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", self.sync)

    def sync(self, fd: int) -> None:
        """In the place of ``os.fdatasync``."""
        path = _path_of(fd)
        if Path(path).parent.name != "commitlog":
            return
        shown = Path(path).read_bytes()
        before = self._shown.get(path, bytes(len(shown)))
        dirty = self._dirty.pop(path, set())
        dirty |= {
            start // PAGE
            for start in range(0, len(shown), PAGE)
            if shown[start : start + PAGE] != before[start : start + PAGE]
        }
        self._shown[path] = shown
        if self.is_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        device = self._device.setdefault(path, bytearray(len(shown)))
        for page in dirty:
            device[page * PAGE : (page + 1) * PAGE] = shown[page * PAGE : (page + 1) * PAGE]

    def cut_power(self) -> None:
        """From now on the page cache shows what the device has."""
        for path in (self._files.directory / "commitlog").iterdir():
            device = self._device.get(str(path), bytearray(SEGMENT_BYTES))
            path.write_bytes(device)
            self._shown[str(path)] = bytes(device)
        self._dirty.clear()


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class Scene:
    """A store with SYNC_FLUSH on such a disk."""

    def __init__(self, files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = files
        self.disk = Disk(files, monkeypatch)
        self._monkeypatch = monkeypatch
        self._woken = threading.Event()
        self._boots = 0
        files.config = msgspec.structs.replace(
            files.config, flush_disk_type=FlushDiskType.SYNC_FLUSH
        )

    def open(self) -> CommitLogStore:
        store = CommitLogStore.open(
            self.files.directory,
            self.files.config,
            clock=ManualClock(),
            wake=self._woken.set,
            on_progress=lambda progress: None,
            sync=self.disk.sync,
        )
        self.files._stores.append(store)
        return store

    def wait_for_disk(self, store: CommitLogStore) -> None:
        """Until all is synced, or a sync has failed."""
        while store.stats().writable and (
            store.durable_offset() < store.stats().max_commitlog_offset
        ):
            assert self._woken.wait(PATIENCE_SECONDS)
            self._woken.clear()

    def stopped_by_a_failed_sync(self) -> None:
        """Five messages are synced, four are only in the page cache, which holds them for clean."""
        store = self.open()
        put_bodies(store, BODIES[:5])
        self.wait_for_disk(store)
        settle(store)
        self.disk.is_failing = True
        rest = [make_batch([BODIES[n]], first_sequence=n) for n in range(5, len(BODIES))]
        store.put(rest, NOW)
        self.wait_for_disk(store)
        assert not store.stats().writable
        store.close()
        self.disk.is_failing = False

    def cut_power(self) -> None:
        self.files.close()
        self.disk.cut_power()
        self._boots += 1
        boot_id = self._boots.to_bytes(16, "big")
        self._monkeypatch.setattr("mqmesh.storage.opening.read_boot_id", lambda: boot_id)


@pytest.fixture
def scene(files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(files, monkeypatch)


def test_the_disk_of_these_tests_loses_what_a_failed_sync_covered(scene: Scene) -> None:
    scene.stopped_by_a_failed_sync()
    fd = os.open(scene.files.segment(), os.O_RDONLY)
    scene.disk.sync(fd)
    os.close(fd)
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate(BODIES[:5]))


def test_what_is_shown_or_acknowledged_after_a_failed_sync_survives_a_power_cut(
    scene: Scene,
) -> None:
    scene.stopped_by_a_failed_sync()
    again = scene.open()
    assert deliverable(again) == dict(enumerate(BODIES))
    results = again.put([make_batch([BODIES[8]], first_sequence=8)], NOW)
    assert results[0].status is PutStatus.DUPLICATE
    assert results[0].end_offset <= again.durable_offset()
    put_bodies(again, ["new"])
    scene.wait_for_disk(again)
    again.close()
    scene.cut_power()
    recovered = scene.open()
    assert deliverable(recovered) == dict(enumerate([*BODIES, "new"]))
    assert not recovered.stats().damaged


def test_a_store_whose_sync_fails_again_at_its_start_does_not_start(scene: Scene) -> None:
    scene.stopped_by_a_failed_sync()
    scene.disk.is_failing = True
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be synced"):
            scene.open()
    scene.disk.is_failing = False
    assert deliverable(scene.open()) == dict(enumerate(BODIES))
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate(BODIES))


def test_without_its_checkpoint_the_last_segments_are_not_believed_either(scene: Scene) -> None:
    scene.stopped_by_a_failed_sync()
    (scene.files.directory / "checkpoint").unlink()
    assert deliverable(scene.open()) == dict(enumerate(BODIES))
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate(BODIES))


def test_after_an_orderly_stop_nothing_is_written_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = scene.open()
    put_bodies(store, BODIES)
    scene.wait_for_disk(store)
    store.close()
    written = []
    real_write = os.pwrite

    def pwrite(fd: int, data: bytes, position: int) -> int:
        written.append(_path_of(fd))
        return real_write(fd, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    scene.open()
    assert [path for path in written if "commitlog" in path] == []
