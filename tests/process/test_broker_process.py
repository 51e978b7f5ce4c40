"""A broker in a process of its own: killed, stopped, and at rest."""

from __future__ import annotations

import itertools
import time

import psutil
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.stopwatch import Stopwatch

from mqmesh.batch.record_batch import check_stored, decode_messages, encode_batch
from mqmesh.message import Message
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import (
    RoleInfo,
    RuntimeInfo,
    RuntimeInfoRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    PullRequest,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.route import TopicConfig
from mqmesh.testing.processes import RoleProcess
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

SETTINGS = {
    "listen_port": "0",
    "namesrv_addr": "[]",
    "storage.mapped_file_size_commit_log": str(32 * 1024 * 1024),
}


class Client:
    """One connection, one request at a time."""

    def __init__(self, context, process) -> None:
        self.channel = BlockingChannel(context, f"tcp://{process.endpoint}")

    def ask(self, code, header, *body, kind=None):
        data = header if isinstance(header, bytes) else encode_header(header)
        command = self.channel.request(code, *body, header=data, timeout_ms=10_000)
        return decode_header(kind, command.header) if kind else command

    def send(self, number):
        batch = encode_batch(
            [Message("t", b"%d" % number)],
            topic="t",
            queue_id=number % 4,
            producer_id=PRODUCER_ID,
            first_sequence=number,
            born_timestamp=1,
        )
        command = self.ask(RequestCode.SEND_MESSAGE, encode_send(3_000, 1, PRODUCER_KEY), batch)
        return decode_outcomes(command.header, command.body)[0]

    def bodies(self, queue_id):
        command = self.ask(
            RequestCode.PULL_MESSAGE, PullRequest("g", "t", queue_id, 0, max_bytes=16 * 1024 * 1024)
        )
        data, position, found = bytes(command.body), 0, []
        while position < len(data):
            header = check_stored(data, position)
            messages = decode_messages(data, header, position=position)
            found += [int(message.body) for message in messages]
            position += header.total_size
        return found

    def commit(self, queue_id, queue_offset):
        entry = QueueOffsetEntry("t", queue_id, queue_offset)
        self.ask(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", "c", [entry]))

    def committed(self, queue_id):
        request = QueryConsumerOffsetRequest("g", [QueueOffsetEntry("t", queue_id)])
        found = self.ask(RequestCode.QUERY_CONSUMER_OFFSET, request, kind=ConsumerOffsets)
        return found.queues[0].queue_offset

    def put_batches(self):
        request = RuntimeInfoRequest()
        info = self.ask(RequestCode.GET_BROKER_RUNTIME_INFO, request, kind=RuntimeInfo)
        return Readings(info.metrics)["store_put_batches"]


@pytest.fixture
def make(short_tmp_path):
    """Starts brokers on one store, and clients of them."""
    context = sockets.new_context()
    processes, clients = [], []

    def start(**settings):
        process = RoleProcess(
            "broker",
            SETTINGS | {"store_path_root_dir": str(short_tmp_path / "store")} | settings,
            short_tmp_path / "log",
        )
        processes.append(process)
        clients.append(Client(context, process))
        return process, clients[-1]

    yield start
    for client in clients:
        client.channel.close()
    for process in processes:
        if process.running:
            process.kill()
    context.destroy(linger=0)


def test_what_was_acknowledged_outlives_a_kill(make):
    numbers = itertools.count()
    acknowledged = []
    for _ in range(3):
        process, client = make()
        for number in itertools.islice(numbers, 200):
            assert client.send(number).code == 0
            acknowledged.append(number)
        process.kill()
    _, client = make()
    for queue_id in range(4):
        assert client.bodies(queue_id) == [n for n in acknowledged if n % 4 == queue_id]


def test_offsets_are_written_while_the_broker_runs(make):
    process, client = make(flush_consumer_offset_interval_ms="100")
    client.send(0)
    client.commit(0, 0)  # makes the group, which is written in its turn
    config = TopicConfig("other")
    client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(UpdateTopicRequest(config)))
    written = client.put_batches()
    client.commit(0, 1)
    deadline = time.monotonic() + 10
    while client.put_batches() == written:
        assert time.monotonic() < deadline
    process.kill()
    _, client = make()
    assert client.committed(0) == 1


def test_a_stop_is_clean_and_quick_and_keeps_the_last_commit(make):
    process, client = make()
    client.send(0)
    client.commit(0, 1)
    watch = Stopwatch()
    assert process.stop() == 0
    assert watch.seconds < 2
    _, client = make()
    assert client.committed(0) == 1
    assert client.ask(RequestCode.PING, b"", kind=RoleInfo).state == "running"


def test_a_broker_at_rest_is_small_and_quiet(make):
    process, client = make()
    client.send(0)
    broker = psutil.Process(process.pid)
    before = sum(broker.cpu_times()[:2])
    began = time.monotonic()
    # A pull that waits is what an idle broker has most of.
    client.ask(RequestCode.PULL_MESSAGE, PullRequest("g", "t", 1, 0, suspend_timeout_ms=2_000))
    used = (sum(broker.cpu_times()[:2]) - before) / (time.monotonic() - began)
    assert used < 0.05, "goal: 1 %; the clock of the system counts in hundredths"
    assert broker.memory_info().rss < 80 * 1024 * 1024
