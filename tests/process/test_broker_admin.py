"""Brokers and name servers are seen to while they run: settings, clients, queues, retention."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from harness.patience import until

from mqmesh import aio
from mqmesh.cli import main
from mqmesh.errors import MessageIllegal, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC, Message, tag_hash
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("b")
    with ProcessCluster(folder, brokers=("broker-a", "broker-b")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def environment(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("MQMESH_NAMESRV", cluster.namesrv_addr)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def run(capsys):
    """Run a command with --json; returns exit code, decoded lines, decoded lines of errors."""

    def run(*arguments):
        code = main.main([*arguments, "--json"])
        out, err = capsys.readouterr()
        return code, *([json.loads(line) for line in text.splitlines()] for text in (out, err))

    return run


@pytest.fixture
def table(capsys):
    """Run a command for people; returns its lines."""

    def table(*arguments):
        assert main.main(list(arguments)) == 0
        return capsys.readouterr().out.splitlines()

    return table


@pytest.fixture
def topic(cluster, request):
    name = "b." + request.node.name[5:60]
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(name, queues=1)
    return name


def settings_of(admin, name="broker-a"):
    return {one.key: one for one in admin.config(name)[0]}


def makes_topics(admin):
    """True while a broker makes topics for first messages, as name servers know."""
    try:
        return bool(admin.route(AUTO_CREATE_TOPIC).queues)
    except TopicNotFound:
        return False


def test_a_setting_holds_at_once_and_after_a_restart(run, table, cluster):
    path = cluster.folder / "broker-a" / "config" / "overrides.json"
    code, (done,), _ = run("broker", "set", "broker-a", "auto_create_topic_enable=false")
    assert code == 0
    change = {"key": "auto_create_topic_enable", "before": True, "after": False}
    assert done["replicas"] == [{"broker_id": 0, "changes": [change]}]
    assert path.exists()
    _, (found,), _ = run("broker", "config", "broker-a", "--changed")
    (one,) = (one for one in found["settings"] if one["key"] == change["key"])
    assert (one["value"], one["at_start"], one["is_overridden"]) == (False, True, True)
    (line,) = (line for line in table("broker", "config", "broker-a") if change["key"] in line)
    assert line.split() == ["auto_create_topic_enable", "false", "true", "true", "yes", "yes"]

    with BrokerAdmin(cluster.namesrv_addr) as admin:
        assert not settings_of(admin, "broker-b")[change["key"]].is_overridden
        run("broker", "set", "broker-b", "auto_create_topic_enable=false")
        until(lambda: not makes_topics(admin))
        cluster.brokers["broker-a"].kill()
        cluster.start_broker("broker-a")
        cluster.wait_known()
        assert settings_of(admin)[change["key"]].value == "false"
        for name in ("broker-a", "broker-b"):
            code, out, _ = run("broker", "set", name, "--unset", "auto_create_topic_enable")
            assert (code, out[0]["replicas"][0]["changes"][0]["after"]) == (0, True)
        until(lambda: makes_topics(admin))
        assert table("broker", "set", "broker-b", "busy_poll_us=200") == [
            "broker broker-b, id 0: no setting has another value"
        ]


def test_what_may_not_be_set_is_refused_with_the_sentence_of_the_start(run, cluster):
    for asked, told in (
        ("storage.backend=memory", "storage.backend cannot be changed while broker broker-a runs"),
        ("auto_create=1", "unknown key auto_create; did you mean auto_create_topic_enable?"),
        ("busy_poll_us=-1", "busy_poll_us = -1: must be a whole number of 0 to 10,000"),
    ):
        code, out, (err,) = run("broker", "set", "broker-a", "long_polling_max_ms=7", asked)
        assert (code, out) == (1, [])
        assert told in err["error"]
        assert err["error"].count("broker broker-a:") == 0, "who it is was said before"
        assert err["error"].startswith("broker broker-a, id 0: ")
    with BrokerAdmin(cluster.namesrv_addr) as admin:
        assert settings_of(admin)["long_polling_max_ms"].value == "30000"
    assert run("broker", "set", "broker-a")[0] == 2
    assert run("broker", "set", "broker-a", "busy_poll_us")[0] == 2
    code, _, (err,) = run("broker", "set", "broker-x", "busy_poll_us=1")
    assert (code, err["error"]) == (
        1,
        "no broker group 'broker-x'; there are broker-a, broker-b",
    )


def test_a_damaged_file_of_changes_is_an_error_in_the_log_and_no_end(cluster):
    folder = cluster.folder / "broker-b" / "config"
    with BrokerAdmin(cluster.namesrv_addr) as admin:
        admin.set_config("broker-b", {"long_polling_max_ms": 5_000})
        admin.set_config("broker-b", {"long_polling_max_ms": 6_000, "log_level": "ERROR"})
        cluster.brokers["broker-b"].stop()
        for path in folder.glob("overrides.json*"):
            path.write_bytes(b"damaged")
        cluster.start_broker("broker-b")
        cluster.wait_known()
        assert settings_of(admin, "broker-b")["long_polling_max_ms"].value == "30000"
        assert "what `mqmesh broker set` has changed is not in force" in (
            cluster.folder / "broker-b.log"
        ).read_text(encoding="utf-8")
        # It can be set anew, which is kept as before.
        admin.set_config("broker-b", {"long_polling_max_ms": 7_000})
        cluster.brokers["broker-b"].kill()
        cluster.start_broker("broker-b")
        cluster.wait_known()
        assert settings_of(admin, "broker-b")["long_polling_max_ms"].value == "7000"


def test_a_name_server_s_two_settings_are_changed(run, table, cluster):
    (endpoint,) = [one.endpoint for one in cluster.namesrvs]
    code, (done,), _ = run("namesrv", "set", "broker_expire_ms=60000")
    change = {"key": "broker_expire_ms", "before": 120_000, "after": 60_000}
    assert (code, done["changes"], done["silent_namesrvs"]) == (0, {endpoint: [change]}, [])
    _, ((found,),), _ = run("namesrv", "config", "--changed")
    shown = {one["key"]: one["value"] for one in found["settings"]}
    assert (found["endpoint"], shown["broker_expire_ms"]) == (endpoint, 60_000)
    assert any("scan_interval_ms" in line for line in table("namesrv", "config", endpoint))
    code, _, (err,) = run("namesrv", "set", "data_dir=/tmp")
    assert (code, "data_dir cannot be changed while" in err["error"]) == (1, True)
    assert table("namesrv", "set", "--unset", "broker_expire_ms") == [
        f"name server {endpoint}: broker_expire_ms = 120000, before 60000"
    ]


def test_programs_change_settings_from_coroutines(cluster):
    async def work():
        async with aio.BrokerAdmin(cluster.namesrv_addr) as admin:
            (changes,) = (await admin.set_config("broker-a", {"busy_poll_us": 0})).values()
            with pytest.raises(MessageIllegal, match=r"broker broker-a, id 0: .*busy_poll_us"):
                await admin.set_config("broker-a", {"busy_poll_us": 10_001})
            await admin.set_config("broker-a", {}, ["busy_poll_us"])
        async with aio.NamesrvAdmin(cluster.namesrv_addr) as admin:
            return changes, await admin.config(cluster.namesrv_addr)

    changes, entries = asyncio.run(work())
    assert [(one.key, one.before, one.after) for one in changes] == [("busy_poll_us", "200", "0")]
    with NamesrvAdmin(cluster.namesrv_addr) as admin:
        assert admin.config(cluster.namesrv_addr) == entries


def test_everybody_who_is_registered_is_listed(run, table, cluster, topic):
    names = cluster.namesrv_addr
    with (
        PullConsumer("readers", namesrv_addr=names) as consumer,
        Producer("writers", namesrv_addr=names) as producer,
    ):
        consumer.subscribe(topic)
        producer.send(Message(topic, b"x"))
        until(lambda: consumer.poll(100, 1) or True)

        def listed(*options):
            found = []
            for name in ("broker-a", "broker-b"):
                code, (clients,), _ = run("broker", "clients", name, *options)
                assert code == 0
                found += [(one["producer_groups"], one["consumer_groups"]) for one in clients]
            return found

        until(lambda: ([], ["readers"]) in listed("--consumers"))
        assert all(consumes for _, consumes in listed("--consumers"))
        until(lambda: (["writers"], []) in listed("--producers"))
        assert all(produces for produces, _ in listed("--producers"))
        head, *lines = table("broker", "clients", "broker-a", "--consumers")
        assert head.split()[:3] == ["CLIENT", "LANGUAGE", "VERSION"]
        assert any("readers" in line and "python" in line.lower() for line in lines)
    code, _, (err,) = run("broker", "clients", "broker-x")
    assert (code, "there are broker-a, broker-b" in err["error"]) == (1, True)


def test_entries_of_a_queue_are_shown(run, table, cluster, topic):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        results = [producer.send(Message(topic, b"x", tag="red")) for _ in range(6)]
    (name, count), *_ = Counter(one.message_queue.broker_name for one in results).most_common()
    code, (found,), _ = run("broker", "queue", name, topic, "0", "--from", "1", "--count", "2")
    assert code == 0
    assert (found["min_queue_offset"], found["max_queue_offset"]) == (0, count)
    assert [one["queue_offset"] for one in found["entries"]] == [1, 2][: count - 1]
    assert {one["tag_hash"] for one in found["entries"]} == {tag_hash("red")}
    assert {one["problem"] for one in found["entries"]} == {""}
    lines = table("broker", "queue", name, topic, "0")
    assert len(lines) == 1 + count + 1
    assert lines[-1] == f"the queue has 0 to {count}"
    code, _, (err,) = run("broker", "queue", name, "no-such-topic", "0")
    assert (code, err["error"]) == (1, f"broker {name}: no topic 'no-such-topic'")
    assert run("broker", "queue", name, topic, "0", "--count", "1001")[0] == 2
    code, found, (err,) = run("broker", "queue", name, topic, "99")
    assert (code, found) == (1, [])
    assert f"queue 99 of topic '{topic}' does not exist: read_queue_nums = " in err["error"]


def test_a_pass_of_retention_is_made_now(run, table, cluster):
    with BrokerAdmin(cluster.namesrv_addr) as admin:
        code, (done,), _ = run("broker", "clean", "broker-a", "--dry-run")
        assert (code, done["segments"], done["topics"]) == (0, [], [])
        assert "no full segment is older than 72 h" in done["reason"]
        assert table("broker", "clean", "broker-a")[0].startswith("0 segments of 0 bytes went: no")
        assert admin.clean("broker-b", dry_run=True).segments == []


def test_what_goes_through_the_cluster_is_told(run, table, cluster, topic):
    names = cluster.namesrv_addr
    with PullConsumer("takers", namesrv_addr=names, consume_from_where="FIRST_OFFSET") as consumer:
        consumer.subscribe(topic)
        with Producer("p", namesrv_addr=names) as producer:
            for _ in range(5):
                producer.send(Message(topic, b"x"))
        found = []
        until(lambda: found.extend(consumer.poll(100, 10)) or len(found) == 5)
        consumer.commit()

    def of_topic(*options):
        _, (rows,), _ = run("topic", "stats", "--all", *options)
        return {one["group"]: one for one in rows if one["topic"] == topic}

    until(lambda: of_topic().get("takers", {}).get("backlog") == 0)
    row = of_topic("--active")["takers"]
    assert (row["in_today"], row["out_today"]) == (5, 5)
    assert row["in_per_s"] > 0
    assert row["out_per_s"] > 0
    (line,) = (one for one in table("topic", "stats", "--all") if one.split()[:1] == [topic])
    assert line.split()[1] == "takers"
    assert run("topic", "stats")[0] == run("topic", "stats", topic, "--all")[0] == 2

    code, (rows,), _ = run("cluster", "list", "--more")
    brokers = [one for one in rows if one["role"] == "broker"]
    assert code == 0
    assert sum(one["in_today"] for one in brokers) >= 5
    assert all(one["oldest_timestamp"] > 1_700_000_000_000 for one in brokers)
    assert all(one["disk_used_percent"] > 0 for one in brokers)
    lines = table("cluster", "list", "--more")
    assert lines[0].split()[:4] == ["BROKER", "ID", "ENDPOINT", "VERSION"]
    assert [line.split()[0] for line in lines[1:]] == ["broker-a", "broker-b"]

    code, (told,), _ = run("cluster", "report")
    assert (code, [one["broker_name"] for one in told["brokers"]]) == (0, ["broker-a", "broker-b"])
    assert sum(one["put_messages_day_per_s"] for one in told["brokers"]) > 0
    assert table("cluster", "report")[1].split()[0] == "broker-a"


def test_a_broker_that_hangs_is_down_and_the_others_are_told(run, cluster, monkeypatch):
    with AdminClient(cluster.namesrv_addr) as admin:
        known = admin.cluster()
    # Name servers forget a broker that hangs, sooner or later.
    monkeypatch.setattr(AdminClient, "cluster", lambda self: known)
    cluster.brokers["broker-b"].suspend()
    try:
        code, (rows,), _ = run("cluster", "list", "--more")
        by_name = {one["name"]: one for one in rows if one["role"] == "broker"}
        assert (code, by_name["broker-b"]["state"]) == (0, "down")
        assert run("cluster", "list", "--check")[0] == 1
        assert "in_per_s" in by_name["broker-a"]
        assert "in_per_s" not in by_name["broker-b"]
        code, (told,), _ = run("cluster", "report")
        assert (code, ["version" in one for one in told["brokers"]]) == (0, [True, False])
        assert run("cluster", "report", "--check")[0] == 1
    finally:
        cluster.brokers["broker-b"].resume()
    assert run("cluster", "list", "--check")[0] == 0
