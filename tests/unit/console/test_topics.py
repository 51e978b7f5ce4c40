"""Topics: list, one of them, and what changes them."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.cluster_view import ClusterReadings
from mqmesh.errors import TopicNotFound
from mqmesh.protocol.admin import QueueStats, TopicStats
from mqmesh.protocol.route import BrokerAddress, BrokerData, ClusterInfo, TopicConfig
from mqmesh.sdk.admin.admin import TopicDeletion


@pytest.fixture
def world():
    def configs(topic=""):
        found = {
            "broker-a": [
                TopicConfig("orders", 8, 8),
                TopicConfig("%RETRY%billing", 1, 1),
            ],
            "broker-b": [TopicConfig("orders", 8, 8, 4, message_ttl=True)],
        }
        if not topic:
            return found
        if topic != "orders":
            return TopicNotFound(f"no topic {topic!r}")
        return {name: [one for one in of if one.topic == topic] for name, of in found.items()}

    queues = [QueueStats(0, 10, 30, 2_000, 1_000, 5), QueueStats(1, 0, 0)]
    return ConsoleWorld(
        {
            "topic_configs": configs,
            "topic_stats": {"broker-a": TopicStats("orders", queues)},
            "topic_consumers": ["billing", "ledger"],
            "topics": ["orders"],
            "topic_schema": '{"type": "object"}',
            "cluster": ClusterInfo([BrokerData("c", "broker-a", {0: BrokerAddress("h:1")})]),
            "create_topic": {"broker-a": TopicConfig("t2")},
            "put_topic": {},
            "delete_topic": TopicDeletion(["broker-a"], ["h:9"]),
        },
        readings=ClusterReadings({"orders": 12.5}, {}, [], {}),
    )


def test_topics_of_all_brokers_are_one_row(world):
    told = open_console(world).get("/api/v1/topics").json()
    assert told["total"] == 1
    assert told["rows"] == [
        {
            "topic": "orders",
            "kind": "normal",
            "queues": 16,
            "brokers": 2,
            "perm": "r",
            "order": False,
            "priorities": 0,
            "expires": True,
            "in_per_s": 12.5,
            "out_per_s": 0.0,
        }
    ]


def test_topics_of_one_kind_are_shown(world):
    page = open_console(world).get("/topics", params={"kind": "retry"}).text
    assert "%RETRY%billing" in page
    assert 'data-test="topic-orders"' not in page


def test_a_topic_has_its_queues_and_readers(world):
    told = open_console(world).get("/api/v1/topics/orders").json()
    assert told["messages"] == 20
    assert (told["first_ms"], told["last_ms"]) == (1_000, 2_000)
    assert told["groups"] == ["billing", "ledger"]
    assert [one["unread"] for one in told["queues"]] == [5, 0]
    page = open_console(world).get("/topics/orders").text
    assert 'href="/groups/ledger"' in page
    assert 'href="/messages?topic=orders"' in page
    assert "&#34;type&#34;: &#34;object&#34;" in page
    assert "may expire, dropped then" in page


def test_a_topic_that_is_not_there_is_a_page_of_its_own(world):
    answer = open_console(world).get("/topics/nope")
    assert answer.status_code == 404
    assert "no topic &#39;nope&#39;" in answer.text


def test_a_topic_is_made_in_two_steps(world):
    client = open_console(world)
    csrf = client.csrf("/new/topic")
    plan = client.act("/new/topic", csrf, "plan", topic="t2", queues="4")
    assert "4 queues on each of 1 broker groups: broker-a" in plan.text
    assert not [call for call in world.calls if call[1] == "create_topic"]
    done = client.act("/new/topic", csrf, topic="t2", queues="4")
    assert "Topic t2 is there" in done.text
    (call,) = (call for call in world.calls if call[1] == "create_topic")
    assert call[2:] == (("t2",), {"queues": 4, "order": False})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"topic": "orders"}, "already"),
        ({"topic": "a b"}, "topic"),
        ({"topic": "t2", "queues": "0"}, "queues: expected"),
        ({"queues": "4"}, "missing argument `topic`"),
    ],
)
def test_a_form_that_cannot_be_used_comes_back_with_a_sentence(world, fields, sentence):
    client = open_console(world)
    answer = client.act("/new/topic", client.csrf("/new/topic"), "plan", **fields)
    assert answer.status_code == 400
    assert sentence in answer.text
    assert 'name="queues"' in answer.text


def test_settings_begin_as_they_are_and_say_what_changes(world):
    client = open_console(world)
    path = "/topics/orders/settings"
    assert 'value="8"' in client.get(path).text
    csrf = client.csrf(path)
    plan = client.act(path, csrf, "plan", queues="12", perm="rw")
    assert "broker-a: 4 more queues" in plan.text
    assert "broker-b: permissions r become rw" in plan.text
    limits = {"retention": "2h", "retention_messages": "1000"}
    plan = client.act(path, csrf, "plan", queues="12", perm="rw", **limits)
    assert "broker-b: readers see messages of 2h" in plan.text
    assert "broker-b: readers see 1,000 messages of each queue" in plan.text
    assert client.act(path, csrf, "plan", queues="12", retention="soon").status_code == 400
    client.act(path, csrf, queues="12", perm="rw", **limits)
    (call,) = (call for call in world.calls if call[1] == "put_topic")
    assert call[2][0]["broker-b"] == TopicConfig(
        "orders", 12, 12, 6, False, 7_200_000, 1_000, message_ttl=True
    )


def test_a_topic_is_deleted_when_its_name_was_typed(world):
    client = open_console(world)
    path = "/topics/orders/delete"
    form = client.get(path).text
    assert "Its 20 messages are lost" in form
    csrf = client.csrf(path)
    assert client.act(path, csrf, typed="order").status_code == 400
    assert not [call for call in world.calls if call[1] == "delete_topic"]
    done = client.act(path, csrf, typed="orders")
    assert "h:9 does not answer; it learns it later" in done.text


def test_what_was_shown_before_a_change_is_not_shown_after_it(world):
    client = open_console(world)
    client.get("/api/v1/topics")
    client.post("/api/v1/topics/orders/delete", json={"confirm": "orders"})
    world.answers["topic_configs"] = {}
    assert client.get("/api/v1/topics").json()["total"] == 0


def test_programs_ask_for_the_plan_and_confirm_it(world):
    client = open_console(world)
    path = "/api/v1/topics/orders/delete"
    plan = client.post(path, json={"dry_run": True}).json()
    assert plan["typed"] == "orders"
    assert client.post(path, json={}).status_code == 400
    assert client.post(path, json={"confirm": "orders"}).json()["ok"] is True
