"""Repairs of queues: begun once, given a rest where they do not help, and exact."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.store_files import StoreFiles, settle

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import decode_messages
from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.storage.commitlog.queue_repair import MIN_REST_MS, QueueRepairs
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_ENTRY, ConsumeQueue
from mqmesh.storage.tools.stopped_store import open_stopped
from mqmesh.storage.tools.verify import verify_store
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    files = StoreFiles(tmp_path / "store")
    yield files
    files.close()


class Scene:
    """A store of ten batches of ten messages in one queue, and repairs by a clock of our own."""

    def __init__(self, files: StoreFiles) -> None:
        self.store: CommitLogStore = files.open()
        for number in range(10):
            self.store.put([make_batch(["x"] * 10, first_sequence=10 * number)], NOW)
        settle(self.store)
        self.queue: ConsumeQueue = self.store._queues.by_topic["topic"][0]
        self.clock = ManualClock()
        parts = self.store._parts
        log = self.store._log
        self.repairs = QueueRepairs(
            parts.queues,
            log.segments,
            parts.damage,
            key=log.key,
            store_id=log.store_id,
            clock=self.clock,
        )

    def begin(self) -> bool:
        """Wants the queue repaired; True if it is going to be."""
        self.repairs.begin(self.queue, 50, "a test says so", log_end=self.store._log.end)
        return bool(self.repairs._waiting)

    def finish(self) -> None:
        while self.repairs.step():
            pass

    def entries(self) -> bytes:
        return self.queue.read(self.store._files, 0, 100)


@pytest.fixture
def scene(files: StoreFiles) -> Scene:
    return Scene(files)


def test_a_queue_that_needed_no_repair_rests(scene):
    assert scene.begin()
    scene.finish()
    assert not scene.begin()
    scene.clock.advance(MIN_REST_MS - 1)
    assert not scene.begin()
    scene.clock.advance(1)
    assert scene.begin()


def test_a_queue_that_was_helped_may_be_repaired_again_at_once(scene):
    good = scene.entries()
    for _ in range(3):
        scene.queue.write_at(scene.store._files, 55, VOID_ENTRY, set())
        assert scene.begin()
        scene.finish()
        assert scene.entries() == good


def test_a_repair_that_fails_is_tried_again_after_a_rest(scene, monkeypatch, caplog):
    def refuse(*arguments: Any) -> bool:
        raise StorageError("the disk refuses")

    with monkeypatch.context() as patched:
        patched.setattr(scene.store._queues, "overwrite", refuse)
        assert scene.begin()
        scene.finish()
    assert "stays damaged" in caplog.text
    assert not scene.begin()
    scene.clock.advance(MIN_REST_MS)
    assert scene.begin()


def test_on_a_full_disk_one_attempt_is_made_and_told(scene, monkeypatch, caplog):
    attempts = []

    def refuse(queue: ConsumeQueue) -> None:
        attempts.append(queue)
        raise DiskFull("no room")

    scene.store.put([make_batch(["new"], first_sequence=100)], NOW)
    monkeypatch.setattr(scene.store._queues, "write", refuse)
    caplog.set_level(logging.ERROR)
    for _ in range(100):
        assert not scene.begin()
    assert len(attempts) == 1
    assert len(caplog.records) == 2
    monkeypatch.undo()
    scene.clock.advance(MIN_REST_MS)
    assert scene.begin()


def test_a_queue_that_is_gone_is_forgotten(scene):
    assert scene.begin()
    scene.store.delete_topic(scene.queue.topic)
    assert not scene.repairs.step()
    assert scene.begin()


def test_the_rest_of_a_batch_that_the_queue_begins_in_is_kept(scene):
    good = scene.entries()
    scene.queue.first = 52
    scene.queue.write_at(scene.store._files, 52, VOID_ENTRY * 20, set())
    assert scene.begin()
    scene.finish()
    assert scene.queue.read(scene.store._files, 52, 100) == good[52 * ENTRY_SIZE :]


TOPICS = ("mine", "others")


def swapped(files):
    """Two queues with batches of the same sizes, whose files have changed places."""
    store = files.open()
    for number in range(5):
        for topic in TOPICS:
            bodies = [f"{topic[0]}{number}"] * 10
            batch = make_batch(bodies, topic=topic.ljust(6, "_"), first_sequence=10 * number)
            store.put([batch], NOW + number)
    settle(store)
    names = {topic: topic.ljust(6, "_") for topic in TOPICS}
    files.close()
    root = files.directory / "consumequeue"
    mine, others = (
        root / hashlib.blake2b(names[topic].encode(), digest_size=16).hexdigest()
        for topic in TOPICS
    )
    for path in sorted(mine.iterdir()):
        other = others / path.name
        path.rename(root / "aside")
        other.rename(path)
        (root / "aside").rename(other)
    return files.open(), names["mine"]


def bodies_of(store, topic, **options):
    found = store.get(topic, 0, 0, max_bytes=1 << 20, **options)
    return [
        message.body
        for data in found.data
        for header, batch in iter_batches(data)
        for message in decode_messages(batch, header)
    ]


@pytest.mark.parametrize("verify", [False, True])
def test_a_queue_file_of_another_topic_gives_nothing_of_it_and_is_repaired(files, verify):
    store, topic = swapped(files)
    with pytest.raises(CorruptRecord, match="where its batch is not"):
        bodies_of(store, topic, verify=verify)
    while store.tick(1):
        pass
    found = bodies_of(store, topic, verify=verify)
    assert found == [b"m%d" % number for number in range(5) for _ in range(10)]


def test_a_queue_file_of_another_topic_gives_no_times_and_says_so(files):
    store, topic = swapped(files)
    entries = store.inspector.entries(topic, 0, 0, 50)
    assert {one.problem for one in entries} == {"damaged: no such batch begins there in the log"}
    with pytest.raises(CorruptRecord, match="no batch of this queue"):
        store.offset_by_time(topic, 0, NOW + 2)
    while store.tick(1):
        pass
    assert store.offset_by_time(topic, 0, NOW + 2) == 20


def test_a_queue_file_of_another_topic_is_told_by_the_check_of_a_stopped_store(files):
    _, topic = swapped(files)
    files.close()
    with open_stopped(files.directory) as stopped:
        report = verify_store(stopped, lambda progress: None)
    assert {one.topic for one in report.queue_damage} == {topic, "others"}
    assert not report.sound
