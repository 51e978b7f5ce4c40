"""Clients that ask for much and never read: a producer notices nothing."""

from __future__ import annotations

import itertools
import time

import psutil
import pytest
import zmq
from harness.batches import PRODUCER_ID, PRODUCER_KEY

from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.command import Command, encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.pulling import MAX_PULL_BYTES, PullRequest
from mqmesh.testing.processes import RoleProcess
from mqmesh.units import MIB

CROWD = 20
PULLS = 20
BUDGET_BYTES = 128 * MIB
MOST_S = 2.0
"""A send takes a millisecond; on a slow machine that does much else, some hundred."""


class Producer:
    """Sends one batch at a time, and times it."""

    def __init__(self, wire, client) -> None:
        self._wire = wire
        self._client = client
        self._sequences = itertools.count()

    def send(self, topic: str, body: bytes) -> float:
        """Returns the seconds it took."""
        batch = encode_batch(
            [Message(topic, body)],
            topic=topic,
            queue_id=0,
            producer_id=PRODUCER_ID,
            born_timestamp=1,
            first_sequence=next(self._sequences),
        )
        began = time.monotonic()
        done = []
        self._client.request(
            RequestCode.SEND_MESSAGE,
            done.append,
            batch,
            header=encode_send(30_000, 1, PRODUCER_KEY),
            timeout_ms=30_000,
        )
        self._wire.until(lambda: done, patience_s=30)
        (command,) = done
        assert isinstance(command, Command), command
        assert decode_outcomes(command.header, command.body)[0].code == 0
        return time.monotonic() - began


@pytest.fixture
def broker(tmp_path):
    settings = {
        "listen_port": "0",
        "namesrv_addr": "[]",
        "store_path_root_dir": str(tmp_path / "store"),
        "max_total_pending_bytes": str(BUDGET_BYTES),
    }
    process = RoleProcess("broker", settings, tmp_path / "broker.log")
    yield process
    assert process.running
    process.stop()


@pytest.fixture
def crowd(broker):
    """Connections that ask again and again for all there is, and read nothing."""
    context = zmq.Context()
    pulls = [
        encode_frame(
            RequestCode.PULL_MESSAGE,
            opaque,
            header=encode_header(PullRequest("g", "big", 0, 0, MAX_PULL_BYTES)),
        )
        for opaque in range(PULLS)
    ]

    sockets = []

    def come() -> None:
        for _ in range(CROWD):
            one = context.socket(zmq.DEALER)
            sockets.append(one)
            one.rcvhwm, one.rcvbuf = 1, 4_096
            one.connect(f"tcp://{broker.endpoint}")
            for pull in pulls:
                one.send(pull)

    yield come
    for one in sockets:
        one.close(linger=0)
    context.term()


def test_clients_that_never_read_hold_up_no_producer(wire, broker, crowd):
    client = wire.client(f"tcp://{broker.endpoint}")
    producer = Producer(wire, client)
    for _ in range(24):
        producer.send("big", bytes(MIB))
    process = psutil.Process(broker.pid)
    before = process.memory_info().rss
    took = [producer.send("small", b"x" * 1_000) for _ in range(50)]

    def requests() -> int:
        info = wire.ask(
            client, RequestCode.GET_BROKER_RUNTIME_INFO, RuntimeInfoRequest(), RuntimeInfo
        )
        return Readings(info.metrics)["requests_total"]

    wanted = requests() + CROWD * PULLS
    crowd()
    peak, rounds = 0, 0
    while requests() < wanted + 2 * rounds or rounds < 100:
        took.append(producer.send("small", b"x" * 1_000))
        peak = max(peak, process.memory_info().rss)
        rounds += 1
    assert max(took) < MOST_S
    # What docs/reliability.md says of memory, and what the log's mapped pages add to it.
    assert peak - before < BUDGET_BYTES * 5 // 4 + 64 * MIB
