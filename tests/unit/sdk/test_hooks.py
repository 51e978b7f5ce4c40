"""Hooks see each batch once, before and after; what they do wrong costs no message."""

from __future__ import annotations

import asyncio
import logging

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.errors import InvalidArgument, MessageIllegal
from mqmesh.message import BatchInfo, Message, MessageQueue, StoredMessage
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult, hooked, hooked_coroutine
from mqmesh.sdk.hooks import MAX_HOOKS, ConsumeContext, Hooks, SendContext, make_hook_calls
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

PROPERTY = {"trace": "1"}
AT = TimestampMs(0)
INFO = BatchInfo("t", 2, "a", QueueOffset(0), CommitLogOffset(0), 100, AT, AT, "h", "h", 1, 1, 0)


class Seen(Hooks):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.before: list[SendContext] = []
        self.after: list[SendContext] = []
        self.consumed: list[tuple[str, ConsumeContext]] = []

    def before_send(self, batch: SendContext) -> None:
        assert (batch.status, batch.error, batch.message_ids) == (None, None, [])
        batch.state[self] = len(self.before)
        self.before.append(batch)
        batch.add_properties(PROPERTY)

    def after_send(self, batch: SendContext) -> None:
        assert self.before[batch.state[self]] is batch
        self.after.append(batch)

    def before_consume(self, batch: ConsumeContext) -> None:
        self.consumed.append(("before", batch))

    def after_consume(self, batch: ConsumeContext) -> None:
        self.consumed.append(("after", batch))


class Broken(Hooks):
    def before_send(self, batch: SendContext) -> None:
        raise RuntimeError("before")

    def after_send(self, batch: SendContext) -> None:
        raise SystemExit("after")

    before_consume = before_send  # type: ignore[assignment]
    after_consume = after_send  # type: ignore[assignment]


def message(body: bytes = b"x", **fields) -> Message:
    return Message("t", body, **fields)


# ---- Sends ----------------------------------------------------------------------------------


def check_stored(world, seen: Seen, count: int, batches: int = 1) -> None:
    stored = world.cluster.messages("t")
    assert len(stored) == count
    assert all(one.property("trace") == "1" for one in stored)
    assert seen.after == seen.before
    assert len(seen.after) == batches
    told = [(ident, one.queue) for one in seen.after for ident in one.message_ids]
    assert sorted(told) == sorted((one.message_id, one.message_queue) for one in stored)
    assert all((one.status, one.error) == (SendStatus.SEND_OK, None) for one in seen.after)


def test_a_batch_that_grew_is_seen_once(world):
    seen = Seen()
    producer = world.producer(hooks=[seen])
    own = {"mine": "2"}
    sent = [message(b"%d" % n, properties=own) for n in range(5)]
    for one in sent:
        producer.send_async(one)
    world.run()
    check_stored(world, seen, 5)
    (batch,) = seen.after
    assert (batch.group, batch.topic, batch.body_bytes, batch.is_half) == ("g", "t", 5, False)
    assert own == {"mine": "2"}
    assert all(one.properties is own for one in sent), "what belongs to the sender stays as it is"
    assert world.cluster.messages("t")[0].property("mine") == "2"


def test_a_send_past_the_buffer_is_seen_before_it_returns(world):
    seen = Seen()
    producer = world.producer(hooks=[seen])
    result = world.call(lambda: producer.send(message()))
    check_stored(world, seen, 1)
    assert seen.after[0].message_ids == [result.message_id]
    assert seen.after[0].queue_offset == result.queue_offset


def test_an_explicit_batch_is_seen_where_it_is_made(world):
    seen = Seen()
    producer = world.producer(hooks=[seen])
    told = []
    producer.send_batch_async([message(b"1"), message(b"2")], told.append)
    assert [one.body for one in seen.before[0].messages] == [b"1", b"2"]
    assert seen.before[0].queue is None
    world.run()
    check_stored(world, seen, 2)
    assert len(told) == 1


def test_an_explicit_batch_that_cannot_be_sent_is_told(world):
    seen = Seen()
    producer = world.producer(hooks=[seen])
    with pytest.raises(InvalidArgument) as refused:
        producer.send_batch_async([message()], queue=MessageQueue("t", "nowhere", 0))
    assert seen.after == seen.before
    assert seen.after[0].error is refused.value
    with pytest.raises(InvalidArgument):
        producer.send_batch_async([message(b"")])
    assert len(seen.before) == 1, "what is illegal is no batch"


def test_a_batch_that_is_sent_again_is_seen_once(world):
    seen = Seen()
    producer = world.producer(hooks=[seen])
    world.broker.faults.append(Fault(FaultKind.CRASH_AFTER))
    future = producer.send_async(message())
    world.run(50)
    world.broker.start()
    world.run(500)
    assert len(world.broker.sends) == 2
    check_stored(world, seen, 1)
    assert seen.after[0].message_ids == [future.result().message_id]


def test_a_failed_send_has_an_error(world):
    seen = Seen()
    producer = world.producer(hooks=[seen], retry_times_when_send_async_failed=0)
    world.broker.faults.append(Fault(FaultKind.REFUSE, ResponseCode.MESSAGE_ILLEGAL))
    future = producer.send_async(message())
    world.run(1_000)
    assert isinstance(future.exception(), MessageIllegal)
    (batch,) = seen.after
    assert isinstance(batch.error, MessageIllegal)
    assert (batch.status, batch.queue_offset, batch.message_ids) == (None, -1, [])


def test_what_hooks_raise_is_told_once_and_counted_and_costs_nothing(world, caplog):
    seen = Seen()
    producer = world.producer(hooks=[Broken(), seen])
    for number in range(3):
        producer.send_async(message(b"%d" % number))
        world.run()
    check_stored(world, seen, 3, batches=3)
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert [text.partition(" ")[0] for text in told] == ["Broken.before_send", "Broken.after_send"]
    assert producer.metrics().number("hook_failures_total") == 2 * 3


@pytest.mark.parametrize(
    "properties", [{"TTL": "5"}, {"": "x"}, {"a": 1}, {"a": "b" * 40_000}, {"a": "\ud800"}]
)
def test_properties_that_are_illegal_are_not_added(world, properties):
    raised = []

    class Adds(Hooks):
        def before_send(self, batch: SendContext) -> None:
            try:
                batch.add_properties(properties)
            except InvalidArgument as error:
                raised.append(error)

    producer = world.producer(hooks=[Adds()])
    producer.send_async(message())
    world.run()
    assert len(raised) == 1
    assert [one.properties for one in world.cluster.messages("t")] == [None]


def test_one_message_of_a_batch_can_be_given_properties(world):
    class Numbers(Hooks):
        def before_send(self, batch: SendContext) -> None:
            for index in range(len(batch.messages)):
                batch.add_properties({"number": str(index)}, index)

    producer = world.producer(hooks=[Numbers()])
    producer.send_batch_async([message(b"0"), message(b"1")])
    world.run()
    stored = world.cluster.messages("t")
    assert [(one.body, one.property("number")) for one in stored] == [(b"0", "0"), (b"1", "1")]


def test_without_hooks_nobody_is_asked():
    assert make_hook_calls([], "g") is None


@pytest.mark.parametrize("hooks", [Seen(), [object()], "hooks", [Hooks()] * (MAX_HOOKS + 1)])
def test_what_is_no_list_of_hooks_is_refused(hooks):
    with pytest.raises(InvalidArgument, match="hook"):
        make_hook_calls(hooks, "g")


# ---- Listeners ------------------------------------------------------------------------------


def consume(listener, *, is_async: bool, hooks: Hooks) -> object:
    """Calls a listener with one message; what it returned or raised."""
    calls = make_hook_calls([hooks], "g")
    assert calls is not None
    messages = [StoredMessage("t", b"x", queue_offset=QueueOffset(7), batch=INFO)]
    try:
        if is_async:

            async def coroutine(given):
                return listener(given)

            return asyncio.run(hooked_coroutine(coroutine, calls, lambda: 77)(messages))
        return hooked(listener, calls, lambda: 77)(messages)
    except BaseException as error:
        return error


def fail(messages):
    raise ValueError("no")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("listener", "again", "kind"),
    [
        (lambda _: None, False, type(None)),
        (lambda _: ConsumeResult.RECONSUME_LATER, True, type(None)),
        (lambda _: "done", False, type(None)),
        (fail, True, ValueError),
    ],
)
def test_a_call_is_seen_before_and_after(is_async, listener, again, kind):
    seen = Seen()
    consume(listener, is_async=is_async, hooks=seen)
    (before, batch), (after, same) = seen.consumed
    assert (before, after) == ("before", "after")
    assert same is batch
    assert (batch.group, batch.began_ms, len(batch.messages)) == ("g", 77, 1)
    assert batch.again is again
    assert isinstance(batch.error, kind)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_broken_hook_changes_nothing_of_a_call(is_async):
    later = ConsumeResult.RECONSUME_LATER
    assert consume(lambda _: later, is_async=is_async, hooks=Broken()) is later
    assert isinstance(consume(fail, is_async=is_async, hooks=Broken()), ValueError)
