"""Asynchronous sends that leave at once, from their caller's thread, and have no answer yet."""

from __future__ import annotations

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import ClientClosed, RequestTimeout, SystemBusy
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus


def message(body: str = "x", **fields) -> Message:
    return Message("t", body.encode(), **fields)


@pytest.fixture
def producer(world):
    producer = world.producer(watches=True)
    world.call(lambda: producer.send(message("first"), queue=MessageQueue("t", "a", 0)))
    world.broker.sends.clear()
    return producer


def test_a_message_that_finds_no_other_one_leaves_before_the_loop_turns(world, producer):
    told = []
    future = producer.send_async(message(), told.append)
    assert len(world.broker.sends) == 1
    assert not future.done()
    assert producer._sender.in_flight == 0
    world.run(5)
    assert future.result().status is SendStatus.SEND_OK
    assert told == [future]
    assert producer.metrics().number("sends_total", "t", "SEND_OK") == 2
    assert producer.metrics()["send_latency_ms"].count == 2


def test_what_comes_meanwhile_shares_the_next_request_and_then_no_message_leaves_first(
    world, producer
):
    first = [producer.send_async(message(str(n))) for n in range(10)]
    world.run()
    assert len(world.broker.sends) == 2
    again = [producer.send_async(message(str(n))) for n in range(10)]
    world.run()
    assert len(world.broker.sends) == 3
    assert all(future.exception() is None for future in [*first, *again])
    producer.send_async(message("alone"))
    world.run()
    producer.send_async(message("alone again"))
    assert len(world.broker.sends) == 5, "it is quiet again"


def test_the_order_of_a_queue_holds(world, producer):
    queue = MessageQueue("t", "a", 1)
    world.broker.faults.append(Fault(FaultKind.LATE, 300))
    futures = [producer.send_async(message(str(n)), queue=queue) for n in range(5)]
    world.run(100)
    assert len(world.broker.sends) == 1
    world.run(1_000)
    assert [future.result().queue_offset for future in futures] == list(range(5))
    assert [one.body for one in world.broker.messages("t", 1)] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_refusal_is_retried_by_the_loop(world, producer):
    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR))
    future = producer.send_async(message())
    world.run(1_000)
    assert future.result().status is SendStatus.SEND_OK
    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY))
    future = producer.send_async(message())
    world.run(1_000)
    assert isinstance(future.exception(), SystemBusy)


def test_an_answer_that_does_not_come_ends_with_the_time_of_the_send(world, producer):
    world.broker.faults.append(Fault(FaultKind.LOSE))
    future = producer.send_async(message(), timeout_ms=400)
    world.run(300)
    assert not future.done()
    world.run(300)
    assert isinstance(future.exception(), RequestTimeout)
    later = [producer.send_async(message()), producer.send_async(message(), timeout_ms=100)]
    world.run(1_000)
    assert all(one.exception() is None for one in later)


def test_a_broker_that_dies_behind_the_write_has_the_message_once(world, producer):
    world.broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(message("once"), timeout_ms=5_000)
    world.run(100)
    world.broker.start()
    world.run(5_000)
    assert future.exception() is None
    assert sorted(world.stored()) == [b"first", b"once"]


def test_a_connection_that_breaks_ends_the_wait(world, producer):
    world.broker.faults.append(Fault(FaultKind.LOSE))
    future = producer.send_async(message("once"), timeout_ms=3_000)
    world.run(100)
    world.broker.crash()
    world.run(100)
    assert producer._sender._posted is None
    world.broker.start()
    world.run(2_000)
    assert future.exception() is None
    assert sorted(world.stored()) == [b"first", b"once"]


def test_closing_ends_the_wait(world, producer):
    world.broker.faults.append(Fault(FaultKind.LOSE))
    future = producer.send_async(message())
    producer.close()
    assert isinstance(future.exception(), ClientClosed)


def test_a_broker_without_a_channel_is_sent_to_by_the_loop(world, producer, monkeypatch):
    def fail(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr(producer._engine.transport, "channel", fail)
    future = producer.send_async(message())
    world.run(10)
    assert future.result().status is SendStatus.SEND_OK


def test_an_interrupted_send_leaves_nothing_behind(world, producer, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(producer._sender, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(message())
    world.run(50)
    assert producer._buffer.pending_bytes == 0
    assert producer.send(message()).status is SendStatus.SEND_OK


def test_in_a_callback_a_message_waits_for_the_loop(world, producer):
    futures = []
    producer.send_async(message("1"), lambda _: futures.append(producer.send_async(message("2"))))
    world.run(10)
    assert futures[0].result().status is SendStatus.SEND_OK
