"""Delayed messages: what waits by due time, and cancelling."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console
from unit.console.test_messages import ID, NOW_MS, calls_of, stored

from mqmesh.console.queries.delayed import due_steps
from mqmesh.errors import CancelRefused
from mqmesh.sdk.admin.delays import DelayedMessage
from mqmesh.sdk.admin.tracks import MessageTrack

PATH = f"/delayed/{ID}/cancel"


@pytest.fixture
def world():
    waiting = [
        DelayedMessage(NOW_MS + 60_000, "orders", "broker-a", stored()),
        DelayedMessage(NOW_MS + 3_700_000, "%RETRY%shipping", "broker-a", stored(number=8)),
    ]
    world = ConsoleWorld(
        {
            "waiting": waiting,
            "track": MessageTrack([stored()], NOW_MS + 60_000, []),
            "cancel": ["broker-a"],
        }
    )
    world.clock.jump_wall(NOW_MS - world.clock.wall_ms())
    return world


def test_messages_that_wait_are_shown_by_due_time(world):
    client = open_console(world)
    answer = client.get("/api/v1/delayed").json()
    rows = answer["table"]["rows"]
    assert [(one["topic"], one["retry_of"]) for one in rows] == [
        ("orders", ""),
        ("orders", "shipping"),
    ]
    steps = {one["label"]: one["count"] for one in answer["steps"]}
    assert (steps["1 min"], steps["6 h"], sum(steps.values())) == (1, 1, 2)
    page = client.get("/delayed", params={"topic": "orders"}).text
    assert "retry of shipping" in page
    assert calls_of(world, "waiting")[-1] == (("orders",), {"max_count": 1_000})


def test_a_list_that_is_cut_says_so(world):
    answer = open_console(world, max_query_messages=2).get("/api/v1/delayed").json()
    assert answer["table"]["cut"] == "These are the 2 due next: name a topic."


def test_bars_are_high_as_counts_and_seen_if_there_is_one():
    steps = due_steps([-5] * 200 + [1, 1 << 50])
    assert [(one.label, one.count, one.height) for one in steps if one.count] == [
        ("now", 200, 100),
        ("1 min", 1, 3),
        ("later", 1, 3),
    ]
    assert {one.height for one in due_steps([])} == {0}


def test_a_message_is_cancelled(world):
    client = open_console(world)
    plan = client.get(PATH).text
    assert f"Message {ID} to topic orders is cancelled" in plan
    assert "It is never delivered" in plan
    assert calls_of(world, "cancel") == []
    done = client.act(PATH, client.csrf(PATH)).text
    assert f"Message {ID} is cancelled at broker-a" in done


def test_what_does_not_wait_cannot_be_cancelled(world):
    client = open_console(world)
    csrf = client.csrf(PATH)
    world.answers["cancel"] = CancelRefused("it is being delivered")
    assert "it is being delivered" in client.act(PATH, csrf).text
    world.answers["track"] = MessageTrack([stored()], 0, [])
    page = client.get(PATH).text
    assert "does not wait" in page
    assert 'value="do"' not in page
