"""The system dies: of what was not synced, any subset of pages may be on the disk."""

import os
import random
import shutil
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from harness.store_files import StoreFiles, deliverable, put_bodies, settle

from mqmesh.storage.commitlog import checkpointer
from mqmesh.storage.commitlog.checkpoint import CheckpointFile
from mqmesh.storage.commitlog.checkpointer import MOST_SYNCED_AT_CLOSE
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.log.control_record import ControlKind, decode_control_record
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE

PAGE = 4096


def lose_pages(before: StoreFiles, after: StoreFiles, durable_end: int, seed: int) -> None:
    """Reverts a random subset of the log's unsynced pages to what was there before."""
    choice = random.Random(seed)
    for number in (0, 1):
        path = after.segment(number)
        old = before.segment(number).read_bytes()
        new = bytearray(path.read_bytes())
        for start in range(0, len(new), PAGE):
            if number * len(new) + start + PAGE > durable_end and choice.random() < 0.5:
                new[start : start + PAGE] = old[start : start + PAGE]
        path.write_bytes(new)


@pytest.mark.usefixtures("another_boot")
def test_any_subset_of_unsynced_pages_leaves_a_prefix(files: StoreFiles) -> None:
    store = files.open()
    synced = [f"synced {number} " + "s" * 3000 for number in range(12)]
    put_bodies(store, synced)
    settle(store)
    durable_end = store.durable_offset()
    before = files.copy()
    # The segment behind is made and synced before it is written to.
    store._log.next_segment(store._log._current)
    before = files.copy()
    unsynced = [f"unsynced {number} " + "u" * (500 * (number % 9)) for number in range(20)]
    put_bodies(store, unsynced)
    bodies = synced + unsynced
    for seed in range(60):
        after = files.copy()
        lose_pages(before, after, durable_end, seed)
        recovered = after.open()
        found = deliverable(recovered)
        assert found == dict(enumerate(bodies[: len(found)])), seed
        assert len(found) >= len(synced), seed
        assert not recovered.stats().damaged, seed
        put_bodies(recovered, ["new"])
        after.close()
        again = after.open()
        assert again.stats().cut_bytes == 0, seed
        assert deliverable(again) == {**found, len(found): "new"}, seed
        after.close()
        shutil.rmtree(after.directory)


@pytest.mark.usefixtures("another_boot")
def test_queues_that_lost_unsynced_pages_are_written_again(files: StoreFiles) -> None:
    store = files.open()
    bodies = [f"{number}" for number in range(200)]
    put_bodies(store, bodies[:100])
    now_ms = settle(store)
    put_bodies(store, bodies[100:])
    settle(store, now_ms)
    reference = files.queue_files()
    crashed = files.copy()
    # The table says they are written, and the checkpoint that only the first half is synced.
    claim_queues_synced(crashed, files_offset_of(store, 100))
    for path, content in reference.items():
        kept = max(0, 100 * ENTRY_SIZE - int(path.rpartition("-")[2]))
        lost = content[:kept] + bytes(max(0, len(content) - kept))
        (crashed.directory / "consumequeue" / path).write_bytes(lost)
    recovered = crashed.open()
    assert deliverable(recovered) == dict(enumerate(bodies))
    crashed.close()
    assert crashed.queue_files() == reference


def test_what_a_stop_left_unsynced_is_synced_by_the_next_life(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files.open()
    queues = range(MOST_SYNCED_AT_CLOSE + 1)
    for queue_id in queues:
        put_bodies(store, ["unsynced"], queue_id=queue_id)
    with mock.patch.object(checkpointer, "sync_paths") as sync_at_stop:
        files.close()
    assert not sync_at_stop.called, "too many for a stop to sync"
    store = files.open()
    put_bodies(store, ["new"])
    sync = checkpointer.sync_paths
    synced: set[str] = set()
    monkeypatch.setattr(
        checkpointer, "sync_paths", lambda paths, how: (synced.update(paths), sync(paths, how))
    )
    settle(store)
    paths = [Path(path) for path in synced]
    assert {f"{queue_id}-{0:020d}" for queue_id in queues} <= {path.name for path in paths}
    # And the directories that name them.
    (directory,) = {str(path.parent) for path in paths if path.name == f"0-{0:020d}"}
    assert {str(files.directory / "consumequeue"), directory} <= synced
    files.close()


def files_offset_of(store: CommitLogStore, queue_offset: int) -> int:
    """Commit-log offset of the batch at a queue offset."""
    queue = store._queues.by_topic["topic"][0]
    found = queue.next_place(store._files, queue_offset, queue_offset + 1)
    assert found is not None
    return found[1]


def claim_queues_synced(files: StoreFiles, commitlog_offset: int) -> None:
    """Rewrites the checkpoint: consume queue files are only synced so far."""
    file = CheckpointFile(files.directory / "checkpoint", sync=os.fsync)
    assert file.newest is not None
    file.save(msgspec.structs.replace(file.newest, queues_synced_through=commitlog_offset))
    file.close()


def cut_after(files: StoreFiles, store: CommitLogStore, kept: int, *, torn: bool) -> StoreFiles:
    """The files of a store whose system died: of its log only the first batches are there."""
    end = store.stats().max_commitlog_offset
    cut = files_offset_of(store, kept)
    after = files.copy()
    # Torn: a bit of the first lost batch is there.
    start = cut + (60 if torn else 0)
    after.write(start, bytes(end - start))
    return after


@pytest.mark.usefixtures("another_boot")
@pytest.mark.parametrize("torn", [False, True])
def test_after_a_power_cut_the_store_tells_from_where_on_messages_are_others(
    files: StoreFiles, torn: bool
) -> None:
    store = files.open()
    put_bodies(store, ["kept"] * 10)
    put_bodies(store, ["of another queue"] * 3, queue_id=1)
    settle(store)
    known = store.epoch()
    put_bodies(store, ["doomed"] * 10)
    after = cut_after(files, store, 10, torn=torn)
    recovered = after.open()
    assert recovered.queue_bounds("topic", 0) == (0, 10)
    assert recovered.epoch() == known + 1
    # Also behind a further stop, and when the queues are longer than they were.
    for round_number in range(2):
        put_bodies(recovered, ["new"] * 15)
        assert recovered.cut_offset("topic", 0, known) == 10
        assert recovered.cut_offset("topic", 1, known) == 3
        assert recovered.cut_offset("of later", 0, known) == 0
        assert recovered.cut_offset("topic", 0, known + 1) is None
        assert recovered.epoch() == known + 1
        if round_number:
            settle(recovered)
            assert recovered.cut_offset("topic", 0, known) == 10
        after.close()
        recovered = after.open()
    assert not recovered.stats().damaged
    after.close()


@pytest.mark.usefixtures("another_boot")
def test_of_several_power_cuts_the_first_one_that_somebody_missed_counts(
    files: StoreFiles,
) -> None:
    epochs = []
    for kept in (5, 8):
        store = files.open()
        put_bodies(store, ["kept"] * (kept - store.queue_bounds("topic", 0)[1]))
        settle(store)
        epochs.append(store.epoch())
        put_bodies(store, ["doomed"] * 4)
        files = cut_after(files, store, kept, torn=False)
    store = files.open()
    put_bodies(store, ["new"] * 9)
    assert [store.cut_offset("topic", 0, epoch) for epoch in epochs] == [5, 8]
    assert epochs == sorted(set(epochs))
    files.close()


def test_the_death_of_the_process_alone_cuts_nothing_off(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["kept"] * 10)
    known = store.epoch()
    recovered = files.copy().open()
    assert recovered.epoch() == known
    assert recovered.cut_offset("topic", 0, known) is None
    recovered.close()


@pytest.mark.usefixtures("another_boot")
def test_the_first_record_behind_a_power_cut_tells_of_the_new_epoch(files: StoreFiles) -> None:
    """So what was pulled before, and lost without a trace, never fits its place again."""
    store = files.open()
    put_bodies(store, ["kept"])
    settle(store)
    (place,) = put_bodies(store, ["pulled"])
    after = cut_after(files, store, 1, torn=False)
    recovered = after.open()
    assert recovered.stats().max_commitlog_offset == place
    put_bodies(recovered, ["new"])
    marker = decode_control_record(after.read(place, 48))
    assert (marker.kind, marker.epoch) == (ControlKind.EPOCH, store.epoch() + 1)
    assert deliverable(recovered) == {0: "kept", 1: "new"}
    after.close()
