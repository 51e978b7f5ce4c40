"""Messages that wait to be polled."""

from __future__ import annotations

import threading

import pytest
from harness.pulled import FakeBatch

from mqmesh.errors import CorruptBatch, UndecodableMessages
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.fetching.fetch_buffer import FetchBuffer, PollOrder
from mqmesh.sdk.consumer.fetching.process_queue import FlowLimits


class Case:
    def __init__(self, start=0, **limits):
        self.arrivals = 0
        self.broken = []
        self.buffer = FetchBuffer(
            start, FlowLimits(**limits), threading.Condition(), self._arrived, self._broken
        )

    def take(self, count, **batch):
        start = self.buffer.next_offset
        self.buffer.take([FakeBatch(start, count, **batch)], start + count, count * 10)

    def poll(self, most):
        found = []
        self.buffer.poll(most, found)
        return [message.queue_offset for message in found]

    def _arrived(self):
        self.arrivals += 1

    def _broken(self, batch, error):
        self.broken.append((batch.first, batch.end, error))
        return UndecodableMessages("told", next_offset=batch.end)


def test_messages_come_in_order_and_as_many_as_are_wanted():
    case = Case(start=5)
    case.take(3)
    case.take(4)
    assert case.poll(2) == [5, 6]
    assert case.buffer.position == 7
    assert case.poll(100) == [7, 8, 9, 10, 11]
    assert case.buffer.position == 12
    assert case.poll(1) == []
    assert case.arrivals == 2


def test_the_position_passes_over_what_a_filter_left_out():
    case = Case()
    case.buffer.take([], 40, 0)
    assert case.buffer.position == 40
    case.buffer.take([FakeBatch(45, 1)], 60, 10)
    case.buffer.take([], 70, 0)
    assert case.buffer.position == 40
    assert case.poll(10) == [45]
    assert case.buffer.position == 70
    assert case.arrivals == 1


def test_messages_that_the_broker_took_for_wanted_are_left_out():
    case = Case()
    case.take(3, unwanted={0, 1, 2})
    case.take(3, unwanted={3, 5})
    assert case.poll(10) == [4]
    assert case.buffer.position == 6
    case.take(2, unwanted={6, 7})
    assert case.poll(10) == []
    assert case.buffer.position == 8
    assert case.buffer.has_room()


def test_nothing_behind_a_batch_that_cannot_be_decoded_is_handed_out():
    case, error = Case(), CorruptBatch("undecodable")
    case.take(2)
    case.take(2, error=error)
    case.take(2)
    assert case.poll(10) == [0, 1]
    for _ in range(2):
        with pytest.raises(UndecodableMessages) as caught:
            case.poll(10)
        assert caught.value.next_offset == 4
    assert case.broken == [(2, 4, error)]
    assert case.buffer.position == 2
    case.buffer.move(4)
    case.take(1)
    assert case.poll(10) == [4]


def test_only_what_is_acknowledged_is_committed():
    case = Case()
    case.take(10)
    case.poll(4)
    assert case.buffer.commit_offset() == 0
    case.buffer.acked = case.buffer.position
    assert case.buffer.commit_offset() == 4


@pytest.mark.parametrize("limits", [{"messages": 10}, {"size_bytes": 100}])
def test_a_full_buffer_wants_no_more(limits):
    case = Case(**limits)
    case.take(9)
    assert case.buffer.has_room()
    case.take(1)
    assert not case.buffer.has_room()
    case.poll(1)
    assert case.buffer.has_room()


def test_moving_drops_what_is_held():
    case = Case()
    case.take(10)
    case.poll(3)
    case.buffer.move(100)
    assert (case.buffer.position, case.buffer.next_offset) == (100, 100)
    assert case.buffer.commit_offset() == 100
    assert case.poll(10) == []
    case.take(1)
    assert case.poll(10) == [100]


def test_a_queue_that_was_given_away_has_nothing_to_poll():
    case = Case()
    case.take(10)
    case.buffer.drop()
    assert case.poll(10) == []
    assert case.buffer.dropped


def test_queues_take_turns():
    cases = {MessageQueue("t", "broker-a", number): Case() for number in range(3)}
    for case in cases.values():
        case.take(4)
    buffers = {queue: case.buffer for queue, case in cases.items()}
    order = PollOrder()
    for _ in range(6):
        order.poll(buffers, 2)
    assert [case.buffer.position for case in cases.values()] == [4, 4, 4]
    assert order.poll(buffers, 2) == []


def test_a_poll_takes_from_several_queues():
    cases = [Case(), Case()]
    for case in cases:
        case.take(3)
    buffers = {MessageQueue("t", "b", n): case.buffer for n, case in enumerate(cases)}
    assert len(PollOrder().poll(buffers, 5)) == 5


def test_a_paused_queue_is_passed_over():
    cases = [Case(), Case()]
    for case in cases:
        case.take(3)
    cases[0].buffer.paused = True
    buffers = {MessageQueue("t", "b", n): case.buffer for n, case in enumerate(cases)}
    assert len(PollOrder().poll(buffers, 10)) == 3
    assert cases[0].buffer.position == 0


def test_a_queue_that_cannot_be_decoded_has_its_turn_and_holds_up_no_other():
    bad, good = Case(), Case()
    bad.take(2, error=CorruptBatch("undecodable"))
    good.take(4)
    buffers = {MessageQueue("t", "b", 0): bad.buffer, MessageQueue("t", "b", 1): good.buffer}
    order, seen, told = PollOrder(), [], 0
    for _ in range(4):
        try:
            seen += [message.queue_offset for message in order.poll(buffers, 2)]
        except UndecodableMessages:
            told += 1
    assert (seen, told) == ([0, 1, 2, 3], 2)


def test_what_was_polled_before_an_administrator_moved_the_group_does_not_count():
    case = Case()
    case.take(50)
    case.poll(40)
    case.buffer.acknowledge(30)
    case.buffer.move(100, by_admin=True)
    case.buffer.acknowledge(40)
    assert case.buffer.commit_offset() == 100
    case.take(10)
    case.poll(4)
    case.buffer.acknowledge(104)
    case.buffer.acknowledge(105)  # nobody has it yet
    assert case.buffer.commit_offset() == 104
    case.buffer.move(0)  # the application seeks
    case.buffer.acknowledge(90)
    assert case.buffer.commit_offset() == 90
