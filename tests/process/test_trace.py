"""The message trace of every kind of client, through a real cluster, and what shows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from harness.patience import until

from mqmesh import aio
from mqmesh.cli import main
from mqmesh.message import TRACE_TOPIC, Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.admin.traces import SpanKind, TraceClient, TraceSpan
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 40
Traceable = Producer | PushConsumer | PullConsumer | aio.Producer | aio.PushConsumer
FIRST = ConsumeFromWhere.FIRST_OFFSET


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def spans_of(cluster: ProcessCluster, message_id: str) -> list[TraceSpan]:
    with TraceClient(cluster.namesrv_addr) as client:
        return client.trace(message_id).spans


def written(client: Traceable, count: int) -> None:
    """Waits until so many records are stored: with its end a client waits for a moment only."""
    until(lambda: client.metrics().number("trace_records_total", "sent") == count)


def shown(one: TraceSpan) -> tuple[str, str, str]:
    return one.kind, one.group, one.result


def test_blocking_clients_are_traced(cluster, capsys):
    address, topic, done = cluster.namesrv_addr, "blocking", threading.Event()
    failed: list[StoredMessage] = []
    handled: set[bytes] = set()

    def listen(messages: list[StoredMessage]) -> None:
        if not failed:
            failed.extend(messages)
            raise ValueError("the first time")
        handled.update(one.body for one in messages)
        if len(handled) == 3:
            done.set()

    consumer = PushConsumer(
        "billing",
        namesrv_addr=address,
        consume_from_where=FIRST,
        consume_orderly=True,
        suspend_current_queue_time_ms=10,
        msg_trace=1,
    )
    consumer.subscribe(topic, listener=listen)
    with Producer("shop", namesrv_addr=address, msg_trace=1) as producer:
        sent = producer.send(Message(topic, b"12345", tag="new", keys=["4711", "a b"]))
        batch = producer.send_batch([Message(topic, b"1"), Message(topic, b"2")])
        written(producer, 3)
    with consumer:
        assert done.wait(PATIENCE_S)
        written(consumer, 2 * 4)
    with PullConsumer(
        "puller", namesrv_addr=address, consume_from_where=FIRST, msg_trace=1
    ) as puller:
        puller.subscribe(topic)
        got: list[StoredMessage] = []
        while len(got) < 3:
            got += puller.poll(1_000)
        puller.poll(0)  # which says that they are done
        written(puller, 2 * 3)
    (first,) = (one.message_id for one in failed)
    spans = spans_of(cluster, first)
    assert [shown(one) for one in spans[:3]] == [
        (SpanKind.SEND, "shop", "SUCCESS"),
        (SpanKind.CONSUME, "billing", "EXCEPTION"),
        (SpanKind.CONSUME, "billing", "SUCCESS"),
    ]
    for message_id in (sent.message_id, *batch.message_ids):
        spans = spans_of(cluster, message_id)
        assert {(one.kind, one.group) for one in spans} == {
            (SpanKind.SEND, "shop"),
            (SpanKind.CONSUME, "billing"),
            (SpanKind.CONSUME, "puller"),
        }
        assert all(one.cost_ms is not None for one in spans)
    send = next(one for one in spans_of(cluster, sent.message_id) if one.kind is SpanKind.SEND)
    assert (send.topic, send.tag, send.keys, send.size) == (topic, "new", "4711 a b", 5)
    assert send.store_host == cluster.brokers["broker-a"].endpoint

    assert main.main(["--namesrv", address, "trace", "show", sent.message_id]) == 0
    assert "shop" in capsys.readouterr().out
    assert main.main(["--namesrv", address, "trace", "show", sent.message_id, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["message_id"], one["spans"][0]["group"]) == (sent.message_id, "shop")
    assert main.main(["--namesrv", address, "trace", "by-key", topic, "4711", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["message_id"] == sent.message_id
    assert len(one["spans"]) == len(spans_of(cluster, sent.message_id))


class Agrees(TransactionListener):
    def execute_local_transaction(self, message: StoredMessage, arg: object):
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: StoredMessage):
        return LocalTransactionState.UNKNOWN


def test_transactions_are_traced_to_their_end(cluster):
    ids = {}
    with TransactionProducer(
        "bank", Agrees(), namesrv_addr=cluster.namesrv_addr, msg_trace=1
    ) as producer:
        sent = producer.send_message_in_transaction(Message("transfers", b"x", keys=["k"]))
        ids["COMMIT"] = [sent.send_result.message_id]
        later = producer.send_message_in_transaction_async(Message("transfers", b"x"))
        ids["COMMIT"].append(later.result(PATIENCE_S).send_result.message_id)
        with producer.transaction(Message("transfers", b"x")) as by_hand:
            by_hand.rollback()
        ids["ROLLBACK"] = [by_hand.message_id]
        written(producer, 6)
    for result, these in ids.items():
        for message_id in these:
            spans = spans_of(cluster, message_id)
            assert [shown(one) for one in spans] == [
                (SpanKind.SEND, "bank", "SUCCESS"),
                (SpanKind.END_TRANSACTION, "bank", result),
            ]
            assert [one.message_type for one in spans] == ["HALF", "COMMIT"]


def test_the_trace_is_not_traced(cluster):
    address = cluster.namesrv_addr
    with Producer("shop", namesrv_addr=address, msg_trace=1) as producer:
        producer.send(Message("quiet", b"x"))
        producer.send(Message(TRACE_TOPIC, b"a user's own", keys=["quiet"]))
        written(producer, 1)
    with PullConsumer(
        "reader", namesrv_addr=address, consume_from_where=FIRST, msg_trace=1
    ) as reader:
        reader.subscribe(TRACE_TOPIC)
        found: list[StoredMessage] = []
        while not any(one.body == b"a user's own" for one in found):
            found += reader.poll(1_000)
    assert [one.metrics().number("trace_records_total", "sent") for one in (producer, reader)] == [
        1,
        0,
    ]


def test_without_a_trace_what_is_stored_is_shown(cluster, capsys):
    address = cluster.namesrv_addr
    with Producer("shop", namesrv_addr=address) as producer:
        sent = producer.send(Message("untraced", b"x"))
    arguments = ["--namesrv", address, "trace", "show", sent.message_id]
    until(lambda: main.main(arguments) == 0)  # the index process of a new broker takes a moment
    told = capsys.readouterr()
    assert "no trace of this message" in told.err
    assert "untraced" in told.out
    assert main.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["spans"], found["track"]["copies"][0]["topic"]) == ([], "untraced")
    assert main.main(["--namesrv", address, "trace", "show", "0" * 32]) == 1
    assert main.main(["--namesrv", address, "trace", "by-key", "untraced", "k"]) == 1
