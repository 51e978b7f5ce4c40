"""Whether a batch is stored: by its answer, the producer's batches, the index, the log's bounds."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from mqmesh.errors import (
    AuthenticationFailed,
    InvalidArgument,
    LocalProtocolError,
    NoPermission,
    NoRoute,
    RemoteProtocolError,
    RequestTimeout,
    SendInDoubt,
    SequenceConflict,
    SystemBusy,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import SCHEDULE_TOPIC, Message, MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import (
    BatchOutcome,
    ProducerBatch,
    ProducerInfo,
    SendStatus,
    decode_send,
    encode_outcomes,
)
from mqmesh.protocol.pulling import QueueBoundsRequest
from mqmesh.protocol.queries import QueryMessageResponse
from mqmesh.sdk.connector.numbered_sender import NumberedBatch, NumberedSender

QUEUE = MessageQueue("t", "broker-a", 1)
STORED = BatchOutcome(0)
CONFLICT = BatchOutcome(int(ResponseCode.SEQUENCE_CONFLICT))
REFUSED = BatchOutcome(int(ResponseCode.NO_PERMISSION), remark="not you")
UNSAFE = BatchOutcome(0, int(SendStatus.FLUSH_DISK_TIMEOUT))


class Sender(NumberedSender):
    """A sender whose broker answers as a test says."""

    known = ProducerInfo([], 0, 100)
    indexed = False
    forbidden = ()
    readable = (QUEUE,)
    outcomes = ()
    failure = None

    def ask_once(self, broker_name, code, header, parts=()):
        self.sizes.append(sum(map(len, parts)))
        if self.failure is not None:
            raise self.failure
        _, count, _ = decode_send(memoryview(header))
        header, body = encode_outcomes(list(self.outcomes or [STORED] * count))
        return SimpleNamespace(header=memoryview(header), body=memoryview(body))

    def ask(self, broker_name, code, header, parts=()):
        if code == RequestCode.QUERY_QUEUE_BOUNDS:
            topic = decode_header(QueueBoundsRequest, header).topic
            raise NoPermission(topic) if topic in self.forbidden else TopicNotFound(topic)
        if code == RequestCode.SEND_MESSAGE:
            return self.ask_once(broker_name, code, header, parts)
        return SimpleNamespace(header=memoryview(encode_header(self.known)))

    def is_stored_at(self, broker_name, sequence):
        return self.indexed

    def readable_queues(self, topic):
        if self.readable is None:
            raise TopicNotFound(topic)
        return self.readable


@pytest.fixture
def sender():
    with Sender(
        "127.0.0.1:1", bytes(16), born_host="h:1", patience_ms=0, max_message_size=16 << 20
    ) as sender:
        sender.sizes = []
        yield sender


def batch(first, body=b"x", **fields):
    return NumberedBatch(QUEUE, [Message("t", body, **fields)] * 2, first)


def test_each_batch_has_its_outcome_of_one_try(sender):
    sender.outcomes = STORED, REFUSED, UNSAFE, CONFLICT
    ended = sender.try_send([batch(0), batch(2), batch(4), batch(6)])
    assert [type(error) for _, error in ended] == [
        type(None),
        NoPermission,
        SystemBusy,
        SequenceConflict,
    ]
    assert "not as safely as the broker should: FLUSH_DISK_TIMEOUT" in str(ended[2][1])
    assert len(sender.sizes) == 1


@pytest.mark.parametrize(
    "failure",
    [RequestTimeout("x"), AuthenticationFailed("x"), RemoteProtocolError("x"), NoPermission("x")],
)
def test_a_request_that_fails_is_not_sent_again(sender, failure):
    sender.failure = failure
    assert [error for _, error in sender.try_send([batch(0), batch(2)])] == [failure] * 2
    assert len(sender.sizes) == 1


def test_a_request_that_fails_does_not_say_that_its_batches_were_never_sent(sender):
    sender.failure = InvalidArgument("of something else")
    ((_, error),) = sender.try_send([batch(0)])
    assert isinstance(error, RequestTimeout)


def test_an_answer_for_other_batches_says_nothing(sender):
    sender.outcomes = (STORED,)
    for _, error in sender.try_send([batch(0), batch(2)]):
        assert "a send of 2 batches is answered for 1" in str(error)


def test_a_batch_that_is_there_already_is_judged_by_itself(sender, monkeypatch):
    sender.outcomes = STORED, CONFLICT, CONFLICT, CONFLICT
    status = int(SendStatus.SLAVE_NOT_AVAILABLE)
    sender.known = ProducerInfo([ProducerBatch(2, 2), ProducerBatch(4, 2, status)], 0, 100)

    def fail(broker_name, sequence):
        raise RequestTimeout("the index")

    monkeypatch.setattr(sender, "is_stored_at", fail)
    ended = sender.try_send([batch(0), batch(2), batch(4), batch(6)])
    assert [type(error) for _, error in ended] == [
        type(None),
        type(None),
        SystemBusy,
        RequestTimeout,
    ]


def test_what_cannot_be_encoded_is_no_matter_of_other_batches(sender):
    large = batch(0, bytes(9 << 20))  # together they are over the limit of a batch
    illegal = batch(2, b"")
    (_, first), (_, second), (_, third) = sender.try_send([large, illegal, batch(4)])
    assert isinstance(first, LocalProtocolError)
    assert isinstance(second, InvalidArgument)
    assert third is None


def test_batches_are_divided_into_requests_that_fit_into_a_frame(sender):
    chance = random.Random(1)
    batches = [batch(2 * one, chance.randbytes(3 << 20)) for one in range(6)]
    assert [error for _, error in sender.try_send(batches)] == [None] * 6
    assert [size >> 20 for size in sender.sizes] == [12, 12, 12]


def test_a_send_counts_what_is_stored_and_raises_for_what_is_refused(sender, caplog):
    sender.known = ProducerInfo([ProducerBatch(4, 2)], 0, 100)
    sender.outcomes = STORED, UNSAFE, CONFLICT, REFUSED
    with pytest.raises(NoPermission, match="not you"):
        sender.send([batch(0), batch(2), batch(4), batch(6)])
    assert "FLUSH_DISK_TIMEOUT" in caplog.text
    sender.outcomes = STORED, UNSAFE, CONFLICT
    sender.send([batch(0), batch(2), batch(4)])


def test_a_batch_that_is_not_safe_yet_is_asked_for_again(sender):
    status = int(SendStatus.SLAVE_NOT_AVAILABLE)
    sender.known = ProducerInfo([ProducerBatch(2, 2, status)], 50, 100)
    with pytest.raises(SystemBusy, match="not as safely as the broker should: SLAVE_NOT_AVAILABLE"):
        sender.is_sent(batch(2), 10)


def test_batches_that_the_broker_remembers_decide(sender):
    sender.known = ProducerInfo([ProducerBatch(2, 2), ProducerBatch(4, 2)], 50, 100)
    assert sender.is_sent(batch(4), 10)
    assert not sender.is_sent(batch(6), 10)
    # Delayed ones are in one of several queues, of which the newest may have been forgotten.
    assert sender.is_sent(batch(4, delay_level=1), 10)
    with pytest.raises(SendInDoubt):
        sender.is_sent(batch(6, delay_level=1), 10)


def test_a_batch_without_its_messages_is_looked_for_among_delayed_ones_too(sender, monkeypatch):
    kinds = {False: ProducerInfo([ProducerBatch(2, 2)], 50, 100), True: ProducerInfo([], 50, 100)}
    monkeypatch.setattr(sender, "_remembered", lambda queue, *, delayed: kinds[delayed])
    assert sender.is_sent(NumberedBatch(QUEUE, [], 2), 60)
    assert not sender.is_sent(NumberedBatch(QUEUE, [], 4), 60)
    kinds[True] = ProducerInfo([ProducerBatch(4, 2)], 50, 100)
    assert sender.is_sent(NumberedBatch(QUEUE, [], 4), 60)


def test_without_them_the_index_does_as_far_as_the_log_goes(sender):
    assert not sender.is_sent(batch(0), 100)  # nothing was stored since
    assert not sender.is_sent(batch(0), 200)  # the log was cut
    assert not sender.is_sent(batch(0), 0)
    sender.indexed = True
    assert sender.is_sent(batch(0), 0)
    sender.indexed, sender.known = False, ProducerInfo([], 50, 100)
    assert not sender.is_sent(batch(0), 50)
    with pytest.raises(SendInDoubt, match="log begins at 50, behind 49, where it ended then"):
        sender.is_sent(batch(0), 49)


def test_a_broker_without_an_index_leaves_a_doubt_that_somebody_can_decide(sender, monkeypatch):
    def refuse(broker_name, sequence):
        raise UnsupportedCommand("this broker has no index of keys and message ids (index.enable)")

    monkeypatch.setattr(sender, "is_stored_at", refuse)
    with pytest.raises(SendInDoubt, match=r"its producer any more, and this broker has no index"):
        sender.is_sent(batch(0), 0)
    assert not sender.is_sent(batch(0), 100)  # nothing was stored since
    sender.known = ProducerInfo([ProducerBatch(2, 2)], 50, 100)
    assert sender.is_sent(batch(2), 0)
    assert not sender.is_sent(batch(4), 0)


def test_only_the_index_of_the_batch_s_own_broker_is_asked(sender, monkeypatch):
    asked = []

    def ask_once(broker_name, code, header, parts=()):
        asked.append((broker_name, code))
        return SimpleNamespace(header=memoryview(encode_header(found)))

    monkeypatch.setattr(sender, "ask_once", ask_once)
    found = QueryMessageResponse(1, missing_bytes=5)
    assert NumberedSender.is_stored_at(sender, "broker-b", 7)
    found = QueryMessageResponse(0)
    assert not NumberedSender.is_stored_at(sender, "broker-b", 7)
    found = QueryMessageResponse(0, missing_bytes=5_000)
    with pytest.raises(SystemBusy, match="5,000 bytes of the log of broker broker-b are not"):
        NumberedSender.is_stored_at(sender, "broker-b", 7)
    assert asked == [("broker-b", RequestCode.QUERY_MESSAGE_BY_ID)] * 3


def test_what_may_not_be_read_is_in_doubt(sender):
    sender.forbidden = (SCHEDULE_TOPIC,)
    assert not sender.is_sent(batch(0), 0)
    with pytest.raises(SendInDoubt, match="may not look messages of the topic up"):
        sender.is_sent(batch(0, deliver_at_ms=1), 0)
    sender.forbidden = ("t",)
    with pytest.raises(SendInDoubt):
        sender.is_sent(batch(0), 0)
    sender.forbidden, sender.readable = (), ()
    with pytest.raises(SendInDoubt):
        sender.is_sent(batch(0), 0)
    sender.readable = None
    with pytest.raises(NoRoute):  # of a topic that name servers forgot
        sender.is_sent(batch(0), 0)
