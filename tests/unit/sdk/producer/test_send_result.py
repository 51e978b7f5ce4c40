from __future__ import annotations

import threading
import time

import pytest
from harness.waits import finish, make_waits

from mqmesh.errors import BrokerError, RequestTimeout, SystemBusy
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.sdk.producer.lanes import GRACE_MS, PendingBatch
from mqmesh.sdk.producer.send_result import SendFuture, make_result

QUEUE = MessageQueue("t", "a", 3)
OUTCOME = BatchOutcome(0, 1, 0, 100, 4_096, 1_600_000_000_000)


def batch_of(count: int, *, explicit: bool = False, deadline_ms: int = 10**12) -> PendingBatch:
    batch = PendingBatch(
        *make_waits(),
        QUEUE,
        deadline_ms,
        bound=False,
        explicit_count=count if explicit else 0,
        retries=2,
        wait_store=True,
    )
    batch.messages = [Message("t", b"x")] * count
    batch.producer_id, batch.first_sequence = 0xAB, 7
    return batch


def test_each_message_has_a_result_of_its_own() -> None:
    batch = batch_of(3)
    futures = [SendFuture(batch, index) for index in range(3)]
    assert not any(future.done() for future in futures)
    assert futures[0].exception() is None
    finish(batch, OUTCOME)
    results = [future.result() for future in futures]
    assert [one.queue_offset for one in results] == [100, 101, 102]
    assert [one.sequence for one in results] == [7, 8, 9]
    assert {one.message_count for one in results} == {1}
    assert results[2].message_id == f"{0xAB:016X}{9:016X}"
    assert results[2].message_ids == [results[2].message_id]
    assert results[0].status is SendStatus.FLUSH_DISK_TIMEOUT
    assert (results[0].message_queue, results[0].commitlog_offset) == (QUEUE, 4_096)


def test_an_explicit_batch_has_one_result() -> None:
    batch = batch_of(3, explicit=True)
    finish(batch, OUTCOME)
    result = make_result(batch, 0)
    assert result.message_count == 3
    assert result.message_ids == [f"{0xAB:016X}{n:016X}" for n in (7, 8, 9)]


@pytest.mark.parametrize("status", list(SendStatus))
def test_every_status_is_known(status: SendStatus) -> None:
    batch = batch_of(1)
    finish(batch, BatchOutcome(0, int(status)))
    assert make_result(batch, 0).status is status


def test_an_outcome_is_set_once() -> None:
    batch = batch_of(1)
    told: list[SendFuture] = []
    future = SendFuture(batch, 0)
    future.add_done_callback(told.append)
    finish(batch, SystemBusy("slow down", retry_after_ms=5))
    finish(batch, OUTCOME)
    assert told == [future]
    with pytest.raises(SystemBusy) as caught:
        future.result()
    assert caught.value.retry_after_ms == 5
    assert future.exception() is caught.value


def test_an_error_that_is_raised_often_does_not_grow() -> None:
    batch = batch_of(2)
    error = BrokerError("x")
    finish(batch, error)
    depths = set()
    for _ in range(5):
        with pytest.raises(BrokerError):
            SendFuture(batch, 1).result()
        depth, traceback = 0, error.__traceback__
        while traceback is not None:
            depth, traceback = depth + 1, traceback.tb_next
        depths.add(depth)
    assert len(depths) == 1


def test_callbacks_come_in_order_at_once_when_it_is_done_and_whatever_they_raise() -> None:
    batch = batch_of(3)
    futures = [SendFuture(batch, index) for index in range(3)]
    told: list[object] = []

    def bad(future: SendFuture) -> None:
        told.append("bad")
        raise SystemExit

    futures[0].add_done_callback(told.append)
    futures[1].add_done_callback(bad)
    futures[2].add_done_callback(told.append)
    finish(batch, OUTCOME)
    assert told == [futures[0], "bad", futures[2]]
    futures[1].add_done_callback(told.append)
    assert told[-1] is futures[1]
    assert batch.callbacks == [], "nothing holds them any longer"


def test_a_callback_may_look_at_other_futures_of_the_same_batch() -> None:
    batch = batch_of(2)
    first, second = SendFuture(batch, 0), SendFuture(batch, 1)
    found: list[int] = []

    def look(_: SendFuture) -> None:
        second.add_done_callback(lambda other: found.append(other.result().queue_offset))

    first.add_done_callback(look)
    finish(batch, OUTCOME)
    assert found == [101]


def test_waiting_ends_with_the_outcome() -> None:
    batch = batch_of(1)
    future = SendFuture(batch, 0)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(future.result(10).queue_offset))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    finish(batch, OUTCOME)
    for thread in threads:
        thread.join(10)
    assert found == [100] * 4


def test_waiting_ends_after_its_time() -> None:
    future = SendFuture(batch_of(1), 0)
    with pytest.raises(RequestTimeout, match="unknown"):
        future.result(0)
    with pytest.raises(RequestTimeout):
        future.result(0.001)


def test_waiting_without_a_time_ends_with_the_sends_own() -> None:
    # As in a callback that waits for another send: nobody can bring it the outcome.
    late = time.monotonic_ns() // 1_000_000 - GRACE_MS
    with pytest.raises(RequestTimeout):
        SendFuture(batch_of(1, deadline_ms=late), 0).result()
