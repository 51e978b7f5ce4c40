"""Shapes that the command line prints as JSON and the web console shows."""

from __future__ import annotations

import json
import zlib
from collections import Counter

import msgspec
import pytest

from mqmesh.log_identity import EpochStart
from mqmesh.message import BatchInfo, MessageQueue, StoredMessage
from mqmesh.metrics import Distribution, Metric, MetricKind, MetricReading, MetricSample, Readings
from mqmesh.protocol.admin import ConfigEntry, QueueStats, RoleInfo, TopicStats
from mqmesh.protocol.client_rpc import RunningInfo, RunningQueue
from mqmesh.protocol.gateway import GatewayClient
from mqmesh.protocol.groups import (
    ClientInfo,
    ConsumerConnection,
    GroupConfig,
    GroupFailures,
    GroupSummary,
    OffsetChange,
    QueueProgress,
)
from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.protocol.replication import HaSetting, HaStatus, LogEpochs
from mqmesh.protocol.retries import ResendStatus
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    Perm,
    QueueData,
    TopicConfig,
    TopicRoute,
)
from mqmesh.protocol.transactions import HalfInfo, HalfState
from mqmesh.sdk.admin.dead_letters import DeadLetter
from mqmesh.sdk.admin.delays import DelayedMessage
from mqmesh.sdk.admin.group_admin import GroupProgress, OffsetMove, OffsetMoves, QueueLag
from mqmesh.sdk.admin.ha_admin import ReplicaReport
from mqmesh.sdk.admin.traces import MessageSpans
from mqmesh.sdk.admin.tracks import MessageTrack, Track, TrackState
from mqmesh.sdk.admin.transaction_admin import HalfMessage
from mqmesh.sdk.admin.views.clusters import (
    BrokerReportView,
    broker_member_view,
    broker_report_view,
    broker_settings_view,
    client_views,
    gateway_client_views,
    metric_views,
    namesrv_view,
)
from mqmesh.sdk.admin.views.groups import (
    consumers_view,
    group_views,
    offset_moves_view,
    progress_view,
    running_view,
)
from mqmesh.sdk.admin.views.messages import (
    DeadLettersView,
    dead_letter_view,
    delayed_view,
    half_message_view,
    message_view,
    resent_view,
    trace_view,
    trace_views,
    track_view,
)
from mqmesh.sdk.admin.views.replicas import log_views, parted_logs, replica_view
from mqmesh.sdk.admin.views.topics import (
    allocation_views,
    route_view,
    topic_stats_view,
    topic_views,
)

NOW_MS = 1_767_225_600_000
BATCH = BatchInfo(
    topic="orders",
    queue_id=2,
    broker_name="broker-a",
    base_queue_offset=10,
    commitlog_offset=0,
    store_size=1,
    born_timestamp=NOW_MS,
    store_timestamp=NOW_MS + 1,
    born_host="h:1",
    store_host="h:2",
    producer_id=1,
    first_sequence=0,
    payload_crc=0,
)
OF_MESSAGE = {
    "topic": "orders",
    "broker_name": "broker-a",
    "queue_id": 2,
    "queue_offset": 11,
    "message_id": "00000000000000010000000000000001",
    "tag": "new",
    "keys": ["1"],
    "properties": {"a": "b"},
    "sharding_key": "s",
    "flag": 0,
    "born_timestamp": NOW_MS,
    "store_timestamp": NOW_MS + 1,
    "born_host": "h:1",
    "reconsume_times": 0,
    "body": "hello",
    "body_base64": None,
    "physical_topic": "orders",
    "offset_message_id": "h:2#0#1",
    "commitlog_offset": 0,
    "ordinal": 1,
    "store_size": 1,
    "store_host": "h:2",
    "delay_level": 0,
    "deliver_at_ms": 0,
    "body_size": 5,
    "body_crc32": 907060870,
}


def stored(body=b"hello", **fields):
    return StoredMessage("orders", body, queue_offset=11, batch=BATCH, **fields)


MESSAGE = stored(tag="new", keys=["1"], properties={"a": "b"}, sharding_key="s")


def shown(view):
    """Return a view as a program gets it."""
    return json.loads(msgspec.json.encode(view))


def test_a_message_has_every_field_in_a_stable_order():
    assert list(shown(message_view(MESSAGE)).items()) == list(OF_MESSAGE.items())


def test_a_body_that_is_no_text_is_base64():
    found = shown(message_view(stored(b"\xff\0")))
    assert (found["body"], found["body_base64"]) == (None, "/wA=")
    assert (found["body_size"], found["body_crc32"]) == (2, zlib.crc32(b"\xff\0"))


def test_dead_letters_delays_and_half_messages_are_messages_with_more():
    letter = DeadLetter("broker-a", 41, MESSAGE, resent_ms=5)
    more = {"dlq_offset": 41, "reason": letter.reason, "resent_timestamp": 5}
    assert shown(dead_letter_view(letter)) == OF_MESSAGE | more
    delayed = DelayedMessage(7, "orders", "broker-a", MESSAGE)
    assert shown(delayed_view(delayed)) == OF_MESSAGE | {"due_ms": 7, "real_topic": "orders"}
    info = HalfInfo("M", "shop", "real", 3, 8, 9, 1, -1, HalfState.PARKED, 77, 2)
    assert shown(half_message_view(HalfMessage("broker-b", info, MESSAGE))) == OF_MESSAGE | {
        "message_id": "M",
        "state": "PARKED",
        "group": "shop",
        "live_members": 2,
        "topic": "real",
        "broker_name": "broker-b",
        "queue_id": 3,
        "store_timestamp": 8,
        "age_ms": 9,
        "check_times": 1,
        "next_check_ms": -1,
        "half_queue_offset": 77,
    }


def test_what_cannot_be_decoded_is_shown_as_it_is():
    letter = DeadLetter("broker-a", 50, None, undecodable=b"MQB1...", count=3, error="no batch")
    assert shown(dead_letter_view(letter)) == {
        "broker_name": "broker-a",
        "dlq_offset": 50,
        "reason": letter.reason,
        "resent_timestamp": 0,
        "message_count": 3,
        "batch_base64": "TVFCMS4uLg==",
    }


def test_ages_of_dead_letters_are_counted_where_they_are_known():
    found = DeadLettersView()
    found.add(DeadLetter("b", 1, MESSAGE), NOW_MS + 10)
    found.add(DeadLetter("b", 2, MESSAGE), NOW_MS + 2 * 86_400_000)
    found.add(DeadLetter("b", 3, None, count=4), NOW_MS)
    assert found.count == 6
    assert found.ages == {"< 1 hour": 1, "< 1 day": 0, "< 7 days": 1, "< 30 days": 0, "older": 0}
    assert (found.oldest_timestamp, found.newest_timestamp) == (NOW_MS + 1, NOW_MS + 1)
    assert DeadLettersView().ages["< 1 hour"] == 0


def test_a_resend_counts_every_outcome():
    counts = Counter({ResendStatus.RESENT: 5, ResendStatus.REFUSED: 1})
    problems = [(DeadLetter("b", 50, None), "it cannot be decoded")]
    assert shown(resent_view(counts, problems, dry_run=True)) == {
        "dry_run": True,
        "resent": 5,
        "already_resent": 0,
        "gone": 0,
        "refused": 1,
        "problems": [
            {
                "broker_name": "b",
                "dlq_offset": 50,
                "message_id": None,
                "remark": "it cannot be decoded",
            }
        ],
    }


def test_a_track_has_copies_and_groups_and_stands_in_a_trace_without_spans():
    found = MessageTrack([MESSAGE], 0, [Track("g", TrackState.CONSUMED)])
    track = shown(track_view("id", found))
    assert track["groups"][0]["state"] == "CONSUMED"
    assert track["copies"][0]["queue_offset"] == 11
    spans = MessageSpans("id", [])
    assert shown(trace_view(spans, found))["track"] == track
    assert shown(trace_view(spans, None))["track"] is None
    assert "track" not in shown(trace_views([spans])[0])


SETTINGS = {
    "consume_enable": True,
    "consume_broadcast_enable": True,
    "retry_max_times": -1,
    "notify_consumer_ids_changed_enable": True,
    "retry_delays": "",
    "dead_letter": "keep",
    "paused_until": 0,
    "paused_topics": {},
    "max_messages_per_s": 0,
    "delivery": "queue",
    "invisible_ms": 60_000,
    "max_unsettled": 10_000,
    "lost_grace_ms": 10_000,
    "priority_fairness": 0,
}
TWO_FAIL = GroupFailures(3, 2, 0.5)


def test_a_group_on_two_brokers_is_one_row():
    one = GroupSummary(GroupConfig("g"), True, 2, "CLUSTERING", ["t"], 5, 1.5, 1, 2, 1, TWO_FAIL)
    two = GroupSummary(GroupConfig("g", consume_enable=False), True, 1, "", ["u"], 7, 1.0, 0, 1, 0)
    (row,) = group_views({"a": [one], "b": [two]})
    assert shown(row) == {
        "group": "g",
        "message_model": "CLUSTERING",
        "members": 2,
        "lag": 12,
        "consume_tps": 2.5,
        "retrying": 1,
        "recent_deliveries": 3,
        "recent_failures": 2,
        "failed_per_s": 0.5,
        "dead": 3,
        "differing": 1,
        "consume_enable": False,
        "topics": ["t", "u"],
        "brokers": [
            {"broker_name": "a", "is_configured": True} | SETTINGS,
            {"broker_name": "b", "is_configured": True} | SETTINGS | {"consume_enable": False},
        ],
    }


def test_the_lag_of_a_group_that_broadcasts_is_unknown():
    summary = GroupSummary(GroupConfig("g"), message_model="BROADCASTING", lag=0)
    assert group_views({"a": [summary]})[0].lag is None
    queues = [QueueLag("b", QueueProgress("t", 1, 0, 10, 4), 0, is_known=False)]
    found = shown(progress_view(GroupProgress("g", queues, 0.0, 0, 1, "BROADCASTING", 0)))
    for one in (found, *found["queues"]):
        assert (one["lag"], one["lag_ms"], one["in_flight"]) == (None, None, None)


def test_progress_has_everything():
    queues = [
        QueueLag("b", QueueProgress("t", 1, 0, 10, 4, 6, 1, "c"), 7_000),
        QueueLag("b", QueueProgress("%RETRY%g", 0, 0, 2, 1), 0),
    ]
    found = progress_view(GroupProgress("g", queues, 2.5, 3, 1, "CLUSTERING", 0, 3, 50, TWO_FAIL))
    assert (found.lag, found.lag_ms, found.in_flight, found.retrying) == (10, 7_000, 2, 4)
    assert (found.waiting_retries, found.recent_failures) == (3, 2)
    assert (found.consume_tps, found.dead, found.members) == (2.5, 3, 1)
    assert [one.is_retry for one in found.queues] == [False, True]
    assert found.queues[0].client_id == "c"


def test_structs_that_are_arrays_on_the_wire_have_names_in_views():
    data = ConsumerData("g", "CLUSTERING", "LAST_OFFSET", [Subscription("t", "a || b")])
    member = ConsumerConnection("c", "PYTHON", "1", True, 5, data, "differs")
    (found,) = shown(consumers_view("g", [member]))["members"]
    assert found["difference"] == "differs"
    (subscription,) = found["subscriptions"]
    assert subscription == {"topic": "t", "expression": "a || b", "expression_type": "TAG"}
    info = RunningInfo("c", "g", "push", 1, {}, [], [RunningQueue("t", "b", 1, "full")], [])
    assert shown(running_view(info))["queues"][0]["state"] == "full"
    (client,) = client_views([ClientInfo("c", "PYTHON", "1", True, 5, [], ["g"])])
    assert shown(client)["consumer_groups"] == ["g"]
    java = GatewayClient("c", "shop", "gRPC", "h:1", "JAVA", "5", True, 5, [], ["g"], ["t"], ["b"])
    (client,) = gateway_client_views("gateway", [java])
    assert (shown(client)["gateway"], shown(client)["user"]) == ("gateway", "shop")


def test_a_move_of_offsets_says_what_comes_again():
    moves = OffsetMoves([OffsetMove("b", OffsetChange("t", 0, 4, 1, 0, 10))], 2, True)
    found = shown(offset_moves_view("g", moves))
    assert (found["group"], found["dry_run"], found["reread"], found["members_notified"]) == (
        "g",
        True,
        3,
        2,
    )
    (queue,) = found["queues"]
    assert (queue["old_offset"], queue["new_offset"], queue["reread"]) == (4, 1, 3)


def test_topics_are_sorted_and_have_readers_if_these_were_asked_for():
    config = TopicConfig("t", 4, 2, int(Perm.READ))
    by_broker = {"a": [config, TopicConfig("s")], "b": [config]}
    on_a = {
        "broker_name": "a",
        "read_queue_nums": 4,
        "write_queue_nums": 2,
        "perm": "r",
        "order": False,
        "retention_ms": 0,
        "retention_messages": 0,
        "priorities": 0,
        "message_ttl": False,
        "on_expired": "drop",
        "history": 0,
    }
    topics = shown(topic_views(by_broker))
    assert [one["topic"] for one in topics] == ["s", "t"]
    assert topics[1] == {"topic": "t", "brokers": [on_a, on_a | {"broker_name": "b"}]}
    groups = {"a": [GroupSummary(GroupConfig("g"), topics=["t"])]}
    assert [one["groups"] for one in shown(topic_views(by_broker, groups))] == [[], ["g"]]


def test_a_route_names_what_is_down():
    up = BrokerData("C", "a", {0: BrokerAddress("127.0.0.1:1", "ipc:///x")})
    queues = [QueueData("a", 4, 4, int(Perm.READ_WRITE)), QueueData("b", 4, 4, 0)]
    found = route_view("t", TopicRoute("t", queues, [up]))
    assert [(one.cluster_name, one.address, one.perm) for one in found.queues] == [
        ("C", "127.0.0.1:1", "rw"),
        ("", "", "none"),
    ]


def test_queues_of_a_topic_are_added_up():
    found = topic_stats_view(
        "t", {"a": TopicStats("t", [QueueStats(0, 2, 5), QueueStats(1, 0, 4)])}
    )
    assert (found.messages, [one.messages for one in found.queues]) == (7, [3, 4])
    (share,) = allocation_views({"c": [MessageQueue("t", "a", 1)]})
    assert shown(share) == {"client_id": "c", "queues": [{"broker_name": "a", "queue_id": 1}]}


def reading(name, value, labels=()):
    metric = Metric(name, MetricKind.GAUGE, "", "help", tuple(labels))
    return MetricReading(metric, [MetricSample(tuple(labels.values()) if labels else (), value)])


def test_a_process_that_does_not_answer_is_down_and_has_no_load():
    found = shown(namesrv_view("h:1", None))
    assert (found["state"], found["pid"], found["name"], found["broker_id"]) == (
        "down",
        0,
        "",
        None,
    )
    group = BrokerData("C", "a", {0: BrokerAddress("h:2", "")})
    info = RoleInfo("broker", "a", "1", 7, "running", 9)
    assert "in_per_s" not in shown(broker_member_view(group, 0, info))
    loaded = broker_member_view(group, 0, info, Readings([reading("put_messages_per_s", 2.5)]))
    assert (loaded.in_per_s, loaded.out_per_s, loaded.state) == (2.5, 0, "running")


def test_a_report_counts_clients_by_version_and_lacks_all_of_a_broker_that_is_down():
    assert shown(BrokerReportView(broker_name="a")) == {"broker_name": "a", "clients": {}}
    clients = [ClientInfo(str(one), "PYTHON", "1", True, 0, [], []) for one in range(2)]
    found = shown(broker_report_view("a", Readings([reading("topics", 3)]), clients, "1"))
    assert (found["clients"], found["version"]) == ({"PYTHON 1": 2}, "1")
    assert (found["topics"], found["uptime_ms"]) == (3, 0)


def test_metrics_have_a_value_or_values_by_labels():
    found = shown(
        metric_views(
            [
                reading("a", 1),
                reading("b", Distribution((1.0,), (2, 3), 4.0)),
                reading("c", 5, {"topic": "t"}),
            ]
        )
    )
    assert found["a"] == {"kind": "gauge", "unit": "", "help": "help", "value": 1}
    assert found["b"]["value"] == {"bounds": [1.0], "counts": [2, 3], "total": 4.0}
    assert found["c"]["values"] == [{"labels": {"topic": "t"}, "value": 5}]


@pytest.mark.parametrize(("only_changed", "keys"), [(False, ["a", "b", "c"]), (True, ["a", "b"])])
def test_settings_are_those_of_the_first_replica_and_what_others_have(only_changed, keys):
    entries = [
        ConfigEntry("a", "1", "1", "1", True, True),
        ConfigEntry("b", '"x"', '"y"', '"x"', False, False),
        ConfigEntry("c", "1", "1", "1", False, True),
    ]
    other = [msgspec.structs.replace(one, value="2") for one in entries]
    found = broker_settings_view("n", {0: entries, 1: other}, only_changed=only_changed)
    assert [one.key for one in found.settings] == keys
    assert found.settings[1].value == "x"
    assert [(one.broker_id, one.key, one.value) for one in found.differing] == [
        (1, "a", 2),
        (1, "c", 2),
    ]


def test_a_replica_that_does_not_answer_has_no_state():
    silent = shown(replica_view(ReplicaReport("a", 3, "h3", None, "no answer")))
    assert silent == {"broker_name": "a", "broker_id": 3, "endpoint": "h3", "problem": "no answer"}
    status = HaStatus("a", 1, "MASTER", 4, 0, 100, 90, settings=[HaSetting("failsafe", "true")])
    found = shown(replica_view(ReplicaReport("a", 1, "h1", status)))
    assert found["status"]["settings"] == {"failsafe": "true"}
    assert (found["followers"], found["metrics"]) == ([], {})
    assert "replicas" not in found["status"]


def test_logs_part_from_the_first_one():
    epochs = [EpochStart(1, 0)]
    stores = {1: 7, 2: 7, 3: 8}
    logs = {one: LogEpochs(one, store, 0, 100, 90, epochs) for one, store in stores.items()}
    found = log_views(logs)
    assert [one.common_end for one in found] == [100, 100, None]
    assert [one.broker_id for one in parted_logs(found)] == [3]
    assert log_views({}) == []
