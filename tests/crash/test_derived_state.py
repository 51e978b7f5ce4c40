"""Consume queues, queue table and side files lost, torn or ahead: the log decides."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from harness.store_files import StoreFiles, deliverable, put_bodies, settle

from mqmesh.errors import StoreLocked
from mqmesh.storage.commitlog.checkpoint import CheckpointFile
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.interface import BatchToPut, PutStatus, RecoveryProgress
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.queue_table import decode_table, encode_table
from mqmesh.testing.store_contract import NOW, make_batch

TAGS = ["red", "green", None, "blue", "red"]


def batch_number(number: int, queue_id: int) -> BatchToPut:
    return make_batch(
        [f"{queue_id} {number} {index}" for index in range(5)],
        queue_id=queue_id,
        tags=TAGS if number % 2 else (),
        first_sequence=5 * number,
    )


def fill(files: StoreFiles) -> dict[str, bytes]:
    """A store with three queues and mixed tags; returns its queue files after a clean stop."""
    store = files.open()
    for number in range(30):
        for queue_id in range(3):
            store.put([batch_number(number, queue_id)], NOW)
    settle(store)
    store.close()
    return files.queue_files()


def lose_all(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def lose_root(root: Path) -> None:
    shutil.rmtree(root)


def lose_one_file(root: Path) -> None:
    sorted(path for path in root.rglob("*") if path.is_file())[3].unlink()


def lose_last_entry(root: Path) -> None:
    path = sorted(path for path in root.rglob("*") if path.is_file())[-1]
    path.write_bytes(path.read_bytes()[:-20])


def tear_last_entry(root: Path) -> None:
    path = sorted(path for path in root.rglob("*") if path.is_file())[-1]
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "damage", [lose_all, lose_root, lose_one_file, lose_last_entry, tear_last_entry]
)
def test_damaged_queues_become_what_they_were(
    files: StoreFiles, damage: Callable[[Path], None]
) -> None:
    good = fill(files)
    assert len(good) == 9
    damage(files.directory / "consumequeue")
    store = files.open()
    assert len(deliverable(store, "topic", 2)) == 150
    store.close()
    assert files.queue_files() == good


@pytest.mark.parametrize("names", [["queue-table"], ["queue-table", "queue-table.bak"]])
def test_a_lost_queue_table_is_made_again(files: StoreFiles, names: list[str]) -> None:
    good = fill(files)
    for name in names:
        (files.directory / name).unlink(missing_ok=True)
    store = files.open()
    assert len(deliverable(store, "topic", 1)) == 150
    (again,) = store.put([batch_number(29, queue_id=1)], NOW)
    assert again.status is PutStatus.DUPLICATE
    store.close()
    assert files.queue_files() == good


def test_a_garbled_queue_table_is_kept_aside_and_made_again(files: StoreFiles) -> None:
    good = fill(files)
    for name in ("queue-table", "queue-table.bak"):
        (files.directory / name).write_bytes(b"garbage")
    store = files.open()
    assert len(deliverable(store, "topic", 1)) == 150
    store.close()
    assert files.queue_files() == good
    assert (files.directory / "queue-table.damaged-1").read_bytes() == b"garbage"


def test_an_older_queue_table_is_brought_up_to_date(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, [f"{number}" for number in range(50)])
    now_ms = settle(store)
    old = (files.directory / "queue-table").read_bytes()
    put_bodies(store, [f"{number}" for number in range(50, 120)])
    settle(store, now_ms)
    crashed = files.copy()
    (crashed.directory / "queue-table").write_bytes(old)
    recovered = crashed.open()
    assert deliverable(recovered) == {number: f"{number}" for number in range(120)}
    crashed.close()


def test_a_table_that_leaves_something_out_is_not_believed(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["a"] * 10, queue_id=0)
    put_bodies(store, ["b"] * 10, queue_id=1)
    settle(store)
    put_bodies(store, ["c"], queue_id=1)
    document = load_document(files.directory / "queue-table")
    assert document is not None
    table = decode_table(document)
    for end in (None, 7):
        rows = [row for row in table.queues if row.queue_id == 0 or end]
        crashed = files.copy()
        queues = [
            ConsumeQueue(row.topic, row.queue_id, "", first=0, end=end or row.end, file_entries=64)
            for row in rows
        ]
        frames = encode_table(table.head, queues, table.producers)
        save_document(crashed.directory / "queue-table", b"".join(frames))
        recovered = crashed.open()
        assert list(deliverable(recovered, queue_id=0).values()) == ["a"] * 10
        assert list(deliverable(recovered, queue_id=1).values()) == ["b"] * 10 + ["c"]
        crashed.close()


@pytest.mark.usefixtures("another_boot")
def test_queues_ahead_of_a_log_that_lost_its_tail_are_trimmed(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, [f"{number}" for number in range(100)])
    settle(store)
    good = files.queue_files()
    offsets = put_bodies(store, [f"lost {number}" for number in range(100)])
    store._queues.write_oldest(10)
    crashed = files.copy()
    assert crashed.queue_files() != good
    crashed.write(offsets[0], bytes(5000))
    recovered = crashed.open()
    assert recovered.queue_bounds("topic", 0) == (0, 100)
    crashed.close()
    assert crashed.queue_files() == good


def test_files_of_queues_that_nobody_knows_are_removed(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["a"])
    settle(store)
    crashed = files.copy()
    (topic,) = (crashed.directory / "consumequeue").iterdir()
    stray = topic / f"3-{0:020d}"
    stray.write_bytes(bytes(20))
    strange = topic.with_name("ab" * 16)
    strange.mkdir()
    (strange / f"0-{0:020d}").write_bytes(bytes(20))
    # Only a start after a crash looks for them.
    recovered = crashed.open()
    assert deliverable(recovered) == {0: "a"}
    assert not stray.exists()
    assert not strange.exists()
    crashed.close()


def test_batches_before_and_after_a_deletion_are_told_apart(files: StoreFiles) -> None:
    store = files.open()
    put_bodies(store, ["old"] * 30)
    settle(store)
    store.delete_topic("topic")
    put_bodies(store, ["new"] * 3)
    for remove in ([], ["queue-table", "queue-table.bak"]):
        crashed = files.copy()
        for name in remove:
            (crashed.directory / name).unlink(missing_ok=True)
        recovered = crashed.open()
        assert deliverable(recovered) == dict.fromkeys(range(3), "new")
        crashed.close()
        assert deliverable(crashed.open()) == dict.fromkeys(range(3), "new")
        crashed.close()


def test_a_recovery_that_was_killed_goes_on_where_it_was(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files.open()
    put_bodies(store, ["x" * 5000] * 100)
    crashed = files.copy()
    total = store.stats().max_commitlog_offset
    monkeypatch.setattr("mqmesh.storage.commitlog.recovery.SAVE_EVERY_BYTES", 50_000)
    monkeypatch.setattr("mqmesh.storage.commitlog.recovery.PROGRESS_EVERY_BYTES", 40_000)

    class Killed(BaseException):
        pass

    def die(progress: RecoveryProgress) -> None:
        nonlocal patience
        patience -= progress.step == "reading the log"
        if patience < 0:
            raise Killed

    read = []
    for _ in range(3):
        patience = 2
        crashed.progress = type("Deadly", (), {"append": staticmethod(die)})()  # type: ignore[assignment]
        with pytest.raises(Killed):
            crashed.open()
        crashed.progress = []
        survivor = crashed.copy()
        read.append(survivor.open().stats().recovered_bytes)
        survivor.close()
    assert read == sorted(read, reverse=True)
    assert read[-1] < read[0] < total
    recovered = crashed.open()
    assert len(deliverable(recovered)) == 100
    assert crashed.progress[-1].done_bytes == crashed.progress[-1].total_bytes
    crashed.close()


def test_a_store_is_opened_once(files: StoreFiles) -> None:
    store = files.open()
    with pytest.raises(StoreLocked, match="pid"):
        files.open()
    put_bodies(store, ["still at work"])
    store.close()
    assert deliverable(files.open()) == {0: "still at work"}


def test_a_start_makes_no_files_for_many_queues_before_the_store_can_be_used(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqmesh.storage.commitlog.opening.MOST_TAILS_AT_START", 50)
    topics = [f"topic-{number}" for number in range(51)]
    store = files.open()
    for topic in topics:
        store.put([make_batch([topic], topic=topic)], NOW)
    crashes = [crashed := files.copy()]
    for _ in range(2):  # It dies again before it has made any.
        recovered = crashed.open()
        assert crashed.queue_files() == {}
        for topic in topics:
            assert deliverable(recovered, topic) == {0: topic}
        crashes.append(crashed := crashed.copy())
    recovered = crashed.open()
    put_bodies(recovered, ["more"], topic=topics[7])
    settle(recovered)
    assert len(crashed.queue_files()) == len(topics)
    crashes.append(crashed := crashed.copy())
    again = crashed.open()
    assert again.stats().recovered_bytes == 0
    assert deliverable(again, topics[7]) == {0: topics[7], 1: "more"}
    assert deliverable(again, topics[-1]) == {0: topics[-1]}
    for crashed in crashes:
        crashed.close()


MANY = [f"topic-{number}" for number in range(52)]


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqmesh.storage.commitlog.opening.MOST_TAILS_AT_START", 50)
    monkeypatch.setattr("mqmesh.storage.commitlog.checkpointer.MOST_TAILS_AT_CLOSE", 50)


@pytest.mark.usefixtures("few_are_many")
def test_a_stop_soon_after_a_start_with_many_queues_makes_no_files_either(
    files: StoreFiles,
) -> None:
    store = files.open()
    for topic in MANY:
        store.put([make_batch([topic], topic=topic)], NOW)
    crashed = files.copy()
    started = crashed.open()
    put_bodies(started, ["more"], topic=MANY[7])
    started.delete_topic(MANY[8])
    started.close()
    assert crashed.queue_files() == {}
    # The stop is a clean one, and costs the next start what a crash would have.
    for round_number in range(2):
        again = crashed.open()
        assert again.stats().started_clean
        assert again.stats().recovered_bytes == again.stats().max_commitlog_offset
        assert again.stats().epoch == store.stats().epoch
        assert deliverable(again, MANY[7]) == {0: MANY[7], 1: "more"}
        assert MANY[8] not in again.topics()
        assert deliverable(again, MANY[-1]) == {0: MANY[-1]}
        if round_number:
            put_bodies(again, ["at last"], topic=MANY[7])
            settle(again)
            assert len(crashed.queue_files()) == len(MANY) - 1
        again.close()
    last = crashed.open()
    assert last.stats().recovered_bytes == 0
    assert deliverable(last, MANY[7]) == {0: MANY[7], 1: "more", 2: "at last"}
    crashed.close()


@pytest.mark.usefixtures("few_are_many")
def test_a_stop_makes_the_files_when_reading_the_log_once_more_would_take_longer(
    files: StoreFiles,
) -> None:
    store = files.open()
    for topic in MANY:
        store.put([make_batch(["x" * 5_000], topic=topic)], NOW)
    store.close()
    assert len(files.queue_files()) == len(MANY)
    again = files.open()
    assert again.stats().recovered_bytes == 0
    again.close()


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("lost", ["pages", "checkpoint"])
def test_queue_files_that_a_start_doubted_are_doubted_by_the_next_one_too(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch, lost: str, killed: bool
) -> None:
    """The system died, or the checkpoint was lost; then entries are in memory only."""
    boots = iter([b"a" * 16, b"b" * 16, b"b" * 16])
    monkeypatch.setattr("mqmesh.storage.commitlog.opening.read_boot_id", lambda: next(boots))
    store = files.open()
    for topic in MANY:
        put_bodies(store, ["a", "b"], topic=topic)
    settle(store)
    crashed = files.copy()
    for path, content in crashed.queue_files().items():
        (crashed.directory / "consumequeue" / path).write_bytes(bytes(len(content)))
    if lost == "checkpoint":
        (crashed.directory / "checkpoint").unlink()
    else:
        # The table tells of entries whose pages were not on the disk yet.
        checkpoint = CheckpointFile(crashed.directory / "checkpoint", sync=os.fsync)
        assert checkpoint.newest is not None
        checkpoint.save(msgspec.structs.replace(checkpoint.newest, queues_synced_through=0))
        checkpoint.close()
    started = crashed.open()
    stopped = crashed.copy() if killed else crashed
    if not killed:
        started.close()
    again = stopped.open()
    for topic in MANY:
        assert deliverable(again, topic) == {0: "a", 1: "b"}
    crashed.close()
    stopped.close()


@pytest.mark.usefixtures("another_boot")
def test_what_is_ahead_of_many_queues_is_cut_although_their_ends_are_only_in_memory(
    files: StoreFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqmesh.storage.commitlog.opening.MOST_TAILS_AT_START", 50)
    topics = [f"topic-{number}" for number in range(51)]
    store = files.open()
    for body in ("a", "b"):
        for topic in topics:
            store.put([make_batch([body], topic=topic, first_sequence=ord(body))], NOW)
    settle(store)
    crashed = files.copy()
    file = crashed.directory / "consumequeue" / next(iter(crashed.queue_files()))
    whole = file.read_bytes()
    file.write_bytes(whole + b"x" * 40)
    (crashed.directory / "queue-table").unlink()
    (crashed.directory / "queue-table.bak").unlink(missing_ok=True)
    recovered = crashed.open()
    assert file.read_bytes() == whole
    assert all(deliverable(recovered, topic) == {0: "a", 1: "b"} for topic in topics)
    crashed.close()
