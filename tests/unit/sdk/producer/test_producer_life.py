"""Callbacks, start and end of a producer."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MessageIllegal,
    NoRoute,
    RequestTimeout,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.producer.producer import Producer


def message(body: bytes | str = b"x", **fields) -> Message:
    return Message("t", body.encode() if isinstance(body, str) else body, **fields)


def queue(number: int = 0, broker: str = "a") -> MessageQueue:
    return MessageQueue("t", broker, number)


# ---- Callbacks ----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_fails_hurts_nobody_else(world, failure, caplog):
    producer = world.producer()
    told = []

    def bad(future):
        raise failure("in a callback")

    futures = [
        producer.send_async(message(str(n)), bad if n % 2 else told.append) for n in range(10)
    ]
    world.run()
    assert len(told) == 5
    assert all(future.result() for future in futures)
    assert "a callback of a send failed" in caplog.text
    assert world.call(lambda: producer.send(message("on"))).status is SendStatus.SEND_OK


def test_a_callback_may_send_but_not_wait(world):
    producer = world.producer()
    found = []

    def again(future):
        found.append(producer.send_async(message("again")))
        try:
            producer.send(message("never"))
        except InvalidArgument as error:
            found.append(error)
        try:
            producer.send_async(Message("unknown", b"x"))
        except NoRoute as error:
            found.append(error)
        future.add_done_callback(found.append)

    future = producer.send_async(message("first"), again)
    world.run()
    assert found[0].result().status is SendStatus.SEND_OK
    assert isinstance(found[1], InvalidArgument)
    assert isinstance(found[2], NoRoute)
    assert found[3] is future
    assert sorted(world.stored()) == [b"again", b"first"]


def test_a_callback_that_waits_for_another_send_gets_an_error_and_no_deadlock(world):
    producer = world.producer()
    second = []
    found = []

    def wait(_):
        try:
            second[0].result(0)
        except RequestTimeout as error:
            found.append(error)

    world.broker.faults.append(Fault(FaultKind.NONE))
    producer.send_async(message("1"), wait, queue=queue(0))
    world.broker.faults.append(Fault(FaultKind.LATE, 100))
    second.append(producer.send_async(message("2"), queue=queue(0)))
    producer.send_async(message("3"), queue=queue(1))
    world.run(500)
    assert second[0].result().status is SendStatus.SEND_OK


# ---- Life ---------------------------------------------------------------------------------


def test_nothing_can_be_sent_before_start_or_after_close(world):
    producer = Producer(
        "g", namesrv_addr=world.cluster.namesrv_addr, transport=world.network.transport()
    )
    calls = [
        lambda: producer.send(message()),
        lambda: producer.send_async(message()),
        lambda: producer.send_oneway(message()),
        lambda: producer.send_batch([message()]),
        lambda: producer.send_batch_async([message()]),
        lambda: producer.fetch_publish_queues("t"),
        lambda: producer.can_send("t"),
        lambda: producer.can_send("t", wait=True),
    ]
    for call in calls:
        with pytest.raises(ClientClosed, match="start"):
            call()
    producer.start()
    producer.start()
    producer.close()
    producer.close()
    for call in calls:
        with pytest.raises(ClientClosed, match="closed"):
            call()
    with pytest.raises(ClientClosed):
        producer.start()


def test_a_producer_that_was_never_started_can_be_closed(world):
    producer = Producer(
        "g", namesrv_addr=world.cluster.namesrv_addr, transport=world.network.transport()
    )
    producer.close()
    producer.close()


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault(FaultKind.LOSE)],
        [Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_ERROR)],
        [Fault(FaultKind.REFUSE, ResponseCode.SERVICE_NOT_AVAILABLE)],
        [Fault(FaultKind.REFUSE, ResponseCode.MESSAGE_ILLEGAL)],
        [Fault(FaultKind.CRASH_AFTER)],
        [Fault(FaultKind.LATE, 1_000)],
    ],
    ids=lambda faults: faults[0].kind.name if faults else "none",
)
@pytest.mark.parametrize("after_ms", [0, 1, 2, 3, 50, 150])
def test_closing_ends_every_send(world, faults, after_ms):
    producer = world.producer()
    told = []
    world.broker.faults.extend(faults)
    futures = [producer.send_async(message(), told.append, queue=queue(n % 4)) for n in range(8)]
    futures.append(producer.send_batch_async([message()] * 3, told.append))
    world.run(after_ms)
    futures.append(producer.send_async(message("last"), told.append))
    producer.close()
    assert all(future.done() for future in futures)
    assert sorted(map(id, told)) == sorted(map(id, futures))
    assert {type(future.exception()) for future in futures} <= {
        type(None),
        ClientClosed,
        MessageIllegal,
    }


def test_close_waits_for_what_is_under_way(world):
    producer = world.producer(close_timeout_ms=10_000)
    future = producer.send_async(message())
    closer = threading.Thread(target=producer.close)
    closer.start()
    while closer.is_alive():
        world.run(1)
        closer.join(0.001)
    assert future.result().status is SendStatus.SEND_OK


def test_a_callback_may_close_the_producer(world):
    producer = world.producer()
    told = []

    def close(future):
        told.append(future)
        producer.close()

    first = producer.send_async(message("1"), close, queue=queue(0))
    second = producer.send_async(message("2"), told.append, queue=queue(1))
    third = producer.send_batch_async([message("3")], told.append, queue=queue(0))
    world.run()
    assert first.result().status is SendStatus.SEND_OK
    assert all(one.done() for one in (first, second, third))
    assert len(told) == 3
    with pytest.raises(ClientClosed):
        producer.send_async(message())


def test_the_death_of_the_engine_ends_every_send(world, monkeypatch, caplog):
    producer = world.producer()
    futures = [producer.send_async(message(str(n))) for n in range(5)]
    world.run(0)

    def die(_):
        raise MemoryError

    engine = producer._engine
    monkeypatch.setattr(engine.loop, "tick", die)
    engine._thread.join()
    assert {type(future.exception()) for future in futures} == {ClientClosed}
    with pytest.raises(ClientClosed, match="died"):
        producer.send_async(message())
    with pytest.raises(ClientClosed, match="died"):
        producer.send(message())
    assert "died" in caplog.text


def test_a_fork_closes_the_producer_in_the_child(world):
    producer = world.producer()
    producer._forked()
    with pytest.raises(ClientClosed, match="fork"):
        producer.send_async(message())
    producer.close()
    producer._state = "running"  # back in the parent


def test_a_producer_that_is_started_after_a_fork_has_a_key_of_its_own(world):
    producer = Producer(
        "g",
        namesrv_addr=world.cluster.namesrv_addr,
        transport=world.network.transport(),
        close_timeout_ms=1,
    )
    world.producers.append(producer)
    before = producer._codec.key
    producer._forked()
    producer.start()
    codec = producer._codec
    assert codec.key != before
    assert codec.producer_id != producer_id_of(before)


def test_ctrl_c_in_a_synchronous_send_leaves_the_queue_usable(world, monkeypatch):
    producer = world.producer()
    world.call(lambda: producer.send(message("0"), queue=queue()))
    waiting = []

    def interrupt(command, answer):
        waiting.append(producer.send_async(message("2"), queue=queue()))
        raise KeyboardInterrupt

    monkeypatch.setattr(world.broker, "serve", interrupt)
    with pytest.raises(KeyboardInterrupt):
        producer.send(message("1"), queue=queue())
    monkeypatch.undo()
    world.run()
    assert waiting[0].result().queue_offset == 1
    assert producer.send(message("3"), queue=queue()).queue_offset == 2


class Strike:
    """Ctrl-C at one of the calls that the producer's modules make; only there Python looks for it.

    Args:
        at: Number of the call, from 0.
    """

    MODULES = ("mqmesh/sdk/producer/", "mqmesh/sdk/client/outbox.py")

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __enter__(self):
        sys.setprofile(self.look)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    def look(self, frame, event, arg) -> None:
        if event not in ("call", "c_return") or not self._is_ours(frame):
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt

    def _is_ours(self, frame) -> bool:
        return any(one in frame.f_code.co_filename for one in self.MODULES)


def test_ctrl_c_at_any_call_of_a_synchronous_send_leaves_the_producer_whole(world, monkeypatch):
    producer = world.producer()
    world.call(lambda: producer.send(message("0"), queue=queue()))
    serve = world.broker.serve
    behind = []

    def overtake(command, answer):
        sys.setprofile(None)
        monkeypatch.setattr(world.broker, "serve", serve)
        behind.append(producer.send_async(message("behind"), queue=queue()))
        serve(command, answer)
        sys.setprofile(strike.look)

    for at in range(1_000):
        behind.clear()
        monkeypatch.setattr(world.broker, "serve", overtake)
        strike = Strike(at)
        with strike, contextlib.suppress(KeyboardInterrupt):
            producer.send(message("1"), queue=queue())
        monkeypatch.setattr(world.broker, "serve", serve)
        world.run(50)
        assert producer._buffer.pending_bytes == 0, strike.where
        assert all(one.done() and one.result() for one in behind), strike.where
        assert producer.send(message("2"), queue=queue()).status is SendStatus.SEND_OK, strike.where
        if not strike.where:
            break
    assert 20 < at < 999


def test_ctrl_c_at_any_call_of_an_asynchronous_send_leaves_the_producer_whole(world):
    producer = world.producer()
    for at in range(1_000):
        with Strike(at) as strike, contextlib.suppress(KeyboardInterrupt):
            producer.send_async(message("1"))
        future = producer.send_async(message("2"))
        world.run(50)
        assert future.done() and future.result(), strike.where
        assert producer._buffer.pending_bytes == 0, strike.where
        if not strike.where:
            break
    assert 10 < at < 999


def test_a_lone_send_that_comes_back_to_a_closed_buffer_is_ended(world, monkeypatch):
    """No connection, and meanwhile the client's thread has died and ended all it knew of."""
    producer = world.producer()

    def die(broker_name: str) -> None:
        producer._sender.end_all(ClientClosed("dead"), "g")

    monkeypatch.setattr(producer._engine.brokers, "live_endpoint", die)
    with pytest.raises(ClientClosed):
        producer.send(message("1"))
    assert producer._buffer.pending_bytes == 0


def test_what_waits_behind_a_failed_direct_send_is_sent(world, monkeypatch):
    producer = world.producer()
    world.call(lambda: producer.send(message("0"), queue=queue()))
    behind = []
    serve = world.broker.serve

    def overtake(command, answer):
        behind.append(producer.send_async(message("2"), queue=queue()))
        monkeypatch.setattr(world.broker, "serve", serve)
        serve(command, answer)

    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY))
    monkeypatch.setattr(world.broker, "serve", overtake)
    assert isinstance(world.call(lambda: producer.send(message("1"), queue=queue())), SystemBusy)
    world.run(100)
    assert behind[0].result().queue_offset == 1


def test_options_are_checked(world):
    for options in (
        {"send_msg_timeout_ms": 0},
        {"unknown": 1},
        {"batch_messages": 10**9},
        {"retry_times_when_send_failed": -1},
    ):
        with pytest.raises(InvalidArgument):
            Producer("g", **options)
    with pytest.raises(InvalidArgument):
        Producer("a b")
    with pytest.raises(InvalidArgument):
        Producer("g", namesrv_addr="nonsense")


def test_a_deleted_topic_is_told(world):
    producer = world.producer()
    world.run()
    del world.broker.topics["t"]
    future = producer.send_async(message())
    world.run(1_000)
    assert isinstance(future.exception(), TopicNotFound)


def test_a_request_of_one_millisecond_times_out_and_is_no_illegal_one(world, monkeypatch):
    clock, ticks = world.network.clock, []

    def monotonic_ns() -> int:
        if ticks:
            clock.advance(1)  # a millisecond ends between any two looks
        return clock.monotonic_ms() * 1_000_000

    monkeypatch.setattr(clock, "monotonic_ns", monotonic_ns)
    producer = world.producer()
    ticks.append(True)
    future = producer.request_async(message(), timeout_ms=1)
    ticks.clear()
    world.run(2_000)
    assert isinstance(future.exception(0), RequestTimeout)
