"""Documents saved beside the loop."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future

import pytest

from mqmesh.errors import DiskFull, StorageError
from mqmesh.roles.document_saver import ROOM_BYTES, DocumentSaver
from mqmesh.storage.files.atomic_file import load_document


class HandExecutor:
    """Does what was submitted when a test says so."""

    def __init__(self):
        self.jobs = deque()

    def submit(self, call, *arguments):
        future = Future()
        self.jobs.append((future, call, arguments))
        return future

    def work(self):
        future, call, arguments = self.jobs.popleft()
        try:
            future.set_result(call(*arguments))
        except StorageError as error:
            future.set_exception(error)


class Bench:
    def __init__(self, path):
        self.path = path
        self.calls = deque()
        self.executor = HandExecutor()
        self.content = b"first"
        self.told = []
        self.saver = DocumentSaver(
            path, lambda: self.content, self.executor, lambda call: self.calls.append(call)
        )

    def turn(self):
        while self.calls:
            self.calls.popleft()()


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "document")


def test_a_document_is_saved_and_that_is_told(bench):
    bench.saver.save(bench.told.append)
    bench.turn()
    assert bench.told == []
    bench.executor.work()
    bench.turn()
    assert bench.told == [None]
    assert load_document(bench.path) == b"first"


def test_changes_of_one_turn_are_one_write_of_the_latest(bench):
    for number in range(10):
        bench.saver.save(bench.told.append)
        bench.content = b"%d" % number
    bench.turn()
    assert len(bench.executor.jobs) == 1
    bench.executor.work()
    bench.turn()
    assert (len(bench.told), load_document(bench.path)) == (10, b"9")
    assert not bench.executor.jobs


def test_a_change_during_a_write_gets_a_write_of_its_own(bench):
    bench.saver.save(bench.told.append)
    bench.turn()
    bench.content = b"second"
    bench.saver.save(lambda error: bench.told.append("second"))
    bench.turn()
    bench.executor.work()
    bench.turn()
    assert bench.told == [None]
    bench.executor.work()
    bench.turn()
    assert bench.told == [None, "second"]
    assert load_document(bench.path) == b"second"


def test_a_failure_is_told_and_tried_again_when_asked_to(tmp_path):
    bench = Bench(tmp_path / "missing" / "document")
    bench.saver.save(bench.told.append)
    bench.turn()
    bench.executor.work()
    bench.turn()
    assert isinstance(bench.told[0], StorageError)
    assert not bench.executor.jobs, "not at once: the disk may be full"
    bench.path.parent.mkdir()
    bench.saver.save_if_failed()
    bench.executor.work()
    bench.turn()
    assert load_document(bench.path) == b"first"
    bench.saver.save_if_failed()
    assert not bench.executor.jobs


def test_closing_saves_what_is_not_saved_yet(bench):
    bench.saver.save(bench.told.append)
    bench.saver.close()
    assert (bench.told, load_document(bench.path)) == ([None], b"first")
    bench.turn()
    assert not bench.executor.jobs


def test_closing_waits_for_a_write_and_then_writes_what_came_since(bench):
    bench.saver.save(bench.told.append)
    bench.turn()
    bench.content = b"second"
    bench.saver.save(bench.told.append)
    bench.executor.work()
    bench.saver.close()
    bench.turn()
    assert (bench.told, load_document(bench.path)) == ([None, None], b"second")


def test_a_close_that_cannot_save_says_so(tmp_path):
    bench = Bench(tmp_path / "missing" / "document")
    bench.saver.save()
    with pytest.raises(StorageError):
        bench.saver.close()


def test_the_last_failure_is_known_until_a_write_succeeds(bench, monkeypatch):
    assert bench.saver.failure is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_sync)
        bench.saver.save()
        bench.turn()
        bench.executor.work()
        bench.turn()
    assert isinstance(bench.saver.failure, DiskFull)
    bench.saver.save_if_failed()
    bench.executor.work()
    bench.turn()
    assert bench.saver.failure is None


class FullDisk:
    """Refuses to take room; counts how often it was asked."""

    def __init__(self, patch):
        self.asked = 0
        patch.setattr(os, "posix_fallocate", self._refuse)

    def _refuse(self, fd, position, size):
        self.asked += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_start_takes_the_room_that_the_life_before_did_not_leave(bench, monkeypatch, caplog):
    bench.content = b"x" * 100_000
    bench.saver.save()
    bench.saver.close()
    new = bench.path.with_name("document.new")
    new.unlink()
    again = Bench(bench.path)
    again.saver.take_room()
    assert again.saver.failure is None
    assert new.stat().st_size > 100_000 + ROOM_BYTES
    new.unlink()
    with monkeypatch.context() as patch:
        FullDisk(patch)
        again.saver.take_room()
    assert isinstance(again.saver.failure, DiskFull)
    assert "no room for the next save" in caplog.text


def test_room_that_comes_back_is_noticed_without_a_save(bench, monkeypatch):
    with monkeypatch.context() as patch:
        disk = FullDisk(patch)
        bench.saver.take_room()
        for _ in range(3):
            bench.saver.look_for_room()
        # One call at a time, in the helper thread.
        assert (disk.asked, len(bench.executor.jobs)) == (1, 1)
        bench.executor.work()
        bench.turn()
        assert disk.asked == 2
        assert isinstance(bench.saver.failure, DiskFull)
    bench.saver.look_for_room()
    bench.executor.work()
    bench.turn()
    assert bench.saver.failure is None
    assert load_document(bench.path) is None
    bench.saver.look_for_room()
    assert not bench.executor.jobs


def test_what_could_not_be_saved_is_saved_as_soon_as_there_is_room(bench, monkeypatch):
    with monkeypatch.context() as patch:
        FullDisk(patch)
        patch.setattr(os, "fsync", failing_sync)
        bench.saver.save()
        bench.turn()
        bench.executor.work()
        bench.turn()
        # A save that is asked for meanwhile goes first, and tells.
        bench.saver.look_for_room()
        bench.saver.save(bench.told.append)
        bench.turn()
        bench.executor.work()
        bench.executor.work()
        bench.turn()
        assert isinstance(bench.told[0], DiskFull)
    bench.saver.look_for_room()
    bench.executor.work()
    bench.turn()
    bench.executor.work()
    bench.turn()
    assert (bench.saver.failure, load_document(bench.path)) == (None, b"first")
    assert not bench.executor.jobs


def test_a_close_waits_for_who_looks_for_room(bench, monkeypatch):
    with monkeypatch.context() as patch:
        FullDisk(patch)
        bench.saver.take_room()
    bench.saver.look_for_room()
    bench.saver.save()
    bench.executor.work()
    bench.saver.close()
    bench.turn()
    assert load_document(bench.path) == b"first"
    assert not bench.executor.jobs


def failing_sync(fd):
    raise OSError(errno.ENOSPC, "no room")


def test_who_may_not_be_saved_next_time_is_told_before(bench, monkeypatch):
    def refuse(fd, position, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        bench.saver.save(bench.told.append)
        bench.turn()
        bench.executor.work()
        bench.turn()
    assert (bench.told, load_document(bench.path)) == ([None], b"first")
    assert isinstance(bench.saver.failure, DiskFull)
    bench.saver.save()
    bench.turn()
    bench.executor.work()
    bench.turn()
    assert bench.saver.failure is None
