"""A log is copied as it is, and cut: two stores that are one history, and one that dies at it."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from harness.kill_points import KillPoints
from harness.log_copies import end_of, log_of, replicate, state_of
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.errors import CorruptRecord, DiskFull, OffsetOutOfRange, StorageError, StoreClosed
from mqmesh.log_identity import CommonEnd, EpochStart, common_end
from mqmesh.storage.commitlog.cut_files import KEPT_MS, remove_old_cuts
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.interface import FlushDiskType, LogChunk, PutStatus
from mqmesh.storage.log.commitlog import CommitLog
from mqmesh.storage.log.control_record import ControlKind, decode_control_record
from mqmesh.storage.log.tail_cut import TailCut
from mqmesh.storage.queues.consume_queues import ConsumeQueues
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch
from mqmesh.units import CommitLogOffset


class Pair:
    """A leader's store and a follower's, which began as a copy of its empty directory."""

    def __init__(self, files: StoreFiles) -> None:
        files.open().close()
        self.leader_files, self.follower_files = files, files.copy()
        self.leader = files.open()
        self.follower = self.follower_files.open()

    def replicate(self, max_bytes: int = 2_000) -> list[LogChunk]:
        """Copies until the follower has all."""
        return replicate(self.leader, self.follower, max_bytes)

    def assert_equal(self) -> None:
        assert log_of(self.leader) == log_of(self.follower)
        assert state_of(self.leader) == state_of(self.follower)


def workload(store: CommitLogStore, numbers: range) -> None:
    """Batches of two producers for two queues, over several segments, and a deleted topic."""
    for number in numbers:
        for producer_id in (7, 8):
            batch = make_batch(
                [f"{number}-{producer_id}" + "x" * 4_000],
                queue_id=producer_id % 2,
                producer_id=producer_id,
                first_sequence=number,
                tags=["a"],
            )
            (result,) = store.put([batch], NOW)
            assert result.status is PutStatus.PUT_OK
        if number % 8 == 5:
            store.put(
                [make_batch(["gone"], topic="gone", producer_id=9, first_sequence=number)], NOW
            )
            store.delete_topic("gone")


@pytest.fixture
def pair(files: StoreFiles):
    pair = Pair(files)
    yield pair
    pair.follower_files.close()


@pytest.mark.parametrize("max_bytes", [1, 5_000, 1 << 20])
def test_a_copied_log_is_byte_for_byte_the_same_and_so_is_all_that_is_derived(pair, max_bytes):
    workload(pair.leader, range(20))
    chunks = pair.replicate(max_bytes)
    pair.assert_equal()
    assert len(pair.leader._log.segments) >= 3
    for chunk in chunks:
        # Whole records of one segment: one at least, and no more than was asked for.
        assert chunk.start // SEGMENT_BYTES == (chunk.start + len(chunk.data) - 1) // SEGMENT_BYTES
        assert len(chunk.data) <= max(max_bytes, 4_500)
    settle(pair.follower)
    pair.follower.close()
    again = pair.follower_files.open()
    assert log_of(again) == log_of(pair.leader)
    assert state_of(again) == state_of(pair.leader)


def test_a_follower_that_dies_has_the_same_log_afterwards_and_goes_on(pair):
    workload(pair.leader, range(6))
    pair.replicate()
    torn = pair.follower_files.copy()
    # Of the next record only the beginning came to the disk.
    workload(pair.leader, range(6, 7))
    start = end_of(pair.follower)
    torn.write(start, pair.leader_files.read(start, 60))
    follower = torn.open()
    assert follower.stats().cut_bytes > 0
    # No record of its own tells of the cut: they would part from here on.
    assert end_of(follower) == start
    workload(pair.leader, range(7, 20))
    replicate(pair.leader, follower, 2_000)
    assert log_of(follower) == log_of(pair.leader)
    assert state_of(follower) == state_of(pair.leader)
    torn.close()


def test_what_is_behind_the_stop_is_not_read(pair):
    offsets = put_bodies(pair.leader, ["one", "two", "three"])
    read = pair.leader.read_raw
    assert read(offsets[0], max_bytes=1 << 20, stop=offsets[2]).end == offsets[2]
    for stop in (offsets[1], offsets[1] + 1, offsets[2] - 1):
        assert read(offsets[1], max_bytes=1 << 20, stop=stop).data == b""
    assert read(end_of(pair.leader), max_bytes=100).data == b""


def test_a_follower_that_is_fed_after_each_write_gets_the_log_as_it_stands(pair):
    for number in range(6):
        place, epoch = end_of(pair.leader), pair.leader.epoch()
        put_bodies(pair.leader, [f"body {number}"] * (number % 3 + 1))
        if number == 3:
            pair.leader.begin_epoch(9)  # its marker follows with the next write
        read = pair.leader.read_raw(place, max_bytes=1 << 20)
        assert bytes(read.data) == pair.leader_files.read(place, read.end - place)
        assert (read.epoch, read.start) == (epoch, place)
        replicate(pair.leader, pair.follower, 1 << 20)
        assert pair.leader.read_raw(end_of(pair.leader), max_bytes=1 << 20).data == b""
    pair.assert_equal()


def test_only_where_a_record_begins_can_be_read(pair):
    offsets = put_bodies(pair.leader, ["one", "two"])
    for place in (offsets[0] + 1, offsets[1] - 8, offsets[1] + 104):
        with pytest.raises(CorruptRecord):
            pair.leader.read_raw(place, max_bytes=100)
    with pytest.raises(OffsetOutOfRange):
        pair.leader.read_raw(end_of(pair.leader) + 1, max_bytes=100)


def test_a_record_inside_of_a_body_is_not_read_as_one(pair):
    (place,) = put_bodies(pair.leader, ["one"])
    inner = pair.leader_files.read(place, end_of(pair.leader) - place)
    (outer,) = [pair.leader.put([make_batch([inner], producer_id=3)], NOW)[0].commitlog_offset]
    at = pair.leader_files.read(outer, end_of(pair.leader) - outer).index(inner)
    with pytest.raises(CorruptRecord):
        pair.leader.read_raw(outer + at, max_bytes=1 << 20)


def test_of_a_chunk_with_a_bad_record_nothing_is_added(pair):
    put_bodies(pair.leader, ["one", "two", "three"])
    good = pair.leader.read_raw(0, max_bytes=1 << 20)
    size = len(good.data)
    before = log_of(pair.follower)
    for position in [*range(0, size, 7), size - 1]:
        data = bytearray(good.data)
        data[position] ^= 1
        with pytest.raises(StorageError):
            pair.follower.append_raw(msgspec.structs.replace(good, data=bytes(data)))
    for changes in (
        {"data": bytes(good.data)[:-1]},
        {"data": bytes(good.data)[:50]},
        {"end": good.end - 1},
        {"end": good.segment_end},
        {"epoch": 5},
        {"segment_end": SEGMENT_BYTES * 2},
        {"start": 1},
        {"data": bytes(good.data) * 2},
    ):
        with pytest.raises(StorageError):
            pair.follower.append_raw(msgspec.structs.replace(good, **changes))
    assert log_of(pair.follower) == before
    assert deliverable(pair.follower) == {}
    pair.follower.append_raw(good)
    pair.assert_equal()


def test_the_log_of_another_store_is_refused(pair, tmp_path):
    other_files = StoreFiles(tmp_path / "other")
    other = other_files.open()
    put_bodies(other, ["one"])
    with pytest.raises(CorruptRecord, match="this store's check"):
        pair.follower.append_raw(other.read_raw(0, max_bytes=1000))
    other_files.close()


def test_a_leader_notes_its_epoch_before_its_first_record_and_a_follower_with_it(pair):
    put_bodies(pair.leader, ["one"])
    place = end_of(pair.leader)
    pair.leader.begin_epoch(7, b"replica 2")
    marker = decode_control_record(pair.leader_files.read(place, 57))
    assert (marker.kind, marker.epoch, marker.data) == (ControlKind.EPOCH, 7, b"replica 2")
    assert pair.leader.epochs() == [EpochStart(1, 0), EpochStart(7, place)]
    for low in (1, 7):
        with pytest.raises(StorageError, match="cannot follow epoch 7"):
            pair.leader.begin_epoch(low)
    put_bodies(pair.leader, ["two"])
    chunks = pair.replicate(1 << 20)
    # A chunk is of one epoch.
    assert [chunk.epoch for chunk in chunks] == [1, 7]
    pair.assert_equal()
    # The follower becomes the leader: its own records begin an epoch, told or not.
    end = end_of(pair.follower)
    put_bodies(pair.follower, ["three"])
    assert pair.follower.epochs()[-1] == EpochStart(8, end)
    assert pair.follower.epoch() == 8


def test_an_old_leader_is_cut_where_its_history_parts_and_gets_the_new_ones(pair):
    workload(pair.leader, range(4))
    pair.replicate()
    parted = end_of(pair.leader)
    workload(pair.leader, range(4, 12))
    pair.follower.begin_epoch(5)
    workload(pair.follower, range(4, 9))
    common = common_end(
        pair.leader.epochs(), end_of(pair.leader), pair.follower.epochs(), end_of(pair.follower)
    )
    assert common == CommonEnd(1, parted)
    cut = bytes(pair.leader.read_raw(parted, max_bytes=1 << 20).data)
    pair.leader.truncate(common.end_offset)
    assert end_of(pair.leader) == parted
    # What is cut is kept aside.
    (kept,) = (pair.leader_files.directory / "cut").iterdir()
    assert kept.name == f"1-{parted}"
    assert kept.read_bytes().startswith(cut)
    replicate(pair.follower, pair.leader, 3_000)
    pair.assert_equal()
    # A client that came behind the place in the old epoch is told.
    assert pair.leader.cut_offset("topic", 0, 1) == 4
    # A week later nobody has missed it.
    written_ms = kept.stat().st_mtime_ns // 1_000_000
    remove_old_cuts(kept.parent, written_ms + KEPT_MS)
    assert kept.exists()
    remove_old_cuts(kept.parent, written_ms + KEPT_MS + 1)
    assert not kept.exists()


def reference(files: StoreFiles, end_offset: int) -> CommitLogStore:
    """A store whose log never was longer."""
    copy = files.copy()
    store = copy.open()
    shorter = StoreFiles(copy.directory.with_name(copy.directory.name + "-ref"), files.config)
    shutil.copytree(files.directory, shorter.directory)
    for name in ("commitlog", "consumequeue"):
        shutil.rmtree(shorter.directory / name)
    for name in ("queue-table", "epochs", "checkpoint"):
        for spare in ("", ".bak"):
            (shorter.directory / (name + spare)).unlink(missing_ok=True)
    (shorter.directory / "commitlog").mkdir()
    for segment in store._log.segments:
        if segment.start < end_offset:
            data = Path(segment.path).read_bytes()
            kept = data[: end_offset - segment.start]
            path = shorter.directory / "commitlog" / Path(segment.path).name
            path.write_bytes(kept.ljust(len(data), b"\0"))
    copy.close()
    return shorter.open()


def places(store: CommitLogStore) -> list[int]:
    """Where records begin."""
    found, place = [], 0
    while place < end_of(store):
        found.append(place)
        place = store.read_raw(place, max_bytes=0).end
    return found


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_log_that_was_cut_anywhere_is_as_if_it_had_never_been_longer(files, is_settled):
    store = files.open()
    workload(store, range(14))
    store.put([make_batch(["late"], topic="late", producer_id=7, first_sequence=99)], NOW)
    if is_settled:
        settle(store)
    every = places(store)
    for place in every[:1] + every[1::3]:
        copy = files.copy()
        cut = copy.open()
        cut.truncate(place)
        expected = reference(files, place)
        assert end_of(cut) == end_of(expected) == place
        assert state_of(cut)[:2] == state_of(expected)[:2]
        assert not cut.stats().damaged
        cut.close()
        again = copy.open()
        assert state_of(again)[:2] == state_of(expected)[:2]
        assert (end_of(again), again.stats().damaged) == (place, [])
        expected.close()
        copy.close()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("later", [range(4, 6), range(4, 5)], ids=["with a deletion", "batches"])
def test_a_cut_takes_back_what_the_queue_table_knows_beyond_what_it_covers(
    files, monkeypatch, later, number
):
    """Else a batch that was cut passes for stored when its producer repeats it."""
    monkeypatch.setattr("mqmesh.storage.commitlog.checkpointer.TAILS_PER_STEP", 1)
    store = files.open()
    workload(store, range(4))
    covered = end_of(store)
    store.tick(0)
    store.tick(1_000)  # a round begins, and goes on while more is stored
    workload(store, later)
    while store.checkpointed_through() < covered:
        if not store.tick(1_000):
            store.wait_for_chores()
    assert store.checkpointed_through() == covered
    place = [place for place in places(store) if place >= covered][number]
    expected = state_of(reference(files, place))
    store.truncate(place)
    assert state_of(store)[:2] == expected[:2]
    (repeated,) = store.put([make_batch(producer_id=8, first_sequence=4)], NOW)
    assert (repeated.status, repeated.base_queue_offset) == (PutStatus.PUT_OK, 4)


def test_a_place_where_no_record_begins_is_not_cut(files):
    store = files.open()
    offsets = put_bodies(store, ["one", "two"])
    for place in (offsets[1] + 1, offsets[1] - 1):
        with pytest.raises(CorruptRecord):
            store.truncate(place)
    with pytest.raises(OffsetOutOfRange):
        store.truncate(end_of(store) + 1)
    store.truncate(end_of(store))
    assert deliverable(store) == {0: "one", 1: "two"}
    assert not (files.directory / "cut").exists()


def test_without_room_for_what_is_to_be_kept_nothing_is_cut(files, monkeypatch):
    store = files.open()
    offsets = put_bodies(store, ["one", "two"])

    def refuse(*arguments, epoch):
        raise DiskFull("no room")

    monkeypatch.setattr("mqmesh.storage.commitlog.store.keep_cut", refuse)
    with pytest.raises(DiskFull):
        store.truncate(offsets[1])
    assert deliverable(store) == {0: "one", 1: "two"}
    put_bodies(store, ["three"])
    assert files.copy().open().queue_bounds("topic", 0) == (0, 3)


def test_a_cut_that_fails_closes_the_store_and_is_done_by_the_next_start(files, monkeypatch):
    store = files.open()
    offsets = put_bodies(store, ["one", "two", "three"])

    def fail(self):
        raise StorageError("the disk refuses")

    monkeypatch.setattr(TailCut, "clear", fail)
    with pytest.raises(StorageError, match="refuses"):
        store.truncate(offsets[1])
    with pytest.raises(StoreClosed):
        store.put([make_batch(["four"])], NOW)
    store.close()
    monkeypatch.undo()
    again = files.open()
    assert deliverable(again) == {0: "one"}
    assert end_of(again) == offsets[1]


@pytest.mark.parametrize("is_other_boot", [False, True])
def test_a_cut_that_dies_anywhere_is_done_by_the_next_start_or_was_not_begun(
    files: StoreFiles,
    kill_points: KillPoints,
    monkeypatch: pytest.MonkeyPatch,
    is_other_boot: bool,
) -> None:
    store = files.open()
    workload(store, range(8))
    settle(store)
    workload(store, range(8, 11))
    place = places(store)[7]
    before, after = state_of(store), state_of(expected := reference(files, place))
    expected.close()
    end = end_of(store)
    kill_points.start(files, lambda: (files.directory / "log-cut").read_bytes())
    store.truncate(place)
    idle = (files.directory / "log-cut").read_bytes()
    outcomes = set()
    if is_other_boot:
        boot = "mqmesh.storage.commitlog.opening.read_boot_id"
        monkeypatch.setattr(boot, lambda: b"another boot id.")
    for copy, note in kill_points.stop():
        again = copy.open()
        outcomes.add(end_of(again))
        if note != idle:
            assert end_of(again) == place
        assert state_of(again)[:2] == (after if end_of(again) == place else before)[:2]
        assert not again.stats().damaged
        # It goes on from there, and is found like that.
        put_bodies(again, ["new"], topic="new")
        found = state_of(again)
        again.close()
        assert state_of(copy.open())[:2] == found[:2]
    assert outcomes == {place, end}
    assert state_of(store)[:2] == after[:2]


def test_a_follower_that_dies_anywhere_goes_on_with_its_leaders_log(
    pair: Pair, kill_points: KillPoints
) -> None:
    workload(pair.leader, range(5))
    pair.replicate()
    pair.leader.begin_epoch(4)
    workload(pair.leader, range(5, 9))
    kill_points.start(pair.follower_files, tuple)
    pair.replicate(9_000)
    for copy, _ in kill_points.stop():
        again = copy.open()
        replicate(pair.leader, again, 9_000)
        assert log_of(again) == log_of(pair.leader)
        assert state_of(again) == state_of(pair.leader)


def test_without_room_nothing_is_added_and_later_it_is(pair, monkeypatch):
    put_bodies(pair.leader, ["one", "two"])
    chunk = pair.leader.read_raw(0, max_bytes=1 << 20)

    def refuse(*arguments):
        raise DiskFull("no room")

    monkeypatch.setattr(CommitLog, "take_room", refuse)
    with pytest.raises(DiskFull):
        pair.follower.append_raw(chunk)
    monkeypatch.undo()
    for error in (OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full")):

        def fail(*arguments, error=error):
            raise error

        monkeypatch.setattr(CommitLog, "write", fail)
        with pytest.raises(StorageError):
            pair.follower.append_raw(chunk)
        monkeypatch.undo()
    assert (end_of(pair.follower), deliverable(pair.follower)) == (0, {})
    pair.follower.append_raw(chunk)
    pair.assert_equal()


def test_a_full_disk_takes_more_of_the_log_while_retention_waits_for_it(pair):
    workload(pair.leader, range(12))
    pair.replicate()
    pair.follower.close()
    clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    follower = pair.follower = pair.follower_files.open(
        clock=clock, space_of=lambda path: Space(92, 8)
    )
    follower.keep_from("tables", CommitLogOffset(0))
    follower.tick(clock.monotonic_ms())
    settle(follower)
    put_bodies(pair.leader, ["carried"])
    with pytest.raises(DiskFull):
        pair.replicate()
    clock.advance(73 * 3_600_000)
    follower.tick(clock.monotonic_ms())
    assert 0 < follower.retention_wish() < end_of(follower)
    pair.replicate()
    pair.assert_equal()


def test_records_that_cannot_be_applied_stop_the_store_and_the_next_start_applies_them(
    pair, monkeypatch
):
    put_bodies(pair.leader, ["one", "two"])

    def fail(*arguments):
        raise StorageError("the disk refuses")

    monkeypatch.setattr(ConsumeQueues, "append", fail)
    with pytest.raises(StoreClosed, match="cannot be applied"):
        pair.replicate()
    monkeypatch.undo()
    with pytest.raises(StoreClosed):
        pair.follower.put([make_batch()], NOW)
    pair.follower.close()
    again = pair.follower_files.open()
    assert deliverable(again) == {0: "one", 1: "two"}


def test_what_a_follower_shows_is_on_its_disk_with_sync_flush(files):
    files.config = msgspec.structs.replace(files.config, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    pair = Pair(files)
    put_bodies(pair.leader, ["one"])
    pair.follower._flusher.close()  # from here on nothing is synced
    pair.replicate()
    assert pair.follower.queue_bounds("topic", 0) == (0, 0)
    pair.follower_files.close()
    assert deliverable(pair.follower_files.open()) == {0: "one"}
    pair.follower_files.close()


@pytest.mark.usefixtures("another_boot")
def test_an_epoch_whose_first_record_a_power_cut_took_is_none_of_the_log(files):
    """Else its replica would win elections over those who have what was acknowledged."""
    store = files.open()
    put_bodies(store, ["one"])
    settle(store)
    known, end = list(store.epochs()), store.log_end()
    store.begin_epoch(7)
    crashed = files.copy()
    crashed.write(end, bytes(store.log_end() - end))
    again = crashed.open()
    assert again.log_end() == end
    assert again.epochs() == known
    put_bodies(again, ["two"])
    assert again.epochs() == [*known, EpochStart(8, end)], "its number is not used again"
    crashed.close()


def test_a_cut_that_fails_half_way_says_that_the_store_is_closed(files, monkeypatch):
    store = files.open()
    put_bodies(store, ["one"])
    end = store.log_end()
    put_bodies(store, ["two"])

    def refuse(lock):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(store, "_reopen", refuse)
    with pytest.raises(StoreClosed, match="cannot be cut: the disk is gone"):
        store.truncate(end)
    with pytest.raises(StoreClosed):
        store.identity()
    crashed = files.copy()
    assert deliverable(crashed.open()) == {0: "one"}, "the next start does the rest"
    crashed.close()


def test_a_follower_forgets_an_epoch_whose_first_record_it_could_not_write(pair):
    put_bodies(pair.leader, ["one"])
    pair.replicate()
    pair.follower._parts.epochs.begin(9, end_of(pair.follower))
    put_bodies(pair.leader, ["two"])
    pair.replicate()
    assert pair.follower.epochs() == pair.leader.epochs()


def test_epochs_that_are_lost_are_read_from_the_log(files):
    store = files.open()
    put_bodies(store, ["one"])
    store.begin_epoch(3)
    put_bodies(store, ["two"])
    store.begin_epoch(9)
    settle(store)
    known = store.epochs()
    store.close()
    for name in ("epochs", "epochs.bak"):
        (files.directory / name).unlink()
    again = files.open()
    assert again.epochs() == known
    again.close()
    assert files.open().epochs() == known


def test_what_may_not_be_seen_yet_is_seen_later_and_what_was_seen_stays(files):
    store = files.open()
    offsets = put_bodies(store, ["one"])
    end, shown = end_of(store), [0]
    store.show_to(lambda: shown[0])
    assert deliverable(store) == {0: "one"}
    assert store.read_at(offsets[0])
    later = put_bodies(store, ["two", "three"])
    assert store.queue_bounds("topic", 0) == (0, 1)
    with pytest.raises(OffsetOutOfRange):
        store.read_at(later[0])
    shown[0] = later[1]
    assert deliverable(store) == {0: "one", 1: "two"}
    assert store.read_at(later[0])
    shown[0] = end
    assert store.queue_bounds("topic", 0) == (0, 2), "it never goes back"
    store.show_to(None)
    put_bodies(store, ["four"])
    assert store.queue_bounds("topic", 0) == (0, 4)
