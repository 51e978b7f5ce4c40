"""A sync fails once: the page cache then shows, as clean, what the disk does not have."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

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

from mqmesh.errors import StorageError
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import FlushDiskType, PutStatus
from mqmesh.storage.log import disk_check
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch

PAGE = 4096
BODIES = [f"{number} " + "x" * 9_000 for number in range(9)]


class Disk:
    """What the device has of the log's segments, beside what the page cache shows.

    A sync takes the dirty pages to the device. One that fails forgets that they are dirty, as
    Linux does. Pages that are written again with the same bytes are dirty again. A page for which
    a sync failed once is lost for as long as its file is there, whatever is written to it and
    synced later: ext4 without a journal does that, where a file's blocks were new.
    """

    def __init__(self, files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files = files
        # By file, not by name; each is held open, so that no other gets its number.
        self._device: dict[int, bytearray] = {}
        self._shown: dict[int, bytes] = {}
        self._dirty: dict[int, set[int]] = {}
        self._lost: dict[int, set[int]] = {}
        self._held: dict[int, int] = {}
        self._dropped: dict[int, set[int]] = {}
        self.is_failing = False
        self.has_direct_reads = True
        self._read = os.pread
        real_write = os.pwrite

        def pwrite(fd: int, data: bytes, position: int) -> int:
            count = real_write(fd, data, position)
            if Path(_path_of(fd)).parent.name == "commitlog":
                pages = range(position // PAGE, (position + count - 1) // PAGE + 1)
                self._dirty.setdefault(self._number_of(fd), set()).update(pages)
                self._dropped.get(self._number_of(fd), set()).difference_update(pages)
            return count

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fdatasync", self.sync)
        monkeypatch.setattr(os, "posix_fadvise", self._drop)
        monkeypatch.setattr(disk_check, "pages_in_memory", self._pages_in_memory)
        monkeypatch.setattr(disk_check, "DirectFile", lambda path: _Direct(self, path))

    def sync(self, fd: int) -> None:
        """In the place of ``os.fdatasync``."""
        if Path(_path_of(fd)).parent.name != "commitlog":
            return
        number = self._number_of(fd)
        shown = self._read(fd, SEGMENT_BYTES, 0)
        before = self._shown.get(number, bytes(len(shown)))
        dirty = self._dirty.pop(number, set())
        dirty |= {
            start // PAGE
            for start in range(0, len(shown), PAGE)
            if shown[start : start + PAGE] != before[start : start + PAGE]
        }
        self._shown[number] = shown
        lost = self._lost.setdefault(number, set())
        if self.is_failing:
            lost |= dirty
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        device = self._device.setdefault(number, bytearray(len(shown)))
        for page in dirty - lost:
            device[page * PAGE : (page + 1) * PAGE] = shown[page * PAGE : (page + 1) * PAGE]

    def has(self, path: str) -> bytes:
        """What the device has of a segment."""
        number = os.stat(path).st_ino
        return bytes(self._device.get(number, bytes(SEGMENT_BYTES)))

    def _drop(self, fd: int, position: int, size: int, advice: int) -> None:
        """In the place of ``os.posix_fadvise``: clean pages go, and what was wrong about them."""
        assert advice == os.POSIX_FADV_DONTNEED
        number = self._number_of(fd)
        stop = position + size if size else SEGMENT_BYTES
        pages = set(range(position // PAGE, -(-stop // PAGE))) - self._dirty.get(number, set())
        device = self._device.get(number, bytes(SEGMENT_BYTES))
        with open(os.open(_path_of(fd), os.O_RDWR), "r+b", buffering=0) as file:
            for page in pages:
                file.seek(page * PAGE)
                file.write(device[page * PAGE : (page + 1) * PAGE])
        self._shown[number] = self._read(fd, SEGMENT_BYTES, 0)
        self._lost.get(number, set()).difference_update(pages)
        self._dropped.setdefault(number, set()).update(pages)

    def _pages_in_memory(self, fd: int, size: int) -> bytes:
        dropped = self._dropped.get(self._number_of(fd), set())
        return bytes(page not in dropped for page in range(size // PAGE))

    def cut_power(self) -> None:
        """From now on the page cache shows what the device has."""
        for path in (self._files.directory / "commitlog").iterdir():
            number = path.stat().st_ino
            device = self._device.get(number, bytearray(SEGMENT_BYTES))
            path.write_bytes(device)
            self._shown[number] = bytes(device)
        self._dirty.clear()
        self._lost.clear()

    def close(self) -> None:
        """Lets go of the files."""
        for fd in self._held.values():
            os.close(fd)

    def _number_of(self, fd: int) -> int:
        number = os.fstat(fd).st_ino
        if number not in self._held:
            self._held[number] = os.dup(fd)
        return number


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


class _Direct:
    """In the place of ``DirectFile``."""

    def __init__(self, disk: Disk, path: str) -> None:
        if not disk.has_direct_reads:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._disk = disk
        self._path = path

    def read(self, position: int, size: int) -> bytes:
        return self._disk.has(self._path)[position : position + size]

    def is_direct(self, position: int) -> bool:
        return True

    def close(self) -> None:
        pass


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
            machine=Machine(sync=self.disk.sync),
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
        self._monkeypatch.setattr("mqmesh.storage.commitlog.opening.read_boot_id", lambda: boot_id)


def _leave_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def posix_fallocate(fd: int, position: int, size: int) -> None:
        if _path_of(fd).endswith(".new"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, position, size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)


@pytest.fixture
def scene(files: StoreFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(files, monkeypatch)
    yield scene
    scene.disk.close()


def test_the_disk_of_these_tests_loses_what_a_failed_sync_covered(scene: Scene) -> None:
    scene.stopped_by_a_failed_sync()
    shown = scene.files.segment().read_bytes()
    fd = os.open(scene.files.segment(), os.O_RDWR)
    os.pwrite(fd, shown, 0)
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
        with pytest.raises(StorageError, match=r"cannot be (synced|written again)"):
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


def test_the_copy_of_a_segment_replaces_it_and_another_link_keeps_the_old_file(
    scene: Scene, tmp_path: Path
) -> None:
    scene.stopped_by_a_failed_sync()
    segment = scene.files.segment()
    before = segment.read_bytes()
    linked = tmp_path / "linked"
    linked.hardlink_to(segment)
    segment.with_name(segment.name + ".new").write_bytes(b"left by a crash")
    store = scene.open()
    put_bodies(store, ["new"])
    scene.wait_for_disk(store)
    assert deliverable(store) == dict(enumerate([*BODIES, "new"]))
    assert linked.read_bytes() == before
    assert segment.stat().st_ino != linked.stat().st_ino
    assert segment.stat().st_size == SEGMENT_BYTES
    assert not list(segment.parent.glob("*.new"))


def test_without_room_for_a_copy_the_store_opens_and_says_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.stopped_by_a_failed_sync()
    before = scene.files.segment().read_bytes()
    _leave_no_room_for_copies(monkeypatch)
    scene.disk.has_direct_reads = False
    assert deliverable(scene.open()) == dict(enumerate(BODIES))
    assert "mapped_file_size_commit_log" in caplog.text
    assert scene.files.segment().read_bytes() == before
    assert not list(scene.files.segment().parent.glob("*.new"))


def test_without_room_for_a_copy_lost_pages_are_written_anew_in_their_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.stopped_by_a_failed_sync()
    _leave_no_room_for_copies(monkeypatch)
    store = scene.open()
    put_bodies(store, ["new"])
    scene.wait_for_disk(store)
    assert "mapped_file_size_commit_log" not in caplog.text
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate([*BODIES, "new"]))


def test_without_direct_reads_what_is_shown_survives_too(scene: Scene) -> None:
    scene.stopped_by_a_failed_sync()
    scene.disk.has_direct_reads = False
    assert deliverable(scene.open()) == dict(enumerate(BODIES))
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate(BODIES))


@pytest.mark.parametrize("is_torn", [False, True])
def test_what_the_disk_has_behind_the_synced_mark_is_not_copied(
    scene: Scene, is_torn: bool
) -> None:
    store = scene.open()
    put_bodies(store, BODIES[:5])
    scene.wait_for_disk(store)
    end = store.stats().max_commitlog_offset
    # Killed before a checkpoint: files as they are now, one of them with half a record more.
    copied = scene.files.copy()
    scene.files.close()
    scene.files.directory = copied.directory
    segment = scene.files.segment()
    if is_torn:
        with segment.open("r+b") as file:
            file.seek(end)
            file.write(b"half a record")
    fd = os.open(segment, os.O_RDWR)
    scene.disk.sync(fd)
    os.close(fd)
    number = segment.stat().st_ino
    again = scene.open()
    assert deliverable(again) == dict(enumerate(BODIES[:5]))
    assert segment.stat().st_ino == number
    put_bodies(again, ["new"])
    scene.wait_for_disk(again)
    scene.cut_power()
    assert deliverable(scene.open()) == dict(enumerate([*BODIES[:5], "new"]))


def test_pages_ahead_of_the_log_whose_sync_failed_are_not_written_as_they_are(
    scene: Scene,
) -> None:
    store = scene.open()
    put_bodies(store, BODIES[:5])
    scene.wait_for_disk(store)
    copied = scene.files.copy()
    scene.files.close()
    scene.files.directory = copied.directory
    segment = scene.files.segment()
    fd = os.open(segment, os.O_RDWR)
    scene.disk.sync(fd)
    os.pwrite(fd, bytes(4 * PAGE), SEGMENT_BYTES - 4 * PAGE)
    scene.disk.is_failing = True
    with pytest.raises(OSError, match="Input/output"):
        scene.disk.sync(fd)
    scene.disk.is_failing = False
    os.close(fd)
    again = scene.open()
    put_bodies(again, ["new " + "y" * (SEGMENT_BYTES - 50_000)])
    scene.wait_for_disk(again)
    scene.cut_power()
    assert len(deliverable(scene.open())) == 6


def test_a_sector_that_cannot_be_copied_costs_its_batch_and_the_old_file_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.stopped_by_a_failed_sync()
    segment = scene.files.segment()
    before = segment.read_bytes()
    bad = 3 * PAGE  # of the second batch, which was synced
    real = os.pread

    def pread(fd: int, size: int, position: int) -> bytes:
        if position <= bad < position + size and _path_of(fd) == str(segment):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, position)

    with monkeypatch.context() as patches:
        patches.setattr(os, "pread", pread)
        store = scene.open()
    (aside,) = segment.parent.glob("*.damaged-*")
    assert aside.read_bytes() == before
    after = segment.read_bytes()
    assert after == before[:bad] + bytes(PAGE) + before[bad + PAGE :]
    assert store.stats().writable
