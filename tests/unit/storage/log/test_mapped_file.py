"""Maps of files: stores, views, and what keeps a signal away."""

import mmap
import os
from pathlib import Path

import pytest

from mqmesh.storage.log import mapped_file
from mqmesh.storage.log.mapped_file import PAGE, MappedFile, ScannedFile
from mqmesh.units import MIB

SIZE = 64 * PAGE


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, SIZE)
    os.pwrite(fd, bytes(range(256)) * (SIZE // 512), 0)
    os.close(fd)
    return str(path)


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def drop_from_memory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_stores_are_in_the_file_and_reads_see_what_calls_write(path: str) -> None:
    mapped = MappedFile(path, SIZE)
    assert mapped.bring_in(3 * PAGE, 5 * PAGE)
    mapped.store(3 * PAGE + 7, [b"one", bytearray(b"two"), memoryview(b"three")])
    assert content(path)[3 * PAGE + 7 : 3 * PAGE + 18] == b"onetwothree"
    with open(path, "r+b") as file:
        file.seek(PAGE)
        file.write(b"by a call")
    view = mapped.view(PAGE, 9, stop=SIZE // 2)
    assert view == b"by a call"
    assert view is not None and view.readonly


def test_what_is_brought_in_keeps_its_bytes(path: str) -> None:
    before = content(path)
    mapped = MappedFile(path, SIZE)
    assert mapped.bring_in(0, SIZE)
    mapped.give_back(0, SIZE)
    assert content(path) == before
    assert mapped.bring_in(1, 2)
    mapped.store(0, [b"x"])
    mapped.give_back(0, SIZE)
    assert content(path) == b"x" + before[1:]


def test_a_view_keeps_the_map_of_a_file_that_is_gone(path: str) -> None:
    before = content(path)
    mapped = MappedFile(path, SIZE)
    view = mapped.view(10, 1000, stop=SIZE // 2)
    assert view is not None
    assert mapped.views == 1
    part = view[5:10]
    os.unlink(path)
    left = mapped.leave()
    del mapped, view
    assert (left.views, left.size) == (1, SIZE)
    assert part == before[15:20]
    del part
    assert left.views == 0


def test_a_map_without_views_goes_at_once(path: str) -> None:
    mapped = MappedFile(path, SIZE)
    assert mapped.view(0, SIZE // 2, stop=SIZE // 2) is not None
    left = mapped.leave()
    del mapped
    assert left.views == 0
    with open("/proc/self/maps") as maps:
        assert path not in maps.read()


def test_what_is_not_in_memory_has_no_view(path: str) -> None:
    mapped = MappedFile(path, SIZE)
    drop_from_memory(path)
    assert mapped.view(0, SIZE // 2, stop=SIZE // 2) is None
    with open(path, "rb") as file:
        file.read(1)
    # The rest may have been read ahead; the first page certainly was read.
    assert mapped.view(0, PAGE, stop=PAGE) is not None


def test_a_file_that_was_cut_has_no_view_behind_its_end(path: str) -> None:
    mapped = MappedFile(path, SIZE)
    os.truncate(path, 2 * PAGE)
    assert mapped.view(0, 2 * PAGE, stop=SIZE) is not None
    assert mapped.view(PAGE, 2 * PAGE, stop=SIZE) is None
    assert not mapped.bring_in(PAGE, 3 * PAGE)


def test_what_was_found_is_believed_until_it_is_looked_at_again(path: str) -> None:
    mapped = MappedFile(path, SIZE)
    assert mapped.view(0, PAGE, stop=SIZE // 2) is not None
    os.truncate(path, 0)
    assert mapped.view(PAGE, PAGE, stop=SIZE // 2) is not None
    mapped.look_again()
    assert mapped.view(PAGE, PAGE, stop=SIZE // 2) is None


def test_a_file_that_is_shorter_is_not_mapped(path: str) -> None:
    with pytest.raises(OSError, match="instead of"):
        MappedFile(path, SIZE + 1)
    with pytest.raises(FileNotFoundError):
        MappedFile(path + "-", SIZE)


def test_without_the_calls_nothing_is_ready_and_nothing_is_viewed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "_IS_LINUX", False)
    mapped = MappedFile(path, SIZE)
    assert not mapped.bring_in(0, PAGE)
    assert mapped.view(0, PAGE, stop=SIZE) is None
    mapped.give_back(0, PAGE)
    with open(path, "rb") as file:
        assert ScannedFile(file.fileno()).view(0, PAGE) is None


def test_a_kernel_that_cannot_bring_in_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_POPULATE_WRITE", 999)
    assert not MappedFile(path, SIZE).bring_in(0, PAGE)


def test_a_scan_sees_the_file_and_its_end(path: str) -> None:
    before = content(path)
    with open(path, "rb") as file:
        scanned = ScannedFile(file.fileno())
    assert scanned.view(5, 3 * PAGE) == before[5 : 5 + 3 * PAGE]
    assert scanned.view(SIZE - 5, PAGE) == before[-5:]
    assert scanned.view(SIZE, PAGE) is None


def test_a_scan_brings_in_pages_by_the_call_that_lets_other_threads_go_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods of ``mmap`` hold the interpreter's lock for as long as the disk takes."""
    fd = os.open(path, os.O_RDONLY)
    scanned = ScannedFile(fd)
    os.close(fd)
    monkeypatch.setattr(mapped_file, "_madvise", lambda *arguments: -1)
    assert scanned.view(0, PAGE) is None


def test_a_scan_neither_changes_a_file_nor_lets_anybody(path: str) -> None:
    os.chmod(path, 0o400)
    fd = os.open(path, os.O_RDONLY)
    scanned = ScannedFile(fd)
    os.close(fd)
    view = scanned.view(0, SIZE)
    assert view is not None and view.readonly


def kept_bytes(path: str) -> int:
    """Return the bytes of a file that are in the memory of this process by a map."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            is_it = words[-1] == path
        elif is_it and words[0] == "Rss:":
            found += int(words[1]) * 1_024
    return found


def test_a_scan_keeps_two_windows_in_memory_and_older_views_stay_good(path: str) -> None:
    before, window = bytes(range(256)) * (32 * MIB // 256), MIB
    Path(path).write_bytes(before)
    with open(path, "rb") as file:
        scanned = ScannedFile(file.fileno())
    views = []
    # From the middle on, and one back, as where a bad record is searched for.
    for position in [*range(8 * MIB, 31 * MIB, window - 10), 24 * MIB]:
        view = scanned.view(position, window)
        assert view is not None
        views.append((position, view))
        # A page of the page cache may have 2 MiB.
        assert window <= kept_bytes(path) <= 2 * window + 4 * MIB
    for position, view in views:
        assert view == before[position : position + window]


def test_a_scan_of_a_file_that_is_cut_meanwhile_fails_without_a_signal(path: str) -> None:
    with open(path, "rb") as file:
        scanned = ScannedFile(file.fileno())
    os.truncate(path, PAGE)
    assert scanned.view(0, PAGE) is not None
    assert scanned.view(PAGE, PAGE) is None
    os.truncate(path, 0)
    with open(path, "rb") as file, pytest.raises(OSError, match="empty"):
        ScannedFile(file.fileno())


def test_pages_are_those_of_the_system() -> None:
    assert PAGE == mmap.PAGESIZE
