"""Nothing is refused, cut off or set aside silently: C12, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.chaos_scene import wait_until
from harness.checker import check
from harness.history import Degradation, History
from harness.observations import recovery_degradations, refusal_degradation

from mqmesh.batch.record_batch import HEADER_SIZE, encode_batch
from mqmesh.errors import BrokerError
from mqmesh.message import Message
from mqmesh.metrics import Readings
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

BROKER = "broker-a"


@pytest.fixture
def cluster(short_tmp_path) -> Iterator[ProcessCluster]:
    settings = {"auto_create_topic_enable": "false", "max_message_size": "1000"}
    with ProcessCluster(short_tmp_path, broker_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def channel(cluster) -> Iterator[BlockingChannel]:
    """Says to a broker what no producer of ours would say."""
    context = sockets.new_context()
    channel = BlockingChannel(context, f"tcp://{cluster.brokers[BROKER].endpoint}")
    yield channel
    channel.close()
    context.destroy(linger=0)


def log_of(cluster: ProcessCluster) -> str:
    return (cluster.folder / f"{BROKER}.log").read_text()


def metrics_of(cluster: ProcessCluster) -> Readings:
    with AdminClient(cluster.namesrv_addr) as admin:
        return admin.runtime_info()[BROKER]


def judge(*degradations: Degradation) -> None:
    assert all(one.happened for one in degradations), "nothing was provoked"
    report = check(History(degradations=list(degradations)))
    assert report.good, report.text()


def send(channel: BlockingChannel, topic: str, body: bytes = b"x", queue_id: int = 0) -> int:
    """Sends a batch as it is; returns the code of its outcome."""
    batch = encode_batch(
        [Message(topic, body)],
        topic=topic,
        queue_id=queue_id,
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=1,
    )
    answer = channel.request(
        RequestCode.SEND_MESSAGE,
        batch,
        header=encode_send(3_000, 1, PRODUCER_KEY),
        timeout_ms=10_000,
    )
    return decode_outcomes(answer.header, answer.body)[0].code


def ask(channel: BlockingChannel, code: int, header: bytes) -> int:
    """Asks for something; returns the code of the answer."""
    try:
        channel.request(code, header=header, timeout_ms=10_000)
    except BrokerError as error:
        return error.code
    return ResponseCode.SUCCESS


def test_each_refusal_is_an_error_code_a_log_line_and_a_counter(cluster, channel):
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(TopicConfig("small", 1, 1))
        admin.create_topic(TopicConfig("closed", 1, 1, perm=Perm.READ))
    refused = {
        "TOPIC_NOT_EXIST": [send(channel, "nowhere")],
        "NO_PERMISSION": [send(channel, "closed")],
        "MESSAGE_ILLEGAL": [
            send(channel, "small", bytes(2_000_000)),
            ask(channel, RequestCode.PULL_MESSAGE, b"\x91\x01"),
        ],
        "REQUEST_CODE_NOT_SUPPORTED": [ask(channel, 9_999, b"\x90")],
    }
    # The first line comes at once, the others with the next turn, a second later.
    wait_until(
        "lines about all refusals",
        lambda: all(f"with {one}:" in log_of(cluster) for one in refused),
    )
    metrics, log = metrics_of(cluster), log_of(cluster)
    judge(
        *(
            refusal_degradation(name, len(codes), codes.count(ResponseCode[name]), metrics, log)
            for name, codes in refused.items()
        )
    )


def test_a_torn_tail_and_damage_are_told(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(TopicConfig("t", 1, 1))
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        offsets = [producer.send(Message("t", b"%d" % n)).commitlog_offset for n in range(10)]
        end = int(metrics_of(cluster).number("store_max_commitlog_offset"))
    cluster.brokers[BROKER].kill()
    store = cluster.folder / BROKER
    (segment,) = [one for one in sorted(store.rglob("commitlog/0*")) if one.stat().st_size][:1]
    data = segment.read_bytes()
    torn = data[offsets[0] : offsets[1]][: HEADER_SIZE + 3]
    with segment.open("r+b") as file:
        file.seek(end)
        file.write(torn[:40] + b"\xff" * (len(torn) - 40))
        file.seek(offsets[4] + HEADER_SIZE + 8)
        file.write(b"\xff\xff\xff\xff")
    cluster.start_broker()
    cluster.wait_known()
    metrics, log = metrics_of(cluster), log_of(cluster)
    judge(*recovery_degradations(metrics, log))
