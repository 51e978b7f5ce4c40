"""The first page: what is wrong comes first, and numbers are those of the exporter."""

from __future__ import annotations

import msgspec
import pytest
from harness.console import WELL, ConsoleWorld, open_console

from mqmesh.console.cluster_view import (
    PENDING_MS,
    STILL_MS,
    AlarmView,
    GroupLag,
    ProcessView,
    Standstills,
    cluster_readings,
    cluster_view,
)
from mqmesh.console.sampler import series_values
from mqmesh.console.series import BYTES_PER_POINT, BYTES_PER_SERIES, SeriesBook
from mqmesh.metrics import MetricKind
from mqmesh.roles.exporter.alarm_board import AlarmBoard
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.rates import Rates
from mqmesh.roles.supervisor.run_file import RoleEntry

NODE = ("cluster", "node_type", "node_id")
NOW_MS = 1_700_000_000_000


def series(name, value, **labels):
    known = {"cluster": "c", "node_type": "broker", "node_id": "broker-a"} | labels
    return Series(
        ExportedMetric(name, MetricKind.GAUGE, "", tuple(known)), tuple(known.values()), value
    )


def of_group(name, value, group="billing", **labels):
    kept = {"topic": "orders", "consumer_group": group, "is_retry": "false", "is_system": "false"}
    return series(name, value, **(kept | labels))


def look(stored, *, lag=0, up=1, failures=0, deliveries=0, members=1):
    return Families(
        [
            series("mqmesh_up", 1, node_type="namesrv", node_id="h:1"),
            series("mqmesh_up", up),
            series("rocketmq_messages_in_total", stored, topic="orders"),
            series("rocketmq_messages_in_total", 9e9, topic="%RETRY%billing"),
            series("rocketmq_messages_out_total", 2 * stored, topic="orders"),
            series("mqmesh_store_disk_used_ratio", 0.4),
            of_group("rocketmq_consumer_lag_messages", lag),
            of_group("rocketmq_consumer_lag_latency_milliseconds", 5_000.0),
            series("rocketmq_consumer_connections", members, consumer_group="billing"),
            series("mqmesh_group_recent_failures", failures, consumer_group="billing"),
            series("mqmesh_group_recent_deliveries", deliveries, consumer_group="billing"),
        ]
    )


def view_of(families, rates, board, at_ms):
    board.judge(families, at_ms)
    readings = cluster_readings(families, rates, at_ms)
    return readings, cluster_view(families, readings, board.state.known.values(), at_ms, 7)


@pytest.fixture
def board():
    return AlarmBoard()


def test_rates_are_those_of_all_topics_but_the_systems(board):
    rates = Rates()
    view_of(look(100), rates, board, NOW_MS)
    readings, view = view_of(look(300, lag=50), rates, board, NOW_MS + 10_000)
    assert (view.in_per_s, view.out_per_s, view.backlog) == (20.0, 40.0, 50)
    assert [one.topic for one in view.top_topics] == ["orders"]
    assert view.lagging_groups == [GroupLag("billing", 50, 5_000, 1, 0.0)]
    assert (view.disk_used, view.disk_node) == (0.4, "broker-a")
    assert series_values(view, readings) == {
        ("rocketmq_messages_in_total",): 20.0,
        ("rocketmq_messages_out_total",): 40.0,
        ("rocketmq_consumer_lag_messages",): 50,
        ("mqmesh_store_disk_used_ratio", "broker-a"): 0.4,
        ("rocketmq_consumer_lag_messages", "billing"): 50,
        ("rocketmq_messages_in_total", "orders"): 20.0,
        ("rocketmq_messages_out_total", "orders"): 40.0,
    }


def test_what_fails_is_seen_before_its_alarm_is_due(board):
    rates = Rates()
    failing = look(100, failures=8, deliveries=10)
    assert view_of(failing, rates, board, NOW_MS)[1].alarms == []
    _, view = view_of(failing, rates, board, NOW_MS + PENDING_MS)
    (alarm,) = view.alarms
    assert (alarm.alarm, alarm.is_pending) == ("group-failing", True)
    assert view.lagging_groups[0].failing == 0.8


def test_a_queue_that_does_not_move_is_seen_though_others_do():
    stills = Standstills()

    def look_at(at_ms, waits_ms, members=1):
        families = Families(
            [
                of_group("rocketmq_consumer_lag_latency_milliseconds", waits_ms),
                series("rocketmq_consumer_connections", members, consumer_group="billing"),
            ]
        )
        return [one.labels["topic"] for one in stills.look(families, NOW_MS + at_ms)]

    assert look_at(0, 1_000) == []
    assert look_at(9_000, 10_003) == []
    assert look_at(STILL_MS, 11_001) == ["orders"]
    assert look_at(12_000, 300) == [], "it moved"
    assert look_at(30_000, 18_300, members=0) == [], "nobody is there: that is another alarm"


def test_a_process_that_is_down_is_seen_at_once(board):
    _, view = view_of(look(1, up=0), Rates(), board, NOW_MS)
    assert view.down == 1
    assert view.processes[0] == ProcessView("broker", "broker-a", False)


def test_a_process_that_died_and_came_back_is_marked(board):
    entries = [
        RoleEntry(role="broker", name="broker-a", restarts=1, started_ms=NOW_MS - 1_000),
        RoleEntry(role="namesrv", name="n", endpoint="tcp://h:1", restarts=2, started_ms=1),
    ]
    families = look(1)
    readings = cluster_readings(families, Rates(), NOW_MS)
    view = cluster_view(families, readings, [], NOW_MS, 7, entries)
    assert view.restarted == ["broker-a"]
    page = open_console(ConsoleWorld(view=view)).get("/").text
    assert "started again: broker-a" in page


def test_without_name_servers_the_figures_are_old(board):
    families = Families([series("mqmesh_up", 0, node_type="namesrv", node_id="h:1")])
    assert view_of(families, Rates(), board, NOW_MS)[1].problem == "no name server answers"


def alarm(name, severity, **labels):
    return AlarmView(name, severity, f"{name} happened", NOW_MS, False, labels)


def test_trouble_comes_first_on_the_page():
    alarms = [alarm("group-stuck", "critical", consumer_group="billing"), alarm("busy", "warning")]
    processes = [ProcessView("broker", "broker-a", False), ProcessView("namesrv", "h:1", True)]
    world = ConsoleWorld(view=msgspec.structs.replace(WELL, alarms=alarms, processes=processes))
    page = open_console(world).get("/").text
    assert page.index('data-test="alarm-group-stuck"') < page.index('data-test="card-processes"')
    assert 'href="/groups/billing"' in page
    assert "1 of 2 processes down" in page
    assert "down: broker-a" in page


def test_a_cluster_that_is_well_says_so():
    page = open_console(ConsoleWorld()).get("/").text
    assert "All is well" in page
    assert 'data-test="alarms"' not in page


def test_charts_are_asked_for_by_what_they_show():
    world = ConsoleWorld()
    for second in range(3):
        world.series.note(second * 2_000, {("rocketmq_messages_in_total", "orders"): second})
    told = open_console(world).get(
        "/api/v1/series", params={"chart": "messages", "topic": "orders"}
    )
    assert told.json() == {
        "labels": ["in", "out"],
        "times": [0, 2, 4],
        "values": [[0.0, 1.0, 2.0], [None, None, None]],
    }
    assert open_console(world).get("/api/v1/series").status_code == 400
    assert open_console(world).get("/api/v1/series", params={"chart": "x"}).status_code == 400


def test_an_hour_is_kept_by_looks_and_a_day_by_minutes():
    book = SeriesBook()
    for second in range(0, 2 * 86_400, 30):
        book.note(second * 1_000, {("a",): float(second)})
    hour, day = book.data([("a", ("a",))]), book.data([("a", ("a",))], day=True)
    assert hour.times[-1] - hour.times[0] in range(3_500, 4_600)
    assert day.times[-1] - day.times[0] in range(86_000, 109_000)
    assert len(day.times) <= 600


def test_what_was_looked_at_longest_ago_goes_first():
    room = 2 * BYTES_PER_SERIES + 6 * BYTES_PER_POINT
    book = SeriesBook(max_bytes=room)
    book.note(0, {("a",): 1.0, ("b",): 1.0})
    book.data([("a", ("a",))])
    for second in range(2, 10, 2):
        book.note(second * 1_000, {("a",): 1.0, ("b",): 1.0})
    assert book.data([("b", ("b",))]).times == []
    assert book.data([("a", ("a",))]).times
