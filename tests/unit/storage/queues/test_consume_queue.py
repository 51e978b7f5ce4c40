"""Entries of a queue: made, kept, written and read."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.batch.record_batch import MAX_BATCH_BYTES
from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.message import tag_hash
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.consume_queue import (
    ENTRY,
    ENTRY_SIZE,
    MOST_LOOKED_AT_ONCE,
    OFFSET_MASK,
    SIZE_MASK,
    VOID_ENTRY,
    VOID_OFFSET,
    WRITE_BYTES,
    ConsumeQueue,
    check_in,
    check_of,
    count_void,
    entries_of,
    hashes_of,
)


@pytest.fixture
def queue(tmp_path: Path) -> ConsumeQueue:
    return ConsumeQueue("topic", 3, str(tmp_path / "q" / "t"), first=0, end=0, file_entries=16)


def entry_of(commitlog_offset: int, size: int = 1, tag: int = 0) -> bytes:
    return entries_of(commitlog_offset, size, 1, tag.to_bytes(8, "little"))


def add(queue: ConsumeQueue, places: Iterable[int]) -> None:
    for place in places:
        queue.tail.append(place, 1, 1, b"")
        queue.end += 1


def test_an_entry_is_these_bytes_for_ever() -> None:
    entry = entry_of(1 << 40, 70_000, 0x1122334455667788)
    assert entry.hex() == "00000000000100a4701101408877665544332211"
    assert entry_of(VOID_OFFSET, 0) == VOID_ENTRY == b"\xff" * 8 + bytes(12)


@given(
    st.integers(0, (1 << 56) - 2),
    st.integers(1, MAX_BATCH_BYTES),
    st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=40),
)
def test_a_place_and_its_check_come_back_out_of_every_entry(
    commitlog_offset: int, size: int, hashes: list[int]
) -> None:
    packed = b"".join(number.to_bytes(8, "little") for number in hashes)
    for tag_hashes in (packed, packed[:8]):
        entries = entries_of(commitlog_offset, size, len(hashes), tag_hashes)
        found = hashes_of(entries)
        assert list(found) == (hashes if tag_hashes is packed else hashes[:1] * len(hashes))
        check = check_of(commitlog_offset, size, found)
        for place, extent, _ in ENTRY.iter_unpack(entries):
            assert (place & OFFSET_MASK, extent & SIZE_MASK) == (commitlog_offset, size)
            assert check_in(place, extent) == check


def test_a_check_tells_zeros_and_flipped_bits() -> None:
    hashes = b"".join(tag_hash(tag).to_bytes(8, "little") for tag in ("red", "green", None) * 20)
    check = check_of(1 << 40, 70_000, hashes)
    unseen = 0
    for bit in range(8 * len(hashes)):
        flipped = bytearray(hashes)
        flipped[bit // 8] ^= 1 << bit % 8
        unseen += check_of(1 << 40, 70_000, flipped) == check
    assert unseen <= 1  # of 11,520
    for count in range(1, 3000):
        assert check_of(0, 0, bytes(8 * count)) != 0


@given(st.lists(st.sampled_from([None, "red", "green"]), min_size=1, max_size=50))
def test_entries_are_the_same_as_made_one_by_one(tags: list[str | None]) -> None:
    hashes = [tag_hash(tag) for tag in tags]
    packed = b"".join(number.to_bytes(8, "little") for number in hashes)
    entries = entries_of(5, 6, len(tags), packed)
    place, extent, _ = ENTRY.unpack_from(entries)
    assert entries == b"".join(ENTRY.pack(place, extent, number) for number in hashes)
    assert list(hashes_of(entries)) == hashes


@pytest.mark.parametrize("tag_hashes", [b"", tag_hash("red").to_bytes(8, "little")])
def test_a_batch_of_one_tag_has_equal_entries(tag_hashes: bytes) -> None:
    entries = entries_of(5, 6, 3, tag_hashes)
    assert entries == entries[:20] * 3
    assert ENTRY.unpack_from(entries)[2] == int.from_bytes(tag_hashes, "little")


def test_entries_are_read_across_files_and_tail(queue: ConsumeQueue) -> None:
    files = OpenFiles(4)
    entries = [entry_of(number) for number in range(50)]
    add(queue, range(41))
    changed: set[str] = set()
    queue.write_tail(files, changed)
    add(queue, range(41, 50))
    assert (queue.written, queue.end) == (41, 50)
    for start in range(51):
        for stop in range(start, 51):
            assert queue.read(files, start, stop) == b"".join(entries[start:stop])
    names = sorted(path.name for path in Path(queue.directory).iterdir())
    assert names == [f"3-{number * 16 * 20:020d}" for number in range(3)]
    assert {str(Path(queue.directory).parent), queue.directory} < changed
    files.close()


def add_large_tail(queue: ConsumeQueue) -> bytes:
    """Batches of 700 messages, so that pieces end somewhere in files; returns the entries."""
    batches = [(number * 9_000, 8_000, 700, b"") for number in range(12)]
    for batch in batches:
        queue.tail.append(*batch)
        queue.end += batch[2]
    entries = b"".join(entries_of(*batch) for batch in batches)
    assert len(entries) > 2 * WRITE_BYTES
    return entries


def test_a_large_tail_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = OpenFiles(4)
    queue = ConsumeQueue("topic", 3, str(tmp_path / "q" / "t"), first=0, end=0, file_entries=5_000)
    sizes = []
    pwrite = os.pwrite

    def noting(fd: int, data: memoryview, position: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data, position)

    monkeypatch.setattr("os.pwrite", noting)
    add(queue, range(3))
    queue.write_tail(files, set())
    entries = b"".join(entry_of(number) for number in range(3)) + add_large_tail(queue)
    queue.write_tail(files, set())
    assert (queue.written, queue.end, len(queue.tail)) == (8_403, 8_403, 0)
    assert queue.read(files, 0, 8_403) == entries
    assert max(sizes) < WRITE_BYTES + 700 * ENTRY_SIZE
    files.close()


def test_a_tail_that_was_written_in_part_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OpenFiles(4)
    queue = ConsumeQueue("topic", 3, str(tmp_path / "q" / "t"), first=0, end=0, file_entries=50_000)
    entries = add_large_tail(queue)
    calls = []
    pwrite = os.pwrite

    def failing(fd: int, data: memoryview, position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no room")
        return pwrite(fd, data, position)

    monkeypatch.setattr("os.pwrite", failing)
    with pytest.raises(DiskFull):
        queue.write_tail(files, set())
    assert (queue.written, queue.tail.start) == (0, 0)
    assert queue.read(files, 0, queue.end) == entries
    add(queue, [77])
    queue.write_tail(files, set())
    assert (queue.written, len(queue.tail)) == (8_401, 0)
    assert queue.read(files, 0, queue.end) == entries + entry_of(77)
    files.close()


def test_missing_entries_are_damage(queue: ConsumeQueue) -> None:
    files = OpenFiles(4)
    add(queue, [0] * 20)
    queue.write_tail(files, set())
    files.close()
    Path(queue.file_path(0)).write_bytes(bytes(20 * 15))
    assert queue.read(files, 0, 15) == bytes(300)
    with pytest.raises(CorruptRecord):
        queue.read(files, 0, 16)
    Path(queue.file_path(1)).unlink()
    with pytest.raises(CorruptRecord):
        queue.read(files, 16, 17)
    files.close()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 100, MOST_LOOKED_AT_ONCE])
def test_void_entries_are_counted(count: int) -> None:
    assert count_void(VOID_ENTRY * count) == count
    for lost in {0, 1, count // 2, count - 1} & set(range(count)):
        good = ENTRY.pack(1, 1, 0)
        assert count_void(VOID_ENTRY * lost + good * (count - lost)) == lost
        assert count_void(VOID_ENTRY * lost + good + VOID_ENTRY * (count - lost - 1)) == lost


@pytest.mark.parametrize("written", [0, 37, 60])
def test_lost_messages_are_passed(
    queue: ConsumeQueue, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqmesh.storage.queues.consume_queue.MOST_LOOKED_AT_ONCE", 5)
    files = OpenFiles(4)
    kept = {0, 1, 7, 20, 21, 36, 37, 55}
    places = [number if number in kept else VOID_OFFSET for number in range(60)]
    add(queue, places[:written])
    queue.write_tail(files, set())
    if written > 12:  # damaged in a place that nobody looks at
        queue.write_at(files, 12, ENTRY.pack(VOID_OFFSET, 0, 1), set())
    add(queue, places[written:])
    for start in range(61):
        for stop in range(start, 61):
            found = next((number for number in range(start, stop) if number in kept), None)
            wanted = None if found is None else (found, found)
            assert queue.next_place(files, start, stop) == wanted
    files.close()
