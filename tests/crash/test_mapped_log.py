"""Trouble with a log that is in memory: no signal, no lost answer, no foreign byte."""

import os

import msgspec
import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.errors import CorruptRecord, StoreClosed
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import GetStatus
from mqmesh.storage.log.mapped_file import MappedFile
from mqmesh.testing.store_contract import NOW, make_batch, read_queue

LARGE = "x" * 20_000


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Position and size of every store into a map."""
    done: list[tuple[int, int]] = []
    store = MappedFile.store

    def noting(mapped: MappedFile, position: int, pieces: list[bytes]) -> None:
        done.append((position, sum(map(len, pieces))))
        store(mapped, position, pieces)

    monkeypatch.setattr(MappedFile, "store", noting)
    return done


def view_of(store: CommitLogStore, queue_offset: int) -> memoryview:
    result = store.get("topic", 0, queue_offset, max_bytes=1)
    assert result.status is GetStatus.FOUND
    (data,) = result.data
    assert isinstance(data, memoryview), "it was copied"
    return data


def forget_pages(store: CommitLogStore, files: StoreFiles) -> None:
    """Nothing of the log is in memory any more, as after a while without readers."""
    store.wait_for_chores()
    store._log._window.give_back()
    for mapped in store._log.maps._maps.values():
        mapped.give_back(0, mapped.size)
        mapped.look_again()
    for path in (files.directory / "commitlog").iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def test_small_writes_are_stores_and_survive(
    files: StoreFiles, stores: list[tuple[int, int]]
) -> None:
    store = files.open()
    bodies = [f"{number}" * 50 for number in range(1000)]
    put_bodies(store, bodies)
    # The first of each segment finds no page ready.
    assert len(stores) >= 1000 - 2 * store.stats().segments
    assert all(position + size <= SEGMENT_BYTES for position, size in stores)
    crashed = files.copy()
    assert list(deliverable(crashed.open()).values()) == bodies
    crashed.close()
    assert read_queue(store) == bodies


def test_without_a_window_everything_is_written_by_calls(
    files: StoreFiles, stores: list[tuple[int, int]]
) -> None:
    files.config = msgspec.structs.replace(files.config, commit_log_window_bytes=0)
    store = files.open()
    put_bodies(store, ["a"] * 10)
    assert read_queue(store) == ["a"] * 10
    assert not stores


def test_large_and_small_writes_may_be_mixed(
    files: StoreFiles, stores: list[tuple[int, int]]
) -> None:
    store = files.open()
    bodies = [("s" if number % 3 else "L" * 40_000) + str(number) for number in range(30)]
    put_bodies(store, bodies)
    assert stores
    assert max(size for _, size in stores) < 40_000
    assert read_queue(store) == bodies
    crashed = files.copy()
    assert list(deliverable(crashed.open()).values()) == bodies
    crashed.close()


def test_stores_stay_where_blocks_were_taken(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.config = msgspec.structs.replace(
        files.config,
        mapped_file_size_commit_log=1 << 20,
        allocate_ahead_bytes=1 << 16,
        disk_reserve_bytes=0,
    )
    touched: list[int] = []
    bring_in = MappedFile.bring_in

    def noting(mapped: MappedFile, position: int, stop: int) -> bool:
        touched.append(stop - store._log._current.allocated_through)
        return bring_in(mapped, position, stop)

    monkeypatch.setattr(MappedFile, "bring_in", noting)
    store = files.open()
    for number in range(1500):
        store.put([make_batch(["x" * 300], first_sequence=number)], NOW)
        if number % 100 == 0:
            store.tick(number)
            store.wait_for_chores()
    assert touched
    assert max(touched) <= 0


def test_reads_are_views_that_outlive_the_store(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, [LARGE] * 3)
    view = view_of(store, 1)
    copy = bytes(view)
    assert store.stats().log_views == 1
    files.close()
    assert view == copy


def test_retention_while_views_are_out(files: StoreFiles) -> None:
    """The files go at once, the bytes of views stay, and maps go with their last view."""
    files.config = msgspec.structs.replace(files.config, disk_reserve_bytes=0)
    store = files.open()
    put_bodies(store, [LARGE] * 31)
    settle(store)
    views = [view_of(store, number) for number in range(0, 30, 3)]
    copies = [bytes(view) for view in views]
    paths = sorted(str(path) for path in (files.directory / "commitlog").iterdir())
    maps = store._log.maps
    assert len(store._cleaner._sealed()) >= 10
    gone = store._log.segments.take_first(10)
    for segment in gone:
        os.unlink(segment.path)
        maps.forget(segment)
    assert files.segment(10).exists()
    assert store.stats().log_views == 10
    assert store.stats().held_bytes == 10 * SEGMENT_BYTES
    put_bodies(store, [LARGE] * 30)
    assert views == copies
    del views[3:]
    assert store.stats().held_bytes == 3 * SEGMENT_BYTES
    views.clear()
    assert store.stats().held_bytes == 0
    with open("/proc/self/maps") as mapped:
        found = mapped.read()
    assert not any(path in found for path in paths[:10])


def test_what_is_not_in_memory_is_read_by_calls(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, [LARGE] * 9)
    forget_pages(store, files)
    result = store.get("topic", 0, 0, max_bytes=1)
    assert isinstance(result.data[0], bytes)
    assert read_queue(store) == [LARGE] * 9


@pytest.mark.parametrize("cut_to", [0, 1, 4096, 30_000])
def test_a_sealed_segment_that_was_shortened_is_an_error_and_no_signal(
    files: StoreFiles, cut_to: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = files.open()
    put_bodies(store, [LARGE] * 10)
    view_of(store, 0)
    os.truncate(files.segment(0), cut_to)
    store.tick(10_000)
    assert "was cut from outside" in caplog.text
    with pytest.raises(CorruptRecord):
        store.get("topic", 0, 2, max_bytes=1)
    # Everything else goes on.
    put_bodies(store, ["more"])
    assert store.get("topic", 0, 5, max_bytes=1).status is GetStatus.FOUND


def test_a_sealed_segment_that_was_removed_is_reported_and_an_error(
    files: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = files.open()
    put_bodies(store, [LARGE] * 10)
    view = view_of(store, 0)
    copy = bytes(view)
    store._log._files.close_path(str(files.segment(0)))
    os.unlink(files.segment(0))
    store.tick(10_000)
    assert "was removed from outside" in caplog.text
    assert view == copy
    put_bodies(store, ["more"])
    assert store.get("topic", 0, 5, max_bytes=1).status is GetStatus.FOUND


@pytest.mark.parametrize("harm", ["shortened", "removed"])
def test_the_segment_that_is_written_stops_the_store(files: StoreFiles, harm: str) -> None:
    store = files.open()
    put_bodies(store, ["a"] * 100)
    end = store.stats().max_commitlog_offset
    if harm == "removed":
        os.unlink(files.segment(0))
    else:
        os.truncate(files.segment(0), end + 4096)
    with pytest.raises(StoreClosed, match="from outside"):
        store.tick(10_000)
    with pytest.raises(StoreClosed, match="from outside"):
        put_bodies(store, ["b"])
    if harm == "shortened":
        store.close()
        assert read_queue(files.open()) == ["a"] * 100


def test_the_next_segment_is_looked_at_before_it_is_written(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, [LARGE] * 2)
    store.tick(0)
    store.wait_for_chores()
    store.tick(1)
    following = files.segment(1)
    if following.exists():
        os.truncate(following, 0)
    put_bodies(store, [LARGE] * 2 + ["s"] * 50)
    assert following.stat().st_size == SEGMENT_BYTES
    assert read_queue(store) == [LARGE] * 4 + ["s"] * 50


def test_pages_of_an_idle_log_are_given_back(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["a"] * 5)
    window = store._log._window
    assert window._stretch is not None
    store.tick(5_000)
    assert window._stretch is not None, "something was stored since the last look"
    store.tick(6_001)
    assert window._stretch is None
    put_bodies(store, ["b"] * 5)
    assert read_queue(store) == ["a"] * 5 + ["b"] * 5


def test_ten_thousand_queues_are_written_by_stores(
    files: StoreFiles, stores: list[tuple[int, int]]
) -> None:
    files.config = msgspec.structs.replace(files.config, mapped_file_size_commit_log=16 << 20)
    store = files.open()
    for start in range(0, 10_000, 100):
        store.put([make_batch(["x"], queue_id=start + number) for number in range(100)], NOW)
    assert len(stores) == 99
    for queue_id in range(0, 10_000, 111):
        assert read_queue(store, queue_id=queue_id) == ["x"]
