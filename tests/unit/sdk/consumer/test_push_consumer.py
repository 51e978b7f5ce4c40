"""One queue's messages on their way through a push consumer."""

from __future__ import annotations

import functools
import threading
import time

import pytest
from harness.pulled import FakeBatch
from harness.simulated_network import SimulatedNetwork

from mqmesh.errors import ClientClosed, InvalidArgument
from mqmesh.message import MessageQueue, check_consumer_group
from mqmesh.protocol.membership import MAX_SUBSCRIPTIONS
from mqmesh.sdk.client.options import make_options
from mqmesh.sdk.consumer.consumer_options import (
    ConsumerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
)
from mqmesh.sdk.consumer.fetching.process_queue import DONE, FlowLimits
from mqmesh.sdk.consumer.fetching.pull_loop import PullSettings
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.listening.consume_service import ConcurrentService
from mqmesh.sdk.consumer.listening.consume_work import QueueWork, Waiting
from mqmesh.sdk.consumer.listening.send_back_queue import SentBack
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.push_sink import PushSink
from mqmesh.units import MIB


class FakeService(ConcurrentService):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__(threading.Condition(), time.monotonic_ns, lambda *_: None)
        self.submitted = []

    def submit(self, work, batches, span):
        self.submitted.append((work, batches, span))

    def revoke(self, work):
        work.revoked = True


class Case:
    def __init__(self, start=0, **options):
        self.service = FakeService()
        self.sink = PushSink(start, PushConsumerOptions(**options), self.service, self._make_work)

    def take(self, count):
        first = self.sink.next_offset
        self.sink.take([FakeBatch(first, count)], first + count, count * 10)
        return self.service.submitted[-1]

    @staticmethod
    def _make_work():
        return QueueWork(lambda _: ConsumeResult.SUCCESS, 1, lambda: None, lambda _: None)


def test_what_is_pulled_goes_to_the_workers_and_what_they_do_may_be_committed():
    case = Case(start=7)
    _, (batch,), span = case.take(5)
    assert (batch.first, batch.end) == (7, 12)
    assert (case.sink.next_offset, case.sink.commit_offset(), case.sink.held()[0]) == (12, 7, 5)
    span.mark(7, 9, DONE)
    assert (case.sink.commit_offset(), case.sink.held()[0]) == (10, 2)


def test_what_is_passed_over_needs_no_worker():
    case = Case()
    case.sink.take([], 50, 0)
    assert case.service.submitted == []
    assert case.sink.commit_offset() == 50


def test_there_is_room_up_to_the_thresholds():
    case = Case(pull_threshold_for_queue=10)
    assert case.sink.has_room()
    case.take(10)
    assert not case.sink.has_room()


def test_a_move_gives_up_what_is_held():
    case = Case()
    work, _, span = case.take(10)
    case.sink.move(100)
    assert work.revoked
    span.mark(0, 9, DONE)  # what a listener finishes now has no effect
    assert (case.sink.next_offset, case.sink.commit_offset()) == (100, 100)
    new_work, _, _ = case.take(1)
    assert not new_work.revoked


def test_a_dropped_queue_hands_out_nothing_more():
    case = Case()
    work, _, _ = case.take(10)
    case.sink.drop()
    assert work.revoked


def test_what_is_with_the_listener_for_too_long_is_told_once():
    case = Case(consume_timeout_ms=1_000)
    assert case.sink.overdue(0, {}) == []
    work, _, span = case.take(5)
    waiting = {work: Waiting(3)}
    assert case.sink.overdue(10_000, waiting) == []
    span.mark(1, 1, DONE)
    assert case.sink.overdue(10_999, waiting) == []
    assert case.sink.overdue(11_000, waiting) == [(0, span), (2, span)]
    assert case.sink.overdue(12_000, waiting) == []
    # The others were begun only now.
    assert case.sink.overdue(12_000, {}) == []
    assert case.sink.overdue(13_000, {}) == [(3, span), (4, span)]


def test_what_waits_for_a_further_try_is_not_with_the_listener():
    case = Case(consume_timeout_ms=1_000)
    work, _, span = case.take(3)
    waiting = {work: Waiting(again=frozenset({1}))}
    case.sink.overdue(0, waiting)
    assert case.sink.overdue(5_000, waiting) == [(0, span), (2, span)]


# ---- Options --------------------------------------------------------------------------


def test_the_defaults_are_the_documented_ones():
    options = PushConsumerOptions()
    assert options.flow_limits() == FlowLimits(messages=1_000, size_bytes=100 * MIB, span=2_000)
    assert options.pull_settings() == PullSettings(max_bytes=MIB, suspend_ms=15_000)
    assert options.consume_message_batch_max_size == 1
    assert options.consume_timeout_ms == 15 * 60 * 1_000
    assert options.persist_consumer_offset_interval_ms == 5_000
    assert options.rebalance_interval_ms == 20_000
    assert PullConsumerOptions().pull_batch_size == 32
    assert FlowLimits() == options.flow_limits()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pull_max_bytes": 0}, "pull_max_bytes"),
        ({"broker_suspend_max_time_ms": 30_001}, "broker_suspend_max_time_ms"),
        ({"message_model": "SOMEHOW"}, "message_model"),
        ({"consume_from_where": "MIDDLE"}, "consume_from_where"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(values, words):
    with pytest.raises(InvalidArgument, match=words):
        make_options(ConsumerOptions, values, "consumer option")


@pytest.mark.parametrize("group", ["", "a b", "x" * 256, "%RETRY%g", "%DLQ%g", None])
def test_illegal_and_reserved_groups_are_refused(group):
    with pytest.raises(InvalidArgument):
        check_consumer_group(group)


class AsyncObject:
    async def __call__(self, messages):
        raise AssertionError("nobody awaits it")


async def _listen(messages, more=None):
    raise AssertionError("nobody awaits it")


@pytest.mark.parametrize("listener", [_listen, functools.partial(_listen, more=1), AsyncObject()])
def test_coroutine_functions_are_refused_where_nobody_awaits_them(listener):
    consumer = PushConsumer("g")
    try:
        with pytest.raises(InvalidArgument, match="coroutine function"):
            consumer.subscribe("t", listener=listener)
    finally:
        consumer.close()


def test_what_is_on_its_way_back_when_the_consumer_ends_has_an_outcome(network):
    consumer = PushConsumer("g", transport=network.transport())
    consumer.subscribe("t", listener=lambda _: ConsumeResult.SUCCESS)
    outcomes = []
    consumer._back.send(SentBack(MessageQueue("t", "a", 0), 0, 1, "E: no", outcomes.append))
    consumer.close()
    assert [type(one) for one in outcomes] == [ClientClosed]
    assert consumer._back.wait(0)


@pytest.fixture
def network():
    network = SimulatedNetwork()
    yield network
    network.close()


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
def test_a_topic_too_many_is_an_error_at_once(kind):
    consumer = kind("g", transport=SimulatedNetwork().transport())
    more = {"listener": print} if kind is PushConsumer else {}
    for number in range(MAX_SUBSCRIPTIONS - 1):
        consumer.subscribe(f"t{number}", **more)
    with pytest.raises(InvalidArgument, match=r"subscribes to 16383 topics.*another group"):
        consumer.subscribe("one-more", **more)
    consumer.unsubscribe("t7")
    consumer.subscribe("one-more", **more)
    consumer.close()
