"""Which epoch began where: noted, also later where there was no room."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future

import pytest

from mqmesh.errors import StorageError
from mqmesh.storage.log.epochs import MOST_EPOCHS, RETRY_MS, EpochStart, EpochTable


class Later:
    """A helper thread that works when a test says so."""

    def __init__(self):
        self.jobs = deque()

    def submit(self, task):
        future = Future()
        self.jobs.append((future, task))
        return future

    def work(self):
        future, task = self.jobs.popleft()
        try:
            future.set_result(task())
        except StorageError as error:
            future.set_exception(error)


@pytest.fixture
def full(monkeypatch):
    """A full disk; gives what makes room."""

    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        patch.setattr(os, "write", refuse)
        yield patch.undo


def test_an_epoch_without_room_is_saved_when_there_is_some(tmp_path, full):
    path, helper = tmp_path / "epochs", Later()
    epochs = EpochTable(path)
    epochs.begin(3, 700)
    assert epochs.lost_since(2) == 700
    for now_ms in (0, 10, 20):
        epochs.tick(now_ms, helper.submit)
    assert len(helper.jobs) == 1
    helper.work()
    epochs.tick(30, helper.submit)
    # Not again and again.
    epochs.tick(RETRY_MS, helper.submit)
    assert not helper.jobs
    assert EpochTable(path).lost_since(2) is None
    full()
    epochs.tick(RETRY_MS + 30, helper.submit)
    helper.work()
    epochs.tick(RETRY_MS + 31, helper.submit)
    assert epochs.settled
    assert EpochTable(path).lost_since(2) == 700
    epochs.tick(10 * RETRY_MS, helper.submit)
    assert not helper.jobs


def test_room_for_the_next_epoch_is_taken_when_there_is_some(tmp_path, full):
    path, helper = tmp_path / "epochs", Later()
    epochs = EpochTable(path)
    assert not epochs.settled
    full()
    epochs.tick(0, helper.submit)
    helper.work()
    epochs.tick(1, helper.submit)
    assert epochs.settled
    assert path.with_name("epochs.new").stat().st_blocks
    assert EpochTable(path).lost_since(0) is None


def starts(*rows):
    return [EpochStart(*row) for row in rows]


def test_the_table_is_kept_over_starts_and_cut_with_the_log(tmp_path):
    path = tmp_path / "epochs"
    table = EpochTable(path)
    assert (table.newest, table.is_known) == (0, False)
    for row in ((1, 0), (4, 100), (5, 300), (5, 300)):
        table.begin(*row)
    again = EpochTable(path)
    assert again.is_known and again.newest == 5
    assert again.starts == starts((1, 0), (4, 100), (5, 300))
    assert [again.lost_since(epoch) for epoch in (0, 1, 3, 4, 5)] == [0, 100, 100, 300, None]
    again.cut(300)
    assert EpochTable(path).starts == starts((1, 0), (4, 100))
    again.cut(50)
    assert EpochTable(path).starts == starts((1, 0))


def test_an_epoch_that_nothing_was_written_in_gives_way_to_the_next(tmp_path):
    table = EpochTable(tmp_path / "epochs")
    for row in ((1, 0), (3, 500), (4, 500)):
        table.begin(*row)
    assert table.starts == starts((1, 0), (4, 500))
    # What was told of a place behind an end that was lost is not true any more.
    table.begin(6, 400)
    assert table.starts == starts((1, 0), (6, 400))


def test_a_table_that_is_damaged_is_not_known(tmp_path):
    path = tmp_path / "epochs"
    EpochTable(path).begin(7, 100)
    for name in ("epochs", "epochs.bak"):
        (tmp_path / name).write_bytes(b"nothing")
    assert not EpochTable(path).is_known
    assert EpochTable(path).starts == []


def test_of_too_many_epochs_the_oldest_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr("mqmesh.storage.log.epochs.MOST_EPOCHS", 3)
    assert MOST_EPOCHS == 10_000
    table = EpochTable(tmp_path / "epochs")
    for number in range(1, 6):
        table.learn(number, 100 * number)
    assert table.starts == starts((3, 100), (4, 400), (5, 500))
    # Who is older than all of them repeats more than he must, and skips nothing.
    assert [table.lost_since(epoch) for epoch in (1, 3, 4)] == [100, 400, 500]
