"""When to register with whom."""

from __future__ import annotations

import pytest

from mqmesh.protocol.route import DataVersion, RegisterBrokerResponse
from mqmesh.roles.broker.registration import RETRY_MS, Registration, RegistrationPlan

V1, V2, V3 = DataVersion(1, 1), DataVersion(1, 2), DataVersion(1, 3)
FINE, MORE = RegisterBrokerResponse(), RegisterBrokerResponse(need_topics=True)
INTERVAL_MS = 30_000


@pytest.fixture
def plan():
    """A plan for one name server that is connected and knows version 1."""
    plan = RegistrationPlan(1, INTERVAL_MS)
    plan.on_connection(0, True, 0)
    assert plan.tick(V1, 0) == [Registration(0, False)]
    plan.on_answer(0, FINE, 0)
    return plan


def test_nobody_is_spoken_to_without_a_connection():
    plan = RegistrationPlan(3, INTERVAL_MS)
    assert plan.tick(V1, 10**9) == []
    plan.on_connection(1, True, 10**9)
    assert plan.tick(V1, 10**9) == [Registration(1, False)]


def test_a_heartbeat_is_small_and_comes_in_time(plan):
    assert plan.tick(V1, INTERVAL_MS - 1) == []
    assert plan.tick(V1, INTERVAL_MS) == [Registration(0, False)]
    assert plan.tick(V1, INTERVAL_MS) == [], "one at a time"


def test_whoever_asks_for_the_topics_gets_them_at_once(plan):
    plan.tick(V1, INTERVAL_MS)
    plan.on_answer(0, MORE, INTERVAL_MS)
    assert plan.registered_count == 0
    assert plan.tick(V1, INTERVAL_MS) == [Registration(0, True)]
    plan.on_answer(0, FINE, INTERVAL_MS)
    assert plan.registered_count == 1
    assert plan.tick(V1, INTERVAL_MS + 1) == []


def test_a_name_server_that_always_asks_again_makes_no_storm(plan):
    plan.tick(V1, INTERVAL_MS)
    plan.on_answer(0, MORE, INTERVAL_MS)
    plan.tick(V1, INTERVAL_MS)
    plan.on_answer(0, MORE, INTERVAL_MS)
    assert plan.tick(V1, INTERVAL_MS + RETRY_MS - 1) == []
    assert plan.tick(V1, INTERVAL_MS + RETRY_MS) == [Registration(0, True)]


def test_changes_are_sent_at_once_and_those_during_a_registration_with_the_next_one(plan):
    assert plan.tick(V2, 10) == [Registration(0, False, since=V1)]
    assert plan.tick(V3, 11) == [], "the answer is still to come"
    plan.on_answer(0, FINE, 12)
    assert plan.tick(V3, 12) == [Registration(0, False, since=V2)]
    plan.on_answer(0, FINE, 13)
    assert plan.tick(V3, 14) == []


def test_a_name_server_without_the_version_that_changes_start_from_gets_the_table(plan):
    plan.tick(V2, 10)
    plan.on_answer(0, MORE, 11)
    assert plan.tick(V2, 11) == [Registration(0, True)]


def test_a_new_connection_is_registered_at_once_since_a_new_server_may_be_behind_it(plan):
    plan.on_connection(0, False, 50)
    assert plan.registered_count == 0
    assert plan.tick(V2, 60) == []
    plan.on_connection(0, True, 70)
    assert plan.tick(V2, 70) == [Registration(0, False)]
    plan.on_answer(0, MORE, 71)
    assert plan.tick(V2, 71) == [Registration(0, True)]


def test_an_answer_of_a_connection_that_broke_means_nothing(plan):
    plan.tick(V2, 10)
    plan.on_connection(0, False, 20)
    plan.on_answer(0, FINE, 21)
    assert plan.registered_count == 0
    plan.on_failure(0, 21)
    assert plan.tick(V2, 10**6) == []


def test_a_failure_is_tried_again_soon(plan):
    plan.tick(V1, INTERVAL_MS)
    plan.on_failure(0, INTERVAL_MS)
    assert plan.tick(V1, INTERVAL_MS + RETRY_MS - 1) == []
    assert plan.tick(V1, INTERVAL_MS + RETRY_MS) == [Registration(0, False)]


def test_a_failed_announcement_of_topics_is_no_storm_either(plan):
    plan.tick(V2, 10)
    plan.on_failure(0, 3_010)
    assert plan.tick(V2, 3_010 + RETRY_MS - 1) == []
    assert plan.tick(V2, 3_010 + RETRY_MS) == [Registration(0, False, since=V1)]
