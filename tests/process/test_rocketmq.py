"""A real broker of RocketMQ and its clients: mqmesh tells the same, and reads what they write."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
from harness.patience import until
from harness.rocketmq import Traffic, families, golden_families, traffic_of_a_real_broker

from mqmesh.cli import main
from mqmesh.message import TRACE_TOPIC, Message
from mqmesh.sdk.admin.traces import TraceClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.tracing.trace_records import (
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    decode_records,
    encode_record,
)
from mqmesh.testing.processes import ProcessCluster

pytestmark = pytest.mark.timeout(420)  # it loads 80 MB the first time

KEYS = {"one": "4711 größe 订单", "paid": "4711", "asked": "4712"}
STORE_HOST = "127.0.0.1:10911"
SENT = {
    "one": TraceMessageType.NORMAL,
    "bad": TraceMessageType.NORMAL,
    "late": TraceMessageType.DELAY,
    "both": TraceMessageType.NORMAL,
    "paid": TraceMessageType.HALF,
    "void": TraceMessageType.HALF,
    "asked": TraceMessageType.HALF,
}
"""What its producers trace; of a message that was sent one way they know no outcome."""
ENDED = [
    ("paid", "COMMIT_MESSAGE"),
    ("void", "ROLLBACK_MESSAGE"),
    ("asked", "UNKNOW"),
    ("asked", "COMMIT_MESSAGE"),
]
CONSUMED = [
    *((name, 0, ContextCode.SUCCESS) for name in ("one", "late", "oneway", "paid", "asked")),
    ("bad", 0, ContextCode.FAILED),
    ("bad", 1, ContextCode.EXCEPTION),
    ("bad", 2, ContextCode.RETURN_NULL),
]
"""Name, how often it came back before, and how the listener's call ended."""
EVENTS = [
    *(f"Pub {name}" for name in SENT),
    *(f"EndTransaction {name} {state}" for name, state in ENDED),
    *(f"SubBefore {name} {retry_times}" for name, retry_times, _ in CONSUMED),
    *(f"SubAfter {name} {code:d}" for name, _, code in CONSUMED),
    "Recall late",
]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory, project_root) -> Traffic:
    folder = tmp_path_factory.mktemp("rocketmq")
    return traffic_of_a_real_broker(folder, sorted(golden_families(project_root)), EVENTS)


@pytest.fixture(scope="module")
def records(traffic) -> list[TraceRecord]:
    """All that its clients have traced."""
    found: list[TraceRecord] = []
    for _, body in traffic.traces:
        some, strange = decode_records(body.decode())
        assert strange == 0
        assert "".join(map(encode_record, some)) == body.decode(), "something is lost"
        found += some
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_a_real_broker_tells_what_the_golden_file_says(traffic, project_root):
    told = {name: labels for name, labels in families(traffic.page).items() if "_pop_" not in name}
    assert told == golden_families(project_root)


def of(records: list[TraceRecord], kind: TraceKind, message_id: str) -> list[TraceRecord]:
    """Those of a message, without their times, which must be good."""
    found = [one for one in records if (one.kind, one.message_id) == (kind, message_id)]
    for one in found:
        assert 0 <= one.cost_ms < 600_000
        assert 0 <= time.time() * 1_000 - one.time_ms < 3_600_000
    return [msgspec.structs.replace(one, time_ms=0, cost_ms=0) for one in found]


def test_what_its_producers_trace_is_read(traffic, records):
    for name, message_type in SENT.items():
        message_id, offset_id = traffic.sent[name]
        (found,) = of(records, TraceKind.PUB, message_id)
        assert found == TraceRecord(
            TraceKind.PUB,
            message_id,
            region="DefaultRegion",
            group="pay" if message_type is TraceMessageType.HALF else "shop",
            topic="orders",
            tag="null" if name == "both" else "tag",
            keys=KEYS.get(name, "null"),
            store_host=STORE_HOST,
            size=found.size if name == "both" else len(name),
            message_type=message_type,
            offset_id=offset_id or found.offset_id,  # transactions' clients do not tell it
        )
    first, second = traffic.sent["first"][0], traffic.sent["second"][0]
    assert traffic.sent["both"][0] == f"{first},{second}", "a batch has one record"
    (recalled,) = of(records, TraceKind.RECALL, late := traffic.sent["late"][0])
    assert recalled == TraceRecord(
        TraceKind.RECALL, late, 0, "DefaultRegion", "shop", "orders", success=False
    )


def test_how_its_transactions_end_is_read(traffic, records):
    expected = [
        TraceRecord(
            TraceKind.END_TRANSACTION,
            traffic.sent[name][0],
            region="DefaultRegion",
            group="pay",
            topic="orders",
            tag="tag",
            keys=KEYS.get(name, "null"),
            store_host=STORE_HOST,
            message_type=TraceMessageType.COMMIT,
            transaction_id=traffic.sent[name][0],
            state=state,
            from_check=(name, state) == ("asked", "COMMIT_MESSAGE"),
        )
        for name, state in ENDED
    ]
    for name in "paid", "void", "asked":
        message_id = traffic.sent[name][0]
        found = set(of(records, TraceKind.END_TRANSACTION, message_id))
        assert found == {one for one in expected if one.message_id == message_id}


def test_what_its_consumers_trace_is_read(traffic, records):
    for name in dict.fromkeys(name for name, _, _ in CONSUMED):
        message_id = traffic.sent[name][0]
        ends = {one.request_id: one for one in of(records, TraceKind.SUB_AFTER, message_id)}
        called = set()
        for one in of(records, TraceKind.SUB_BEFORE, message_id):
            end = ends.get(one.request_id)
            if end is None:
                continue  # it was delivered again, and all that is wanted was there
            called.add((name, one.retry_times, end.context_code))
            assert (one.region, one.group, end.group) == ("DefaultRegion", "billing", "billing")
            assert one.keys == end.keys == KEYS.get(name, "null")
            assert end.success is (end.context_code == ContextCode.SUCCESS)
        assert called == {one for one in CONSUMED if one[0] == name}


def test_mqmesh_trace_shows_its_clients_messages(
    traffic, cluster, capsys: pytest.CaptureFixture[str]
):
    with Producer("bridge", namesrv_addr=cluster.namesrv_addr) as producer:
        for keys, body in traffic.traces:
            producer.send(Message(TRACE_TOPIC, body, keys=keys))
    with TraceClient(cluster.namesrv_addr) as client:

        def shown(name: str) -> set[tuple[str, str, str, int]]:
            spans = client.trace(traffic.sent[name][0]).spans
            return {(one.kind, one.group, one.result, one.retry_times) for one in spans}

        bad = {
            ("SEND", "shop", "SUCCESS", 0),
            ("CONSUME", "billing", "FAILED", 0),
            ("CONSUME", "billing", "EXCEPTION", 1),
            ("CONSUME", "billing", "FAILED", 2),
        }
        asked = {
            ("SEND", "pay", "SUCCESS", 0),
            ("END_TRANSACTION", "pay", "UNKNOWN", 0),
            ("END_TRANSACTION", "pay", "COMMIT", 0),
            ("CONSUME", "billing", "SUCCESS", 0),
        }
        until(lambda: shown("bad") == bad)
        until(lambda: shown("asked") >= asked)  # it may be committed twice
        until(lambda: ("RECALL", "shop", "FAILED", 0) in shown("late"))
        until(lambda: ("SEND", "shop", "SUCCESS", 0) in shown("one"))
    arguments = ["--namesrv", cluster.namesrv_addr, "trace", "by-key", "orders", "订单"]
    assert main.main(arguments) == 0
    assert traffic.sent["one"][0] in capsys.readouterr().out
