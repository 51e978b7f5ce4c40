"""Consumer groups: list, one of them, and what moves their offsets."""

from __future__ import annotations

import msgspec
import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.cluster_view import ClusterReadings, GroupLag
from mqmesh.errors import GroupNotFound
from mqmesh.protocol.client_rpc import RunningInfo
from mqmesh.protocol.groups import (
    ConsumerConnection,
    GroupConfig,
    GroupFailures,
    GroupSummary,
    OffsetChange,
    QueueProgress,
    ResetWhere,
    WindowProgress,
)
from mqmesh.protocol.membership import ConsumerData
from mqmesh.protocol.policies import FOREVER_MS
from mqmesh.sdk.admin.group_admin import GroupProgress, OffsetMove, OffsetMoves, QueueLag

NOW_MS = 1_700_000_000_000


def summary(group, lag, members=1, **others):
    return GroupSummary(GroupConfig(group), members=members, lag=lag, topics=["orders"], **others)


def moves(*, dry_run, old=100, new=40):
    change = OffsetChange("orders", 3, old, new, 0, 100)
    return OffsetMoves([OffsetMove("broker-a", change)], 2, dry_run)


@pytest.fixture
def world():
    failures = GroupFailures(10, 8, 1.0)

    def groups(group=""):
        found = [summary("billing", 7, failures=failures), summary("ledger", 1_000, members=0)]
        if not group:
            return {"broker-a": found}
        paused = GroupConfig("idle", paused_topics={"orders": FOREVER_MS})
        found.append(msgspec.structs.replace(summary("idle", 0), config=paused))
        known = [one for one in found if one.config.group == group]
        return {"broker-a": known} if known else GroupNotFound(f"no consumer group {group!r}")

    queue = QueueLag("broker-a", QueueProgress("orders", 0, 0, 10, 3, 5, 1, "client-1"), 60_000)
    member = ConsumerConnection(
        "client-1", "PYTHON", "0.1.0", True, 900, ConsumerData("billing", "CLUSTERING", "", [])
    )

    window = WindowProgress(4, 2, 1, 1, 90_000)
    windowed = QueueLag("broker-a", QueueProgress("orders", 0, 0, 10, 3, 5, 1, "", window), 60_000)

    def progress(group):
        queues = [windowed if group == "ledger" else queue]
        return GroupProgress(group, queues, 2.0, 4, int(group == "billing"), "CLUSTERING", 0)

    world = ConsoleWorld(
        {
            "groups": groups,
            "progress": progress,
            "connections": [member],
            "running_info": RunningInfo("client-1", "billing", "push", 1, {"x": "y"}, [], [], []),
            "create_group": {"broker-a": GroupConfig("audit")},
            "put_group": {},
            "pause_group": {},
            "resume_group": {},
            "delete_group": ["broker-a"],
            "reset_offset": lambda *args, dry_run, **others: moves(dry_run=dry_run),
            "skip_backlog": lambda group, topic, dry_run=False: moves(dry_run=dry_run, new=100),
            "clone_offset": lambda *args, dry_run=False: moves(dry_run=dry_run, old=-1),
        },
        readings=ClusterReadings({}, {}, [GroupLag("ledger", 1_000, 90_000, 0, 0.0)], {}),
    )
    world.clock.wall = NOW_MS
    return world


def calls(world, method):
    return [(args, kwargs) for _, name, args, kwargs in world.calls if name == method]


def test_groups_are_sorted_by_what_is_asked_for(world):
    client = open_console(world)
    told = client.get("/api/v1/groups", params={"sort": "-lag"}).json()
    assert [(one["group"], one["lag"], one["lag_ms"]) for one in told["rows"]] == [
        ("ledger", 1_000, 90_000),
        ("billing", 7, None),
    ]
    assert told["rows"][1]["failing"] == 0.8
    page = client.get("/groups", params={"sort": "-lag"}).text
    assert page.index('data-test="group-ledger"') < page.index('data-test="group-billing"')
    assert 'aria-sort="descending"' in page


def test_a_group_has_queues_members_and_settings(world):
    client = open_console(world)
    told = client.get("/api/v1/groups/billing").json()
    assert told["progress"]["queues"][0]["client_id"] == "client-1"
    assert told["progress"]["lag"] == 7
    assert told["members"]["members"][0]["silent_ms"] == 900
    assert told["settings"]["brokers"][0]["retry_max_times"] == -1
    page = client.get("/groups/billing").text
    assert "/groups/billing/member?client_id=client-1" in page
    assert "Redelivered" not in page


def test_a_group_that_acknowledges_each_message_shows_its_windows(world):
    page = open_console(world).get("/groups/ledger").text
    assert "Nobody is there" in page
    assert all(heading in page for heading in ("Ready", "Waiting", "Redelivered", "Held"))
    assert "1 min 30 s" in page


def test_a_member_says_how_it_is(world):
    page = open_console(world).get("/groups/billing/member", params={"client_id": "client-1"})
    assert "<dt>x</dt><dd>y</dd>" in page.text


def test_a_group_is_made(world):
    client = open_console(world)
    csrf = client.csrf("/new/group")
    again = client.act("/new/group", csrf, group="billing")
    assert again.status_code == 400
    assert "already" in again.text
    fields = {"group": "audit", "retry_max_times": "5", "consume_enable": "on"}
    assert "Group audit is there" in client.act("/new/group", csrf, **fields).text
    (((config,), _),) = calls(world, "create_group")
    assert config == GroupConfig("audit", retry_max_times=5, consume_broadcast_enable=False)


def test_settings_say_what_changes(world):
    client = open_console(world)
    path = "/groups/billing/settings"
    page = client.get(path).text
    assert 'name="consume_enable" checked' in page
    fields = {"retry_max_times": "5", "consume_enable": "on", "consume_broadcast_enable": "on"}
    fields["retry_delays"] = "10s 30s"
    plan = client.act(path, client.csrf(path), "plan", **fields).text
    assert "retry max times" in plan
    assert "retry delays" in plan
    client.act(path, client.csrf(path), **fields)
    (((changed,), _),) = calls(world, "put_group")
    wanted = GroupConfig("billing", retry_max_times=5, retry_delays="10s 30s")
    assert changed == {"broker-a": wanted}
    fields["retry_delays"] = "soon"
    refused = client.act(path, client.csrf(path), "plan", **fields)
    assert refused.status_code == 400
    assert "no delay" in refused.text


def test_a_group_is_paused_and_goes_on(world):
    client = open_console(world)
    path = "/groups/billing/pause"
    fields = {"topic": "orders", "minutes": "30"}
    plan = client.act(path, client.csrf(path), "plan", **fields).text
    assert "gets no messages of orders for 30 minutes" in plan
    client.act(path, client.csrf(path), **fields)
    client.act(path, client.csrf(path), minutes="0")
    assert calls(world, "pause_group") == [
        (("billing", "orders"), {"until_ms": world.clock.wall_ms() + 1_800_000}),
        (("billing", ""), {"until_ms": FOREVER_MS}),
    ]
    path = "/groups/billing/resume"
    assert "Nothing of that is paused" in client.act(path, client.csrf(path), "plan").text
    path = "/groups/idle/resume"
    plan = client.act(path, client.csrf(path), "plan", topic="orders").text
    assert "Group idle goes on with orders at once" in plan
    client.act(path, client.csrf(path), topic="orders")
    assert calls(world, "resume_group") == [(("idle", "orders"), {})]


def test_a_reset_is_shown_before_it_is_done(world):
    client = open_console(world)
    path = "/groups/billing/reset"
    form = client.get(path).text
    assert "<option selected>orders</option>" in form
    csrf = client.csrf(path)
    fields = {"topic": "orders", "to": "a time", "time": "1h", "queue_id": "-1", "offset": "0"}
    plan = client.act(path, csrf, "plan", **fields).text
    assert "60 messages are read again, 0 skipped" in plan
    ((args, kwargs),) = calls(world, "reset_offset")
    assert args == ("billing", "orders", ResetWhere.TIMESTAMP)
    assert kwargs["dry_run"] is True
    assert kwargs["timestamp_ms"] == world.clock.wall_ms() - 3_600_000
    done = client.act(path, csrf, **fields).text
    assert 'data-test="outcome"' in done
    assert calls(world, "reset_offset")[-1][1]["dry_run"] is False


def test_one_queue_goes_to_an_offset(world):
    client = open_console(world)
    path = "/groups/ledger/reset"
    link = {"topic": "orders", "broker_name": "broker-a", "queue_id": "3", "to": "an offset"}
    form = client.get(path, params=link | {"offset": "0"}).text
    assert 'name="broker_name" type="text" value="broker-a"' in form
    client.act(path, client.csrf(path), **link, offset="17", time="1h")
    _, kwargs = calls(world, "reset_offset")[-1]
    assert (kwargs["queue_id"], kwargs["queue_offset"], kwargs["broker_name"]) == (
        3,
        17,
        "broker-a",
    )


def test_a_time_that_is_none_comes_back(world):
    client = open_console(world)
    path = "/groups/billing/reset"
    fields = {"topic": "orders", "to": "a time", "time": "yesterday"}
    answer = client.act(path, client.csrf(path), "plan", **fields)
    assert answer.status_code == 400
    assert "must be a time like" in answer.text
    assert "<option selected>orders</option>" in answer.text


def test_a_backlog_is_skipped_when_the_name_was_typed(world):
    client = open_console(world)
    path = "/groups/ledger/skip"
    csrf = client.csrf(path)
    world.answers["skip_backlog"] = lambda group, topic, dry_run=False: moves(
        dry_run=dry_run, old=40, new=100
    )
    assert client.act(path, csrf, typed="billing").status_code == 400
    plan = client.act(path, csrf, "plan").text
    assert "60 messages never come to the group" in plan
    assert 'data-typed="ledger"' in plan
    assert "60 skipped" in client.act(path, csrf, typed="ledger").text


def test_a_clone_shows_offsets(world):
    client = open_console(world)
    path = "/groups/billing/clone"
    plan = client.act(path, client.csrf(path), "plan", target="billing-v2").text
    assert "Group billing-v2 goes on where billing is" in plan
    client.act(path, client.csrf(path), target="billing-v2")
    assert calls(world, "clone_offset")[-1] == (("billing", "billing-v2", ""), {})


def test_a_group_with_members_is_not_deleted(world):
    client = open_console(world)
    path = "/groups/billing/delete"
    plan = client.act(path, client.csrf(path), typed="billing").text
    assert "has 1 members: stop them first" in plan
    assert not calls(world, "delete_group")
    path = "/groups/ledger/delete"
    client.act(path, client.csrf(path), typed="ledger", remove_topics="on")
    assert calls(world, "delete_group") == [(("ledger",), {"remove_topics": True})]
