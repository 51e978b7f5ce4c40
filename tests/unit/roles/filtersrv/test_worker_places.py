"""How many processes of filters run at once."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError, SystemBusy
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.worker_places import FREE_MS, TURN_MS
from mqmesh.sandbox.frames import Status
from mqmesh.units import MIB


@pytest.fixture
def load(stage):
    """Load a filter of a group; there is room for two processes."""
    stage.room(worker_memory_bytes=100 * MIB, max_total_worker_memory_bytes=299 * MIB)

    def load(group, user=""):
        runner = stage.runner(group, "f" * 32, "x", user=user)
        told = []
        runner.load(told.append)
        return runner, told

    return load


def test_a_process_too_many_is_refused_with_the_setting(stage, load):
    load("a")
    load("b")
    runner, told = load("c")
    (error,) = told
    assert isinstance(error, SystemBusy)
    assert "2 run" in str(error)
    assert "max_total_worker_memory_bytes" in str(error)
    assert len(stage.workers) == 2
    done = []
    runner.match([b"x"], 1, done.append)
    assert isinstance(done[0], SystemBusy)
    assert runner.pending_bytes == 0


def test_a_process_with_nothing_to_do_makes_room_and_comes_back(stage, load):
    first, _ = load("a")
    second, _ = load("b")
    for worker in stage.workers:
        worker.ready()
    busy = []
    second.match([b"x"], 1, busy.append)
    stage.clock.advance(FREE_MS)
    _, told = load("c")
    assert told == []
    assert [worker.closed for worker in stage.workers] == [True, False, False]
    stage.workers[2].ready()
    # Its messages wait for nobody else to do nothing.
    done = []
    first.match([b"x"], 1, done.append)
    assert isinstance(done.pop(), SystemBusy)
    stage.clock.advance(FREE_MS)
    first.match([b"x"], 1, done.append)
    assert stage.workers[2].closed
    stage.workers[3].ready()
    stage.workers[3].says(Status.MATCHED, b"\1")
    assert done == [b"\1"]
    assert busy == []


def busy(runner, worker):
    """Has a runner work; what comes of it."""
    worker.ready()
    done = []
    runner.match([b"x"], 1, done.append)
    return done


def test_one_user_with_busy_filters_keeps_no_other_one_out(stage, load):
    outcomes = [
        busy(load(group, "greedy")[0], stage.workers[number])
        for number, group in enumerate(("a", "b"))
    ]
    third, told = load("c", "greedy")
    assert isinstance(told[0], SystemBusy), "it has all places already"
    _, told = load("d", "modest")
    assert told == []
    assert [worker.closed for worker in stage.workers] == [True, False, False]
    (error,) = outcomes[0]
    assert isinstance(error, SystemBusy)
    assert error.retry_after_ms
    _, told = load("e", "modest")
    assert isinstance(told[0], SystemBusy), "it has its share"
    assert third.pending_bytes == 0
    assert outcomes[1] == []


def test_more_users_than_places_have_them_in_turn(stage, load):
    for number, user in enumerate("ab"):
        busy(load(user, user)[0], stage.workers[number])
        stage.clock.advance(1)
    _, told = load("c", "c")
    assert isinstance(told[0], SystemBusy)
    stage.clock.advance(TURN_MS - 2)
    _, told = load("c", "c")
    assert told == []
    assert [worker.closed for worker in stage.workers] == [True, False, False]
    _, told = load("a", "a")
    assert isinstance(told[0], SystemBusy)
    stage.clock.advance(1)
    _, told = load("a", "a")
    assert told == []
    assert [worker.closed for worker in stage.workers] == [True, True, False, False]


def test_a_process_that_died_leaves_its_place(stage, load):
    load("a")
    load("b")
    stage.workers[0].dies()
    _, told = load("c")
    assert told == []
    assert len(stage.workers) == 3


def test_there_must_be_room_for_one():
    with pytest.raises(ConfigError, match="less than one worker may have"):
        FiltersrvConfig(worker_memory_bytes=512 * MIB, max_total_worker_memory_bytes=511 * MIB)
