"""Which queues a member gets: whom it asks, when again, and what it does with the answer."""

from __future__ import annotations

import pytest

from mqmesh.errors import EndpointUnreachable, GroupNotFound
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumerList
from mqmesh.sdk.consumer.queue_assignment import RETRY_MAX_MS, RETRY_MS, QueueAssignment
from mqmesh.sdk.consumer.rebalance import Average, allocate_strategy
from mqmesh.sdk.consumer.rebalance_timer import REJOIN_MS
from mqmesh.testing.clock import ManualClock

QUEUES = [MessageQueue("t", name, number) for name in ("a", "b") for number in range(2)]


class Case:
    """A consumer and its client, both played by the test."""

    client_id = "me"

    def __init__(self, strategy="average"):
        self.clock = ManualClock()
        self.loop = self.routes = self
        self.timers = []
        self.requests = []
        self.applied = []
        self.hindered = []
        self.topics = ["t"]
        self.connected = {"a", "b"}
        self.heartbeats_sent = 0
        self.brokers = self.heartbeats = self
        self.owns = False
        self.assignment = QueueAssignment(
            "g",
            self,
            allocate_strategy(strategy) if isinstance(strategy, str) else strategy,
            subscribed=lambda: self.topics,
            has_queues=lambda: self.owns,
            on_hindered=self.hindered.append,
            apply=lambda *taken: self.applied.append(taken),
        )

    def call_later(self, delay_ms, callback):
        self.timers.append((delay_ms, callback))

    def subscribe_queues(self, topic):
        return tuple(QUEUES) if topic == "t" else ()

    def brokers_of(self, topic):
        return ("b", "a")

    def is_connected(self, broker_name):
        return broker_name in self.connected

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        assert code == RequestCode.GET_CONSUMER_LIST_BY_GROUP
        self.requests.append((broker_name, on_done))

    def send_all(self):
        self.heartbeats_sent += 1

    def run(self):
        """Time goes to the next timer; returns how far that is."""
        delay_ms, callback = self.timers.pop(0)
        self.clock.advance(delay_ms)
        callback()
        return delay_ms

    def answer(self, *members, owners=None):
        _, on_done = self.requests.pop(0)
        header = encode_header(ConsumerList(list(members), 1, owners or {}))
        on_done(Command(0, 1, 1, header, memoryview(b"")))

    def fail(self, error):
        self.requests.pop(0)[1](error)


@pytest.fixture
def case():
    case = Case()
    case.assignment.plan()
    assert case.run() == 0
    return case


def test_the_first_broker_by_name_that_is_connected_says_who_the_members_are(case):
    assert [name for name, _ in case.requests] == ["a"]
    case.connected = {"b"}
    case.assignment.plan()
    case.run()
    assert [name for name, _ in case.requests] == ["a", "b"]
    case.connected = set()
    case.assignment.plan()
    case.run()
    assert len(case.requests) == 2


def test_a_member_alone_has_all_queues_and_one_of_two_has_half(case):
    case.answer("me")
    assert case.applied.pop() == ("t", QUEUES, True)
    case.assignment.plan()
    case.run()
    case.answer("you", "me")
    assert case.applied.pop() == ("t", QUEUES[:2], False)


def test_everybody_reads_everything_where_nothing_is_divided():
    case = Case(strategy=None)
    case.assignment.plan()
    case.run()
    assert (case.requests, case.applied) == ([], [("t", QUEUES, True)])


def test_who_is_not_known_yet_says_hello_and_asks_again(case):
    case.answer("you")
    assert (case.heartbeats_sent, case.applied) == (1, [])
    assert case.run() == RETRY_MS
    case.fail(GroupNotFound("planned"))
    assert case.heartbeats_sent == 2
    assert case.run() == RETRY_MS
    assert len(case.requests) == 1


def test_who_has_queues_keeps_them_until_others_have_come_back_too(case):
    case.owns = True
    case.answer("you")
    assert case.applied == []
    assert case.run() == REJOIN_MS


def test_an_answer_that_does_not_come_is_asked_for_again(case):
    planned = EndpointUnreachable("planned")
    case.fail(planned)
    assert (case.heartbeats_sent, case.applied, case.hindered) == (0, [], [planned])
    assert case.run() == RETRY_MAX_MS
    assert len(case.requests) == 1


def test_an_answer_of_an_earlier_round_or_an_unwanted_topic_counts_for_nothing(case):
    case.assignment.plan()
    case.run()
    case.answer("me")
    assert case.applied == []
    case.topics = []
    case.answer("me")
    assert case.applied == []


def test_a_strategy_that_fails_changes_nothing(caplog):
    class Broken:
        def allocate(self, *arguments):
            raise ValueError("planned")

    case = Case(strategy=Broken())
    case.assignment.plan()
    case.run()
    case.answer("me")
    assert case.applied == []
    assert "the allocation strategy failed" in caplog.text


def test_many_wishes_make_one_round(case):
    case.requests.clear()
    for _ in range(5):
        case.assignment.plan()
    assert len(case.timers) == 1


def test_one_question_is_asked_for_all_topics_of_a_broker(case):
    case.requests.clear()
    case.topics = ["t", *(f"t{number}" for number in range(1_000))]
    case.assignment.plan()
    case.run()
    assert len(case.requests) == 1
    case.topics.remove("t7")
    case.answer("me")
    assert [topic for topic, _, _ in case.applied] == case.topics
    case.assignment.plan()
    case.run()
    case.fail(GroupNotFound("planned"))
    assert case.heartbeats_sent == 1, "and not one for each topic"


def test_members_keep_what_they_have_at_the_broker_that_was_asked():
    case = Case()
    case.assignment.plan()
    case.run()
    case.answer("me", "you", owners={"t": [1, 0], "other": [0]})
    assert case.applied.pop() == ("t", [QUEUES[1], QUEUES[2]], False)
    # What nobody has, or one who is not in the list.
    case.assignment.plan()
    case.run()
    case.answer("me", "you", owners={"t": [-1, 7]})
    assert case.applied.pop() == ("t", QUEUES[:2], False)


class First(Average):
    """A user's own: the first member reads all."""

    def allocate(self, group, client_id, queues, client_ids):
        return list(queues) if client_id == client_ids[0] else []


def test_a_subclass_of_the_average_strategy_divides_in_its_own_way():
    case = Case(First())
    case.assignment.plan()
    case.run()
    case.answer("me", "you", owners={"t": [1, 1]})
    assert case.applied.pop() == ("t", QUEUES, False)
