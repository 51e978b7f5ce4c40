"""Commits of processed messages: where outputs go, what is repeated, and for how long."""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace

import pytest

from mqmesh.batch.record_batch import check_batch, read_meta
from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    NoRoute,
    NotMaster,
    RequestTimeout,
    SendInDoubt,
    SequenceConflict,
    StaleReceipt,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import Message
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.processing import MAX_COMMIT_BYTES, CommitProcessedRequest
from mqmesh.protocol.route import BrokerAddress, BrokerData, QueueData, TopicRoute
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.sdk.consumer.outputs import Outputs
from mqmesh.sdk.consumer.processed_commits import (
    DOUBT_MS,
    MOST_AT_ONCE,
    MOST_PRODUCERS,
    PATIENCE_MS,
    Commit,
    ProcessedCommits,
)
from mqmesh.testing.clock import ManualClock

DONE = Command(0, 0, 0, memoryview(b""), memoryview(b""))
UNKNOWN = BrokerError("not safe", code=int(ResponseCode.SYSTEM_ERROR))


class Case:
    """Commits of a consumer, the requests that they made, and the outcomes."""

    transport = SimpleNamespace(random=Random(7))
    namespace = ""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = SimpleNamespace(clock=self.clock)
        self.routes = RouteCache()
        self.finder = self
        self.asked: list = []
        self.requests: deque = deque()
        self.later: deque = deque()
        self.outcomes: list = []
        self.until_ms = 2**62
        self.commits = ProcessedCommits(self)

    def have(self, topic="bills", *, broker="broker-a", queues=4, perm=6, priorities=0) -> None:
        data = QueueData(broker, queues, queues, perm, priorities)
        group = BrokerData("c", broker, {0: BrokerAddress("127.0.0.1:1")}, epoch=1)
        self.routes.update(TopicRoute(topic, [data], [group]))

    def find(self, topic, on_done, *, anew) -> None:
        self.asked.append((topic, on_done))

    def request(self, broker, code, on_answer, *parts, header, timeout_ms) -> None:
        assert (broker, code) == ("broker-a", RequestCode.COMMIT_PROCESSED)
        request = decode_header(CommitProcessedRequest, memoryview(header))
        self.requests.append((request, b"".join(parts), on_answer))

    def call_later(self, delay_ms, callback) -> None:
        self.later.append((delay_ms, callback))

    def begin(self, *messages, **options) -> None:
        out = Outputs()
        for message in messages or [Message("bills", b"x")]:
            out.send(message, **options)
        request = CommitProcessedRequest("g", "orders", "member", b"")
        self.commits.begin(
            Commit("broker-a", request, out.end(), lambda: self.until_ms, self.outcomes.append)
        )

    def answer(self, outcome=DONE) -> tuple[CommitProcessedRequest, bytes]:
        request, body, on_answer = self.requests.popleft()
        on_answer(outcome)
        return request, body

    def pause(self) -> int:
        delay_ms, callback = self.later.popleft()
        self.clock.advance(delay_ms)
        callback()
        return delay_ms


@pytest.fixture
def case():
    case = Case()
    case.have()
    return case


def batches_of(body):
    found, position = [], 0
    while position < len(body):
        header = check_batch(memoryview(body), position)
        data = memoryview(body)[position : position + header.total_size]
        found.append((read_meta(data, header).topic, header))
        position += header.total_size
    return found


def test_outputs_of_a_queue_are_one_batch_and_of_a_key_one_queue(case):
    keyed = [Message("bills", b"%d" % n, sharding_key=str(n % 2)) for n in range(6)]
    case.begin(*keyed, Message("bills", b"a"), Message("bills", b"b"))
    request, body = case.answer()
    found = batches_of(body)
    assert request.batch_count == len(found)
    assert sorted(header.message_count for _, header in found) in ([2, 3, 3], [3, 5])
    assert len({header.producer_id for _, header in found}) == 1
    assert sorted(header.first_sequence for _, header in found)[0] == 0
    assert case.outcomes == [None]


def test_delays_and_life_times_are_batches_of_their_own_in_order(case):
    now, later = (Message("bills", b"x", sharding_key="k", delay_level=n) for n in (0, 3))
    case.begin(now, later, now, later, later)
    assert [header.message_count for _, header in batches_of(case.answer()[1])] == [2, 3]


def test_outputs_are_in_the_namespace_of_the_client(case):
    case.namespace = "shop"
    case.begin()
    ((topic, _),) = batches_of(case.answer()[1])
    assert topic == "shop%bills"


def test_a_priority_is_a_queue(case):
    case.have(priorities=4)
    case.begin(priority=3)
    case.begin()
    assert [batches_of(case.answer()[1])[0][1].queue_id for _ in range(2)] == [3, 0]
    case.begin(priority=4)
    assert isinstance(case.outcomes[-1], InvalidArgument)


def test_a_topic_is_looked_for_once_and_an_error_names_topic_and_broker(case):
    case.begin(Message("copies", b"x"))
    case.have("copies")
    topic, found = case.asked.pop()
    found(case.routes.route(topic))
    case.answer()
    case.begin(Message("gone", b"x"), Message("lost", b"x"))
    for _, found in case.asked:
        found(TopicNotFound("no such topic"))
    case.asked.clear()
    case.have("far", broker="broker-b")
    case.begin(Message("far", b"x"))
    case.asked.pop()[1](case.routes.route("far"))
    errors = case.outcomes[1:]
    assert [type(one) for one in errors] == [NoRoute, NoRoute]
    assert "'far'" in str(errors[1])
    assert "'broker-a', where 'orders' is consumed" in str(errors[1])


def test_queues_that_were_known_are_used_while_their_broker_is_away(case):
    case.begin()
    case.answer()
    case.have(perm=0)
    case.begin()
    case.answer()
    assert case.outcomes == [None, None]


@pytest.mark.parametrize("lost", [RequestTimeout("late"), EndpointUnreachable("gone"), UNKNOWN])
def test_a_lost_answer_is_asked_for_with_the_same_bytes(case, lost):
    case.begin()
    first = case.answer(lost)
    assert case.pause() == 200
    assert case.answer() == first
    assert case.outcomes == [None]


def test_a_busy_broker_is_given_its_time(case):
    case.begin()
    case.answer(SystemBusy("full", retry_after_ms=700))
    assert case.pause() == 700
    case.answer()
    assert case.outcomes == [None]


def test_a_refusal_is_the_outcome_and_the_producer_goes_on(case):
    case.begin()
    refused, _ = case.answer(StaleReceipt("late"))
    case.begin()
    request, body = case.answer()
    assert request.producer_key == refused.producer_key
    assert batches_of(body)[0][1].first_sequence == 1
    assert [type(one) for one in case.outcomes] == [StaleReceipt, type(None)]


def test_when_the_lease_is_over_the_outcome_says_that_it_is_not_known(case):
    case.until_ms = case.clock.monotonic_ms() + 1_000
    case.begin()
    doubted, _ = case.answer(RequestTimeout("late"))
    while not case.outcomes:
        case.pause()
        case.answer(SystemBusy("full"))
    (outcome,) = case.outcomes
    assert isinstance(outcome, SendInDoubt)
    assert "may be stored or not" in str(outcome)
    case.begin()
    request, _ = case.answer(SequenceConflict("other"))
    assert request.producer_key != doubted.producer_key, "its sequences are not used again"
    case.begin()
    assert case.answer()[0].producer_key != request.producer_key


def test_a_producer_in_doubt_rests_and_producers_are_bounded(case):
    for _ in range(MOST_PRODUCERS):
        case.begin()
        case.answer(SequenceConflict("other"))
    case.begin()
    assert not case.requests
    assert "0 are under way, and 48 ended in doubt" in str(case.outcomes[-1])
    assert case.pause() == DOUBT_MS
    case.begin()
    case.answer()
    assert case.outcomes[-1] is None


def test_a_commit_that_waits_for_too_long_is_never_sent(case):
    for _ in range(MOST_AT_ONCE + 2):
        case.begin()
    case.clock.advance(PATIENCE_MS)
    case.answer()
    assert [type(one) for one in case.outcomes] == [type(None), SystemBusy, SystemBusy]
    assert len(case.requests) == MOST_AT_ONCE - 1


def test_many_that_cannot_be_encoded_are_refused_one_after_the_other(case):
    for _ in range(MOST_AT_ONCE):
        case.begin()
    for _ in range(2_000):
        case.begin(Message("bills", b"x"), Message("bills", b""))
    case.answer()
    assert len(case.outcomes) == 2_001


def test_a_master_that_was_lost_leaves_a_doubt_and_the_next_one_is_asked_at_once(case):
    case.until_ms = case.clock.monotonic_ms() + 1_000
    case.begin()
    case.answer(NotMaster("deposed", epoch=2, master="127.0.0.1:2"))
    assert case.pause() == 0, "its name is in the refusal"
    while not case.outcomes:
        case.answer(SystemBusy("full"))
        case.pause()
    assert isinstance(case.outcomes[0], SendInDoubt)


def test_what_was_never_taken_is_no_doubt(case):
    case.until_ms = 0
    case.begin()
    case.answer(SystemBusy("full"))
    assert isinstance(case.outcomes[0], SystemBusy)


def test_nothing_is_repeated_for_ever(case):
    case.begin()
    case.answer(RequestTimeout("late"))
    case.clock.advance(PATIENCE_MS)
    case.pause()
    case.answer(RequestTimeout("late"))
    assert isinstance(case.outcomes[0], SendInDoubt)


def test_commits_side_by_side_are_of_different_producers_and_bounded(case):
    for _ in range(MOST_AT_ONCE + 5):
        case.begin()
    assert len({request.producer_key for request, *_ in case.requests}) == MOST_AT_ONCE
    case.answer()
    assert len(case.requests) == MOST_AT_ONCE
    case.commits.end_all()
    assert [type(one) for one in case.outcomes] == [type(None)] + [ClientClosed] * (
        MOST_AT_ONCE + 4
    )
    case.answer()
    assert len(case.outcomes) == MOST_AT_ONCE + 5, "each has one outcome"


def test_outputs_have_limits():
    out = Outputs()
    out.send(Message("bills", b"x" * (MAX_COMMIT_BYTES // 2)))
    with pytest.raises(InvalidArgument, match=str(MAX_COMMIT_BYTES)):
        out.send(Message("bills", b"x" * (MAX_COMMIT_BYTES // 2)))
    with pytest.raises(InvalidArgument, match="reserved"):
        out.send(Message("%RETRY%g", b"x"))
    with pytest.raises(InvalidArgument, match="ttl_ms"):
        out.send(Message("bills", b"x"), ttl_ms=0)
    assert len(out.end().plain["bills"]) == 1
    with pytest.raises(InvalidArgument, match="ended"):
        out.send(Message("bills", b"x"))


def test_a_message_that_was_not_looked_at_is_refused_at_the_end(case):
    case.begin(Message("bills", b"x"), Message("bills", b""))
    assert "body" in str(case.outcomes[0])
    due_ms = case.clock.wall_ms() + 60_000
    case.begin(Message("bills", b"x"), Message("bills", b"y", deliver_at_ms=due_ms))
    assert [header.message_count for _, header in batches_of(case.answer()[1])] in ([1, 1], [2])


def test_too_many_batches_are_refused_before_anything_is_sent(case):
    out = Outputs()
    for n in range(5):
        out.send(Message("bills", b"x", sharding_key="k"), ttl_ms=1_000 + n)
    request = CommitProcessedRequest("g", "orders", "member", b"")
    case.commits.begin(Commit("broker-a", request, out.end(), lambda: 2**62, case.outcomes.append))
    case.have(queues=2_000)
    case.begin(*[Message("bills", b"x", sharding_key=str(n)) for n in range(3_000)])
    one_of_each = [Message("bills", b"x", sharding_key=str(n), delay_level=1) for n in range(300)]
    case.begin(*one_of_each)
    for error, limit in zip(case.outcomes, (4, 1_000, 128), strict=True):
        assert isinstance(error, InvalidArgument)
        assert str(error).endswith(f"may have {limit}")
    assert not case.requests
