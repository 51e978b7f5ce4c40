"""RocketMQ's own codec of trace records, in Java, and ours read what the other has written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from harness.java import java_command
from harness.patience import until
from harness.rocketmq import rocketmq_jars

from mqmesh.message import TRACE_TOPIC, Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.tracing.trace_records import TraceKind, TraceRecord, decode_records
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.processes import ProcessCluster

JAVA_S = 50
FIRST = ConsumeFromWhere.FIRST_OFFSET

FIELDS = {
    TraceKind.PUB: (
        "time_ms region group topic message_id tag keys store_host size cost_ms message_type "
        "offset_id success"
    ),
    TraceKind.SUB_BEFORE: "time_ms region group request_id message_id retry_times keys",
    TraceKind.SUB_AFTER: ("request_id message_id cost_ms success keys context_code time_ms group"),
    TraceKind.END_TRANSACTION: (
        "time_ms region group topic message_id tag keys store_host message_type transaction_id "
        "state from_check"
    ),
}
"""What ``TraceRecords.java`` says of each kind, in this order."""


class Codec:
    """RocketMQ's ``TraceDataEncoder``."""

    def __init__(self) -> None:
        self._command = java_command("TraceRecords", rocketmq_jars("4.9.8", ("rocketmq-tools",)))

    def encoded(self) -> str:
        """Some records of each kind."""
        return self._run("encode", "")

    def decoded(self, text: str) -> list[str]:
        """Each record, its fields separated by tabs."""
        return self._run("decode", text).splitlines()

    def _run(self, job: str, text: str) -> str:
        done = subprocess.run(
            [*self._command, job],
            input=text.encode(),
            capture_output=True,
            timeout=JAVA_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()[-2_000:]
        return done.stdout.decode()


def described(one: TraceRecord) -> str:
    """As ``TraceRecords.java`` does."""
    values = [getattr(one, name) for name in FIELDS[one.kind].split()]
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return "\t".join([one.kind, *texts])


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_what_java_writes_is_read_here_as_java_reads_it(codec, project_root):
    text = codec.encoded()
    golden = project_root / "tests" / "data" / "trace-records-rocketmq-4.9.8.txt"
    assert text == golden.read_text(), "RocketMQ's encoder made the golden file"
    records, strange = decode_records(text)
    assert strange == 0
    assert [described(one) for one in records] == codec.decoded(text)


class Agrees(TransactionListener):
    def execute_local_transaction(self, message: StoredMessage, arg: object):
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: StoredMessage):
        return LocalTransactionState.UNKNOWN


def test_java_reads_what_clients_write(codec, cluster):
    address = cluster.namesrv_addr
    with TransactionProducer("bank", Agrees(), namesrv_addr=address, msg_trace=1) as producer:
        producer.send(Message("orders", b"x", tag="a\x01b\x02Pub", keys=["größe", "b\x02c"]))
        producer.send(Message("orders", b"x").delayed_by(1))
        producer.send_message_in_transaction(Message("orders", b"bare"))
        until(lambda: producer.metrics().number("trace_records_total", "sent") == 4)
    with PullConsumer(
        "audit", namesrv_addr=address, consume_from_where=FIRST, msg_trace=1
    ) as puller:
        puller.subscribe("orders")
        while not puller.poll(1_000):
            pass
        puller.poll(0)
        until(lambda: puller.metrics().number("trace_records_total", "sent") >= 2)
    with PullConsumer("reader", namesrv_addr=address, consume_from_where=FIRST) as reader:
        reader.subscribe(TRACE_TOPIC)
        bodies: list[bytes] = []
        kinds: set[str] = set()
        while kinds != set(FIELDS):
            bodies += [one.body for one in reader.poll(1_000)]
            text = b"".join(bodies).decode()
            records, strange = decode_records(text)
            kinds = {one.kind for one in records}
    assert strange == 0
    assert [described(one) for one in records] == codec.decoded(text)
