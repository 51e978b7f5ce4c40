"""Requests that wait for replies, without any network."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    ClientNotOnline,
    EndpointUnreachable,
    InvalidArgument,
    MessageIllegal,
    NoRoute,
    QueueFull,
    RequestTimeout,
)
from mqmesh.message import BatchInfo, Message, MessageQueue, StoredMessage
from mqmesh.protocol.command import decode_frame, decode_header, encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replies import AcknowledgeReply, PushReply, SendReplyRequest, SendReplyResponse
from mqmesh.sdk.client.outbox import WATCH_MS
from mqmesh.sdk.producer.replies import ReplySender, is_request, make_reply, time_to_live_ms
from mqmesh.sdk.producer.requests import REMEMBERED_REPLIES, Requests
from mqmesh.testing.clock import ManualClock
from mqmesh.units import CommitLogOffset, QueueOffset, TimestampMs

MIB = 1 << 20
MANY = 10**12


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """Timers that run when the clock is moved."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers: list[tuple[int, Timer, object]] = []

    def call_later(self, delay_ms, callback):
        timer = Timer()
        self.timers.append((self.clock.monotonic_ms() + delay_ms, timer, callback))
        return timer

    @property
    def planned(self) -> int:
        return sum(not timer.cancelled for _, timer, _ in self.timers)

    def run(self, duration_ms: int) -> None:
        end_ms = self.clock.monotonic_ms() + duration_ms
        while True:
            due = [one for one in self.timers if one[0] <= end_ms and not one[1].cancelled]
            if not due:
                break
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.clock.advance(max(first[0] - self.clock.monotonic_ms(), 0))
            first[2]()
        self.clock.advance(end_ms - self.clock.monotonic_ms())


class FakeRoutes:
    def __init__(self) -> None:
        self.brokers = ["a", "b"]

    def address(self, name):
        return name if name in self.brokers else None

    def publish_queues(self, topic):
        return tuple(MessageQueue(topic, name, 0) for name in self.brokers)


class FakeEngine:
    """Keeps what it is asked; a test answers."""

    client_id = "me"

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.brokers = self.finder = self
        self.transport = SimpleNamespace(random=random.Random(7))
        self.routes = FakeRoutes()
        self.away: set[str] = set()
        self.closed = False
        self.acknowledged: list[AcknowledgeReply] = []
        self.asked: list[tuple[str, SendReplyRequest, bytes, object]] = []

    def post(self, callback):
        if self.closed:
            raise ClientClosed("closed")
        callback()

    def connection(self, name):
        if name in self.away:
            raise EndpointUnreachable(name)
        return self

    def oneway(self, code, *, header):
        assert code == RequestCode.ACKNOWLEDGE_REPLY
        self.acknowledged.append(decode_header(AcknowledgeReply, header))

    def find(self, topic, on_done):
        self.routes.brokers = ["a", "b"]
        on_done(None)

    def may_come(self, name):
        return name not in self.away

    def is_connected(self, name):
        return name not in self.away

    def request(self, name, code, on_done, body, *, header, timeout_ms):
        assert code == RequestCode.SEND_REPLY_MESSAGE
        self.asked.append((name, decode_header(SendReplyRequest, header), body, on_done))

    def answer(self, outcome) -> str:
        name, _, _, on_done = self.asked.pop(0)
        if isinstance(outcome, bool):
            frame = encode_frame(0, 1, header=encode_header(SendReplyResponse(outcome)))
            outcome = decode_frame(frame)
        on_done(outcome)
        return name


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def requests(engine):
    return Requests(engine, 3)


def push(requests, correlation_id, body=b"reply", attempt_id=1, token=1):
    data = msgspec.msgpack.encode(Message("t", body))
    header = encode_header(PushReply(token, correlation_id, attempt_id))
    requests.on_push("a", decode_frame(encode_frame(326, 0, data, header=header)))


# ---- Asking ---------------------------------------------------------------------------------


def test_a_request_says_who_waits_and_how_long(requests):
    message = Message("t", b"q", properties={"own": "1"})
    asking, correlation_id, _ = requests.open(message, 500)
    assert asking.properties == {
        "own": "1",
        "CORRELATION_ID": correlation_id,
        "REPLY_TO_CLIENT": "me",
        "TTL": "500",
    }
    assert message.properties == {"own": "1"}, "the caller's message stays as it was"
    assert is_request(asking)
    assert not is_request(message)


def test_the_reply_ends_the_wait_and_is_acknowledged(requests, engine):
    _, correlation_id, future = requests.open(Message("t", b"q"), 500)
    push(requests, correlation_id, token=7)
    assert future.result(0).body == b"reply"
    assert engine.acknowledged == [AcknowledgeReply(7, True)]
    assert len(requests) == 0


def test_without_a_reply_the_time_runs_out(requests, engine):
    _, _, first = requests.open(Message("t", b"q"), 500)
    _, _, second = requests.open(Message("t", b"q"), 300)
    engine.loop.run(299)
    assert not second.done()
    engine.loop.run(100)
    with pytest.raises(RequestTimeout, match="300 ms"):
        second.result(0)
    assert not first.done()
    engine.loop.run(200)
    assert isinstance(first.exception(0), RequestTimeout)
    assert engine.loop.planned == 0, "nothing is looked for any more"


def test_a_late_reply_is_dropped_counted_and_told(requests, engine):
    _, correlation_id, _ = requests.open(Message("t", b"q"), 500)
    engine.loop.run(600)
    push(requests, correlation_id)
    assert requests.late_replies == 1
    assert engine.acknowledged == [AcknowledgeReply(1, False)]


def test_a_reply_pushed_again_counts_as_taken_and_a_second_reply_does_not(requests, engine):
    _, correlation_id, _ = requests.open(Message("t", b"q"), 500)
    push(requests, correlation_id, attempt_id=1)
    push(requests, correlation_id, attempt_id=1)
    push(requests, correlation_id, attempt_id=2)
    assert [one.taken for one in engine.acknowledged] == [True, True, False]
    assert requests.late_replies == 1


def test_what_is_remembered_is_bounded(engine):
    requests = Requests(engine, 10)
    for _ in range(REMEMBERED_REPLIES + 10):
        _, correlation_id, _ = requests.open(Message("t", b"q"), 500)
        push(requests, correlation_id)
    assert len(requests._taken) == REMEMBERED_REPLIES


def test_the_table_is_bounded_and_a_cancelled_request_makes_room(requests):
    futures = [requests.open(Message("t", b"q"), 500)[2] for _ in range(3)]
    with pytest.raises(QueueFull, match="max_pending_requests"):
        requests.open(Message("t", b"q"), 500)
    assert futures[0].cancel()
    requests.open(Message("t", b"q"), 500)


def test_a_request_that_could_not_be_sent_ends_at_once(requests):
    _, correlation_id, future = requests.open(Message("t", b"q"), 500)
    requests.fail(correlation_id, NoRoute("nowhere"))
    assert isinstance(future.exception(0), NoRoute)
    requests.fail(correlation_id, NoRoute("again"))


def test_all_end_when_the_client_is_closed(requests, engine):
    future = requests.open(Message("t", b"q"), 500)[2]
    requests.end_all(ClientClosed("closed"))
    assert isinstance(future.exception(0), ClientClosed)
    engine.loop.run(600)
    engine.closed = True
    with pytest.raises(ClientClosed):
        requests.open(Message("t", b"q"), 500)
    assert len(requests) == 0


def test_no_one_sets_the_properties_of_a_request_by_hand(requests):
    with pytest.raises(InvalidArgument, match="CORRELATION_ID"):
        requests.open(Message("t", b"q", properties={"CORRELATION_ID": "1"}), 500)
    with pytest.raises(InvalidArgument, match="Message"):
        requests.open(b"q", 500)
    with pytest.raises(InvalidArgument, match="properties"):
        requests.open(Message("t", b"q", properties=[1]), 500)


def test_a_push_that_is_none_is_ignored(requests, engine):
    requests.on_push("a", decode_frame(encode_frame(326, 0, b"\xc1", header=b"\x91\x01")))
    assert engine.acknowledged == []


def test_an_acknowledgement_that_cannot_be_sent_does_no_harm(requests, engine):
    _, correlation_id, future = requests.open(Message("t", b"q"), 500)
    engine.away = {"a"}
    push(requests, correlation_id)
    assert future.result(0).body == b"reply"


# ---- Replying -------------------------------------------------------------------------------


def asked(ttl: str = "500") -> Message:
    properties = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": "asker", "TTL": ttl}
    return Message("t", b"q", properties=properties)


def consumed(broker_name: str) -> StoredMessage:
    request = asked()
    one = StoredMessage(request.topic, request.body, properties=request.properties)
    offsets, times = (QueueOffset(0), CommitLogOffset(0), 0), (TimestampMs(0), TimestampMs(0))
    one.batch = BatchInfo("t", 0, broker_name, *offsets, *times, "", "", 0, 0, 0)
    return one


def test_a_reply_names_its_request():
    reply = make_reply(asked(), b"r", max_message_size=10, tag="T", properties={"own": "1"})
    assert reply == Message("t", b"r", "T", properties={"own": "1", "CORRELATION_ID": "c1"})


def test_only_requests_are_replied_to_and_only_with_legal_replies():
    with pytest.raises(InvalidArgument, match="is_request"):
        make_reply(Message("t", b"q"), b"r", max_message_size=10)
    with pytest.raises(InvalidArgument, match="is_request"):
        make_reply(b"t", b"r", max_message_size=10)
    with pytest.raises(InvalidArgument, match="max_message_size"):
        make_reply(asked(), b"x" * 11, max_message_size=10)


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("500", 500), ("0", 0), ("", None), ("-1", None), ("9" * 10, None), ("²", None)],
)
def test_the_time_that_a_request_lives(text, time_ms):
    assert time_to_live_ms(asked(text)) == time_ms
    assert time_to_live_ms(Message("t", b"q")) is None


def reply_sender(engine, timeout_ms=1_000):
    reply = make_reply(asked(), b"r", max_message_size=MIB)
    deadline_ms = engine.loop.clock.monotonic_ms() + timeout_ms
    return ReplySender(engine, 3).send(consumed("a"), reply, deadline_ms)


@pytest.mark.parametrize("taken", [True, False])
def test_a_reply_goes_through_the_broker_of_its_request(engine, taken):
    future = reply_sender(engine)
    _, header, body, _ = engine.asked[0]
    assert (header.client_id, header.correlation_id) == ("asker", "c1")
    assert msgspec.msgpack.decode(body, type=Message).body == b"r"
    assert engine.answer(taken) == "a"
    assert future.result(0) is taken


def test_the_same_attempt_is_made_again_while_who_asked_is_away(engine):
    future = reply_sender(engine)
    attempt = engine.asked[0][1].attempt_id
    for _ in range(3):
        assert engine.answer(ClientNotOnline("away")) == "a"
        engine.loop.run(60)
    assert engine.asked[0][1].attempt_id == attempt
    engine.answer(True)
    assert future.result(0) is True


def test_another_broker_is_tried_when_the_first_is_away(engine):
    future = reply_sender(engine)
    engine.away = {"a"}
    engine.answer(EndpointUnreachable("a broke"))
    engine.loop.run(60)
    assert engine.answer(True) == "b"
    assert future.result(0) is True


def test_a_broker_not_known_yet_is_looked_for(engine):
    engine.routes.brokers = []
    future = reply_sender(engine)
    assert engine.answer(True) == "a"
    assert future.result(0) is True


def test_in_the_end_the_last_reason_is_told(engine):
    future = reply_sender(engine, timeout_ms=200)
    while not future.done():
        if engine.asked:
            engine.answer(BrokerNotAvailable("stopping"))
        engine.loop.run(10)
    assert isinstance(future.exception(0), BrokerNotAvailable)


def test_what_trying_again_does_not_help_is_told_at_once(engine):
    future = reply_sender(engine)
    engine.answer(MessageIllegal("too large"))
    assert isinstance(future.exception(0), MessageIllegal)


def test_a_cancelled_reply_is_not_tried_again(engine):
    future = reply_sender(engine)
    future.cancel()
    engine.answer(ClientNotOnline("away"))
    engine.loop.run(100)
    assert engine.asked == []


def test_without_a_connection_another_broker_is_tried(engine):
    engine.away = {"a"}
    future = reply_sender(engine)
    engine.loop.run(WATCH_MS)
    assert engine.answer(True) == "b"
    assert future.result(0) is True


def test_replies_on_their_way_are_bounded_and_a_cancelled_one_makes_room(engine):
    sender = ReplySender(engine, 2)
    reply = make_reply(asked(), b"r", max_message_size=MIB)
    futures = [sender.send(consumed("a"), reply, MANY) for _ in range(2)]
    with pytest.raises(QueueFull, match="max_pending_requests"):
        sender.send(consumed("a"), reply, MANY)
    futures[0].cancel()
    engine.answer(ClientNotOnline("away"))
    engine.loop.run(60)
    assert sender.send(consumed("a"), reply, MANY)


def test_all_replies_end_when_the_client_is_closed(engine):
    sender = ReplySender(engine, 3)
    reply = make_reply(asked(), b"r", max_message_size=MIB)
    at_broker = sender.send(consumed("a"), reply, MANY)
    engine.away = {"a", "b"}
    waiting = sender.send(consumed("b"), reply, MANY)
    engine.closed = True
    with pytest.raises(ClientClosed):
        sender.send(consumed("a"), reply, MANY)
    error = ClientClosed("closed")
    sender.end_all(error)
    assert at_broker.exception(0) is waiting.exception(0) is error
