"""A broker in a process of its own: killed, stopped, and at rest."""

from __future__ import annotations

import time

import psutil
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.stopwatch import Stopwatch

from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.protocol.admin import RoleInfo
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    PullRequest,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
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

    def commit(self, queue_id, queue_offset):
        entry = QueueOffsetEntry("t", queue_id, queue_offset)
        self.ask(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", "c", [entry]))

    def committed(self, queue_id):
        request = QueryConsumerOffsetRequest("g", [QueueOffsetEntry("t", queue_id)])
        found = self.ask(RequestCode.QUERY_CONSUMER_OFFSET, request, kind=ConsumerOffsets)
        return found.queues[0].queue_offset


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
