"""The short way of a synchronous send, and who else may interfere with it."""

from __future__ import annotations

import threading

import pytest
from harness.batches import PRODUCER_KEY
from harness.simulated_cluster import Fault, FaultKind
from harness.waits import make_waits

from mqmesh.errors import ClientClosed, EndpointUnreachable, RequestTimeout
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer import direct_path
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.direct_path import DirectLink
from mqmesh.sdk.producer.send_result import PendingBatch


@pytest.fixture
def path(world):
    producer = world.producer()
    path = DirectLink(producer._engine, BatchCodec(PRODUCER_KEY, None), 0)
    yield path
    path.close(0)


def batch(world, timeout_ms: int = 1_000) -> PendingBatch:
    one = PendingBatch(
        make_waits(),
        MessageQueue("t", "a", 0),
        world.network.clock.monotonic_ms() + timeout_ms,
        bound=True,
        explicit_count=0,
        retries=0,
        wait_store=True,
    )
    one.messages.append(Message("t", b"x"))
    return one


def send(world, path, timeout_ms: int = 1_000):
    now_ms = world.network.clock.monotonic_ms()
    return path.send(batch(world, timeout_ms), world.broker.endpoint, now_ms)


def test_one_thread_at_a_time_is_let_in(path):
    assert path.enter()
    assert not path.enter()
    path.leave()
    assert path.enter()
    path.leave()


def test_an_outcome_or_the_reason_is_returned(world, path):
    assert isinstance(send(world, path), BatchOutcome)
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
    assert isinstance(send(world, path), BatchOutcome)
    second = path._channels["a"]
    assert second is not first
    assert first.closed
    world.broker.move("tcp://127.0.0.1:20911")
    assert isinstance(send(world, path), BatchOutcome)
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
    assert isinstance(send(world, path), BatchOutcome)


def test_whatever_goes_wrong_is_returned_so_that_the_engine_may_try(world, path, monkeypatch):
    def fail(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr(path._engine.transport, "channel", fail)
    assert isinstance(send(world, path), EndpointUnreachable)


def test_closing_waits_for_who_is_inside_and_then_makes_him_give_up(world, path, monkeypatch):
    monkeypatch.setattr(direct_path, "CLOSE_TIMEOUT_S", 10.0)
    assert isinstance(send(world, path), BatchOutcome)
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
    monkeypatch.setattr(direct_path, "CLOSE_TIMEOUT_S", 0.001)
    assert path.enter()
    path.close(0)
    assert "does not give up" in caplog.text
    path.leave()
