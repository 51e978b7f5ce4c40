"""How a filter fares, and who has to wait for it."""

from __future__ import annotations

import errno

import pytest

from mqmesh.errors import BrokerNotAvailable, FilterFailed, NoPermission, SystemBusy
from mqmesh.roles.filtersrv.filter_runner import BACKOFF_MS, RAISED_RETRY_MS, FilterState
from mqmesh.sandbox.frames import Status

BATCH = b"b" * 100
MIB = 1024 * 1024


def test_messages_are_judged_one_question_after_the_other(stage):
    runner, done = stage.runner(match_timeout_ms=77), []
    runner.match([BATCH], 2, done.append)
    runner.match([BATCH, BATCH], 3, done.append)
    (worker,) = stage.workers
    assert worker.questions == []
    worker.ready()
    assert worker.questions == [([BATCH], 2, 77)]
    worker.says(Status.MATCHED, b"\x01\x00")
    assert worker.questions[1:] == [([BATCH, BATCH], 3, 77)]
    worker.says(Status.MATCHED, b"\x01\x01\x01")
    assert done == [b"\x01\x00", b"\x01\x01\x01"]
    assert (runner.matched, runner.passed_over) == (4, 1)


def test_loading_tells_what_confines_the_filter(stage):
    runner, told = stage.runner(), []
    runner.load(told.append)
    runner.load(told.append)
    assert runner.state is FilterState.LOADING
    (worker,) = stage.workers
    worker.ready()
    runner.load(told.append)
    assert told == [["rlimits", "seccomp"]] * 3
    assert runner.state is FilterState.READY


@pytest.mark.parametrize(
    ("status", "kind"), [(Status.FAILED, FilterFailed), (Status.UNCONFINED, NoPermission)]
)
def test_a_filter_that_cannot_be_loaded_is_refused_for_good(stage, status, kind):
    runner, told = stage.runner(), []
    runner.load(told.append)
    runner.match([BATCH], 1, told.append)
    (worker,) = stage.workers
    worker.says(status, b"SyntaxError: line 1")
    assert [type(one) for one in told] == [kind, kind]
    assert "SyntaxError: line 1" in str(told[0])
    assert worker.closed
    stage.clock.advance(10**9)
    with pytest.raises(FilterFailed, match="SyntaxError"):
        runner.check_usable()
    assert len(stage.workers) == 1


def test_what_a_filter_raised_is_told_and_its_process_lives_on(stage):
    runner, done = stage.runner(), []
    runner.match([BATCH], 1, done.append)
    runner.match([BATCH], 1, done.append)
    (worker,) = stage.workers
    worker.ready()
    worker.says(Status.FAILED, b"match() raised KeyError: 'x'")
    worker.says(Status.MATCHED, b"\x01")
    assert isinstance(done[0], FilterFailed)
    assert "KeyError: 'x'" in str(done[0])
    assert done[0].retry_after_ms == RAISED_RETRY_MS
    assert done[1] == b"\x01"
    assert not worker.closed


def test_a_dead_process_fails_all_that_waits_and_comes_again_after_a_pause(stage):
    runner, done = stage.runner(), []
    for _ in range(3):
        runner.match([BATCH], 1, done.append)
    stage.workers[0].ready()
    stage.workers[0].dies("it made a system call that filters may not make (SIGSYS)")
    assert [type(one) for one in done] == [FilterFailed] * 3
    assert "SIGSYS" in str(done[0])
    assert done[0].retry_after_ms == BACKOFF_MS
    assert runner.state is FilterState.WAITING

    runner.match([BATCH], 1, done.append)
    assert isinstance(done[3], FilterFailed)
    assert len(stage.workers) == 1

    stage.clock.advance(BACKOFF_MS)
    runner.match([BATCH], 1, done.append)
    stage.workers[1].ready()
    stage.workers[1].says(Status.MATCHED, b"\x00")
    assert done[4] == b"\x00"


def test_a_filter_that_dies_again_and_again_is_parked_and_tried_once_in_a_while(stage, caplog):
    runner, done = stage.runner(failures_to_park=3, park_ms=5_000), []
    for death in range(3):
        runner.match([BATCH], 1, done.append)
        stage.workers[death].ready()
        stage.workers[death].dies()
        assert runner.state is (FilterState.PARKED if death == 2 else FilterState.WAITING)
        if death < 2:
            stage.clock.advance(done[-1].retry_after_ms)
    assert "is parked" in caplog.text
    assert "SIGSEGV" in caplog.text
    with pytest.raises(FilterFailed, match="is parked, 3 failures in a row"):
        runner.begin_pull()

    stage.clock.advance(4_999)
    assert runner.state is FilterState.PARKED
    stage.clock.advance(1)
    runner.match([BATCH], 1, done.append)
    assert len(stage.workers) == 4
    stage.workers[3].dies()
    assert runner.state is FilterState.PARKED

    stage.clock.advance(5_000)
    runner.match([BATCH], 1, done.append)
    stage.workers[4].ready()
    stage.workers[4].says(Status.MATCHED, b"\x01")
    runner.match([BATCH], 1, done.append)
    stage.workers[4].dies()
    assert runner.state is FilterState.WAITING  # it owes nothing to its former failures


def test_success_forgives_former_failures(stage):
    runner, done = stage.runner(failures_to_park=2), []
    for turn in range(5):
        runner.match([BATCH], 1, done.append)
        runner.match([BATCH], 1, done.append)
        stage.workers[turn].ready()
        stage.workers[turn].says(Status.MATCHED, b"\x01")
        stage.workers[turn].dies()
        assert runner.state is FilterState.WAITING
        stage.clock.advance(done[-1].retry_after_ms)


def test_a_process_that_cannot_be_started_counts_as_dead(stage):
    runner, done = stage.runner(), []
    stage.fails_to_start = OSError(errno.EAGAIN, "no more processes")
    runner.match([BATCH], 1, done.append)
    assert isinstance(done[0], FilterFailed)
    assert "no more processes" in str(done[0])
    stage.fails_to_start = None
    stage.clock.advance(BACKOFF_MS)
    runner.match([BATCH], 1, done.append)
    stage.workers[0].ready()
    stage.workers[0].says(Status.MATCHED, b"\x01")
    assert done[1] == b"\x01"


def test_what_waits_is_bounded_in_bytes_and_pulls(stage):
    runner, done = stage.runner(max_pending_bytes=16 * MIB, max_pulls_per_filter=2), []
    big = memoryview(bytes(8 * MIB))
    for _ in range(3):
        runner.match([big], 1, done.append)
    assert isinstance(done[0], SystemBusy)
    assert len(done) == 1
    stage.workers[0].ready()
    stage.workers[0].says(Status.MATCHED, b"\x00")
    runner.begin_pull()
    runner.begin_pull()
    with pytest.raises(SystemBusy, match="max_pulls_per_filter"):
        runner.begin_pull()
    runner.end_pull()
    runner.begin_pull()


def test_a_process_is_renewed_before_its_processor_time_is_used_up(stage):
    runner, done = stage.runner(worker_cpu_s=2), []
    for _ in range(3):
        runner.match([BATCH], 1, done.append)
    first = stage.workers[0]
    first.ready()
    stage.clock.advance(600)
    first.says(Status.MATCHED, b"\x01")
    stage.clock.advance(600)
    first.says(Status.MATCHED, b"\x01")
    assert first.closed
    second = stage.workers[1]
    second.ready()
    second.says(Status.MATCHED, b"\x01")
    assert done == [b"\x01"] * 3
    assert runner.deaths == 0


def test_who_asks_again_while_being_told_is_served(stage):
    runner, done = stage.runner(worker_cpu_s=2), []

    def again(found):
        done.append(found)
        if len(done) < 4:
            runner.match([BATCH], 1, again)

    runner.match([BATCH], 1, again)
    turn = 0
    while len(done) < 4:
        worker = stage.workers[-1]
        if worker is not turn:
            worker.ready()
            turn = worker
        stage.clock.advance(700)
        worker.says(Status.MATCHED, b"\x01")
    assert done == [b"\x01"] * 4
    assert len(stage.workers) == 2


def test_it_is_idle_only_while_nobody_wants_anything(stage):
    runner, done = stage.runner(), []
    stage.clock.advance(50)
    assert runner.idle_ms() == 50
    runner.begin_pull()
    stage.clock.advance(50)
    assert runner.idle_ms() == 0
    runner.end_pull()
    runner.match([BATCH], 1, done.append)
    stage.clock.advance(50)
    assert runner.idle_ms() == 0


def test_closing_ends_the_process_and_tells_who_waits(stage):
    runner, done = stage.runner(), []
    runner.match([BATCH], 1, done.append)
    runner.close()
    assert stage.workers[0].closed
    assert isinstance(done[0], BrokerNotAvailable)
