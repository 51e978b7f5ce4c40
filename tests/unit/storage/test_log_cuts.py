"""Where the log lost its end: noted, and noted later where there was no room."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future

import pytest

from mqmesh.storage.commitlog.log_cuts import RETRY_MS, LogCuts
from mqmesh.storage.files.atomic_file import StorageError


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


def test_a_cut_without_room_is_saved_when_there_is_some(tmp_path, full):
    path, helper = tmp_path / "log-cuts", Later()
    cuts = LogCuts(path)
    cuts.add(3, 700)
    assert cuts.since(2) == 700
    for now_ms in (0, 10, 20):
        cuts.tick(now_ms, helper.submit)
    assert len(helper.jobs) == 1
    helper.work()
    cuts.tick(30, helper.submit)
    # Not again and again.
    cuts.tick(RETRY_MS, helper.submit)
    assert not helper.jobs
    assert LogCuts(path).since(2) is None
    full()
    cuts.tick(RETRY_MS + 30, helper.submit)
    helper.work()
    cuts.tick(RETRY_MS + 31, helper.submit)
    assert cuts.settled
    assert LogCuts(path).since(2) == 700
    cuts.tick(10 * RETRY_MS, helper.submit)
    assert not helper.jobs


def test_room_for_the_next_cut_is_taken_when_there_is_some(tmp_path, full):
    path, helper = tmp_path / "log-cuts", Later()
    cuts = LogCuts(path)
    assert not cuts.settled
    full()
    cuts.tick(0, helper.submit)
    helper.work()
    cuts.tick(1, helper.submit)
    assert cuts.settled
    assert path.with_name("log-cuts.new").stat().st_blocks
    assert LogCuts(path).since(0) is None
