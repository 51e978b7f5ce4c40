"""ext4 on a loop device whose own file has no room for a while: writes of new blocks fail."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mqmesh.storage.commitlog.rewriting import rewrite
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.log.disk_check import DiskCheck
from mqmesh.storage.log.mapped_file import MappedFile
from mqmesh.storage.log.segments import Segments
from mqmesh.units import MIB

SEGMENT_BYTES = 16 * MIB
SYNCED = b"synced" * 1000
STORED = b"stored" * 1000
LATER = b"later" * 1000


def run(*command: str | Path) -> None:
    """Runs a program of the system."""
    subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=50)


class FailingDevice:
    """A file system, the device of which can be made to fail; without the right to mount, a folder.

    Attributes:
        path: Where its files are.
        is_real: It is mounted, and can fail.
    """

    def __init__(self, room: Path) -> None:
        self._room = room
        self._image = room / "image"
        self._filler = room / "filler"
        self.path = room.with_name("mounted")
        self.path.mkdir()
        room.mkdir()
        self.is_real = can_run("mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", room)
        if self.is_real:
            with self._image.open("wb") as file:
                file.truncate(256 * MIB)
            run("mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "nodiscard", self._image)
            if not self.mount():
                self.is_real = False
                run("umount", room)

    def mount(self) -> bool:
        """Makes the files visible."""
        return can_run("mount", "-o", "loop", self._image, self.path)

    def remount(self) -> None:
        """Forgets what is only in the page cache."""
        if self.is_real:
            run("umount", self.path)
            assert self.mount()

    def close(self) -> None:
        """Unmounts everything."""
        if self.is_real:
            run("umount", self.path)
            run("umount", self._room)

    def sync_while_failing(self, fd: int) -> None:
        """Blocks that were never written cannot be meanwhile."""
        if not self.is_real:
            os.fdatasync(fd)
            return
        room = os.statvfs(self._room)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        with pytest.raises(OSError, match="No space left"):
            os.fdatasync(fd)
        self._filler.unlink()


def can_run(*command: str | Path) -> bool:
    """False if a program is not there, or fails."""
    try:
        run(*command)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FailingDevice]:
    device = FailingDevice(tmp_path / "room")
    yield device
    device.close()


def a_segment_with_a_failed_sync(device: FailingDevice) -> str:
    """One piece is synced; of a second one and of zero pages behind it the sync has failed."""
    path = str(device.path / f"{0:020d}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SEGMENT_BYTES)
    os.posix_fallocate(fd, 0, SEGMENT_BYTES)
    os.pwrite(fd, SYNCED, 0)
    os.fdatasync(fd)
    os.pwrite(fd, STORED, 1 * MIB)
    fail_with_pages_of_zeros(device, path, fd)
    return path


def fail_with_pages_of_zeros(device: FailingDevice, path: str, fd: int) -> None:
    """A sync fails, also of pages that were made ready ahead; closes the file."""
    mapped = MappedFile(path, SEGMENT_BYTES)
    assert mapped.bring_in(8 * MIB, 9 * MIB)
    device.sync_while_failing(fd)
    os.close(fd)


def segments_of(device: FailingDevice) -> Segments:
    chores = Chores("test")
    try:
        return Segments(device.path, segment_size=SEGMENT_BYTES, chores=chores)
    finally:
        chores.close()


def append_and_remount(device: FailingDevice, path: str) -> bytes:
    """Syncs more where the zero pages were; returns what the disk has of the file."""
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, LATER, 8 * MIB)
    os.fdatasync(fd)
    os.close(fd)
    device.remount()
    return Path(path).read_bytes()


def is_on_disk(path: str, start: int) -> bool:
    with closing(DiskCheck(path, start, lambda position: None)) as check:
        return check.is_on_disk()


def test_a_segment_that_the_disk_does_not_have_is_found_and_copied(device: FailingDevice) -> None:
    path = a_segment_with_a_failed_sync(device)
    assert not (device.is_real and is_on_disk(path, len(SYNCED)))
    rewrite(segments_of(device), len(SYNCED), lambda position: None)
    found = append_and_remount(device, path)
    assert found.startswith(SYNCED)
    assert found[1 * MIB :].startswith(STORED)
    assert found[8 * MIB :].startswith(LATER)


def test_without_room_for_a_copy_a_segment_is_mended_in_its_place(
    device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_segment_with_a_failed_sync(device)
    number = os.stat(path).st_ino
    monkeypatch.setattr("mqmesh.storage.commitlog.rewriting._Copy._has_room", lambda copy: False)
    rewrite(segments_of(device), len(SYNCED), lambda position: None)
    found = append_and_remount(device, path)
    assert os.stat(path).st_ino == number
    assert found[1 * MIB :].startswith(STORED)
    assert found[8 * MIB :].startswith(LATER)


def test_pages_of_zeros_that_a_failed_sync_covered_can_be_written_after_the_check(
    device: FailingDevice,
) -> None:
    path = a_segment_with_a_failed_sync(device)
    os.truncate(path, 1 * MIB)  # what differs goes, and comes back as a hole
    os.truncate(path, SEGMENT_BYTES)
    fd = os.open(path, os.O_RDWR)
    os.posix_fallocate(fd, 0, SEGMENT_BYTES)
    fail_with_pages_of_zeros(device, path, fd)
    assert is_on_disk(path, len(SYNCED)) or not device.is_real
    assert append_and_remount(device, path)[8 * MIB :].startswith(LATER)
