"""RocketMQ's own codec of trace records, in Java, and ours read what the other has written."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.debian_package import leave_out
from harness.maven import maven_jars
from harness.patience import until

from mqmesh.errors import ConfigError
from mqmesh.message import TRACE_TOPIC, Message, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.tracing.trace_records import TraceKind, TraceRecord, decode_records
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.spark.jvm.java import find_java
from mqmesh.testing.processes import ProcessCluster

ARCHIVES = {
    "org/apache/rocketmq/rocketmq-client/4.9.8/rocketmq-client-4.9.8.jar": (
        "242a4d5aab16948dfc6f890f52ebdf65ec498835ef6d3a09fbc345bdb86c6e93"
    ),
    "org/apache/rocketmq/rocketmq-common/4.9.8/rocketmq-common-4.9.8.jar": (
        "f072ea223d6a608bca4eb0c8af9b90cb062045447cb2fcb8acd627b86701883b"
    ),
    "org/apache/rocketmq/rocketmq-logging/4.9.8/rocketmq-logging-4.9.8.jar": (
        "daf7160667b7a6c0a9c74711094f49163e92c57f2adc1764a7612af159ebcf79"
    ),
    "commons-validator/commons-validator/1.7/commons-validator-1.7.jar": (
        "4d74f4ce4fb68b2617edad086df6defdf9338467d2377d2c62e69038e1c4f02f"
    ),
}
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

    def __init__(self, program: Path) -> None:
        try:
            java = find_java().home / "bin" / "java"
        except ConfigError as error:
            leave_out(str(error))
        jars = ":".join(map(str, maven_jars(ARCHIVES)))
        self._command = [str(java), "-Xshare:auto", "--class-path", jars, str(program)]

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
def codec(project_root) -> Codec:
    return Codec(project_root / "tests" / "data" / "TraceRecords.java")


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
