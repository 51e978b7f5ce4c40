"""Offsets at the brokers, and where a consumer begins."""

from __future__ import annotations

import pytest

from mqmesh.errors import EndpointUnreachable, MQMeshError, RemoteProtocolError
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueBoundsRequest,
    QueueBoundsResponse,
    QueueOffsetEntry,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from mqmesh.sdk.consumer import offset_store
from mqmesh.sdk.consumer.memberships import Memberships
from mqmesh.sdk.consumer.offset_store import BrokerOffsets
from mqmesh.sdk.consumer.start_positions import MOST_CHOICES, Position, StartPositions

A0, A1, B0 = (
    MessageQueue("t", "broker-a", 0),
    MessageQueue("t", "broker-a", 1),
    MessageQueue("t", "broker-b", 0),
)
KINDS = {
    RequestCode.QUERY_CONSUMER_OFFSET: QueryConsumerOffsetRequest,
    RequestCode.UPDATE_CONSUMER_OFFSET: UpdateConsumerOffsetRequest,
    RequestCode.QUERY_QUEUE_BOUNDS: QueueBoundsRequest,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: SearchOffsetRequest,
}


class FakeNetwork:
    """Keeps requests until the test answers them."""

    def __init__(self):
        self.requests = []

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        self.requests.append((broker_name, decode_header(KINDS[code], header), on_done))

    def call_later(self, delay_ms, callback):
        raise AssertionError("no timers here")

    def next(self):
        broker_name, request, on_done = self.requests.pop(0)

        def answer(outcome=None):
            if not isinstance(outcome, MQMeshError):
                header = b"" if outcome is None else encode_header(outcome)
                outcome = Command(0, 0, 1, memoryview(header), memoryview(b""))
            on_done(outcome)

        return broker_name, request, answer


@pytest.fixture
def network():
    return FakeNetwork()


@pytest.fixture
def offsets(network):
    return BrokerOffsets("g", "me", network, Memberships("g"))


def entries(*pairs):
    return [QueueOffsetEntry("t", queue_id, offset) for queue_id, offset in pairs]


def committed(network):
    """Answers all commits; returns what they said."""
    said = {}
    while network.requests:
        broker_name, request, answer = network.next()
        said.update({(broker_name, one.queue_id): one.queue_offset for one in request.queues})
        answer()
    return said


# ---- Commits --------------------------------------------------------------------------


def test_a_commit_is_one_request_a_broker(network, offsets):
    done = []
    offsets._memberships.on_claim([A0], 7)
    offsets.commit({A0: 5, B0: 6, A1: 7}, done.append)
    broker_name, request, answer = network.next()
    assert broker_name == "broker-a"
    assert request == UpdateConsumerOffsetRequest("g", "me", entries((0, 5), (1, 7)), 7)
    answer()
    assert done == []
    network.next()[2]()
    assert done == [None]


def test_what_did_not_change_is_not_committed_again(network, offsets):
    done = []
    offsets.commit({A0: 5, B0: 6}, done.append)
    committed(network)
    offsets.commit({A0: 5, B0: 8}, done.append)
    assert committed(network) == {("broker-b", 0): 8}
    offsets.commit({A0: 5, B0: 8}, done.append)
    assert done == [None, None, None]


def test_what_failed_is_committed_again(network, offsets):
    done = []
    error = EndpointUnreachable("gone")
    offsets.commit({A0: 5, B0: 6}, done.append)
    network.next()[2](error)
    network.next()[2]()
    assert done == [error]
    offsets.commit({A0: 5, B0: 6}, done.append)
    assert committed(network) == {("broker-a", 0): 5}


def test_a_commit_may_go_back(network, offsets):
    offsets.commit({A0: 5}, lambda _: None)
    committed(network)
    offsets.commit({A0: 3}, lambda _: None)
    assert committed(network) == {("broker-a", 0): 3}


def test_what_was_looked_up_need_not_be_committed(network, offsets):
    offsets.fetch("broker-a", [A0, A1], lambda _: None)
    network.next()[2](ConsumerOffsets(entries((0, 5), (1, -1))))
    offsets.commit({A0: 5, A1: 0}, lambda _: None)
    assert committed(network) == {("broker-a", 1): 0}


def test_after_a_queue_was_given_away_its_offset_is_unknown(network, offsets):
    offsets.commit({A0: 5}, lambda _: None)
    committed(network)
    offsets.forget(A0)
    offsets.commit({A0: 5}, lambda _: None)
    assert committed(network) == {("broker-a", 0): 5}


def test_many_queues_take_several_requests(network, offsets, monkeypatch):
    monkeypatch.setattr(offset_store, "MAX_OFFSETS_PER_REQUEST", 2)
    done = []
    offsets.commit({MessageQueue("t", "broker-a", n): n for n in range(5)}, done.append)
    assert [len(request.queues) for _, request, _ in network.requests] == [2, 2, 1]
    committed(network)
    assert done == [None]


def test_offsets_are_looked_up_in_the_order_asked(network, offsets):
    found = []
    offsets.fetch("broker-a", [A1, A0], found.append)
    broker_name, request, answer = network.next()
    assert (broker_name, request) == (
        "broker-a",
        QueryConsumerOffsetRequest("g", entries((1, -1), (0, -1))),
    )
    answer(ConsumerOffsets(entries((1, 9), (0, -1))))
    assert found == [{A1: 9, A0: -1}]


def test_a_look_up_that_fails_says_so(network, offsets):
    found = []
    error = EndpointUnreachable("gone")
    offsets.fetch("broker-a", [A0], found.append)
    network.next()[2](error)
    offsets.fetch("broker-a", [A0], found.append)
    network.next()[2](ConsumerOffsets([]))
    assert found[0] is error
    assert isinstance(found[1], RemoteProtocolError)


# ---- Where to begin -------------------------------------------------------------------


class Start:
    def __init__(self, network, offsets, where, timestamp_ms=0):
        self.network = network
        self.positions = StartPositions(offsets, network, where, timestamp_ms)
        self.positions.started_at_ms = 1_234
        self.found = {}

    def locate(self, *queues, committed=-1):
        self.positions.locate(
            "broker-a", list(queues), lambda queue, found: self.found.update({queue: found})
        )
        self.network.next()[2](ConsumerOffsets([QueueOffsetEntry("t", 0, committed)] * len(queues)))


def test_a_committed_offset_is_where_to_begin(network, offsets):
    start = Start(network, offsets, ConsumeFromWhere.LAST_OFFSET)
    start.locate(A0, A1, committed=0)
    assert start.found == {A0: Position(0, True), A1: Position(0, True)}


@pytest.mark.parametrize(
    ("where", "expected"),
    [(ConsumeFromWhere.FIRST_OFFSET, 10), (ConsumeFromWhere.LAST_OFFSET, 90)],
)
def test_a_new_group_begins_at_an_end_of_the_queue(network, offsets, where, expected):
    start = Start(network, offsets, where)
    start.positions.note_queues("t", (A0, A1))
    start.locate(A0)
    _, request, answer = network.next()
    assert request == QueueBoundsRequest("t", 0)
    answer(QueueBoundsResponse(10, 90))
    assert start.found == {A0: Position(expected, False)}


def test_a_new_group_may_begin_at_a_time(network, offsets):
    start = Start(network, offsets, ConsumeFromWhere.TIMESTAMP, 777)
    start.locate(A0)
    _, request, answer = network.next()
    assert request == SearchOffsetRequest("t", 0, 777)
    answer(OffsetResponse(40))
    assert start.found == {A0: Position(40, False)}


def test_a_queue_that_came_after_the_consumer_is_read_from_its_beginning(network, offsets):
    start = Start(network, offsets, ConsumeFromWhere.LAST_OFFSET)
    start.positions.note_queues("t", (A0,))
    start.positions.note_queues("t", (A0, A1))
    start.locate(A1)
    network.next()[2](QueueBoundsResponse(0, 90))
    assert start.found == {A1: Position(0, False)}


def test_an_old_queue_that_is_given_later_begins_where_it_ended_when_the_consumer_started(
    network, offsets
):
    start = Start(network, offsets, ConsumeFromWhere.LAST_OFFSET)
    start.positions.note_queues("t", (A0,))
    start.positions.settled = True
    start.locate(A0)
    _, request, answer = network.next()
    assert request == SearchOffsetRequest("t", 0, 1_234)
    answer(OffsetResponse(60))
    assert start.found == {A0: Position(60, False)}


def test_trouble_is_told_queue_by_queue(network, offsets):
    error = EndpointUnreachable("gone")
    start = Start(network, offsets, ConsumeFromWhere.FIRST_OFFSET)
    start.locate(A0, A1)
    network.next()[2](error)
    network.next()[2](QueueBoundsResponse(3, 3))
    assert start.found == {A0: error, A1: Position(3, False)}
    start.positions.locate(
        "broker-a", [A0], lambda queue, found: start.found.update({queue: found})
    )
    network.next()[2](error)
    assert start.found[A0] is error


def test_bounds_of_few_queues_are_asked_for_at_a_time(network, offsets):
    positions = StartPositions(offsets, network, ConsumeFromWhere.FIRST_OFFSET, 0)
    queues = [MessageQueue("t", "broker-a", number) for number in range(3 * MOST_CHOICES)]
    found = []
    positions.locate("broker-a", queues, lambda queue, position: found.append((queue, position)))
    _, asked, answer = network.next()
    answer(ConsumerOffsets(asked.queues))
    most = 0
    while network.requests:
        most = max(most, len(network.requests))
        network.next()[2](QueueBoundsResponse(3, 9))
    assert most == MOST_CHOICES
    assert found == [(queue, Position(3, False)) for queue in queues]


# ---- Where a group stands --------------------------------------------------------------


def test_where_a_group_stands_is_known_before_a_commit_is_answered(network, offsets):
    offsets.claim("broker-a", [A0, A1], lambda found: None)
    network.next()[2](ConsumerOffsets(entries((0, 4), (1, -1)), 1))
    assert [offsets.known(queue) for queue in (A0, A1, B0)] == [4, -1, -1]
    offsets.commit({A0: 6}, lambda error: None)
    assert offsets.known(A0) == 6, "what is sent behind it comes behind it"
    offsets.note_processed(A0, 9)
    offsets.forget_broker("broker-a")
    assert offsets.known(A0) == 9
    offsets.forget(A0)
    assert offsets.known(A0) == -1
