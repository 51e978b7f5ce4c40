"""Requests leave when they may, and each is answered exactly once, whatever happens."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
from harness.hand_network import HandNetwork
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    RequestTimeout,
)
from mqmesh.protocol.command import Command
from mqmesh.sdk.client.outbox import WATCH_MS, Effects, OutgoingRequest, RequestOutbox, Turns

PAUSE_MS = 50
TIMEOUT_MS = 1_000
OK = Command(0, 0, 1, memoryview(b""), memoryview(b""))


class Numbers:
    """Sends numbers, each until it is taken or its time is over; the simplest source."""

    def __init__(self, network: HandNetwork) -> None:
        self.clock = network.clock
        self.waiting: dict[str, deque[tuple[int, int]]] = {}
        self.outcomes: dict[int, object] = {}
        self.pauses = True

    def put(self, broker: str, number: int, timeout_ms: int = TIMEOUT_MS) -> None:
        deadline_ms = self.clock.monotonic_ms() + timeout_ms
        self.waiting.setdefault(broker, deque()).append((number, deadline_ms))

    def brokers(self) -> list[str]:
        return [name for name, numbers in self.waiting.items() if numbers]

    def take(self, broker: str) -> OutgoingRequest | None:
        self.end_late(broker, RequestTimeout("late"))
        if not self.waiting.get(broker):
            return None
        number, deadline_ms = self.waiting[broker].popleft()
        on_answer = partial(self.answered, broker, number, deadline_ms)
        return OutgoingRequest(7, [b"%d" % number], b"head", 100, on_answer)

    def answered(self, broker, number, deadline_ms, answer) -> Effects | None:
        now_ms = self.clock.monotonic_ms()
        if isinstance(answer, MQMeshError) and answer.retriable and now_ms < deadline_ms:
            again = partial(self.again, broker, number, deadline_ms)
            if self.pauses:
                again()
                return Effects(pause=(broker, PAUSE_MS))
            return Effects(later=[(PAUSE_MS, again)])
        return Effects(on_left=partial(self.tell, number, answer))

    def again(self, broker, number, deadline_ms) -> None:
        self.waiting[broker].appendleft((number, deadline_ms))

    def tell(self, number: int, outcome: object) -> None:
        assert number not in self.outcomes, "told twice"
        self.outcomes[number] = outcome

    def without(self, broker: str) -> None:
        self.end_late(broker, EndpointUnreachable("away"))

    def end_late(self, broker: str, error: MQMeshError) -> None:
        numbers = self.waiting.get(broker, deque())
        while numbers and numbers[0][1] <= self.clock.monotonic_ms():
            self.tell(numbers.popleft()[0], error)


class Post:
    """An outbox of numbers, and its network."""

    def __init__(self, max_in_flight: int = 1) -> None:
        self.network = HandNetwork()
        self.source = Numbers(self.network)
        self.outbox = RequestOutbox(self.network, self.source, max_in_flight)

    def put(self, *numbers: int, broker: str = "a", timeout_ms: int = TIMEOUT_MS) -> None:
        for number in numbers:
            self.source.put(broker, number, timeout_ms)
        self.outbox.schedule()
        self.network.run()

    @property
    def asked(self) -> list[tuple[str, bytes]]:
        return [(one.broker_name, one.body) for one in self.network.asked]


@pytest.fixture
def post():
    return Post()


def test_so_many_requests_are_in_flight_at_each_broker():
    post = Post(2)
    post.put(1, 2, 3)
    post.put(4, broker="b")
    assert post.asked == [("a", b"1"), ("a", b"2"), ("b", b"4")]
    assert (post.outbox.has_room("a"), post.outbox.has_room("b")) == (False, True)
    post.network.answer(OK)
    assert post.asked == [("a", b"2"), ("b", b"4"), ("a", b"3")]
    assert post.source.outcomes == {1: OK}


def test_a_request_is_what_the_source_made(post):
    post.put(1)
    (asked,) = post.network.asked
    assert (asked.code, asked.header, asked.timeout_ms) == (7, b"head", 100)


def test_the_next_request_leaves_before_anybody_is_told_of_the_last(post, monkeypatch):
    post.put(1, 2)
    seen = []
    monkeypatch.setattr(post.source, "tell", lambda *_: seen.append(list(post.asked)))
    post.network.answer(OK)
    assert seen == [[("a", b"2")]]


def test_a_pause_stops_one_broker_and_no_other(post):
    post.put(1)
    post.network.answer(BrokerNotAvailable("starting"))
    post.put(2)
    post.put(3, broker="b")
    assert post.asked == [("b", b"3")]
    assert not post.outbox.has_room("a")
    post.network.run(PAUSE_MS - 1)
    assert post.asked == [("b", b"3")]
    post.network.run(1)
    assert post.asked == [("b", b"3"), ("a", b"1")]


def test_what_is_to_come_later_comes_then_and_holds_up_nobody(post):
    post.source.pauses = False
    post.put(1, 2)
    post.network.answer(BrokerNotAvailable("starting"))
    assert post.asked == [("a", b"2")]
    post.network.answer(OK)
    post.network.run(PAUSE_MS)
    assert post.asked == [("a", b"1")]
    post.network.answer(OK)
    assert post.source.outcomes == {1: OK, 2: OK}


def test_it_is_tried_again_until_its_time_is_over(post):
    post.put(1, timeout_ms=3 * PAUSE_MS)
    for _ in range(3):
        post.network.answer(BrokerNotAvailable("starting"))
        post.network.run(PAUSE_MS)
    assert post.asked == []
    assert isinstance(post.source.outcomes[1], RequestTimeout)


def test_without_a_connection_it_waits_no_longer_than_it_may(post):
    post.network.away.add("a")
    post.put(1, timeout_ms=WATCH_MS)
    post.put(2)
    assert post.asked == []
    assert post.network.connecting
    assert not post.outbox.has_room("a")
    post.network.run(WATCH_MS)
    assert isinstance(post.source.outcomes.get(1), EndpointUnreachable)
    post.network.away.clear()
    post.network.run(WATCH_MS)
    assert post.asked == [("a", b"2")]


def test_a_connection_that_breaks_lets_the_rest_wait(post):
    post.put(1, 2)
    post.network.away.add("a")
    post.network.answer(EndpointUnreachable("broke"))
    post.network.run(PAUSE_MS)
    assert post.asked == []
    post.network.away.clear()
    post.outbox.schedule()
    post.network.run()
    assert post.asked == [("a", b"1")]


def test_nobody_is_watched_when_nothing_waits(post):
    post.network.away.add("a")
    post.put(1, timeout_ms=WATCH_MS)
    post.network.run(WATCH_MS)
    assert post.source.outcomes
    assert post.network.planned == 0


def test_the_watch_goes_on_after_a_failure(post, monkeypatch):
    post.network.away.add("a")
    post.put(1)

    def fail(_: str) -> None:
        raise RuntimeError("in a test")

    with monkeypatch.context() as patch:
        patch.setattr(post.source, "without", fail)
        with pytest.raises(RuntimeError):
            post.network.run(WATCH_MS)
    assert post.network.planned == 1


def test_an_event_of_another_thread_comes_in_the_loop(post):
    def event() -> None:
        post.source.put("a", 5)

    post.outbox.post(event)
    assert post.source.waiting == {}
    post.network.run()
    assert post.asked == [("a", b"5")]


def test_closing_answers_what_is_in_flight_and_carries_out_what_was_planned():
    post = Post(2)
    post.source.pauses = False
    post.put(1, 2, 3)
    post.network.answer(BrokerNotAvailable("starting"))
    assert post.asked == [("a", b"2"), ("a", b"3")]
    post.outbox.post(lambda: post.source.put("a", 4))
    answers = [one.on_done for one in post.network.asked]
    error = ClientClosed("closed")
    post.network.closed = True
    post.outbox.close(error)
    assert post.source.outcomes == {2: error, 3: error}
    assert sorted(number for number, _ in post.source.waiting["a"]) == [1, 4], "left to the source"
    for on_done in answers:
        on_done(OK)  # comes too late, and nobody is told twice
    post.network.run(10_000)
    assert len(post.asked) == 2


def test_what_an_answer_of_closing_plans_comes_at_once(post):
    post.source.pauses = False
    post.put(1)
    post.outbox.close(RequestTimeout("closed"))
    assert [number for number, _ in post.source.waiting["a"]] == [1], "left to the source"


def test_a_pump_that_was_planned_before_closing_sends_nothing(post):
    post.source.put("a", 1)
    post.outbox.schedule()
    post.network.closed = True
    post.network.run()
    assert post.asked == []


def test_when_the_client_is_closed_nothing_is_sent_and_events_are_refused(post):
    post.network.closed = True
    post.put(1)
    assert post.asked == []
    with pytest.raises(ClientClosed):
        post.outbox.post(lambda: None)


def test_a_pump_is_planned_once():
    turns = Turns()
    assert [turns.plan(), turns.plan()] == [True, False]
    turns.begin()
    assert turns.pumping
    assert turns.plan()
    turns.end()
    assert not turns.pumping


class AnyCourse(RuleBasedStateMachine):
    """Whatever happens in whatever order: bounded, and one outcome for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.post = Post(2)
        self.count = 0

    @rule(broker=st.sampled_from("ab"), timeout_ms=st.sampled_from([30, 500]))
    def put(self, broker, timeout_ms):
        self.count += 1
        self.post.put(self.count, broker=broker, timeout_ms=timeout_ms)

    @rule(is_good=st.booleans(), pauses=st.booleans())
    def answer(self, is_good, pauses):
        self.post.source.pauses = pauses
        if self.post.network.asked:
            self.post.network.answer(OK if is_good else BrokerNotAvailable("starting"))

    @rule(broker=st.sampled_from("ab"))
    def connection(self, broker):
        self.post.network.away ^= {broker}

    @rule(duration_ms=st.sampled_from([1, PAUSE_MS, WATCH_MS, 1_000]))
    def wait(self, duration_ms):
        self.post.network.run(duration_ms)

    @invariant()
    def so_many_are_in_flight(self):
        for broker in "ab":
            assert sum(one.broker_name == broker for one in self.post.network.asked) <= 2

    def teardown(self):
        network, source = self.post.network, self.post.source
        network.away.clear()
        for _ in range(20 + 2 * self.count):
            network.run(1_000)
            while network.asked:
                network.answer(OK)
        assert len(source.outcomes) == self.count


TestAnyCourse = AnyCourse.TestCase
