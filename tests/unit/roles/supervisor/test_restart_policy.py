"""When a process is started again, and who is stopped when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.roles.process import ExitCode
from mqmesh.roles.supervisor.restart_policy import (
    CRASH_LOOP_DEATHS,
    FIRST_DELAY_MS,
    KILL_MS,
    MAX_DELAY_MS,
    STABLE_MS,
    RestartAction,
    RestartPolicy,
    StopPlan,
    describe_exit,
)

KILLED = -9


def die(policy, lived_ms=10, exit_code=KILLED):
    policy.on_started(1_000)
    return policy.on_exit(exit_code, 1_000 + lived_ms)


def test_the_delay_doubles_up_to_its_limit():
    policy = RestartPolicy()
    delays = [die(policy).delay_ms for _ in range(12)]
    assert delays[:4] == [200, 400, 800, 1_600]
    assert delays[-1] == MAX_DELAY_MS
    assert delays == sorted(delays)


def test_a_thousand_deaths_are_no_arithmetic_problem():
    policy = RestartPolicy()
    assert [die(policy).delay_ms for _ in range(1_000)][-1] == MAX_DELAY_MS


def test_a_stable_life_makes_former_deaths_forgotten():
    policy = RestartPolicy()
    for _ in range(6):
        die(policy)
    decision = die(policy, lived_ms=STABLE_MS)
    assert (decision.delay_ms, decision.quick_deaths) == (FIRST_DELAY_MS, 1)


def test_a_life_just_too_short_is_no_stable_one():
    policy = RestartPolicy()
    die(policy)
    assert die(policy, lived_ms=STABLE_MS - 1).delay_ms == 2 * FIRST_DELAY_MS


def test_every_fifth_quick_death_is_reported_as_a_crash_loop():
    policy = RestartPolicy()
    reported = [number for number in range(1, 16) if die(policy).is_crash_loop]
    assert reported == [CRASH_LOOP_DEATHS, 2 * CRASH_LOOP_DEATHS, 3 * CRASH_LOOP_DEATHS]


def test_a_wrong_configuration_at_the_first_start_ends_everything():
    assert die(RestartPolicy(), exit_code=ExitCode.USAGE).action is RestartAction.GIVE_UP


def test_a_wrong_configuration_after_crashes_without_a_ready_ends_everything():
    policy = RestartPolicy()
    die(policy)
    assert die(policy, exit_code=ExitCode.USAGE).action is RestartAction.GIVE_UP


def test_what_has_worked_before_is_tried_again():
    policy = RestartPolicy()
    policy.on_started(0)
    policy.on_ready()
    assert policy.on_exit(ExitCode.USAGE, 10).action is RestartAction.RESTART


@pytest.mark.parametrize("exit_code", [0, 1, 3, -9, -11, -15])
def test_every_other_end_is_followed_by_a_start(exit_code):
    assert die(RestartPolicy(), exit_code=exit_code).action is RestartAction.RESTART


STAGES = {"broker-a": 0, "broker-b": 0, "namesrv": 1}


def test_brokers_are_asked_first_and_name_servers_when_they_are_gone():
    plan = StopPlan(STAGES, 0)
    assert plan.next(STAGES, 0) == (["broker-a", "broker-b"], [])
    assert plan.next({"broker-b", "namesrv"}, 100) == ([], [])
    assert plan.next({"namesrv"}, 200) == (["namesrv"], [])


def test_name_servers_do_not_wait_for_ever_for_brokers():
    plan = StopPlan(STAGES, 0)
    plan.next(STAGES, 0)
    assert plan.next(STAGES, 999) == ([], [])
    assert plan.next(STAGES, 1_000) == (["namesrv"], [])


def test_what_does_not_stop_is_killed_once():
    plan = StopPlan(STAGES, 0)
    plan.next(STAGES, 0)
    assert plan.next({"broker-a"}, KILL_MS - 1)[1] == []
    assert plan.next({"broker-a"}, KILL_MS)[1] == ["broker-a"]
    assert plan.next({"broker-a"}, KILL_MS + 1)[1] == []


def test_without_brokers_name_servers_are_asked_at_once():
    assert StopPlan({"namesrv": 1}, 0).next({"namesrv"}, 0) == (["namesrv"], [])


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 4), max_size=8),
    st.lists(st.integers(1, 400), max_size=30),
)
def test_everybody_is_asked_and_killed_once_within_the_time(stages, steps):
    plan = StopPlan(stages, 0)
    asked, killed, now_ms = [], [], 0
    while now_ms <= KILL_MS:
        ask, kill = plan.next(stages, now_ms)
        asked += ask
        killed += kill
        wait_ms = plan.wait_ms(now_ms)
        assert 1 <= wait_ms <= KILL_MS
        now_ms += min(wait_ms, steps.pop() if steps else wait_ms)
    assert sorted(asked) == sorted(killed) == sorted(stages)
    assert [stages[name] for name in asked] == sorted(stages.values())


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exit code 0"),
        (2, "exit code 2"),
        (3, "its store has stopped (exit code 3)"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_exit_code_has_words(exit_code, words):
    assert describe_exit(exit_code) == words
