"""A topic was deleted and made anew, and the marker that tells of the deletion is lost."""

import shutil

import msgspec
import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, put_bodies, settle

from mqmesh.errors import CorruptRecord
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.interface import MessageStore
from mqmesh.storage.queues.queue_table import decode_table
from mqmesh.storage.tools.stopped_store import open_stopped
from mqmesh.storage.tools.verify import verify_store
from mqmesh.testing.store_contract import NOW, make_batch

NEW = {number: f"new {number}" for number in range(5)}


def fill_segment(store: MessageStore, number: int) -> None:
    """Puts messages of another topic until the log is in a segment."""
    while store.stats().max_commitlog_offset < number * SEGMENT_BYTES:
        put_bodies(store, ["x" * 5000], topic="filler")


def made_anew(files: StoreFiles, *, clean: bool, store: CommitLogStore | None = None) -> StoreFiles:
    """Old messages in segment 0, the deletion alone in segment 1, new ones in segment 2."""
    store = store or files.open()
    put_bodies(store, [f"old {number}" for number in range(10)])
    put_bodies(store, ["old"], queue_id=1)
    fill_segment(store, 1)
    store.delete_topic("topic")
    fill_segment(store, 2)
    put_bodies(store, list(NEW.values()))
    settle(store)
    if clean:
        store.close()
        return files
    return files.copy()


def lose_queues(files: StoreFiles) -> None:
    shutil.rmtree(files.directory / "consumequeue")


@pytest.mark.parametrize("clean", [False, True])
def test_a_deleted_topic_does_not_come_back(files: StoreFiles, clean: bool) -> None:
    stopped = made_anew(files, clean=clean)
    stopped.segment(1).unlink()
    more: dict[int, str] = {}
    for number in range(5, 8):
        lose_queues(stopped)
        store = stopped.open()
        assert deliverable(store) == NEW | more
        assert store.queues("topic") == [0]
        more[number] = f"more {number}"
        put_bodies(store, [more[number]])
        store.close()


def test_without_checkpoint_too(files: StoreFiles) -> None:
    crashed = made_anew(files, clean=False)
    crashed.segment(1).unlink()
    (crashed.directory / "checkpoint").unlink()
    store = crashed.open()
    assert deliverable(store) == NEW
    # What an old producer repeats is no duplicate of a message that was deleted.
    (result,) = store.put([make_batch(["again"], first_sequence=9)], NOW)
    assert result.base_queue_offset == 5


def test_repairing_a_queue_leaves_deleted_messages_alone(files: StoreFiles) -> None:
    stopped = made_anew(files, clean=True)
    stopped.segment(1).unlink()
    store = stopped.open()
    (path,) = (
        path
        for path in (stopped.directory / "consumequeue").rglob("0-*")
        if path.stat().st_size == 20 * len(NEW)
    )
    good = path.read_bytes()
    path.write_bytes(good[:40] + bytes([good[40] ^ 1]) + good[41:])
    with pytest.raises(CorruptRecord):
        store.get("topic", 0, 2, max_bytes=1)
    now_ms = 0
    while store.tick(now_ms):
        now_ms += 1
    assert path.read_bytes() == good
    assert deliverable(store) == NEW


def test_verifying_does_not_miss_deleted_messages(files: StoreFiles) -> None:
    stopped = made_anew(files, clean=True)
    stopped.segment(1).unlink()
    with open_stopped(stopped.directory) as store:
        report = verify_store(store, lambda progress: None)
    assert report is not None
    assert len(report.log_damage) == 1
    assert {damage.topic for damage in report.queue_damage} == {"filler"}


def test_a_log_that_lost_its_end_keeps_what_is_stored_there_anew(files: StoreFiles) -> None:
    stopped = made_anew(files, clean=True)
    for path in (stopped.directory / "checkpoint", stopped.segment(1), stopped.segment(2)):
        path.unlink()
    store = stopped.open()
    assert deliverable(store) == {}
    assert store.stats().max_commitlog_offset <= SEGMENT_BYTES
    put_bodies(store, ["another"])
    store.close()
    lose_queues(stopped)
    assert deliverable(stopped.open()) == {0: "another"}


def test_a_store_from_before_tables_told_of_deletions_has_the_marker(files: StoreFiles) -> None:
    stopped = made_anew(files, clean=False)
    path = stopped.directory / "queue-table"
    document = load_document(path)
    assert document is not None
    table = decode_table(document)
    assert list(table.deletions) == ["topic"]
    frames = [table.head, [table.queues, table.producers]]
    packed = [msgspec.msgpack.encode(frame) for frame in frames]
    save_document(path, b"".join(len(data).to_bytes(4, "little") + data for data in packed))
    assert deliverable(stopped.open()) == NEW
    stopped.close()
    lose_queues(stopped)
    assert deliverable(stopped.open()) == NEW
    stopped.close()
    # It tells of them from now on.
    stopped.segment(1).unlink()
    lose_queues(stopped)
    assert deliverable(stopped.open()) == NEW


def test_a_checkpoint_older_than_the_table_takes_nothing_from_the_new_topic(
    files: StoreFiles,
) -> None:
    store = files.open()
    put_bodies(store, ["old"] * 10)
    settle(store)
    store.wait_for_chores()
    checkpoint = (files.directory / "checkpoint").read_bytes()
    crashed = made_anew(files, store=store, clean=False)
    (crashed.directory / "checkpoint").write_bytes(checkpoint)
    # The marker is there, but not what it would be followed by.
    crashed.segment(2).unlink()
    recovered = crashed.open()
    assert recovered.queue_bounds("topic", 0) == (0, 5)
