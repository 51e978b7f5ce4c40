"""Transactions: half messages that wait, commit and rollback."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console
from unit.console.test_messages import ID, NOW_MS, calls_of, stored

from mqmesh.errors import BrokerError
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.transactions import Decision, HalfInfo, HalfState
from mqmesh.sdk.admin.transaction_admin import HalfMessage, HalfMessages

PATH = f"/transactions/{ID}"


def half(state=HalfState.PENDING, **others):
    info = HalfInfo(ID, "payments", "orders", 3, NOW_MS, 65_000, 2, 5_000, state.value, 7, 1)
    return HalfMessage("broker-a", info, **others)


@pytest.fixture
def world():
    return ConsoleWorld(
        {
            "half_messages": HalfMessages([half(HalfState.PARKED), half()], 4, 3),
            "half_message": half(HalfState.PARKED, message=stored(price="9")),
            "end_half_message": "broker-a",
        }
    )


def test_half_messages_have_checks_and_live_members(world):
    client = open_console(world)
    answer = client.get("/api/v1/transactions", params={"state": "parked"}).json()
    assert (answer["pending"], answer["parked"]) == (4, 3)
    assert answer["table"]["rows"][0]["live_members"] == 1
    assert calls_of(world, "half_messages")[0][1]["parked"] is True
    page = client.get("/transactions", params={"group": "payments", "topic": "orders"}).text
    assert "next check in 5 s" in page
    assert "parked" in page
    asked = calls_of(world, "half_messages")[-1][1]
    assert (asked["group"], asked["topic"], asked["parked"]) == ("payments", "orders", False)


def test_a_list_that_is_cut_says_so(world):
    answer = open_console(world, max_query_messages=2).get("/api/v1/transactions").json()
    assert answer["table"]["cut"] == "These are the 2 oldest: name a group or topic."


def test_one_half_message_has_its_contents(world):
    client = open_console(world)
    page = client.get(PATH).text
    assert "payments, 1 members connected" in page
    assert "&#34;a&#34;: 1" in page
    hidden = open_console(world, allow_body_view=False).get(f"/api/v1{PATH}").json()
    assert hidden["body"] is None
    assert hidden["half"]["body"] is None


@pytest.mark.parametrize(
    ("verb", "decision", "warning", "done"),
    [
        ("commit", Decision.COMMIT, "known to be done", "committed"),
        ("rollback", Decision.ROLLBACK, "known not to have happened", "rolled back"),
    ],
)
def test_a_decision_is_warned_of_and_made(world, verb, decision, warning, done):
    client = open_console(world)
    path = f"{PATH}/{verb}"
    plan = client.get(path).text
    assert warning in plan
    assert "in vain; nobody is asked any more" in plan
    assert calls_of(world, "end_half_message") == []
    answer = client.act(path, client.csrf(path)).text
    assert f"Message {ID} is {done} at broker-a" in answer
    assert calls_of(world, "end_half_message")[0][0] == (ID, decision)


def test_what_waits_no_more_is_not_found(world):
    world.answers["half_message"] = BrokerError("it ended", code=ResponseCode.QUERY_NOT_FOUND)
    assert open_console(world).get(PATH).status_code == 404
