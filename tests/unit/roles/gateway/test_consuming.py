"""Messages that a pull left for the next one."""

from collections.abc import Callable

import pytest
from harness.batches import encode_flights, stored_batch

from mqmesh.errors import CorruptBatch, EndpointUnreachable
from mqmesh.message import Message
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    PullRequest,
    PullResponse,
    PullStatus,
    QueueBoundsResponse,
)
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.consuming import (
    BROKEN_MS,
    DECODED_BYTES,
    KEPT_MS,
    MOST_FROM_FIRST,
    Consuming,
    PullCache,
    PulledRun,
)
from mqmesh.roles.gateway.members import GatewayMembers
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.interface import OnDone

KEY = ("broker-a", "orders", 0, "TAG", "*")


def run(first: int = 5, size: int = 10, came_ms: int = 0) -> PulledRun:
    return PulledRun(first, first + 3, [first], [], size, (0, 100), came_ms)


def test_a_run_is_found_by_the_offsets_that_it_has():
    cache = PullCache(100, ManualClock().monotonic_ms)
    cache.keep(KEY, run(came_ms=ManualClock().monotonic_ms()))
    assert [cache.find(KEY, offset) is not None for offset in (4, 5, 7, 8)] == [
        *(False, True, True, False),
    ]
    assert cache.find(("broker-a", "orders", 1, "TAG", "*"), 5) is None


def test_what_nobody_took_for_long_is_asked_for_again():
    clock = ManualClock()
    cache = PullCache(100, clock.monotonic_ms)
    cache.keep(KEY, run(came_ms=clock.monotonic_ms()))
    clock.advance(KEPT_MS)
    assert cache.find(KEY, 5) is not None
    clock.advance(1)
    assert cache.find(KEY, 5) is None
    assert cache.held_bytes == 0


def test_the_oldest_go_when_there_is_no_room_and_those_of_a_broker_with_it():
    clock = ManualClock()
    cache = PullCache(25, clock.monotonic_ms)
    keys = [("broker-a", "orders", queue, "TAG", "*") for queue in range(3)]
    for key in keys:
        cache.keep(key, run(came_ms=clock.monotonic_ms()))
    assert [cache.find(key, 5) is not None for key in keys] == [False, True, True]
    cache.keep(keys[1], run(9, came_ms=clock.monotonic_ms()))
    assert cache.find(keys[1], 5) is None
    assert cache.held_bytes == 20
    cache.drop_broker("broker-a")
    assert cache.held_bytes == 0


# ---- Pulls -----------------------------------------------------------------------------


class FakeLoop:
    """A loop whose clock and timers move by ``advance`` only."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._timers: list[tuple[int, Callable[[], None]]] = []

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        self._timers.append((self.clock.monotonic_ms() + delay_ms, callback))

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        due = [one for one in self._timers if one[0] <= self.clock.monotonic_ms()]
        self._timers = [one for one in self._timers if one not in due]
        for _, callback in due:
            callback()


class FakeUpstream:
    """A way to a broker that keeps the pulls which it is asked."""

    closed = False

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.asked: list[tuple[PullRequest, OnDone]] = []

    def request(self, broker_name, code, on_done, *, header, timeout_ms) -> None:
        self.asked.append((decode_header(PullRequest, memoryview(header)), on_done))

    def give(self, body: bytes, following: int, high: int) -> PullRequest:
        """Answers the pull that was asked last; returns it."""
        asked, on_done = self.asked.pop()
        header = encode_header(PullResponse(PullStatus.FOUND, following, 0, high))
        on_done(Command(0, 1, 0, memoryview(header), memoryview(body)))
        return asked

    def break_connection(self) -> PullRequest:
        """Fails the pull that was asked last; returns it."""
        asked, on_done = self.asked.pop()
        on_done(EndpointUnreachable("the connection broke"))
        return asked


class FakeSession:
    """A connection that keeps its answers."""

    broker_name, client_id = "broker-a", ""
    is_closed = False

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict, bytes]] = []
        self.errors: list[Exception] = []

    def answer(self, request, code=0, fields=None, *, body=b"", remark="") -> None:
        self.answers.append((code, fields, body))

    def fail(self, request, error) -> None:
        self.errors.append(error)

    def park(self, request) -> None:
        pass


class Pulls:
    """Pulls of queue 3 of topic flights by the gateway."""

    def __init__(self, cache_bytes: int = 1 << 20) -> None:
        self.upstream = FakeUpstream()
        members = GatewayMembers(self.upstream, 10)
        ports = BrokerPorts(
            "127.0.0.1", 20_911, lambda port, name: None, lambda change: change(None)
        )
        ports.serve("broker-a", "DefaultCluster")
        self.cache = PullCache(cache_bytes, self.upstream.loop.clock.monotonic_ms)
        self._consuming = Consuming(self.upstream, members, ports, self.cache)
        self.session = FakeSession()

    def pull(self, offset: int, most: int = 32, suspend_ms: int = 0) -> None:
        fields = {
            "consumerGroup": "g",
            "topic": "flights",
            "queueId": "3",
            "queueOffset": str(offset),
            "maxMsgNums": str(most),
            "sysFlag": "6",
            "suspendTimeoutMillis": str(suspend_ms),
            "subscription": "*",
        }
        self.post(RemotingCode.PULL_MESSAGE, fields)

    def post(self, code: int, fields: dict[str, str]) -> None:
        request = RemotingCommand(code, fields=fields)
        self._consuming.handlers()[code](self.session, request)


def batch_of(first: int, *bodies: bytes) -> bytes:
    messages = [Message("flights", body) for body in bodies]
    return stored_batch(encode_flights(*messages), base_queue_offset=first)


def damaged(batch: bytes) -> bytes:
    return batch[:-1] + bytes([batch[-1] ^ 1])


def test_messages_before_a_damaged_batch_are_given():
    pulls = Pulls()
    pulls.pull(0)
    pulls.upstream.give(batch_of(0, b"a", b"b") + damaged(batch_of(2, b"c")), 3, 3)
    ((code, fields, body),) = pulls.session.answers
    assert (code, fields["nextBeginOffset"]) == (RemotingStatus.SUCCESS, "2")
    assert b"a" in body
    assert not pulls.upstream.asked


def test_damage_at_the_offset_is_asked_for_again_to_be_verified_and_then_refused():
    pulls = Pulls()
    pulls.pull(2)
    broken = damaged(batch_of(2, b"c"))
    assert not pulls.upstream.give(broken, 3, 3).verify
    assert pulls.session.answers == []
    assert pulls.upstream.give(broken, 3, 3).verify
    assert isinstance(pulls.session.errors[0], CorruptBatch)
    assert pulls.session.answers == []
    assert not pulls.upstream.asked


def test_a_damaged_batch_that_was_repaired_is_given():
    pulls = Pulls()
    pulls.pull(2)
    pulls.upstream.give(damaged(batch_of(2, b"c")), 3, 3)
    pulls.upstream.give(batch_of(2, b"c"), 3, 3)
    assert [code for code, _, _ in pulls.session.answers] == [RemotingStatus.SUCCESS]


def test_a_pull_that_waits_is_repeated_when_its_connection_breaks():
    pulls = Pulls()
    pulls.pull(0, suspend_ms=10_000)
    pulls.upstream.loop.advance(4_000)
    assert pulls.upstream.break_connection().suspend_timeout_ms == 10_000
    assert not pulls.upstream.asked
    pulls.upstream.loop.advance(BROKEN_MS)
    again = pulls.upstream.give(batch_of(0, b"a"), 1, 1)
    assert (again.queue_offset, again.suspend_timeout_ms) == (0, 6_000 - BROKEN_MS)
    assert [code for code, _, _ in pulls.session.answers] == [RemotingStatus.SUCCESS]
    assert not pulls.session.errors


@pytest.mark.parametrize(("suspend_ms", "is_closed"), [(0, False), (1_000, True)])
def test_a_pull_that_nobody_waits_for_fails_when_its_connection_breaks(suspend_ms, is_closed):
    pulls = Pulls()
    pulls.pull(0, suspend_ms=suspend_ms)
    pulls.session.is_closed = is_closed
    pulls.upstream.break_connection()
    pulls.upstream.loop.advance(BROKEN_MS)
    assert not pulls.upstream.asked
    assert isinstance(pulls.session.errors[0], EndpointUnreachable)


def test_a_pull_of_a_broker_that_stays_away_fails_when_its_wait_is_over():
    pulls = Pulls()
    pulls.pull(0, suspend_ms=1_000)
    tries = 0
    while not pulls.session.errors:
        pulls.upstream.break_connection()
        pulls.upstream.loop.advance(BROKEN_MS)
        tries += 1
    assert tries == 1_000 // BROKEN_MS
    assert not pulls.upstream.asked


def test_one_answer_is_decoded_up_to_a_bound_and_the_rest_is_asked_for_again():
    pulls = Pulls()
    large = bytes(DECODED_BYTES // 2 - 1_000)
    batches = b"".join(batch_of(number, large) for number in range(4))
    pulls.pull(0, most=1)
    pulls.upstream.give(batches, 4, 4)
    assert pulls.cache.held_bytes == 0, "what is larger than the cache is not kept"
    assert pulls.session.answers[0][1]["nextBeginOffset"] == "1"
    pulls = Pulls(cache_bytes=1 << 30)
    pulls.pull(0, most=1)
    pulls.upstream.give(batches, 4, 4)
    assert pulls.cache.held_bytes < DECODED_BYTES + 1_000
    pulls.pull(1, most=1)
    assert not pulls.upstream.asked, "it is there"
    pulls.pull(2, most=1)
    assert [asked.queue_offset for asked, _ in pulls.upstream.asked] == [2]


def test_one_batch_above_the_bound_is_given_nevertheless():
    pulls = Pulls(cache_bytes=1 << 30)
    pulls.pull(0)
    pulls.upstream.give(batch_of(0, *[bytes(DECODED_BYTES // 3)] * 4), 4, 4)
    assert pulls.session.answers[0][0] == RemotingStatus.SUCCESS


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ((0, MOST_FROM_FIRST), RemotingStatus.SUCCESS),
        ((0, MOST_FROM_FIRST + 1), RemotingStatus.QUERY_NOT_FOUND),
        ((1, 2), RemotingStatus.QUERY_NOT_FOUND),
        ((0, 0), RemotingStatus.QUERY_NOT_FOUND),
    ],
)
def test_a_new_group_begins_with_the_first_message_of_a_short_queue_only(bounds, code):
    pulls = Pulls()
    answers = {
        RequestCode.QUERY_CONSUMER_OFFSET: ConsumerOffsets([]),
        RequestCode.QUERY_QUEUE_BOUNDS: QueueBoundsResponse(*bounds),
    }

    def ask(broker_name, code, header, on_done) -> None:
        header = memoryview(encode_header(answers[code]))
        on_done(Command(0, 1, 0, header, memoryview(b"")))

    pulls.upstream.ask = ask
    fields = {"consumerGroup": "g", "topic": "flights", "queueId": "3"}
    pulls.post(RemotingCode.QUERY_CONSUMER_OFFSET, fields)
    ((found, offset, _),) = pulls.session.answers
    assert found == code
    assert offset == ({"offset": "0"} if code == RemotingStatus.SUCCESS else None)
