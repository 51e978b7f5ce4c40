"""What clients count of what they do."""

from __future__ import annotations

import re
import runpy

import prometheus_client
import pytest
from harness.simulated_cluster import Fault, FaultKind
from harness.waits import make_waits

from mqmesh.errors import MQMeshError
from mqmesh.message import Message, MessageQueue
from mqmesh.metrics import MAX_LABEL_SETS, OTHER
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.lanes import PendingBatch


def test_every_way_to_send_counts_each_message_once(world):
    producer = world.producer()
    world.call(lambda: producer.send(Message("t", b"alone")))
    futures = [producer.send_async(Message("t", b"x")) for _ in range(5)]
    batch = producer.send_batch_async([Message("t", b"x")] * 3)
    assert producer.metrics().number("send_buffer_bytes") > 0
    world.run()
    assert all(future.exception() is None for future in [*futures, batch])
    told = producer.metrics()
    assert told.number("sends_total", "t", "SEND_OK") == 9
    assert told["send_latency_ms"].count >= 2, "one alone, and a request at least"
    assert told.number("send_requests_in_flight") == 0
    assert told.number("send_buffer_bytes") == 0


@pytest.mark.parametrize("alone", [True, False])
def test_sends_are_told_apart_by_what_became_of_them(world, alone):
    producer = world.producer(retry_times_when_send_failed=0, retry_times_when_send_async_failed=0)

    def send(*faults):
        world.broker.faults.extend(faults)
        if alone:
            return world.call(lambda: producer.send(Message("t", b"x")))
        future = producer.send_async(Message("t", b"x"))
        world.run(100)
        return future.exception()

    send(Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY))
    send(Fault(FaultKind.STATUS, 2))
    send()
    told = producer.metrics()
    assert told.number("sends_total", "t", "SystemBusy") == 1
    assert told.number("sends_total", "t", "FLUSH_SLAVE_TIMEOUT") == 1
    assert told.number("sends_total", "t", "SEND_OK") == 1
    assert told["send_latency_ms"].count == 3


def test_a_send_that_was_repeated_has_one_outcome(world):
    producer = world.producer()
    world.broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(Message("t", b"x"), timeout_ms=5_000)
    world.run(100)
    world.broker.start()
    world.run(5_000)
    assert future.exception() is None
    (sends,) = [one for one in producer.metrics() if one.metric.name == "sends_total"]
    assert [(one.labels, one.value) for one in sends.samples] == [(("t", "SEND_OK"), 1)]


def test_no_more_topics_than_anybody_reads_are_told_apart(world):
    sender = world.producer()._sender

    def end(topic: str, count: int, result: BatchOutcome | MQMeshError) -> None:
        queue = MessageQueue(topic, "a", 0)
        sender._count(PendingBatch(*make_waits(), queue, 0, False, count, 0, True), result)

    stored = BatchOutcome(0, 0)
    for number in range(MAX_LABEL_SETS + 5):
        end(f"t{number}", 2, stored)
    end("t0", 1, stored)
    end("t0", 1, MQMeshError("no"))
    assert len(sender.ended) == MAX_LABEL_SETS + 2
    assert sender.ended["t0", "SEND_OK"] == 3
    assert sender.ended[OTHER, "SEND_OK"] == 10
    assert sender.ended[OTHER, "MQMeshError"] == 1


def test_the_page_that_the_documentation_makes_of_them_has_all(world, project_root, tmp_path):
    text = (project_root / "docs/metrics.md").read_text()
    (lines,) = [
        block for block in re.findall("```python\n(.*?)```", text, re.DOTALL) if "REGISTRY" in block
    ]
    (tmp_path / "page.py").write_text(lines.partition("REGISTRY.register")[0])
    producer = world.producer()
    world.call(lambda: producer.send(Message("t", b"alone")))
    made = runpy.run_path(str(tmp_path / "page.py"))
    registry = prometheus_client.CollectorRegistry()
    registry.register(made["ClientMetrics"](producer, "shop_"))
    page = prometheus_client.generate_latest(registry).decode()
    assert 'shop_sends_total{status="SEND_OK",topic="t"} 1.0' in page
    assert 'shop_send_latency_ms_bucket{le="+Inf"} 1.0' in page
    assert "shop_send_latency_ms_count 1.0" in page
    told = {reading.metric.name for reading in producer.metrics()}
    assert told == {name for name in told if f"# HELP shop_{name} " in page}
