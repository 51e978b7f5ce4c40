"""Groups of batches: whatever dies, whatever is cut, all of a group is there or nothing."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from harness.kill_points import KillPoints
from harness.log_copies import end_of, log_of, replicate, state_of
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.commitlog import opening, recovery
from mqmesh.storage.commitlog.recovery import LogRecovery
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import BatchToPut, FlushDiskType, PutResult, PutStatus
from mqmesh.storage.log.control_record import GROUP_MARKER_SIZE
from mqmesh.storage.log.record import Record, RecordCheck
from mqmesh.storage.log.scan import EVERYTHING, Damaged, LogScanner
from mqmesh.storage.log.segments import FoundSegments
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.testing.store_contract import NOW, make_batch
from mqmesh.units import MIB

QUEUES = 3
LONGEST = 40
EXAMPLES = itertools.count()


def group_of(
    bodies: Sequence[str], number: int = 1, *, first_sequence: int = 0
) -> list[BatchToPut]:
    """Returns a batch a body, in turn for three queues; those of one producer."""
    return [
        make_batch([body], queue_id=at % QUEUES, first_sequence=first_sequence + at, group=number)
        for at, body in enumerate(bodies)
    ]


def put_group(
    store: CommitLogStore, bodies: Sequence[str], *, first_sequence: int = 0
) -> list[PutResult]:
    """Puts a group, and returns the results of its batches, which are all stored."""
    results = store.put(group_of(bodies, first_sequence=first_sequence), NOW)
    assert [result.status for result in results] == [PutStatus.PUT_OK] * len(bodies)
    return results


def stored(store: CommitLogStore) -> list[str]:
    """Returns what consumers get of the three queues."""
    queues = (deliverable(store, "topic", queue_id) for queue_id in range(QUEUES))
    return sorted(body for queue in queues for body in queue.values())


def marker_of(results: Sequence[PutResult]) -> int:
    """Returns where the group of some results begins."""
    return results[0].commitlog_offset - GROUP_MARKER_SIZE


def members(count: int) -> list[str]:
    """Returns so many bodies of a group."""
    return [f"member {number:02}" for number in range(count)]


# ---- Cut anywhere --------------------------------------------------------------------


class Log:
    """The log of a closed store, of which the end is taken byte by byte.

    Attributes:
        start: Where the group begins that is taken.
    """

    def __init__(self, files: StoreFiles, start: int, end: int) -> None:
        files.close()
        self.start = start
        self._end = end
        self._path = files.segment()
        self._segments = FoundSegments(self._path.parent)
        self._key = read_store_key(files.directory)

    def positions(self, wanted: Sequence[int] = ()) -> Iterator[int]:
        """Yields all places inside of the group, or some, last first; nothing is left behind."""
        with open(self._path, "r+b", buffering=0) as file:
            for position in wanted or range(self._end - 1, self.start - 1, -1):
                file.seek(position)
                file.write(bytes(self._end - position))
                yield position

    def found(self, *, searches: bool) -> int:
        """Walks as recovery does; returns the number of records.

        Args:
            searches: The process died, and not the system: what has good records behind it is
                damaged.
        """
        scanner = LogScanner(self._segments, key=self._key, store_id=None)

        def beyond(position: int, epoch: int) -> int | None:
            return scanner.resync(position, EVERYTHING, epoch=epoch) if searches else None

        count = len(list(scanner.walk(self.start, epoch=0, beyond=beyond)))
        scanner.close()
        return count


@pytest.mark.parametrize("searches", [False, True], ids=["system", "process"])
def test_a_group_that_is_cut_at_any_byte_is_not_there(files: StoreFiles, searches: bool) -> None:
    store = files.open()
    put_bodies(store, ["before"], topic="other")
    results = put_group(store, ["a", "b"])
    log = Log(files, marker_of(results), results[-1].end_offset)
    assert log.found(searches=searches) == 3
    lost = [place for place in log.positions() if not log.found(searches=searches)]
    # The last two bytes are zeros in any case.
    assert lost == list(range(results[-1].end_offset - 3, log.start - 1, -1))


def test_at_every_record_of_groups_of_all_lengths_nothing_counts_before_the_last(
    files: StoreFiles,
) -> None:
    files.config = msgspec.structs.replace(files.config, mapped_file_size_commit_log=1 * MIB)
    store = files.open()
    groups = [put_group(store, members(n), first_sequence=100 * n) for n in range(2, LONGEST + 1)]
    for results in reversed(groups):
        log = Log(files, marker_of(results), results[-1].end_offset)
        assert log.found(searches=True) == len(results) + 1
        inside = [one.commitlog_offset + 60 for one in reversed(results)]
        for place in log.positions([*inside, log.start]):
            assert not log.found(searches=place % 2 == 0)


@pytest.mark.parametrize("is_other_boot", [False, True], ids=["process", "system"])
def test_a_store_goes_on_where_the_group_began_that_it_lost(
    files: StoreFiles, request: pytest.FixtureRequest, is_other_boot: bool
) -> None:
    if is_other_boot:
        request.getfixturevalue("another_boot")
    store = files.open()
    put_bodies(store, ["before"], topic="other")
    settle(store)
    results = store.put([make_batch(["alone"], first_sequence=9), *group_of(["a", "b"])], NOW)
    start, end = marker_of(results[1:]), results[-1].end_offset
    good = files.read(start, end - start)
    for position in (10, GROUP_MARKER_SIZE, 150, len(good) - 3):
        crashed = files.copy()
        crashed.write(start, good[:position] + bytes(len(good) - position))
        recovered = crashed.open()
        assert stored(recovered) == ["alone"], position
        assert end_of(recovered) == start
        assert not recovered.stats().damaged
        # It comes once more, and is no duplicate of what is lost.
        put_group(recovered, ["a", "b"])
        recovered.close()
        again = crashed.open()
        assert stored(again) == ["a", "alone", "b"]
        assert (again.stats().cut_bytes, again.stats().recovered_bytes) == (0, 0)
        again.close()


@pytest.mark.usefixtures("another_boot")
@given(
    sizes=st.lists(st.integers(0, 1_400), min_size=2, max_size=LONGEST),
    filled=st.integers(0, 60_000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_any_group_any_pages_may_be_lost_across_a_segment_too(
    files: StoreFiles, sizes: list[int], filled: int, seed: int
) -> None:
    chance = random.Random(seed)
    first = StoreFiles(files.directory.with_name(f"example-{next(EXAMPLES)}"), files.config)
    store = first.open()
    put_bodies(store, ["x" * filled], topic="other")
    settle(store)
    synced = end_of(store)
    bodies = [f"{number:02}" + "y" * size for number, size in enumerate(sizes)]
    results = put_group(store, bodies)
    start, end = marker_of(results), results[-1].end_offset
    assert start // SEGMENT_BYTES == (end - 1) // SEGMENT_BYTES, "a group has one segment"
    put_bodies(store, ["behind"], topic="other")
    crashed = first.copy()
    good = first.read(start, end - start)
    lost = bytearray(good)
    pages = range(start // 4096, end // 4096 + 1)
    for page in chance.sample(pages, chance.randint(1, len(pages))):
        low, high = max(page * 4096, start) - start, min((page + 1) * 4096, end) - start
        lost[low:high] = bytes(high - low)
    assume(lost != good)
    crashed.write(start, bytes(lost))
    recovered = crashed.open()
    assert stored(recovered) == []
    assert end_of(recovered) in (start, synced)
    assert deliverable(recovered, "other") == {0: "x" * filled}
    put_group(recovered, bodies)
    assert stored(recovered) == bodies
    for one in (first, crashed):
        one.close()
        shutil.rmtree(one.directory)


@pytest.mark.parametrize("count", [2, 7])
def test_a_process_that_dies_at_any_step_leaves_all_of_a_group_or_nothing(
    files: StoreFiles, kill_points: KillPoints, count: int
) -> None:
    files.config = msgspec.structs.replace(files.config, flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    store = files.open()
    put_bodies(store, ["first write"], topic="other")  # by a call; those behind it are stores
    done: list[str] = []
    kill_points.start(files, lambda: list(done))
    done += [str(one.status) for one in put_group(store, members(count))]
    put_bodies(store, ["behind"] * 3, topic="other")
    seen = set()
    for copy, before in kill_points.stop():
        recovered = copy.open()
        found = stored(recovered)
        assert found == members(count) or (not found and not before)
        seen.add(len(found))
        (repeated, *_) = recovered.put(group_of(members(count)), NOW)
        assert (repeated.status is PutStatus.DUPLICATE) == bool(found)
        assert stored(recovered) == members(count)
    assert seen == {0, count}


# ---- Queues, progress, damage ----------------------------------------------------------


@pytest.mark.usefixtures("another_boot")
def test_queues_that_are_ahead_of_the_log_end_before_a_lost_group(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["kept"])
    now_ms = settle(store)
    results = put_group(store, ["a", "b", "c"], first_sequence=10)
    crashed = files.copy()
    settle(store, now_ms)
    shutil.rmtree(crashed.directory / "consumequeue")
    shutil.copytree(files.directory / "consumequeue", crashed.directory / "consumequeue")
    crashed.write(results[2].commitlog_offset, bytes(40))
    recovered = crashed.open()
    assert stored(recovered) == ["kept"]
    assert [recovered.queue_bounds("topic", one)[1] for one in range(QUEUES)] == [1, 0, 0]
    put_bodies(recovered, ["new"], queue_id=1)
    crashed.close()
    assert stored(crashed.open()) == ["kept", "new"]
    crashed.close()


def test_a_long_recovery_never_notes_a_place_inside_of_a_group(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files.open()
    ends = []
    for number in range(4):
        ends.append(put_group(store, members(5), first_sequence=10 * number)[-1].end_offset)
        put_bodies(store, ["alone"], topic="other")
        ends += [end_of(store)]
    crashed = files.copy()
    noted: list[int] = []

    def watched(**parts: Any) -> LogRecovery:
        parts["save_progress"] = lambda through, epoch: noted.append(through)
        return LogRecovery(**parts)

    monkeypatch.setattr(recovery, "SAVE_EVERY_BYTES", 1)
    monkeypatch.setattr(opening, "LogRecovery", watched)
    crashed.open()
    assert noted == ends
    crashed.close()


def test_damage_of_a_group_that_the_log_goes_on_behind_takes_what_is_damaged_only(
    files: StoreFiles,
) -> None:
    store = files.open()
    results = put_group(store, ["a", "b", "c"])
    put_bodies(store, ["behind"])
    places = [marker_of(results), *(one.commitlog_offset for one in results)]
    for place, left in zip(places, ["abc", "bc", "ac", "ab"], strict=True):
        crashed = files.copy()
        crashed.flip(place + 20)
        recovered = crashed.open()
        assert stored(recovered) == sorted([*left, "behind"])
        (damage,) = recovered.stats().damaged
        assert damage.start_offset == place
        crashed.close()


@pytest.mark.usefixtures("another_boot")
def test_without_a_checkpoint_a_group_that_lost_a_page_is_not_there(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["before"])
    results = put_group(store, ["a", "b", "c"], first_sequence=10)
    put_bodies(store, ["behind"])
    left = ["before", "behind"]
    for place in (one.commitlog_offset for one in results):
        crashed = files.copy()
        (crashed.directory / "checkpoint").unlink()
        crashed.write(place, bytes(40))
        recovered = crashed.open()
        assert stored(recovered) == left
        (damage,) = recovered.stats().damaged
        assert (damage.start_offset, damage.end_offset) == (
            marker_of(results),
            results[-1].end_offset,
        )
        # What is left of it never counts, however often the queues are made anew of the log.
        (again, *_) = recovered.put(group_of(["a", "b", "c"], first_sequence=10), NOW)
        assert again.status is PutStatus.PUT_OK
        settle(recovered)
        for _ in range(10):
            recovered.repair.look()
        assert recovered.stats().damaged == [damage]
        recovered.close()
        for path in (*crashed.directory.glob("queue-table*"), crashed.directory / "consumequeue"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert stored(crashed.open()) == sorted([*left, "a", "b", "c"])
        crashed.close()


def test_a_walk_that_stops_inside_of_a_group_gives_what_begins_before(files: StoreFiles) -> None:
    store = files.open()
    results = put_group(store, members(6))
    (behind,) = put_bodies(store, ["behind"], topic="other")
    segments, key = FoundSegments(files.segment().parent), read_store_key(files.directory)
    scanner = LogScanner(segments, key=key, store_id=None)

    def starts(start: int, stop: int) -> list[int]:
        walk = scanner.walk(start, epoch=0, beyond=lambda position, epoch: stop, stop=stop)
        return [found.start for found in walk if not isinstance(found, Damaged)]

    every = [marker_of(results), *(one.commitlog_offset for one in results), behind]
    for at, place in enumerate(every):
        assert starts(0, place) == every[:at]
        assert starts(place, end_of(store)) == every[at:]
    scanner.close()


# ---- Copies ----------------------------------------------------------------------------


class Pair:
    """A leader's store and a follower's, which began as a copy of its empty directory."""

    def __init__(self, files: StoreFiles) -> None:
        files.open().close()
        self.leader_files, self.follower_files = files, files.copy()
        self.leader, self.follower = files.open(), self.follower_files.open()


@pytest.fixture
def pair(files: StoreFiles) -> Iterator[Pair]:
    pair = Pair(files)
    yield pair
    pair.follower_files.close()


def test_a_chunk_never_ends_inside_of_a_group(pair: Pair) -> None:
    ends = []
    for number in range(3):
        put_bodies(pair.leader, ["alone"], topic="other")
        ends.append(end_of(pair.leader))
        put_group(pair.leader, members(LONGEST), first_sequence=100 * number)
        ends.append(end_of(pair.leader))
    read = pair.leader.read_raw
    for max_bytes in (1, 300, 3_000, 20_000):
        place = 0
        while place < ends[-1]:
            chunk = read(place, max_bytes=max_bytes)
            assert chunk.end in ends, max_bytes
            place = chunk.end
    # Nor does one that must end before a place inside of it.
    for stop in (ends[0] + 1, ends[0] + 60, ends[1] - 1):
        assert read(ends[0], max_bytes=SEGMENT_BYTES, stop=stop).data == b""
        assert read(0, max_bytes=SEGMENT_BYTES, stop=stop).end == ends[0]
    assert len(replicate(pair.leader, pair.follower, 1)) == len(ends)
    assert log_of(pair.follower) == log_of(pair.leader)
    assert state_of(pair.follower) == state_of(pair.leader)


def test_a_follower_refuses_a_chunk_that_ends_inside_of_a_group(pair: Pair) -> None:
    results = put_group(pair.leader, members(4))
    good = pair.leader.read_raw(0, max_bytes=SEGMENT_BYTES)
    for end in [one.commitlog_offset for one in results]:
        part = msgspec.structs.replace(good, end=end, data=bytes(good.data[: end - good.start]))
        with pytest.raises(CorruptRecord, match="inside of a group"):
            pair.follower.append_raw(part)
        assert end_of(pair.follower) == 0
    pair.follower.append_raw(good)
    assert stored(pair.follower) == members(4)


@pytest.mark.usefixtures("another_boot")
def test_a_follower_that_dies_inside_of_a_group_goes_on_from_its_begin(pair: Pair) -> None:
    put_bodies(pair.leader, ["before"], topic="other")
    replicate(pair.leader, pair.follower, SEGMENT_BYTES)
    start = end_of(pair.follower)
    results = put_group(pair.leader, members(4))
    for end in (start + 10, *(one.commitlog_offset for one in results), results[-1].end_offset - 3):
        torn = pair.follower_files.copy()
        torn.write(start, pair.leader_files.read(start, end - start))
        follower = torn.open()
        assert end_of(follower) == start
        replicate(pair.leader, follower, SEGMENT_BYTES)
        assert log_of(follower) == log_of(pair.leader)
        assert state_of(follower)[:2] == state_of(pair.leader)[:2]
        torn.close()


def test_a_cut_inside_of_a_group_goes_to_its_begin(pair: Pair) -> None:
    """No election asks for one; who does gets a log that ends with a whole group."""
    put_bodies(pair.leader, ["before"])
    replicate(pair.leader, pair.follower, SEGMENT_BYTES)
    expected = state_of(pair.leader)
    start = end_of(pair.leader)
    results = put_group(pair.leader, members(LONGEST), first_sequence=100)
    put_group(pair.leader, members(3), first_sequence=200)
    for place in [one.commitlog_offset for one in results][::7]:
        copy = pair.leader_files.copy()
        store = copy.open()
        store.truncate(place)
        assert end_of(store) == start
        assert state_of(store)[:2] == expected[:2]
        copy.close()
    # Where a group begins, or ends, nothing else goes.
    copy = pair.leader_files.copy()
    store = copy.open()
    store.truncate(results[-1].end_offset)
    assert stored(store) == sorted(["before", *members(LONGEST)])
    store.truncate(start)
    assert stored(store) == ["before"]
    copy.close()


def test_a_cut_checks_little_of_bodies_that_are_full_of_markers(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files.open()
    results = put_group(store, members(2))
    marker = files.read(marker_of(results), GROUP_MARKER_SIZE)
    put_group(store, ["MQM1" * 5_000, "a", "b"], first_sequence=10)
    results = store.put([make_batch([marker * 300], first_sequence=20)], NOW)
    checked: list[int] = []
    check = RecordCheck.record

    def counted(own: RecordCheck, view: memoryview, start: int, **options: int) -> Record:
        checked.append(start)
        return check(own, view, start, **options)

    end = results[0].end_offset
    monkeypatch.setattr(RecordCheck, "record", counted)
    assert store._log.group_start(end) == end
    assert len(checked) == 1


def test_a_damaged_group_is_put_right_by_what_another_replica_has(pair: Pair) -> None:
    results = put_group(pair.leader, members(4))
    put_bodies(pair.leader, ["behind"])
    replicate(pair.leader, pair.follower, SEGMENT_BYTES)
    expected = log_of(pair.leader)
    for place in (marker_of(results), results[2].commitlog_offset):
        copy = pair.follower_files.copy()
        copy.flip(place + 20)
        follower = copy.open()
        (damage,) = follower.repair.damaged()
        size = damage.end_offset - damage.start_offset
        read = partial(pair.leader.read_raw, damage.start_offset, max_bytes=size)
        good = read(whole_groups=False)
        assert good.end == damage.end_offset, "no more is moved than was damaged"
        with pytest.raises(CorruptRecord):
            follower.append_raw(msgspec.structs.replace(good, start=end_of(follower)))
        follower.repair.put_back(good)
        assert log_of(follower) == expected
        assert stored(follower) == sorted([*members(4), "behind"])
        copy.close()
