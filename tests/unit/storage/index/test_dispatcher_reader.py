"""The log as the index process reads it, beside the broker that writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore
from harness.store_files import SEGMENT_BYTES

from mqmesh.batch.record_batch import HEADER_SIZE
from mqmesh.errors import CorruptRecord, OffsetOutOfRange
from mqmesh.message import Message
from mqmesh.storage.index import dispatcher_reader
from mqmesh.storage.index.dispatcher_reader import LogReader
from mqmesh.storage.log.record import MARK_SIZE
from mqmesh.storage.log.segments import FoundSegments
from mqmesh.storage.log.store_key import read_store_key


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[IndexedStore]:
    indexed = IndexedStore(tmp_path / "store")
    yield indexed
    indexed.close()


def reader_of(indexed: IndexedStore, store_id: int | None = None) -> LogReader:
    segments = FoundSegments(indexed.files.directory / "commitlog")
    return LogReader(
        segments,
        key=read_store_key(indexed.files.directory),
        store_id=indexed.store.stats().store_id if store_id is None else store_id,
    )


def put(indexed: IndexedStore, size: int = 100, **options):
    return indexed.put([Message("topic", bytes(size), keys=("a",))], **options)


def read_all(indexed: IndexedStore, most_bytes: int, **options):
    """All slices of the log."""
    reader = reader_of(indexed, **options)
    end = indexed.store.stats().max_commitlog_offset
    position, epoch, slices = 0, 0, []
    while position < end:
        segment = reader.segments.find(position) or reader.segments.after(position)
        one = reader.read_slice(
            segment, max(position, segment.start), end, epoch=epoch, most_bytes=most_bytes
        )
        position, epoch = one.stop, (0 if one.complete else one.epoch)
        slices.append(one)
    reader.close()
    return slices


def test_slices_end_early_where_batches_are_compressed_very_well(indexed, monkeypatch):
    monkeypatch.setattr(dispatcher_reader, "MOST_RAW_BYTES", 50_000)
    for _ in range(20):
        indexed.put([Message("topic", bytes(20_000), keys=("a",))], compress_over_bytes=0)
    slices = read_all(indexed, 1 << 20)
    assert [one.batches for one in slices] == [3, 3, 3, 3, 3, 3, 2]
    assert all(50_000 <= one.raw_bytes < 70_100 for one in slices[:-1])


@pytest.mark.parametrize("most_bytes", [1, 100, 1000, 10_000, 1 << 20])
def test_slices_cover_the_log_without_gap_whatever_their_size(indexed, most_bytes):
    puts = [put(indexed, size) for size in (10, 5000, 1, 30_000, 40_000, 100, 20_000, 60_000)]
    slices = read_all(indexed, most_bytes)
    ends = [0, *(one.stop for one in slices)]
    assert [one.start for one in slices] == ends[:-1]
    assert sum(one.batches for one in slices) == len(puts)
    assert sum(one.skipped_bytes for one in slices) == 0
    complete = [one.stop for one in slices if one.complete]
    assert complete == [n * SEGMENT_BYTES for n in range(1, len(complete) + 1)]
    places = {int.from_bytes(entry[16:], "big") for one in slices for entry in one.entries}
    assert places == {result.commitlog_offset % SEGMENT_BYTES for result in puts}


def test_a_slice_knows_its_times_its_last_record_and_deletions(indexed):
    put(indexed, stored_ms=50)
    put(indexed, stored_ms=20)
    last = put(indexed, stored_ms=30)
    (one,) = read_all(indexed, 1 << 20)
    assert (one.oldest_ms, one.newest_ms, one.batches) == (20, 50, 3)
    assert one.last_offset == last.commitlog_offset
    assert one.last_mark == indexed.files.read(last.commitlog_offset, MARK_SIZE)
    indexed.store.delete_topic("topic")
    (one,) = read_all(indexed, 1 << 20)
    assert [deletion.topic for deletion in one.deletions] == ["topic"]
    assert one.deletions[0].commitlog_offset == last.end_offset == one.last_offset


@pytest.mark.parametrize("position", [0, 5, 12, 36, 48, 56, 100, 150])
def test_a_bad_record_is_passed_over_and_what_stands_around_it_kept(indexed, position):
    puts = [put(indexed) for _ in range(5)]
    indexed.files.flip(puts[2].commitlog_offset + position)
    slices = read_all(indexed, 1 << 20)
    assert sum(one.batches for one in slices) == 4
    size = puts[2].end_offset - puts[2].commitlog_offset
    assert sum(one.skipped_bytes for one in slices) == size


def put_bare(indexed: IndexedStore, size: int):
    return indexed.put([Message("topic", bytes(size))])


def test_large_batches_without_keys_are_learned_of_by_their_headers_alone(indexed, monkeypatch):
    for size in (20_000, 17_000, 5, 20_000, 30_000):
        put_bare(indexed, size)
    put(indexed, 20_000)
    for size in (50_000, 3, 16_300, 16_400):
        put_bare(indexed, size)
    indexed.store.delete_topic("topic")
    put_bare(indexed, 20_000)

    def contents() -> tuple[list[object], int]:
        slices = read_all(indexed, 1 << 20)
        known = [
            [entry for one in slices for entry in one.entries],
            [one.deletions for one in slices if one.deletions],
            [one.stop for one in slices if one.complete],
            sum(one.batches for one in slices),
            min(one.oldest_ms for one in slices),
            max(one.newest_ms for one in slices),
            (slices[-1].last_offset, slices[-1].last_mark, slices[-1].epoch, slices[-1].stop),
        ]
        read = sum(map(len, reads))
        reads.clear()
        return known, read

    monkeypatch.setattr(dispatcher_reader, "VIEW_BYTES", 1 << 30)  # so that reads are counted
    reads: list[bytes] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(pread(*args)) or reads[-1])
    skimmed, few_bytes = contents()
    monkeypatch.setattr(dispatcher_reader, "SKIM_BYTES", 1 << 30)
    whole, all_bytes = contents()
    assert skimmed == whole
    assert few_bytes < all_bytes / 2


def test_a_slice_of_skimmed_batches_ends_after_so_many(indexed, monkeypatch):
    monkeypatch.setattr(dispatcher_reader, "SKIM_BATCHES", 2)
    for _ in range(3):
        put_bare(indexed, 20_000)
    assert [one.batches for one in read_all(indexed, 1 << 20)] == [2, 1]


def test_no_flipped_bit_of_a_skimmed_header_hides_another_batch(indexed):
    puts = [put_bare(indexed, 17_000) for _ in range(3)]
    places = {result.commitlog_offset for result in puts}
    damaged = puts[1].commitlog_offset
    for bit in range(8 * HEADER_SIZE):
        indexed.files.flip(damaged + bit // 8, bit % 8)
        slices = read_all(indexed, 1 << 20)
        found = {int.from_bytes(entry[16:], "big") for one in slices for entry in one.entries}
        assert places - {damaged} <= found <= places, bit
        assert slices[-1].stop == puts[-1].end_offset
        indexed.files.flip(damaged + bit // 8, bit % 8)


def test_damage_up_to_the_end_is_passed_over(indexed):
    put(indexed)
    last = put(indexed)
    indexed.files.write(last.commitlog_offset, bytes(last.end_offset - last.commitlog_offset))
    slices = read_all(indexed, 1 << 20)
    assert slices[-1].stop == last.end_offset
    assert sum(one.batches for one in slices) == 1


def test_a_file_that_was_cut_ends_where_the_next_one_begins(indexed):
    while indexed.store.stats().max_commitlog_offset < 2 * SEGMENT_BYTES:
        put(indexed, 3000)
    first = indexed.files.segment(0)
    with open(first, "r+b") as file:
        file.truncate(SEGMENT_BYTES // 2)
    slices = read_all(indexed, 1 << 20)
    assert sum(one.skipped_bytes for one in slices) > 0
    assert slices[-1].stop == indexed.store.stats().max_commitlog_offset
    complete = [one.stop for one in slices if one.complete]
    assert complete[0] == SEGMENT_BYTES


def test_records_of_another_store_are_none(indexed):
    put(indexed)
    (one,) = read_all(indexed, 1 << 20, store_id=12345)
    assert (one.batches, one.skipped_bytes) == (0, one.stop)


def test_a_batch_is_read_with_all_checks(indexed):
    result = put(indexed)
    reader = reader_of(indexed)
    header, data = reader.read_batch(result.commitlog_offset)
    assert header.total_size == len(data) == result.end_offset - result.commitlog_offset
    for offset in (result.commitlog_offset + 1, result.end_offset):
        with pytest.raises(CorruptRecord):
            reader.read_batch(offset)
    with pytest.raises(OffsetOutOfRange):
        reader.read_batch(1 << 40)
    indexed.files.flip(result.commitlog_offset + 60)
    with pytest.raises(CorruptRecord):
        reader.read_batch(result.commitlog_offset)
    with pytest.raises(CorruptRecord):
        reader_of(indexed, store_id=1).read_batch(result.commitlog_offset)
    indexed.files.segment(0).unlink()
    fresh = reader_of(indexed)
    with pytest.raises(OffsetOutOfRange):
        fresh.read_batch(result.commitlog_offset)
    reader.close()


def test_a_file_that_went_since_it_was_listed_is_out_of_range(indexed):
    result = put(indexed)
    reader = reader_of(indexed)
    indexed.files.segment(0).unlink()
    with pytest.raises(OffsetOutOfRange):
        reader.read_batch(result.commitlog_offset)
    assert reader.mark_at(result.commitlog_offset) == b""


def test_stretches_are_views_and_headers_are_read_by_calls(indexed, monkeypatch):
    monkeypatch.setattr(dispatcher_reader, "VIEW_BYTES", 10_000)
    for _ in range(60):
        put(indexed, size=1_000)
    put(indexed, size=20_000)
    sizes = []
    pread = os.pread

    def noting(fd, size, position):
        sizes.append(size)
        return pread(fd, size, position)

    monkeypatch.setattr(os, "pread", noting)
    slices = read_all(indexed, 20_000)
    assert sum(one.batches for one in slices) == 61
    assert not any(one.skipped_bytes for one in slices)
    assert max(sizes) < 10_000


def test_a_mapped_file_that_is_cut_ends_there_without_a_signal(indexed, monkeypatch):
    monkeypatch.setattr(dispatcher_reader, "VIEW_BYTES", 4_096)
    for _ in range(40):
        put(indexed, size=2_000)
    reader = reader_of(indexed)
    segment = reader.segments.find(0)
    first = reader.read_slice(segment, 0, segment.end, epoch=0, most_bytes=10_000)
    assert first.batches == 4
    os.truncate(segment.path, first.stop + 5_000)
    batches, position = 0, first.stop
    while position < segment.end:
        one = reader.read_slice(
            segment, position, segment.end, epoch=first.epoch, most_bytes=20_000
        )
        batches += one.batches
        position = one.stop
    assert batches == 2
    assert one.skipped_bytes
    reader.close()


def test_files_that_were_forgotten_leave_no_map(indexed, monkeypatch):
    monkeypatch.setattr(dispatcher_reader, "VIEW_BYTES", 4_096)
    for _ in range(40):
        put(indexed, size=2_000)
    reader = reader_of(indexed)
    segment = reader.segments.find(0)
    reader.read_slice(segment, 0, segment.end, epoch=0, most_bytes=10_000)

    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(segment.path in line for line in maps)

    with_reader = mapped()
    reader.forget_files()
    assert mapped() == with_reader - 1


def test_only_segments_are_listed(tmp_path):
    assert len(FoundSegments(tmp_path / "not there")) == 0
    for name in ("00000000000000000000", "00000000000000065536.new", "other", "123"):
        (tmp_path / name).write_bytes(bytes(10))
    segments = FoundSegments(tmp_path)
    assert [segment.start for segment in segments] == [0]
    assert segments.find(5) is not None
    assert segments.find(10) is None
    assert (segments.find(10) or segments.after(10)) is None
