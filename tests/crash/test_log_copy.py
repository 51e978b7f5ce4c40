"""A store that becomes a copy of another's log: from whatever it was before, killed at any step."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.kill_points import KillPoints
from harness.log_copies import end_of, log_of, replicate, state_of
from harness.store_files import PATIENCE_SECONDS, StoreFiles, deliverable, put_bodies

from mqmesh.errors import RemoteProtocolError, StoreLocked
from mqmesh.storage.commitlog.log_copy import begin_copy, decode_log_start, encode_log_start
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import LogStart
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch

BODY = "x" * 20_000
NOW_MS = 1_700_000_000_000


@pytest.fixture
def leader(files: StoreFiles) -> Iterator[CommitLogStore]:
    """A store of which retention has removed the beginning, and with it one of its queues' all."""
    files.config = msgspec.structs.replace(
        files.config, delete_when=";".join(f"{hour:02d}" for hour in range(24))
    )
    clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
    store = files.open(clock=clock)
    store.put([make_batch(["early"], topic="old", queue_id=2)], NOW)
    store.begin_epoch(5)
    for number in range(8):
        store.put([make_batch([BODY], first_sequence=number)], NOW)
    clock.advance(73 * 3_600_000)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not store.stats().min_commitlog_offset or store.queue_bounds("old", 2) != (1, 1):
        assert time.monotonic() < deadline
        clock.advance(100)
        store.tick(clock.monotonic_ms())
        store.wait_for_chores()
    store.put([make_batch(["late"], topic="young", queue_id=1)], NOW)
    yield store
    store.close()


@pytest.fixture
def follower_files(files: StoreFiles) -> Iterator[StoreFiles]:
    made = StoreFiles(files.directory.with_name("follower"), files.config)
    yield made
    made.close()


def replicated_state(store: CommitLogStore) -> object:
    """All that is derived from the log that is there; of earlier batches nobody repeats one."""
    queues, producers, epochs = state_of(store)
    start = store.stats().min_commitlog_offset
    windows = {
        key: [batch for batch in window if batch.commitlog_offset >= start]
        for key, window in producers.items()
    }
    return queues, {key: window for key, window in windows.items() if window}, epochs


def beginning_of(store: CommitLogStore) -> LogStart:
    """By the wire."""
    return decode_log_start(encode_log_start(store.beginning()))


def test_a_copy_of_a_log_that_begins_late_has_all_that_its_leader_has(leader, follower_files):
    begin_copy(follower_files.directory, beginning_of(leader), now_ms=NOW_MS)
    copy = follower_files.open()
    assert end_of(copy) == leader.stats().min_commitlog_offset > 0
    assert copy.queue_bounds("old", 2) == (1, 1)
    replicate(leader, copy, 9_000)
    assert log_of(copy) == log_of(leader)
    assert replicated_state(copy) == replicated_state(leader)
    copy.close()
    again = follower_files.open()
    assert replicated_state(again) == replicated_state(leader)
    assert not again.stats().damaged
    # Both give the same places to what comes.
    batch = make_batch(["new"], topic="old", queue_id=2, producer_id=99)
    assert again.put([batch], NOW) == leader.put([batch], NOW)


def test_what_the_store_was_before_is_kept_beside_it(leader, follower_files):
    before = follower_files.open()
    put_bodies(before, ["mine"])
    with pytest.raises(StoreLocked):
        begin_copy(follower_files.directory, beginning_of(leader), now_ms=NOW_MS)
    before.close()
    aside = begin_copy(follower_files.directory, beginning_of(leader), now_ms=NOW_MS)
    assert aside == follower_files.directory / f"replaced-{NOW_MS}"
    kept = StoreFiles(aside, follower_files.config)
    assert deliverable(kept.open()) == {0: "mine"}
    kept.close()
    copy = follower_files.open()
    assert "mine" not in deliverable(copy).values()


def test_who_dies_while_it_is_made_begins_again(
    leader: CommitLogStore, follower_files: StoreFiles, kill_points: KillPoints
) -> None:
    before = follower_files.open()
    put_bodies(before, ["mine"])
    before.close()
    kill_points.start(follower_files, tuple)
    begin_copy(follower_files.directory, beginning_of(leader), now_ms=NOW_MS)
    looked_at = 0
    for files, _ in kill_points.stop():
        begin_copy(files.directory, beginning_of(leader), now_ms=NOW_MS)
        copy = files.open()
        replicate(leader, copy, 9_000)
        assert replicated_state(copy) == replicated_state(leader)
        assert "mine" in all_that_is_kept(files.directory)
        looked_at += 1
    assert looked_at > 20


def all_that_is_kept(directory: Path) -> str:
    """Messages in segments that were moved aside; a store can be put together of the folders."""
    segments = directory.glob("replaced-*/commitlog/*")
    return "".join("mine" for path in segments if b"mine" in path.read_bytes())


def test_a_half_made_copy_is_no_store_of_another_log(leader, follower_files):
    """It opens, or says what is wrong; what it is not taken for is the copy."""
    directory = follower_files.directory
    begin_copy(directory, beginning_of(leader), now_ms=NOW_MS)
    (directory / "checkpoint").unlink()
    half = follower_files.open()
    assert half.stats().store_id != leader.stats().store_id
    half.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xff", msgspec.msgpack.encode([b"x", 1])])
def test_what_is_no_beginning_is_refused(data):
    with pytest.raises(RemoteProtocolError):
        decode_log_start(data)
