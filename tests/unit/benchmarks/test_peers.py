"""The rows and the table of `scripts/bench --peers`."""

from __future__ import annotations

import importlib
import sys

import pytest

MODULES = (
    "beanstalkd_client",
    "client",
    "kafka_clients",
    "mqmesh_clients",
    "nats_client",
    "orders",
    "redis_clients",
    "systems",
    "table",
)


@pytest.fixture
def load(monkeypatch, project_root):
    """Imports a module of the benchmark, which is not installed; no library of a peer."""
    monkeypatch.syspath_prepend(str(project_root / "benchmarks" / "peers"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def table(load):
    return load("table")


def report(begin_s=0.0, end_s=2.0, cpu_s=0.5, latencies_us=()):
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "cpu_s": cpu_s,
        "latencies_us": list(latencies_us),
    }


def test_a_run_has_rate_latencies_and_processor_time_of_both_sides(table):
    reader = report(0.5, 2.0, 0.25, range(1, 201))
    found = table.measured(1_000, [reader, report(0.0, 1.0, 0.5)], 0.2)
    assert found == table.Measured(500.0, 100.5, 199, 750.0, 200.0)
    assert table.measured(1_000, [report()], 0.0)[:3] == (500.0, 0.0, 0.0)


def test_the_table_has_medians_and_a_dash_where_a_system_has_no_client(table):
    runs = [table.Measured(rate, 0.0, 0.0, 9.96, 1_234.0) for rate in (10_000, 70_000, 20_000)]
    lone = [table.Measured(5.0, 1_200.4, 3_000.0, 50.2, 6.0)]
    figures = {"many": {"mqmesh": runs, "redis": runs}, "one": {"mqmesh": lone}}
    assert table.format_table(figures, ["mqmesh", "redis"]).splitlines() == [
        "| | mqmesh | Redis Streams |",
        "|---|---|---|",
        "| many | 20,000/s; 10.0 + 1,234 | 20,000/s; 10.0 + 1,234 |",
        "| one | 1,200, 3,000 µs; 50 + 6.0 | – |",
    ]


def test_every_row_can_be_done_by_mqmesh_and_its_actions_fit(load, table):
    client = load("client")
    for row in table.ROWS:
        for name in filter(None, (row.writes, row.reads)):
            action = client.ACTIONS[name]
            assert action.reads == (name == row.reads), row.name
            assert client.is_blocking("mqmesh", action) is not None, row.name


def test_slow_systems_move_fewer_messages_but_where_there_are_few(table):
    many, lone = table.ROWS[0], table.ROWS[-1]
    assert table.messages_of(many, "kafka", 0.5) == 500_000
    assert table.messages_of(many, "nats", 0.5) == 50_000
    assert table.messages_of(lone, "nats", 0.5) == 2_500
    assert table.messages_of(lone, "mqmesh", 0.001) == 500


def test_names_of_rows_differ(table):
    assert len({row.name for row in table.ROWS}) == len(table.ROWS)


@pytest.mark.parametrize(
    ("system", "action", "blocking"),
    [
        ("nats", "send_sync", None),
        ("nats", "listen", False),
        ("nats", "send_gather", False),
        ("beanstalkd", "listen", True),
        ("beanstalkd", "send_gather", None),
        ("mqmesh", "send_gather", False),
        ("redis", "send_threads", True),
    ],
)
def test_a_row_is_done_by_the_client_that_it_is_about(load, system, action, blocking):
    client = load("client")
    assert client.is_blocking(system, client.ACTIONS[action]) is blocking


def test_a_job_of_beanstalkd_keeps_fields_and_body_apart(load):
    client, orders = load("beanstalkd_client"), load("orders")
    for kind in ("plain", "ordinary"):
        for order in orders.make_orders(kind, 20):
            fields, body = client.parts_of(client.job_of(order))
            assert body == order.body
            assert (order.key.encode() in fields) and bool(fields) == bool(order.tag)


def test_topics_begin_with_the_one_that_all_rows_use(load):
    orders = load("orders")
    assert orders.topic_names(1) == [orders.TOPIC]
    assert len(set(orders.topic_names(100))) == 100
    task = load("client").Task(orders.make_orders("plain", 10), 1_005, orders.topic_names(3))
    assert len(list(task.each())) == 1_005
    assert task.topic(4) == f"{orders.TOPIC}-1"
