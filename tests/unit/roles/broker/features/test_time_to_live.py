"""Time to live of messages: nobody gets one afterwards, in queue mode or by receives."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import ExpiringMeta, pack_due_times
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, decode_messages, read_header
from mqmesh.batch.schedule_record import ScheduleAction
from mqmesh.message import PROPERTY_LAST_FAILURE, Message, dlq_topic, retry_topic
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    DeliveryMode,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    Settlement,
    SettleRequest,
)
from mqmesh.protocol.groups import GroupConfig, UpdateGroupRequest
from mqmesh.protocol.membership import ConsumerData, HeartbeatRequest, Subscription
from mqmesh.protocol.pulling import PullStatus
from mqmesh.protocol.route import OnExpired, TopicConfig
from mqmesh.roles.broker.features.delays.due_messages import DueMessages
from mqmesh.roles.broker.features.delays.opened_batches import OpenedBatches
from mqmesh.roles.broker.reading.pull_filter import without_expired
from mqmesh.units import KIB

ILLEGAL = 13


class Prices:
    """A broker with a topic whose messages may expire."""

    def __init__(self, stage, **settings) -> None:
        self.stage = stage
        self.features = stage.features
        stage.features.state.topics.set(TopicConfig("t", 1, 1, message_ttl=True, **settings), 0)
        self._sequence = itertools.count(0, 1_000)

    @property
    def now_ms(self) -> int:
        return self.stage.clock.wall_ms()

    def batch(self, *bodies, ttl_ms=0, due_ms=0, tag=None, topic="t") -> bytes:
        payload = encode_payload([Message(topic, body, tag=tag) for body in bodies])
        meta, attributes = None, 0
        times = due_ms if isinstance(due_ms, list) else [due_ms]
        due = pack_due_times(times) if due_ms else b""
        if ttl_ms:
            expires_ms = -ttl_ms if due_ms else self.now_ms + ttl_ms
            meta = ExpiringMeta(topic, payload.tag_hashes, "", 0, due, expires_ms=expires_ms)
            attributes = Attributes.HAS_EXPIRY | (Attributes.HAS_DELAY if due_ms else 0)
        parts = batch_parts(
            payload,
            topic=topic,
            queue_id=0,
            producer_id=PRODUCER_ID,
            first_sequence=next(self._sequence),
            born_timestamp=1,
            attributes=attributes,
            meta=meta,
        )
        return b"".join(parts)

    def send(self, *bodies, **options):
        (outcome,) = self.stage.send(self.batch(*bodies, **options))
        return outcome

    def pulled(self, queue_offset=0, **options):
        answer, bodies = self.stage.pull("t", 0, queue_offset, **options)
        return PullStatus(answer.status).name, answer.next_queue_offset, bodies

    def join(self, delivery=DeliveryMode.MESSAGE, **subscription) -> None:
        config = GroupConfig("g", delivery=delivery)
        self.stage.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, UpdateGroupRequest(config))
        wanted = [Subscription("t", **subscription)]
        data = ConsumerData("g", "CLUSTERING", "FIRST_OFFSET", wanted, delivery)
        self.stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("a", consumers=[data]), peer=b"a")

    def receive(self, turns=4, **options):
        wanted = ReceiveRequest("g", "t", "a", 100, **options)
        opaque = self.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"a")
        for _ in range(turns):
            self.stage.end_tick()
        reply = self.stage.answers.get(opaque)
        if reply is None or isinstance(reply, ReceiveResponse):
            return []
        assert not isinstance(reply, Exception), reply
        return decode_header(ReceiveResponse, reply.header).leases

    def settle(self, lease, action, delay_ms=0) -> None:
        one = Settlement(
            lease.lease, 0, lease.first, b"\1", int(action), delay_ms, is_retry=lease.is_retry
        )
        self.stage.ask(RequestCode.SETTLE_MESSAGES, SettleRequest("g", "t", "a", [one]), peer=b"a")

    @property
    def committed(self) -> int:
        return self.features.state.committed.query("g", "t", 0)

    @property
    def expired(self) -> int:
        return self.stage.features.core.stats.total.expired_messages


@pytest.fixture
def prices(stage):
    return Prices(stage)


def test_a_topic_that_does_not_allow_it_refuses_messages_that_expire(stage):
    prices = Prices(stage)
    stage.features.state.topics.set(TopicConfig("t", 1, 1), 0)
    outcome = prices.send(b"x", ttl_ms=1_000)
    assert (outcome.code, "message_ttl" in outcome.remark) == (ILLEGAL, True)


def test_a_pull_gets_messages_until_they_expire(prices):
    prices.send(b"a", b"b", ttl_ms=1_000)
    prices.send(b"c")
    assert prices.pulled() == ("FOUND", 3, [b"a", b"b", b"c"])
    prices.stage.clock.advance(999)
    assert prices.pulled()[2] == [b"a", b"b", b"c"]
    prices.stage.clock.advance(1)
    assert prices.pulled() == ("NO_MATCHED_MSG", 2, [])
    assert prices.pulled(2) == ("FOUND", 3, [b"c"])
    assert prices.expired == 2


def test_a_pull_that_waits_gets_only_what_lives(prices):
    prices.send(b"a", ttl_ms=10)
    prices.stage.clock.advance(20)
    opaque = prices.stage.begin_pull(queue_offset=0, suspend_timeout_ms=5_000)
    prices.stage.end_tick()
    prices.send(b"b")
    prices.features.pulling.wake("t", 0)
    answer, bodies = prices.stage.pulled(opaque)
    # One that wants everything is first asked to pass over what it does not get.
    assert (bodies, answer.next_queue_offset) == ([], 1)
    assert prices.pulled(1)[2] == [b"b"]


def test_a_filter_gets_only_what_lives(prices):
    prices.send(b"a", ttl_ms=10, tag="x")
    prices.send(b"b", tag="x")
    prices.stage.clock.advance(20)
    assert prices.pulled(expression="x")[2] == [b"b"]


def test_expired_batches_between_others_are_left_out(prices):
    for number in range(6):
        prices.send(b"%d" % number, ttl_ms=10 if number % 2 else 0)
    prices.stage.clock.advance(20)
    found = prices.stage.store.get("t", 0, 0, max_bytes=1_000_000)
    left = without_expired(found, 0, prices.now_ms)
    assert left.message_count == 3
    assert [read_header(one).base_queue_offset for one in left.data] == [0, 2, 4]
    # A consumer that wants all takes no answer with a hole, so it goes on from each.
    place, bodies = 0, []
    while place < 6:
        _, place, found = prices.pulled(place)
        bodies += found
    assert bodies == [b"0", b"2", b"4"]


def test_what_cannot_be_read_is_left_to_the_consumer(prices):
    prices.send(b"a", ttl_ms=10)
    prices.stage.clock.advance(20)
    found = prices.stage.store.get("t", 0, 0, max_bytes=1)
    broken = bytearray(found.data[0])
    broken[0] ^= 1
    damaged = msgspec.structs.replace(found, data=[bytes(broken)])
    assert without_expired(damaged, 0, prices.now_ms) is damaged


def test_a_receive_passes_expired_messages_over_and_settles_them(prices):
    prices.join()
    prices.send(b"a", b"b", ttl_ms=1_000)
    prices.send(b"c")
    prices.stage.clock.advance(1_000)
    (lease,) = prices.receive()
    assert (lease.first, lease.count) == (2, 1)
    assert (prices.committed, prices.expired) == (2, 2)


def test_many_expired_messages_are_passed_over_in_several_turns(prices):
    prices.join()
    for _ in range(50):
        prices.send(*[b"x" * 2_000] * 10, ttl_ms=10)
    prices.send(b"last")
    prices.stage.clock.advance(10)
    leases = prices.receive(turns=60, max_bytes=70_000)
    assert [(one.first, one.count) for one in leases] == [(500, 1)]


def test_a_message_that_expires_while_it_waits_comes_no_more(prices):
    prices.join()
    prices.send(b"a", ttl_ms=5_000)
    (lease,) = prices.receive()
    prices.settle(lease, SettleAction.NACK)
    prices.stage.clock.advance(5_000)
    assert prices.receive() == []
    assert (prices.committed, prices.expired) == (1, 1)


@pytest.mark.parametrize("expression", ["*", "x"])
def test_expired_messages_become_dead_letters_where_the_topic_says_so(stage, expression):
    prices = Prices(stage, on_expired=OnExpired.DEAD_LETTER)
    prices.join(expression=expression)
    prices.send(b"a", b"b", ttl_ms=1_000, tag="x")
    prices.send(b"other", ttl_ms=1_000, tag="y")
    prices.send(b"c", tag="x")
    prices.stage.clock.advance(1_000)
    leases = prices.receive(expression=expression)
    assert [(one.first, one.count) for one in leases] == [(3, 1)]
    wanted = 3 if expression == "*" else 2
    end = stage.store.queue_bounds(dlq_topic("g"), 0)[1]
    assert (end, prices.expired, prices.committed) == (wanted, wanted, 3)


def test_a_delayed_message_lives_from_its_delivery_on(prices):
    prices.send(b"a", ttl_ms=1_000, due_ms=prices.now_ms + 60_000)
    prices.stage.clock.advance(60_500)
    deliver(prices)
    assert prices.pulled()[2] == [b"a"]
    prices.stage.clock.advance(500)
    assert prices.pulled()[2] == []


def deliver(prices, count=1) -> None:
    stage = prices.stage
    found = stage.store.get("SCHEDULE_TOPIC_XXXX", 64, 0, max_bytes=1)
    if not found.data:
        found = stage.store.get("SCHEDULE_TOPIC_XXXX", 17, 0, max_bytes=1)
    place = read_header(found.data[0]).commitlog_offset
    due = DueMessages(stage.features.core, stage.features.writes, OpenedBatches())
    prepared = due.prepare(ScheduleAction.DELIVER, [(place, 0, count)])
    stage.features.writes.put_groups(prepared.groups, lambda outcomes: None)
    stage.end_tick()


def test_messages_that_are_due_at_different_times_expire_at_different_times(prices):
    now_ms = prices.now_ms
    prices.send(b"a", b"b", b"c", ttl_ms=1_000, due_ms=[now_ms + 10, now_ms + 10, now_ms + 900])
    prices.stage.clock.advance(900)
    deliver(prices, 3)
    assert prices.pulled()[2] == [b"a", b"b", b"c"]
    prices.stage.clock.advance(110)
    place, bodies = prices.pulled()[1:]
    assert (place, bodies) == (2, [])
    assert prices.pulled(place)[2] == [b"c"]


def test_a_delayed_batch_that_becomes_more_than_a_group_may_have_is_delivered(make_stage):
    prices = Prices(make_stage(segment_bytes=64 * KIB))
    stage, count, now_ms = prices.stage, 1_000, prices.now_ms
    bodies = [b"%d" % number for number in range(count)]
    prices.send(*bodies, ttl_ms=1_000, due_ms=[now_ms + 10 + one % 2 for one in range(count)])
    prices.send(b"other", ttl_ms=1_000, due_ms=now_ms + 20)
    stage.clock.advance(100)
    places = []
    for queue_offset in (0, count):
        found = stage.store.get("SCHEDULE_TOPIC_XXXX", 64, queue_offset, max_bytes=1)
        places.append(read_header(found.data[0]).commitlog_offset)
    due = DueMessages(stage.features.core, stage.features.writes, OpenedBatches())
    runs = [(places[0], 0, count), (places[1], 0, 1)]
    for wanted, messages in ((runs, count), (runs[1:], 1)):
        prepared = due.prepare(ScheduleAction.DELIVER, wanted)
        assert (bytes(prepared.statuses), prepared.message_count) == (b"\0", messages)
        topics = [[one.topic for one in group] for group in prepared.groups]
        assert len(topics) == (1 if messages == 1 else 3)
        assert [group.count("SCHEDULE_TOPIC_XXXX") for group in topics] == [0] * (
            len(topics) - 1
        ) + [1]
        assert topics[-1][-1] == "SCHEDULE_TOPIC_XXXX"
        outcomes = []
        stage.features.writes.put_groups(prepared.groups, outcomes.extend)
        stage.end_tick()
        assert {one.code for one in outcomes} == {0}
    assert prices.pulled(max_bytes=1_000_000)[2] == [*bodies, b"other"]


def test_a_delayed_message_that_was_rolled_forward_lives_as_long(prices):
    prices.send(b"a", ttl_ms=1_000, due_ms=prices.now_ms + 60_000)
    stage = prices.stage
    found = stage.store.get("SCHEDULE_TOPIC_XXXX", 64, 0, max_bytes=1)
    due = DueMessages(stage.features.core, stage.features.writes, OpenedBatches())
    place = read_header(found.data[0]).commitlog_offset
    ((rolled, _),) = due.prepare(ScheduleAction.ROLL, [(place, 0, 1)]).groups
    assert rolled.header.attributes & Attributes.HAS_EXPIRY


def test_a_retry_keeps_the_expiry_of_its_message(prices):
    prices.join()
    prices.send(b"a", ttl_ms=10_000_000)
    (lease,) = prices.receive()
    prices.settle(lease, SettleAction.NACK, 7_200_000)
    prices.stage.clock.advance(7_200_000)
    deliver(prices)
    (retry,) = prices.receive()
    assert retry.is_retry
    prices.settle(retry, SettleAction.NACK)
    prices.stage.clock.advance(2_800_000)
    assert prices.receive() == []
    assert prices.stage.store.queue_bounds(retry_topic("g"), 0)[1] == 1


@pytest.mark.parametrize("delivery", list(DeliveryMode)[1:])
def test_a_turn_makes_dead_letters_of_one_batch_of_expired_messages(stage, delivery):
    prices = Prices(stage, on_expired=OnExpired.DEAD_LETTER)
    prices.join(delivery)
    for _ in range(3):
        prices.send(b"a", b"b", ttl_ms=1_000)
    stage.clock.advance(1_000)
    wanted = ReceiveRequest("g", "t", "a", 100, suspend_timeout_ms=5_000)
    stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"a")
    found = [prices.expired]
    for _ in range(2):
        stage.end_tick()
        found.append(prices.expired)
    assert found == [2, 4, 6]


def test_a_dead_letter_says_that_it_expired(stage):
    prices = Prices(stage, on_expired=OnExpired.DEAD_LETTER)
    prices.join()
    prices.send(b"a", ttl_ms=10)
    prices.stage.clock.advance(10)
    prices.receive()
    data = stage.store.get(dlq_topic("g"), 0, 0, max_bytes=1).data[0]
    (message,) = decode_messages(data, read_header(data))
    assert message.property(PROPERTY_LAST_FAILURE) == "its time to live was over"
    assert not read_header(data).attributes & Attributes.HAS_EXPIRY
