"""From being given a queue to reading it: locks first, patience, and no queue that nobody wants."""

from __future__ import annotations

import pytest

from mqmesh.errors import EndpointUnreachable, NoPermission
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.start_offsets import (
    LOCATE_RETRY_MS,
    LOCK_RETRY_MAX_MS,
    MOST_AT_ONCE,
    RETRY_MAX_MS,
    QueueStarts,
    Start,
)
from mqmesh.sdk.consumer.start_positions import Position

A, B = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)


class Case:
    """The consumer, its offsets, its positions and its locks."""

    def __init__(self, *, locks):
        self.given: dict[MessageQueue, Start] = {}
        self.begun: list[tuple[MessageQueue, Position]] = []
        self.timers = []
        self.located = []
        self.asked = []
        self.forgotten = []
        self.released = []
        self.hindered = []
        self.starts = QueueStarts(
            self,
            self,
            self.call_later,
            is_ours=self.is_ours,
            is_wanted=self.is_wanted,
            begin=self.begin,
            on_hindered=lambda queue, error: self.hindered.append((queue, error)),
        )
        self.starts.leases = self if locks else None

    def give(self, *queues):
        for queue in queues:
            self.given[queue] = Start(queue)
        self.starts.plan([self.given[queue] for queue in queues], 7)

    def is_wanted(self, start):
        return self.given.get(start.queue) is start

    def is_ours(self, queue):
        return queue in self.given

    def begin(self, start, position):
        self.begun.append((start.queue, position))

    def call_later(self, delay_ms, callback):
        self.timers.append((delay_ms, callback))

    def locate(self, broker_name, queues, on_done):
        self.located.append((broker_name, queues, on_done))

    def acquire(self, broker_name, queues, on_done):
        self.asked.append((broker_name, queues, on_done))

    def forget(self, queues):
        self.forgotten += queues

    def release(self, queues):
        self.released += queues

    def tick(self):
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()
        return [delay_ms for delay_ms, _ in timers if delay_ms]  # the others end a turn


@pytest.fixture
def plain():
    """A consumer that needs no locks."""
    return Case(locks=False)


@pytest.fixture
def locking():
    """A consumer that needs locks."""
    return Case(locks=True)


def test_queues_are_located_broker_by_broker_and_begun(plain):
    plain.give(A, B)
    assert plain.tick() == [7, 7]
    for _, queues, on_done in plain.located:
        on_done(queues[0], Position(5, committed=True))
    assert plain.begun == [(A, Position(5, True)), (B, Position(5, True))]


def test_it_asks_again_ever_more_slowly(plain):
    plain.give(A)
    delays = []
    gone = EndpointUnreachable("gone")
    for _ in range(10):
        delays += plain.tick()
        plain.located.pop()[2](A, gone)
    assert delays[1:4] == [LOCATE_RETRY_MS, LOCATE_RETRY_MS * 2, LOCATE_RETRY_MS * 4]
    assert delays[-1] == RETRY_MAX_MS
    assert set(plain.hindered) == {(A, gone)}
    assert len(plain.hindered) < 10  # not of the first tries


def test_a_missing_right_is_reported_at_the_first_try(plain):
    plain.give(A)
    plain.tick()
    refused = NoPermission("no right")
    plain.located.pop()[2](A, refused)
    assert plain.hindered == [(A, refused)]


def test_what_was_given_up_meanwhile_is_not_begun(plain):
    plain.give(A)
    plain.tick()
    del plain.given[A]
    plain.located.pop()[2](A, Position(5, committed=True))
    plain.give(B)
    del plain.given[B]
    plain.tick()
    assert not plain.begun
    assert not plain.located


def test_a_queue_is_located_only_when_it_is_locked(locking):
    locking.give(A)
    locking.tick()
    locking.asked.pop()[2]([], [A])
    assert not locking.located
    locking.tick()
    locking.asked.pop()[2]([A], [])
    locking.located.pop()[2](A, Position(5, committed=True))
    assert locking.begun == [(A, Position(5, True))]


def test_a_lock_is_asked_for_often(locking):
    locking.give(A)
    for _ in range(10):
        delays = locking.tick()
        locking.asked.pop()[2]([], [A])
    assert delays == [LOCK_RETRY_MAX_MS]


def test_a_lock_that_nobody_wants_any_more_is_given_back(locking):
    locking.give(A)
    locking.tick()
    del locking.given[A]
    locking.asked.pop()[2]([A], [])
    assert locking.forgotten == locking.released == [A]
    assert not locking.located


def test_a_lock_for_a_queue_that_was_given_anew_is_kept_for_that(locking):
    locking.give(A)
    locking.tick()
    locking.give(A)
    locking.asked.pop()[2]([A], [])
    assert not locking.released
    assert not locking.located


def test_a_queue_whose_listener_still_runs_here_is_waited_for(locking):
    locking.starts.leaving.add(A)
    locking.give(A)
    locking.tick()
    assert not locking.asked
    locking.starts.leaving.discard(A)
    locking.tick()
    assert len(locking.asked) == 1


def test_what_is_planned_in_one_turn_is_located_together(plain):
    queues = [MessageQueue(f"t{number}", "broker-a", 0) for number in range(MOST_AT_ONCE + 1)]
    for queue in queues:
        plain.give(queue)
    plain.tick()
    assert [len(some) for _, some, _ in plain.located] == [MOST_AT_ONCE, 1]
    for _, some, on_done in plain.located:
        for queue in some:
            on_done(queue, EndpointUnreachable("gone"))
    plain.located.clear()
    plain.tick()
    assert [len(some) for _, some, _ in plain.located] == [MOST_AT_ONCE, 1], "retries, too"


def test_what_is_planned_in_a_later_turn_waits_as_long_as_it_must(plain):
    plain.give(A)
    (_, seal), (_, first) = plain.timers
    plain.timers.clear()
    seal()
    other = MessageQueue("u", "broker-a", 0)
    plain.give(other)
    first()
    assert [some for _, some, _ in plain.located] == [[A]]
    plain.tick()
    assert [some for _, some, _ in plain.located] == [[A], [other]]
