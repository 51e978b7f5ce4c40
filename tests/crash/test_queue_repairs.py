"""Repairs of queues: begun once, given a rest where they do not help, and exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.store_files import StoreFiles, settle

from mqmesh.errors import DiskFull, StorageError
from mqmesh.storage.commitlog.queue_repair import MIN_REST_MS, QueueRepairs
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_ENTRY, ConsumeQueue
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
