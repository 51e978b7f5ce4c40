"""Sectors that cannot be read: an error for those who read them, and no signal.

The disk is a loop device with ext4 on a file that refuses to be read at chosen places
(``bad_disk.py``). Where none may be mounted, the calls that read are made to refuse.
"""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, put_bodies, settle

from mqmesh.errors import StorageError
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.index.dispatcher_reader import LogReader
from mqmesh.storage.interface import GetStatus
from mqmesh.storage.log.mapped_file import PAGE, MappedFile, ScannedFile
from mqmesh.storage.log.scan import LogScanner
from mqmesh.storage.log.segments import FoundSegments, Segment
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.testing.store_contract import read_queue
from mqmesh.units import MIB

DISK_BYTES = 32 * MIB
LARGE = "x" * 20_000
_FIEMAP = 0xC020660B
_EXTENT = struct.Struct("=QQQ16xI12x")
_TOUCH = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[int(sys.argv[2])]
"""


class Disk:
    """A disk whose sectors can be made bad."""

    def __init__(self, path: Path, server: subprocess.Popen[str] | None) -> None:
        self.path = path
        self._server = server
        self._bad: list[tuple[str, int, int]] = []

    @property
    def is_real(self) -> bool:
        """The system refuses, by calls and by maps; else only calls do."""
        return self._server is not None

    def make_bad(self, path: Path, start: int, stop: int) -> None:
        """Makes whole pages of a file bad; what was written to them is forgotten by the system."""
        assert start % PAGE == stop % PAGE == 0
        self._bad.append((str(path), start, stop))
        if self._server is None:
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for position, place, size in _extents(fd):
                low, high = max(start, position), min(stop, position + size)
                if low < high:
                    self._tell(f"{place + low - position} {place + high - position}")
        finally:
            os.close(fd)

    def make_good(self) -> None:
        """Everything can be read again."""
        self._bad.clear()
        if self._server is not None:
            self._tell("good")

    def _tell(self, line: str) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "done\n"

    def refuse(self, fd: int, size: int, position: int) -> None:
        """In front of a read by a call, where the system refuses nothing."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        for bad, start, stop in self._bad:
            if path == bad and position < stop and start < position + size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


def _extents(fd: int) -> list[tuple[int, int, int]]:
    """Position in the file, place on the disk and size of each extent."""
    most = 64
    data = bytearray(32 + most * _EXTENT.size)
    struct.pack_into("=QQIIII", data, 0, 0, (1 << 63) - 1, 0, 0, most, 0)
    fcntl.ioctl(fd, _FIEMAP, data)
    (count,) = struct.unpack_from("=I", data, 20)
    found = [_EXTENT.unpack_from(data, 32 + number * _EXTENT.size) for number in range(count)]
    return [(position, place, size) for position, place, size, _ in found]


@contextlib.contextmanager
def mounted_disk(folder: Path) -> Iterator[Disk]:
    """The real one."""
    backing, fuse, path = folder / "backing", folder / "fuse", folder / "disk"
    fuse.mkdir()
    path.mkdir()
    with open(backing, "wb") as file:
        file.truncate(DISK_BYTES)

    def run(*command: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50)
        return done.stdout.strip()

    if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        raise PermissionError("no loop device may be made here")
    with contextlib.ExitStack() as stack:
        program = Path(__file__).with_name("bad_disk.py")
        server = subprocess.Popen(
            [sys.executable, program, backing, fuse],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise PermissionError("no file system may be mounted here")
        stack.callback(run, "umount", "--lazy", str(fuse))
        device = run("losetup", "--find", "--show", str(fuse / "disk"))
        stack.callback(run, "losetup", "--detach", device)
        run("mkfs.ext4", "-q", "-F", "-b", str(PAGE), device)
        run("mount", device, str(path))
        stack.callback(run, "umount", "--lazy", str(path))
        yield Disk(path, server)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted_disk(tmp_path))
        except PermissionError:
            disk = Disk(tmp_path, None)
            _let_calls_refuse(disk, monkeypatch)
        yield disk
        gc.collect()  # errors keep the frames that they passed, and those keep maps


def _let_calls_refuse(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, preadv = os.pread, os.preadv

    def refusing_pread(fd: int, size: int, position: int) -> bytes:
        disk.refuse(fd, size, position)
        return pread(fd, size, position)

    def refusing_preadv(fd: int, buffers: list[memoryview], position: int) -> int:
        disk.refuse(fd, sum(map(len, buffers)), position)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(os, "pread", refusing_pread)
    monkeypatch.setattr(os, "preadv", refusing_preadv)
    for kind in (MappedFile, ScannedFile):
        monkeypatch.setattr(kind, "view", lambda *arguments, **options: None)


@pytest.fixture
def files(disk: Disk) -> Iterator[StoreFiles]:
    files = StoreFiles(disk.path / "store")
    files.config = msgspec.structs.replace(files.config, disk_reserve_bytes=0)
    yield files
    files.close()


def forget_pages(store: CommitLogStore) -> None:
    """Nothing of the log is mapped or believed to be in memory any more."""
    store.wait_for_chores()
    store._log._window.give_back()
    for mapped in store._log.maps._maps.values():
        mapped.give_back(0, mapped.size)
        mapped.look_again()


def page_in(segment: Segment, commitlog_offset: int) -> int:
    """Position of the first whole page behind an offset."""
    return -(-(commitlog_offset - segment.start) // PAGE) * PAGE


def test_the_disk_of_these_tests_answers_a_map_by_a_signal(disk: Disk) -> None:
    path = disk.path / "file"
    path.write_bytes(bytes(4 * PAGE))
    disk.make_bad(path, PAGE, 2 * PAGE)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Input/output"):
            os.pread(fd, 10, PAGE)
        assert os.pread(fd, 10, 2 * PAGE) == bytes(10)
        assert ScannedFile(fd).view(PAGE, 10) is None
    finally:
        os.close(fd)
    command = [sys.executable, "-c", _TOUCH, str(path), str(PAGE)]
    expected = -signal.SIGBUS if disk.is_real else 0
    assert subprocess.run(command, timeout=50).returncode == expected


def test_a_bad_sector_of_a_sealed_segment_costs_only_what_lies_in_it(
    disk: Disk, files: StoreFiles
) -> None:
    store = files.open()
    offsets = put_bodies(store, [LARGE] * 9)
    settle(store)
    forget_pages(store)
    segment = store._log.segments.find(offsets[4])
    assert segment is not None
    place = page_in(segment, offsets[4])
    disk.make_bad(Path(segment.path), place, place + PAGE)
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be read"):
            store.get("topic", 0, 4, max_bytes=1)
    for number in (0, 1, 2, 3, 5, 6, 7, 8):
        assert store.get("topic", 0, number, max_bytes=1).status is GetStatus.FOUND
    put_bodies(store, ["more"])
    store.tick(100_000)
    assert store.stats().writable
    store.close()
    # Nor does it hinder the next start, which has no reason to read it.
    again = files.open()
    assert again.get("topic", 0, 9, max_bytes=1).status is GetStatus.FOUND


def test_scans_and_the_index_process_tell_a_bad_sector(disk: Disk, files: StoreFiles) -> None:
    store = files.open()
    offsets = put_bodies(store, [LARGE] * 9)
    settle(store)
    forget_pages(store)
    segment = store._log.segments.find(offsets[4])
    assert segment is not None
    place = page_in(segment, offsets[4])
    disk.make_bad(Path(segment.path), place, place + PAGE)
    key, store_id = read_store_key(files.directory), store._log.store_id
    scanner = LogScanner(store._log.segments, key=key, store_id=store_id)
    with pytest.raises(StorageError, match="cannot be read"):
        scanner.read(offsets[4], epoch=0)
    scanner.close()
    reader = LogReader(FoundSegments(files.directory / "commitlog"), key=key, store_id=store_id)
    with pytest.raises(StorageError, match="cannot be read"):
        reader.read_batch(offsets[4])
    reader.close()


def test_what_is_stored_needs_nothing_of_the_disk_to_be_read(
    disk: Disk, files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores go into pages that were taken on the disk and never written: of these there is
    nothing to be read, so nothing can go wrong there by a signal."""
    stored: list[int] = []
    store_into = MappedFile.store

    def noting(mapped: MappedFile, position: int, pieces: list[bytes]) -> None:
        stored.append(position)
        store_into(mapped, position, pieces)

    monkeypatch.setattr(MappedFile, "store", noting)
    store = files.open()
    put_bodies(store, ["first"])
    disk.make_bad(files.segment(0), PAGE, SEGMENT_BYTES)
    bodies = ["x" * 100 + str(number) for number in range(150)]
    put_bodies(store, bodies)
    assert len(stored) > 100
    assert store.stats().max_commitlog_offset > 8 * PAGE
    disk.make_good()
    settle(store)
    forget_pages(store)
    assert read_queue(store) == ["first", *bodies]


def test_the_page_that_the_log_ends_in_is_brought_in_or_written_by_a_call(
    disk: Disk, files: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """It was written and synced, and may have left memory: then it has to be read again."""
    store = files.open()
    put_bodies(store, ["first"] * 3)
    settle(store)
    forget_pages(store)
    disk.make_bad(files.segment(0), 0, PAGE)
    if disk.is_real:
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be written"):
                put_bodies(store, ["more"])
    with pytest.raises(StorageError, match="cannot be read"):
        store.get("topic", 0, 0, max_bytes=1)
    caplog.clear()  # or it would keep errors, and by them maps
