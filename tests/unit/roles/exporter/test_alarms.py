"""Alarms: what is one, when it is told of, and in which form."""

from __future__ import annotations

import http.server
import json
import threading

import msgspec
import pytest

from mqmesh.config import parse_config
from mqmesh.errors import ConfigError
from mqmesh.metrics import MetricKind
from mqmesh.roles.exporter.alarm_board import AlarmBoard, AlarmState
from mqmesh.roles.exporter.alarm_notes import NO_END, document_of, notify
from mqmesh.roles.exporter.alarm_rules import (
    LAG,
    LONGEST_WINDOW_MS,
    MEMBERS,
    RULES,
    TOPIC_RULES,
    History,
)
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.monitor import Monitor
from mqmesh.roles.exporter.monitor_config import MonitorConfig, NotifyConfig, RuleChange
from mqmesh.roles.exporter.names import COMMITTED

T0 = 1_767_225_600_000
LATENCY = "rocketmq_consumer_lag_latency_milliseconds"
DEAD = "rocketmq_send_to_dlq_messages_total"


def series(name, value, /, **labels):
    exported = ExportedMetric(name, MetricKind.GAUGE, "h", tuple(labels))
    return Series(exported, tuple(labels.values()), value)


def group(lag, *, name="billing", topic="orders", latency_ms=90_000, members=0, done=0):
    found = [
        series(LAG, lag, topic=topic, consumer_group=name, is_retry="false"),
        series(LATENCY, latency_ms, topic=topic, consumer_group=name),
        series(COMMITTED, done, topic=topic, consumer_group=name, is_retry="false"),
    ]
    return [*found, series(MEMBERS, members, consumer_group=name)] if members else found


def names(alarms):
    return [(one.alarm, one.status) for one in alarms]


class Watch:
    """A board that looks at made-up metrics."""

    def __init__(self, *changes, repeat_s=0):
        self.board = AlarmBoard(changes, repeat_s)

    def look(self, at_s, *found, at_once=False):
        return self.board.judge(Families(found), T0 + at_s * 1_000, at_once=at_once)


def test_an_alarm_is_told_when_it_has_lasted_and_when_it_is_over():
    watch = Watch()
    down = series("mqmesh_up", 0, node_type="broker", node_id="broker-a")
    assert watch.look(0, down) == []
    (begun,) = watch.look(10, down)
    assert (begun.alarm, begun.severity, begun.since_ms) == ("process-down", "critical", T0)
    assert begun.summary == "broker broker-a does not answer"
    assert begun.labels == {"node_type": "broker", "node_id": "broker-a"}
    assert watch.look(40, down) == []
    assert watch.board.firing() == [msgspec.structs.replace(begun)]
    up = series("mqmesh_up", 1, node_type="broker", node_id="broker-a")
    assert names(watch.look(70, up)) == [("process-down", "resolved")]
    assert watch.board.firing() == []


def test_what_was_over_before_it_was_an_alarm_is_not_told():
    watch = Watch()
    down = series("mqmesh_up", 0, node_type="broker", node_id="broker-a")
    watch.look(0, down)
    assert watch.look(5) == []
    assert watch.look(6, down) == []
    assert watch.look(12, down) == []


def test_a_lasting_alarm_is_told_again():
    watch = Watch(repeat_s=3_600)
    full = series("mqmesh_store_disk_full", 1, node_id="broker-a")
    told = [bool(watch.look(at_s, full)) for at_s in (0, 60, 3_599, 3_600, 3_660, 7_200)]
    assert told == [True, False, False, True, False, True]


@pytest.mark.parametrize("at_once", [False, True])
def test_once_does_not_wait(at_once):
    found = group(20_000, members=1)
    told = names(Watch().look(0, *found, at_once=at_once))
    assert told == ([("group-behind", "firing")] if at_once else [])


NODE = {"node_type": "broker", "node_id": "a"}
REPLICA = {"node_id": "a", "replica": "2"}


def refusals(count, code):
    return [series("mqmesh_refusals_total", count, **NODE, response_code=code)]


def waiting_for(service):
    return [
        series("rocketmq_timing_messages", 3, **NODE),
        series("mqmesh_schedule_service_info", 1, **NODE, value=service),
    ]


def gauge(name, trouble, well, labels=NODE):
    """What an alarm looks at, in trouble and well."""
    return lambda at_s: [series(name, trouble, **labels)], lambda at_s: [
        series(name, well, **labels)
    ]


def counter(name, labels):
    """A total that grows each second while there is trouble, and stands still when that ended."""
    return lambda at_s: [series(name, at_s, **labels)], lambda at_s: [series(name, 0, **labels)]


TROUBLES = {
    "process-down": gauge("mqmesh_up", 0, 1),
    "disk-filling": gauge("mqmesh_store_disk_used_ratio", 0.86, 0.85),
    "disk-full": gauge("mqmesh_store_disk_full", 1, 0),
    "carry-heavy": gauge("mqmesh_table_log_ratio", 0.26, 0.25),
    "table-damaged": gauge("mqmesh_table_unreadable_values", 1, 0),
    "store-not-writable": gauge("mqmesh_store_writable", 0, 1),
    "messages-lost-unread": counter("mqmesh_forced_lost_messages_total", NODE),
    "group-behind": (
        lambda at_s: group(10_001, done=at_s, members=1),
        lambda at_s: group(10_000, done=at_s, members=1),
    ),
    "group-stuck": (lambda at_s: group(1, members=1), lambda at_s: group(0, members=1)),
    "group-failing": (lambda at_s: failing(6, 10), lambda at_s: failing(5, 10)),
    "group-paused": gauge("mqmesh_group_paused", 1, 0, {"consumer_group": "billing"}),
    "group-without-members": (lambda at_s: group(1), lambda at_s: group(1, members=1, done=at_s)),
    "mixed-subscriptions": gauge(
        "mqmesh_group_differing_members", 1, 0, {"consumer_group": "billing"}
    ),
    "dead-letters": counter(DEAD, {"consumer_group": "billing"}),
    "message-held": gauge("mqmesh_delivery_oldest_lease_seconds", 3_601, 3_600),
    "leases-expiring": (
        lambda at_s: [series("mqmesh_delivery_expired_total", at_s * 1_001, **NODE)],
        lambda at_s: [series("mqmesh_delivery_expired_total", 0, **NODE)],
    ),
    "key-blocks-queue": gauge("mqmesh_delivery_blocked_queues", 1, 0),
    "half-messages-waiting": gauge("mqmesh_half_messages_oldest_seconds", 301, 300),
    "half-messages-parked": gauge("mqmesh_half_messages_parked", 1, 0),
    "delays-late": gauge("rocketmq_timer_dequeue_latency", 5_001, 5_000),
    "no-schedule-service": (
        lambda at_s: waiting_for("off"),
        lambda at_s: waiting_for("on"),
    ),
    "busy": (
        lambda at_s: refusals(at_s * 2, "system_busy"),
        lambda at_s: refusals(0, "system_busy"),
    ),
    "no-permission": (
        lambda at_s: refusals(at_s, "no_permission"),
        lambda at_s: refusals(0, "no_permission"),
    ),
    "index-behind": gauge("mqmesh_index_lag_seconds", 61, 60),
    "archive-behind": gauge("mqmesh_snapshots_waiting_oldest_seconds", 3_601, 3_600),
    "replica-behind": gauge("mqmesh_ha_replica_lag_bytes", 2**26 + 1, 2**26, REPLICA),
    "replica-silent": gauge("mqmesh_ha_replica_silent_seconds", 11, 10, REPLICA),
    "unsafe-answers": counter(
        "mqmesh_unsafe_answers_total", {"node_id": "a", "send_status": "flush_disk_timeout"}
    ),
    "no-failover": gauge("mqmesh_ha_failsafe", 1, 0),
    "bug-survived": counter("mqmesh_callback_failures_total", NODE),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.alarm)
def test_each_alarm_begins_within_two_looks_of_its_time_and_ends_when_its_trouble_does(rule):
    trouble, well = TROUBLES[rule.alarm]
    interval_s, watch = 30, Watch()
    told = []
    for at_s in range(0, 1_200, interval_s):
        told += [(at_s, *one) for one in names(watch.look(at_s, *well(at_s)))]
    assert told == [], "nothing is told while all is well"
    began_s, seconds = 1_200, rule.for_s + 2 * interval_s
    for at_s in range(began_s, began_s + seconds + 1, interval_s):
        found = names(watch.look(at_s, *trouble(at_s - began_s + 1)))
        told += [(at_s, *one) for one in found if one[0] == rule.alarm]
    ((fired_s, _, status),) = told
    assert status == "firing"
    assert rule.for_s <= fired_s - began_s <= seconds
    ended_s = at_s + interval_s
    last = at_s - began_s + 1  # totals stand still
    is_total = well(0)[0].value == 0 and trouble(1)[0].value != trouble(2)[0].value
    for at_s in range(ended_s, ended_s + LONGEST_WINDOW_MS // 1_000 + 2 * interval_s, interval_s):
        found = names(watch.look(at_s, *(trouble(last) if is_total else well(at_s))))
        told += [(at_s, *one) for one in found if one[0] == rule.alarm]
        if len(told) == 2:
            break
    assert told[1][2] == "resolved"
    if not is_total:
        assert at_s - ended_s <= 2 * interval_s


def failing(failures, deliveries, node="a"):
    """What members of a group say of ten minutes; each broker hears the same."""
    labels = {"node_id": node, "consumer_group": "billing"}
    return [
        series("mqmesh_group_recent_failures", failures, **labels),
        series("mqmesh_group_recent_deliveries", deliveries, **labels),
    ]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (failing(2_000, 2_000), 1.0),
        (failing(4, 4), None),  # one message that is tried again
        (failing(3, 3) + failing(3, 3, "b"), None),  # the same three at two brokers
        (failing(0, 0), None),
        ([], None),
    ],
)
def test_a_group_that_fails_is_found_by_its_share(found, told):
    alarms = Watch().look(0, *found, at_once=True)
    assert [one.value for one in alarms] == ([] if told is None else [told])


def test_a_backlog_of_a_moment_is_none():
    watch = Watch()
    assert watch.look(0, *group(20_000, members=1, latency_ms=500), at_once=True) == []


def test_a_group_has_its_own_threshold_and_another_none():
    watch = Watch(
        RuleChange(alarm="group-behind", group="billing", threshold=10, for_s=60),
        RuleChange(alarm="group-behind", for_s=0),
        RuleChange(alarm="group-behind", group="audit", enabled=False),
    )
    found = [
        *group(11, members=1),
        *group(20_000, name="audit", members=1),
        *group(11, name="shipping", members=1),
        *group(20_001, name="stock", members=1),
    ]
    assert [one.labels["consumer_group"] for one in watch.look(0, *found)] == ["stock"]
    (later,) = watch.look(60, *found)
    assert later.summary == "billing lacks 11 messages, more than 10"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e300"])
def test_a_threshold_is_a_number_that_values_can_exceed(text):
    with pytest.raises(ConfigError, match="threshold"):
        parse_config(MonitorConfig, f'[[rule]]\nalarm = "group-behind"\nthreshold = {text}', "m")


def test_a_topic_has_its_own_threshold_beside_that_of_all_topics():
    watch = Watch(
        RuleChange(alarm="group-behind", topic="payments", threshold=10, for_s=0),
        RuleChange(alarm="group-behind", topic="payments", group="audit", threshold=1_000),
        RuleChange(alarm="group-behind", topic="mail", group="billing", enabled=False),
        RuleChange(alarm="group-without-members", topic="mail", group="audit", for_s=0),
    )
    found = [
        *group(9_989, members=1),
        *group(12, topic="payments", members=1),
        *group(999, name="audit", topic="payments"),
        *group(5_000, topic="mail"),
        *group(1, name="audit", topic="mail"),
    ]
    behind, alone = watch.look(0, *found)
    assert behind.labels == {"consumer_group": "billing", "topic": "payments"}
    assert behind.summary == "in payments billing lacks 12 messages, more than 10"
    assert alone.summary == "in mail 1 messages wait for audit, and nobody is there"
    # All topics of a group together are judged as ever.
    assert [one.labels for one in watch.look(300, *found)] == [{"consumer_group": "billing"}]


def test_a_group_that_nobody_reads_for():
    watch = Watch()
    assert watch.look(0, *group(5)) == []
    assert names(watch.look(600, *group(5))) == [("group-without-members", "firing")]


def test_what_waits_for_its_retry_is_no_backlog_of_nobody():
    watch = Watch()
    retry = series(LAG, 5, consumer_group="billing", is_retry="true")
    assert watch.look(0, retry, at_once=True) == []


def test_a_group_with_members_that_gets_nowhere():
    watch = Watch()
    for at_s in range(0, 631, 30):
        told = names(watch.look(at_s, *group(5, members=2, done=100, latency_ms=0)))
        assert told == ([("group-stuck", "firing")] if at_s == 330 else [])
    moved = group(5, members=2, done=101, latency_ms=0)
    assert names(watch.look(660, *moved)) == [("group-stuck", "resolved")]


def test_a_paused_group_is_not_stuck():
    watch = Watch()
    paused = series("mqmesh_group_paused", 1, consumer_group="billing")
    for at_s in range(0, 631, 30):
        told = watch.look(at_s, *group(5, members=2, done=100, latency_ms=0), paused)
        assert told == []


def test_an_offset_that_went_back_moved_and_of_a_new_group_that_never_moved_it_is_0():
    watch = Watch()
    for at_s in range(0, 631, 30):
        told = watch.look(at_s, *group(5, members=2, done=100 - at_s // 30, latency_ms=0))
        assert told == [], "it was reset"
    watch = Watch()
    for at_s in range(0, 331, 30):
        told = names(watch.look(at_s, *group(5, members=2, latency_ms=0)))
    assert told == [("group-stuck", "firing")]


def test_new_dead_letters_are_an_alarm_for_ten_minutes():
    watch = Watch()

    def dead(total):
        return series(DEAD, total, consumer_group="billing", topic="%DLQ%billing")

    assert watch.look(0, dead(7)) == []
    (told,) = watch.look(30, dead(9))
    assert told.summary == "2 messages of billing became dead letters within 10 minutes"
    assert watch.look(600, dead(9)) == []
    assert names(watch.look(660, dead(9))) == [("dead-letters", "resolved")]


def up(node_id, answers=1):
    return series("mqmesh_up", answers, node_type="broker", node_id=node_id)


def test_the_first_of_all_dead_letters_is_one_that_is_new():
    watch = Watch()
    first = series(DEAD, 1, node_type="broker", node_id="a", consumer_group="billing")
    watch.look(0, up("a"))
    assert names(watch.look(30, up("a"), first)) == [("dead-letters", "firing")]


def test_what_a_process_told_before_it_was_watched_is_not_new():
    watch = Watch()
    many = series(DEAD, 9, node_type="broker", node_id="b", consumer_group="billing")
    watch.look(0, up("a"), up("b", answers=0))
    assert names(watch.look(5, up("a"), up("b"), many)) == []
    assert names(watch.look(35, up("a"), up("b"), many)) == []


def test_a_broker_that_does_not_answer_makes_nothing_of_the_others_new():
    watch = Watch(RuleChange(alarm="process-down", enabled=False))

    def dead(node_id, total):
        told = {"node_type": "broker", "node_id": node_id, "consumer_group": "billing"}
        return [up(node_id), series(DEAD, total, **told)]

    for at_s in (0, 30):
        assert watch.look(at_s, *dead("a", 60), *dead("b", 40)) == []
    assert watch.look(60, *dead("a", 60), up("b", answers=0)) == []
    assert watch.look(90, *dead("a", 60), *dead("b", 40)) == []
    (told,) = watch.look(120, *dead("a", 61), *dead("b", 42))
    assert (told.alarm, told.value) == ("dead-letters", 3)


def test_a_total_that_begins_anew_has_grown_by_itself():
    history = History()
    for at_ms, total in ((0, 100), (1_000, 3), (2_000, 5)):
        grown = history.growth("m", {("broker", "a"): total}, T0 + at_ms, 60_000)
    assert grown == {("broker", "a"): 5}


def test_history_stays_small():
    history, one = History(), up("a")
    for at_s in range(0, 3 * 3_600, 30):
        now_ms = T0 + at_s * 1_000
        history.growth("m", {("broker", "a"): at_s}, now_ms, 60_000)
        history.end_look(Families([one]), now_ms)
    assert len(history.totals["m\tbroker\ta"]) <= LONGEST_WINDOW_MS // 30_000 + 2
    history.end_look(Families([]), T0 + 10 * LONGEST_WINDOW_MS)
    assert history == History()


def test_two_codes_of_refusals_are_different_totals():
    watch = Watch(RuleChange(alarm="busy", threshold=5, for_s=0))

    def refused(busy, full):
        return [
            series("mqmesh_refusals_total", n, node_id="a", response_code=code)
            for n, code in ((busy, "system_busy"), (full, "disk_full"))
        ]

    assert watch.look(0, *refused(100, 0)) == []
    assert watch.look(30, *refused(101, 1)) == []
    assert names(watch.look(60, *refused(101, 9))) == [("busy", "firing")]


def test_connections_without_a_good_key_are_an_alarm_as_requests_without_permission_are():
    watch = Watch()
    for at_s, total, told in ((0, 3, []), (30, 13, []), (60, 14, [("no-permission", "firing")])):
        refused = series("mqmesh_refused_connections_total", total, node_id="a")
        assert names(watch.look(at_s, refused)) == told


@pytest.mark.parametrize("rule", [*RULES, *TOPIC_RULES], ids=lambda rule: rule.summary)
def test_every_sentence_can_be_said(rule):
    labels = tuple(f"<{label}>" for label in rule.by)
    said = rule.sentence(labels, 0.9, rule.threshold)
    assert [label for label in labels if label not in said] == []


def test_what_a_monitor_remembers_fits_into_a_file():
    watch = Watch()
    watch.look(0, series("mqmesh_store_disk_full", 1, node_id="a"), *group(5, done=3))
    data = msgspec.json.encode(watch.board.state)
    assert msgspec.json.decode(data, type=AlarmState) == watch.board.state


# ---- Settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RuleChange(alarm="group-behnd"), "is none of process-down"),
        (lambda: RuleChange(alarm="disk-full", group="a"), "is of no consumer group"),
        (
            lambda: RuleChange(alarm="dead-letters", topic="t"),
            "is of no topic; group-behind and group-without-members are",
        ),
        (lambda: NotifyConfig(webhook_url="file:///etc/passwd"), "must be http"),
        (lambda: NotifyConfig(webhook_url="http://"), "must be http"),
    ],
)
def test_a_wrong_setting_is_told(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


# ---- Introspection ---------------------------------------------------------------------


def an_alarm(status="firing"):
    watch = Watch()
    (alarm,) = watch.look(0, series("mqmesh_store_disk_full", 1, node_id="broker-a"))
    return msgspec.structs.replace(alarm, status=status)


def test_the_document_is_that_of_alertmanager():
    both = document_of([an_alarm(), an_alarm("resolved")], T0 + 1_500)
    assert (both["version"], both["status"]) == ("4", "firing")
    first, second = both["alerts"]
    assert first == {
        "status": "firing",
        "labels": {"alertname": "disk-full", "severity": "critical", "node_id": "broker-a"},
        "annotations": {
            "summary": "broker-a refuses messages, its disk is full",
            "description": "free room; writing goes on without a restart",
        },
        "startsAt": "2026-01-01T00:00:00.000Z",
        "endsAt": NO_END,
    }
    assert second["endsAt"] == "2026-01-01T00:00:01.500Z"
    assert document_of([an_alarm("resolved")], T0)["status"] == "resolved"


@pytest.fixture
def hook():
    """A web service that keeps what it is sent, and answers as it is told."""

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status[0])
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            """Nothing."""

    got, status = [], [200]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", got, status
        server.shutdown()


def test_a_web_service_is_told(hook):
    url, got, _ = hook
    notify(NotifyConfig(webhook_url=url), [an_alarm()], T0)
    assert [one["alerts"][0]["labels"]["alertname"] for one in got] == ["disk-full"]


@pytest.mark.parametrize("code", [307, 500])
def test_a_web_service_that_refuses_is_named_in_the_log(hook, code, caplog):
    url, got, status = hook
    status[0] = code
    notify(NotifyConfig(webhook_url=url, log=False), [an_alarm()], T0)
    assert len(got) == 1
    assert f"notify.webhook_url 127.0.0.1:{url.split(':')[2].split('/')[0]}" in caplog.text


def test_a_program_gets_the_alarms(tmp_path):
    path = tmp_path / "told.json"
    script = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    command = ["python3", "-c", script, str(path)]
    notify(NotifyConfig(command=command), [an_alarm()], T0)
    assert json.loads(path.read_text())["status"] == "firing"


@pytest.mark.parametrize(
    ("command", "told"), [(["/nowhere"], "No such file"), (["false"], "ended with code 1")]
)
def test_a_program_that_fails_is_named_in_the_log(command, told, caplog):
    notify(NotifyConfig(command=command, log=False), [an_alarm()], T0)
    assert told in caplog.text


# ---- Monitors -----------------------------------------------------------------------------


class Clock:
    """A clock that the test turns."""

    def __init__(self):
        self.now_ms = T0

    def wall_ms(self):
        return self.now_ms

    def monotonic_ms(self):
        return self.now_ms


class Asked:
    """A cluster as the test wants it."""

    def __init__(self, *found):
        self.found = found

    def collect(self):
        return Families(self.found)

    def close(self):
        """Nothing is open."""


def test_a_second_run_knows_what_the_first_one_saw(tmp_path):
    config = MonitorConfig(state_file=str(tmp_path / "monitor.json"))
    clock = Clock()
    for at_s, total, told in ((0, 7, []), (60, 9, ["dead-letters"]), (120, 9, ["dead-letters"])):
        clock.now_ms = T0 + at_s * 1_000
        dead = series(DEAD, total, consumer_group="billing", topic="%DLQ%billing")
        monitor = Monitor(config, clock, Asked(dead))
        assert [one.alarm for one in monitor.look(at_once=True)] == told
        monitor.close()


@pytest.mark.parametrize("content", ["", "{", '{"known": 3}'])
def test_a_state_file_that_is_none_is_told(tmp_path, content):
    path = tmp_path / "monitor.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="state_file"):
        Monitor(MonitorConfig(state_file=str(path)), Clock(), Asked())


def test_a_state_file_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    monitor = Monitor(MonitorConfig(state_file=str(tmp_path / "no" / "m.json")), Clock(), Asked())
    assert monitor.look() == []
    monitor.close()
    assert "state_file" in caplog.text
