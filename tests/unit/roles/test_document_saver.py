"""Documents saved beside the loop."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import pytest

from mqmesh.errors import StorageError
from mqmesh.roles.document_saver import DocumentSaver
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
        self.saver = DocumentSaver(path, lambda: self.content, self.executor, self.calls.append)

    def turn(self):
        while self.calls:
            self.calls.popleft()()


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "folder" / "document")


@pytest.fixture
def saved(bench):
    """One that can be saved."""
    bench.path.parent.mkdir()
    return bench


def test_a_document_is_saved_beside_the_loop(saved):
    saved.saver.save()
    assert load_document(saved.path) is None
    saved.executor.work()
    saved.turn()
    assert load_document(saved.path) == b"first"


def test_changes_while_a_write_is_under_way_share_the_next_one(saved):
    for number in range(10):
        saved.content = b"%d" % number
        saved.saver.save()
    assert len(saved.executor.jobs) == 1
    saved.executor.work()
    saved.turn()
    assert len(saved.executor.jobs) == 1
    saved.executor.work()
    saved.turn()
    assert (len(saved.executor.jobs), load_document(saved.path)) == (0, b"9")


def test_what_could_not_be_saved_is_tried_again_when_asked(bench, caplog):
    bench.saver.save()
    bench.executor.work()
    bench.turn()
    assert "could not be saved" in caplog.text
    assert not bench.executor.jobs
    bench.path.parent.mkdir()
    bench.saver.save_if_failed()
    bench.executor.work()
    bench.turn()
    assert load_document(bench.path) == b"first"
    bench.saver.save_if_failed()
    assert not bench.executor.jobs


def test_the_end_waits_for_what_is_under_way_and_saves_the_rest(saved):
    saved.saver.save()
    saved.content = b"second"
    saved.saver.save()
    saved.executor.work()
    saved.saver.close()
    assert load_document(saved.path) == b"second"
    saved.turn()
    saved.saver.close()
    assert not saved.executor.jobs


def test_the_end_tells_what_could_not_be_saved(bench):
    bench.saver.save()
    bench.executor.work()
    with pytest.raises(StorageError):
        bench.saver.close()
