"""Retention on real files: what goes, what stays, and a kill at every step of it."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
from harness.store_files import PATIENCE_SECONDS, SEGMENT_BYTES, StoreFiles

from mqmesh.errors import DiskFull, OffsetOutOfRange
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.interface import GetStatus
from mqmesh.storage.log.log_start import read_log_start
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue
from mqmesh.units import CommitLogOffset

BODY = "x" * 20_000
"""Three to a segment."""
HOUR_MS = 3_600_000
ALWAYS = ";".join(f"{hour:02d}" for hour in range(24))
TIB = 1 << 40
ROOMY = Space(10 * TIB, 90 * TIB)


class Kept:
    """A store with a clock and a disk that the test rules."""

    def __init__(self, files: StoreFiles) -> None:
        self.files = files
        files.config = msgspec.structs.replace(
            files.config, mapped_file_size_consume_queue=16, delete_when=ALWAYS
        )
        self.clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
        self.space = ROOMY
        self.sequence = 0
        self.store = self.open()

    def open(self, files: StoreFiles | None = None) -> CommitLogStore:
        # By its files, which know of its threads then: a copy waits for them.
        return (files or self.files).open(clock=self.clock, space_of=lambda path: self.space)

    def reopen(self, **settings: Any) -> None:
        """Opens the store again, with other settings."""
        self.store.close()
        self.files.config = msgspec.structs.replace(self.files.config, **settings)
        self.store = self.open()

    def put(self, number: int, **where: Any) -> None:
        """Stores messages that begin with their number."""
        for _ in range(number):
            body = f"{self.sequence:06d}{BODY}"
            self.store.put([make_batch([body], first_sequence=self.sequence, **where)], NOW)
            self.sequence += 1

    def tick(self, step_ms: int = 100) -> None:
        self.clock.advance(step_ms)
        self.store.tick(self.clock.monotonic_ms())

    def tick_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it never comes"
            self.tick()
            self.store.wait_for_chores()

    def run(self, duration_ms: int) -> None:
        for _ in range(duration_ms // 100):
            self.tick()
            self.store.wait_for_chores()

    def make_durable(self) -> None:
        self.tick_until(
            lambda: self.store.checkpointed_through() == self.store.stats().max_commitlog_offset
        )

    def segments(self) -> list[str]:
        return sorted(p.name for p in (self.files.directory / "commitlog").iterdir())


@pytest.fixture
def kept(files: StoreFiles) -> Iterator[Kept]:
    kept = Kept(files)
    yield kept
    kept.store.close()


def numbers(store: CommitLogStore, queue_id: int = 0) -> list[int]:
    return [int(body[:6]) for body in read_queue(store, queue_id=queue_id)]


def test_what_retention_removed_is_not_lost(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.run(15_000)
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: len(kept.segments()) < 5)
    kept.run(5_000)
    kept.reopen(file_reserved_time=1_000)  # the next ones stay, for all that the clock says
    kept.put(6)
    kept.make_durable()
    assert len(kept.segments()) >= 3
    begins = read_log_start(kept.files.directory / "log-beginning")
    assert begins == kept.store.stats().min_commitlog_offset > 0
    kept.reopen()
    assert kept.store.stats().damaged == []
    kept.store.close()
    os.unlink(kept.files.directory / "commitlog" / kept.segments()[0])
    kept.store = kept.open()
    assert len(kept.store.stats().damaged) == 1


def test_old_segments_go_oldest_first_and_the_newest_stays(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    assert len(kept.segments()) == 11
    kept.run(15_000)
    assert kept.store.stats().deleted_segments == 0
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    kept.run(30_000)
    stats = kept.store.stats()
    assert kept.segments() == [f"{10 * SEGMENT_BYTES:020d}"]
    assert (stats.min_commitlog_offset, stats.deleted_bytes) == (10 * SEGMENT_BYTES,) * 2
    assert kept.store.queue_bounds("topic", 0) == (30, 31)
    assert numbers(kept.store) == [30]


def test_other_settings_count_at_once_and_after_the_log_was_cut(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.run(15_000)
    end = CommitLogOffset(kept.store.stats().max_commitlog_offset)
    longer = msgspec.structs.replace(kept.files.config, file_reserved_time=99)
    kept.store.retention.configure(longer)
    kept.put(1)
    kept.store.truncate(end)
    kept.run(1_000)
    kept.clock.advance(73 * HOUR_MS)
    kept.run(30_000)
    assert kept.store.stats().deleted_segments == 0
    kept.store.retention.configure(kept.files.config)
    kept.tick_until(lambda: kept.store.stats().deleted_segments > 0)


def test_a_pass_on_demand_says_what_would_go_and_what_went(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.store.retention.configure(
        msgspec.structs.replace(kept.files.config, delete_when="04", delete_files_batch_max=4)
    )
    kept.run(15_000)
    nothing = kept.store.retention.clean(dry_run=False)
    assert nothing is not None
    assert (nothing.finished, nothing.segments) == (True, [])
    assert "no full segment is older than 72 h" in nothing.reason
    # Noon, local time: by itself nothing goes then.
    now = time.localtime(kept.clock.wall_ms() / 1_000)
    kept.clock.advance((73 + (24 + 12 - 1 - now.tm_hour) % 24) * HOUR_MS)
    planned = kept.store.retention.clean(dry_run=True)
    assert planned is not None
    kept.tick_until(lambda: planned.finished)
    assert [one.commitlog_offset for one in planned.segments] == [
        number * SEGMENT_BYTES for number in range(4)
    ]
    (move,) = planned.moves
    assert (move.first_before, move.first) == (0, 12)
    assert kept.store.stats().deleted_segments == 0
    assert kept.store.queue_bounds("topic", 0) == (0, 31)

    done = kept.store.retention.clean(dry_run=False)
    assert done is not None
    assert kept.store.retention.clean(dry_run=False) is None, "a pass is under way"
    kept.tick_until(lambda: done.finished)
    assert (done.segments, done.moves, done.error) == (planned.segments, planned.moves, "")
    assert kept.store.stats().deleted_segments == 4
    assert kept.store.queue_bounds("topic", 0) == (12, 31)


def test_a_pass_on_demand_removes_nothing_that_somebody_needs(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.store.keep_from("a follower", CommitLogOffset(0))
    kept.clock.advance(73 * HOUR_MS)
    report = kept.store.retention.clean(dry_run=False)
    assert report is not None
    assert (report.finished, report.segments) == (True, [])
    assert report.reason == "a follower needs the segments that would go"


def test_passes_while_views_are_out(kept: Kept) -> None:
    """Whoever holds views reads on in what was removed; its room comes back with the last one."""
    kept.put(31)
    kept.make_durable()
    views = []
    for number in range(0, 30, 3):
        (data,) = kept.store.get("topic", 0, number, max_bytes=1).data
        assert isinstance(data, memoryview), "it was copied"
        views.append(data)
    copies = [bytes(view) for view in views]
    kept.run(15_000)
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    kept.put(30)
    assert views == copies
    stats = kept.store.stats()
    assert (stats.log_views, stats.held_bytes) == (10, 10 * SEGMENT_BYTES)
    del data, views[3:]
    assert kept.store.stats().held_bytes == 3 * SEGMENT_BYTES
    views.clear()
    assert kept.store.stats().held_bytes == 0
    with open("/proc/self/maps") as maps:
        # Of this store: others of this process may be there still.
        assert not any(f"{kept.files.directory}/commitlog/{0:020d}" in line for line in maps)


def test_readers_are_told_where_to_go_on(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    result = kept.store.get("topic", 0, 5, max_bytes=1000)
    assert result.status is GetStatus.OFFSET_TOO_SMALL
    assert (result.next_queue_offset, result.min_queue_offset) == (30, 30)
    with pytest.raises(OffsetOutOfRange):
        kept.store.read_at(CommitLogOffset(0))
    assert kept.store.offset_by_time("topic", 0, NOW) == 30


def test_consume_queue_files_go_after_a_checkpoint_has_told(kept: Kept) -> None:
    kept.put(20, queue_id=0)
    for number in range(40):
        kept.store.put([make_batch([f"{number:06d}"], queue_id=1, first_sequence=number)], NOW)
    kept.put(12, queue_id=0)
    kept.make_durable()
    assert len(kept.files.queue_files()) == 2 + 3
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: len(kept.files.queue_files()) == 2)
    # A queue of which nothing is left knows where it goes on.
    assert kept.store.queue_bounds("topic", 1) == (40, 40)
    kept.store.put([make_batch(["000040"], queue_id=1, first_sequence=40)], NOW)
    first, end = kept.store.queue_bounds("topic", 0)
    assert 20 <= first < end == 32
    kept.reopen()
    assert kept.store.queue_bounds("topic", 1) == (40, 41)
    assert numbers(kept.store, 1) == [40]
    assert kept.store.queue_bounds("topic", 0) == (first, 32)
    assert len(numbers(kept.store)) == 32 - first


def test_a_leap_of_the_clock_deletes_nothing(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    kept.clock.jump_wall(365 * 24 * HOUR_MS)
    kept.run(60_000)
    assert kept.store.stats().clock_jumps == 1
    assert len(kept.segments()) == 11


def test_a_pass_takes_no_more_than_it_may(kept: Kept) -> None:
    kept.put(46)
    kept.make_durable()
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    kept.run(5_000)
    assert kept.store.stats().deleted_segments == 10
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 15)


def test_a_full_disk_refuses_writes_until_there_is_room(kept: Kept) -> None:
    kept.put(7)
    kept.space = Space(92 * TIB, 8 * TIB)
    kept.run(200)
    with pytest.raises(DiskFull, match=r"92\.0 %.*disk_space_warning_level_ratio"):
        kept.put(1)
    kept.run(20_000)
    assert numbers(kept.store) == list(range(7))
    kept.store.delete_topic("topic")
    assert kept.store.stats().disk_full
    kept.space = ROOMY
    kept.run(200)
    kept.put(1)
    assert not kept.store.stats().disk_full
    assert numbers(kept.store) == [7]


def test_by_default_nothing_unread_goes_from_a_full_disk(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    before = kept.segments()
    for used in (86, 91, 100):
        kept.space = Space(used * TIB, (100 - used) * TIB)
        kept.run(30_000)
    assert kept.segments() == before
    assert numbers(kept.store) == list(range(31))
    assert kept.store.take_forced_moves() == []


def test_by_force_only_as_much_goes_as_is_needed(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.reopen(disk_reserve_bytes=0, clean_file_forcibly_enable=True)
    kept.put(31)
    kept.make_durable()

    def space() -> Space:
        # As if a segment took 1 % of the disk.
        used = 76 + kept.store.stats().disk_bytes // SEGMENT_BYTES
        return Space(used * SEGMENT_BYTES, (100 - used) * SEGMENT_BYTES)

    kept.space = space()
    assert kept.space.used_percent == 87

    def settled() -> bool:
        kept.space = space()
        return kept.store.stats().deleted_segments == 3

    kept.tick_until(settled)
    kept.run(30_000)
    assert kept.space.used_percent == 84
    assert numbers(kept.store) == list(range(9, 31))
    assert kept.store.stats().forcibly_deleted_segments == 3
    assert [
        record.getMessage().partition(",")[0]
        for record in caplog.records
        if record.levelno == logging.ERROR
    ] == ["3 log segments go before their time"]
    # Told once, and as one move however many passes there were.
    (move,) = kept.store.take_forced_moves()
    assert (move.topic, move.queue_id, move.first_before, move.first) == ("topic", 0, 0, 9)
    assert kept.store.take_forced_moves() == []


def test_opening_on_a_full_disk_removes_nothing(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    before = kept.segments()
    kept.space = Space(99 * TIB, 1 * TIB)
    copy = kept.files.copy()
    kept.store = kept.open(copy)
    assert kept.store.stats().disk_full
    kept.run(9_000)
    kept.files = copy
    assert kept.segments() == before
    assert numbers(kept.store) == list(range(31))


def test_a_kill_at_every_step_leaves_a_store_that_begins_where_its_log_does(kept: Kept) -> None:
    for number in range(31):
        kept.put(1, queue_id=number % 2)
    kept.make_durable()
    kept.clock.advance(73 * HOUR_MS)
    images: dict[tuple[str, ...], StoreFiles] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(kept.files.queue_files()) == 2 and len(kept.segments()) > 1:
        assert time.monotonic() < deadline
        kept.tick()
        # One step each: the names and the files of a copy are those of the same moment.
        kept.store.wait_for_chores()
        names = (*kept.segments(), *kept.files.queue_files())
        if names not in images:
            images[names] = kept.files.copy()
    kept.run(10_000)
    assert len(images) >= 2
    for another_boot in (False, True):
        for image in images.values():
            check_killed(kept, image, another_boot)


def check_killed(kept: Kept, image: StoreFiles, another_boot: bool) -> None:
    copy = image.copy()
    with pytest.MonkeyPatch.context() as patch:
        if another_boot:
            patch.setattr("mqmesh.storage.commitlog.opening.read_boot_id", lambda: os.urandom(16))
        store = kept.open(copy)
    stats = store.stats()
    oldest = min(path.name for path in (copy.directory / "commitlog").iterdir())
    assert stats.min_commitlog_offset == int(oldest)
    assert not stats.damaged
    found = sorted(numbers(store, 0) + numbers(store, 1))
    # Three to a segment: what is in the log is found, unless a table told that it would go.
    assert found == list(range(31))[-len(found) :]
    assert 1 <= len(found) <= 31 - 3 * (stats.min_commitlog_offset // SEGMENT_BYTES)
    assert store.queue_bounds("topic", 0)[1] == 16
    assert store.queue_bounds("topic", 1)[1] == 15
    store.close()


def test_a_segment_that_cannot_be_removed_stays_in_the_log(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.put(31)
    kept.make_durable()
    real, calls = os.unlink, count()

    def failing(path: str, **options: object) -> None:
        if "commitlog" in str(path) and next(calls) == 2:
            raise PermissionError(1, "not permitted")
        real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", failing)
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: next(calls) > 3 or len(kept.segments()) == 9)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    assert numbers(kept.store) == [30]


def test_readers_do_not_mind_what_goes_beside_them(kept: Kept) -> None:
    kept.put(31)
    kept.make_durable()
    held = [kept.store.get("topic", 0, offset, max_bytes=1).data for offset in range(31)]
    before = [bytes(b"".join(bytes(piece) for piece in data)) for data in held]
    kept.clock.advance(73 * HOUR_MS)
    kept.tick_until(lambda: kept.store.stats().deleted_segments == 10)
    assert [bytes(b"".join(bytes(piece) for piece in data)) for data in held] == before
