"""Channels of callers' own threads, and who else may interfere with them."""

from __future__ import annotations

import threading

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.batch.record_batch import encode_batch
from mqmesh.errors import ClientClosed, EndpointUnreachable, RequestTimeout
from mqmesh.message import Message
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import encode_send
from mqmesh.sdk.client import direct_channels
from mqmesh.sdk.client.direct_channels import DirectChannels
from mqmesh.sdk.client.outbox import OutgoingRequest


@pytest.fixture
def path(world):
    producer = world.producer()
    path = DirectChannels(producer._engine, 0)
    yield path
    path.close(0)


def send(world, path, timeout_ms: int = 1_000):
    data = encode_batch(
        [Message("t", b"x")],
        topic="t",
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=5,
    )
    header = encode_send(timeout_ms, 1, PRODUCER_KEY)
    request = OutgoingRequest(
        RequestCode.SEND_MESSAGE, [data], header, timeout_ms, lambda answer: None
    )
    return path.request("a", world.broker.endpoint, request)


def test_one_thread_at_a_time_is_let_in(path):
    assert path.enter()
    assert not path.enter()
    path.leave()
    assert path.enter()
    path.leave()


def test_an_outcome_or_the_reason_is_returned(world, path):
    assert isinstance(send(world, path), Command)
    world.broker.faults.append(Fault(FaultKind.LOSE))
    began_ms = world.network.clock.monotonic_ms()
    assert isinstance(send(world, path, 300), RequestTimeout)
    assert world.network.clock.monotonic_ms() - began_ms == 300
    world.broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    assert isinstance(send(world, path), EndpointUnreachable)


def test_a_connection_is_kept_until_the_broker_moves_or_the_connection_breaks(world, path):
    send(world, path)
    first = path._channels["a"]
    send(world, path)
    assert path._channels["a"] is first
    path.interrupt("a")
    path.interrupt("unknown")
    assert isinstance(send(world, path), Command)
    second = path._channels["a"]
    assert second is not first
    assert first.closed
    world.broker.move("tcp://127.0.0.1:20911")
    assert isinstance(send(world, path), Command)
    assert path._channels["a"] is not second
    assert second.closed
    assert not path._broken


def test_who_waits_when_the_connection_breaks_may_try_again(world, path, monkeypatch):
    send(world, path)
    serve = world.broker.serve

    def interrupted(command, answer):
        path.interrupt("a")
        raise ClientClosed("as a channel says that was cancelled")

    monkeypatch.setattr(world.broker, "serve", interrupted)
    assert isinstance(send(world, path), EndpointUnreachable)
    monkeypatch.setattr(world.broker, "serve", serve)
    assert isinstance(send(world, path), Command)


def test_whatever_goes_wrong_is_returned_so_that_the_engine_may_try(world, path, monkeypatch):
    def fail(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr(path._engine.transport, "channel", fail)
    assert isinstance(send(world, path), EndpointUnreachable)


def test_closing_waits_for_who_is_inside_and_then_makes_him_give_up(world, path, monkeypatch):
    monkeypatch.setattr(direct_channels, "CLOSE_TIMEOUT_S", 10.0)
    assert isinstance(send(world, path), Command)
    channel = path._channels["a"]
    assert path.enter()
    cancelled = threading.Event()
    monkeypatch.setattr(channel, "cancel", cancelled.set)
    closer = threading.Thread(target=lambda: path.close(0))
    closer.start()
    assert cancelled.wait(10)
    assert not channel.closed, "not under the thread that uses it"
    path.leave()
    closer.join(10)
    assert channel.closed
    assert isinstance(send(world, path), ClientClosed)


def test_a_way_that_is_never_left_does_not_stop_the_closing(world, path, monkeypatch, caplog):
    monkeypatch.setattr(direct_channels, "CLOSE_TIMEOUT_S", 0.001)
    assert path.enter()
    path.close(0)
    assert "does not give up" in caplog.text
    path.leave()
