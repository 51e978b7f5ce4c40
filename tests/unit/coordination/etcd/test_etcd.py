"""The client of etcd without an etcd: members that fail, what is sent, and what answers mean."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.etcd.gateway import EtcdRefusal, Gateway
from mqmesh.coordination.etcd.groups import MAX_GROUPS, Ages, WatchedKeys
from mqmesh.coordination.etcd.helper import MAX_CALLS, Helper
from mqmesh.coordination.etcd.http_line import MAX_ANSWER_BYTES, HttpAnswer, HttpLine
from mqmesh.coordination.etcd.keys import EtcdKeys, range_end, replica_and_lease, session_id
from mqmesh.coordination.etcd.members import Members, addresses_of
from mqmesh.coordination.etcd.messages import (
    RANGE,
    EtcdAnswer,
    EtcdKeyValue,
    Header,
    KeyEvent,
    RangeAnswer,
    range_of,
    watch_of,
)
from mqmesh.coordination.etcd.records import EtcdRecords
from mqmesh.coordination.interface import (
    Conflict,
    CoordinatorUnavailable,
    OutcomeUnknown,
    SessionLost,
    StateRecord,
    encode_presence,
    encode_state,
)
from mqmesh.errors import (
    ConfigError,
    EndpointUnreachable,
    InvalidArgument,
    RemoteProtocolError,
    RequestTimeout,
)
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.coordinator_contract import GROUP, presence, state
from mqmesh.transport.zmq.transport import ZmqTransport

A, B, C = "a:1", "b:2", "c:3"
TIMEOUT_MS = 3_000


def answer(term: int = 5, cluster: int = 77, **fields) -> HttpAnswer:
    header = {"cluster_id": str(cluster), "raft_term": str(term), "revision": "9"}
    return HttpAnswer(200, json.dumps({"header": header, **fields}).encode())


def refusal(code: int, status: int = 400) -> HttpAnswer:
    return HttpAnswer(status, json.dumps({"code": code, "message": "no!"}).encode())


class Fake:
    """Members that answer as they are told; ``tried`` says who was asked."""

    def __init__(self, *addresses: str) -> None:
        self.clock = ManualClock()
        self.tried: list[str] = []
        self.says: dict[str, Callable[[int], HttpAnswer]] = dict.fromkeys(
            addresses, lambda timeout_ms: answer()
        )
        self.lines: list[bytes] = []
        self.gateway = Gateway(Members(addresses), self._open, self.clock, self._pause, TIMEOUT_MS)

    def _open(self, address: str) -> FakeLine:
        return FakeLine(address, self)

    def _pause(self, duration_s: float) -> None:
        self.clock.advance(int(duration_s * 1_000))

    def fails(self, address: str, error: Exception, after_ms: int = 0) -> None:
        def say(timeout_ms: int) -> HttpAnswer:
            self.clock.advance(min(after_ms, timeout_ms))
            raise error

        self.says[address] = say

    def ask(self, *, changes: bool = False) -> EtcdAnswer:
        deadline_ms = self.clock.monotonic_ms() + TIMEOUT_MS
        return self.gateway.ask(RANGE, range_of(b"k"), RangeAnswer, deadline_ms, changes=changes)


class FakeLine:
    def __init__(self, address: str, fake: Fake) -> None:
        self.address, self.fake = address, fake

    def post(self, path: str, body: bytes, timeout_ms: int) -> HttpAnswer:
        self.fake.tried.append(self.address)
        return self.fake.says[self.address](timeout_ms)

    def stream(self, path: str, body: bytes, timeout_ms: int) -> Iterator[bytes]:
        yield from self.fake.lines

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


# ---- Members ---------------------------------------------------------------------------


def test_who_answers_is_asked_again():
    fake = Fake(A, B, C)
    fake.fails(A, EndpointUnreachable("no"))
    fake.ask()
    fake.ask()
    assert fake.tried == [A, B, B]


def test_each_member_gets_its_part_of_the_time():
    fake = Fake(A, B, C)
    for address in (A, B):
        fake.fails(address, RequestTimeout("late"), after_ms=10_000)
    fake.ask()
    assert (fake.tried, fake.clock.monotonic_ms() - ManualClock().monotonic_ms()) == (
        [A, B, C],
        2_000,
    )


def test_all_members_are_tried_until_the_time_is_over():
    fake = Fake(A, B)
    fake.fails(A, EndpointUnreachable("refused"))
    fake.fails(B, RemoteProtocolError("it broke"))
    with pytest.raises(CoordinatorUnavailable, match=r"a:1: refused; b:2: it broke"):
        fake.ask()
    assert 2 * 29 <= len(fake.tried) <= 2 * 31, "with a pause behind each round"


def test_a_change_is_sent_once():
    fake = Fake(A, B)
    fake.fails(A, EndpointUnreachable("refused"))
    fake.fails(B, RequestTimeout("late"))
    with pytest.raises(OutcomeUnknown, match="b:2: late"):
        fake.ask(changes=True)
    assert fake.tried == [A, B]


def test_a_change_that_no_member_can_be_told_was_not_made():
    fake = Fake(A, B)
    for address in (A, B):
        fake.fails(address, EndpointUnreachable("refused"))
    with pytest.raises(CoordinatorUnavailable):
        fake.ask(changes=True)
    assert fake.tried == [A, B]


def test_what_a_member_that_is_behind_says_is_not_taken():
    fake = Fake(A, B)
    fake.says[A] = lambda timeout_ms: answer(term=6)
    fake.ask()
    fake.fails(A, EndpointUnreachable("no"))
    with pytest.raises(CoordinatorUnavailable, match="raft term is 5, and 6 was seen"):
        fake.ask()
    fake.says[B] = lambda timeout_ms: answer(term=7)
    assert fake.ask().header.raft_term == 7


def test_a_change_that_a_member_that_is_behind_answers_has_an_unknown_outcome():
    fake = Fake(A)
    fake.says[A] = lambda timeout_ms: answer(term=6)
    fake.ask()
    fake.says[A] = lambda timeout_ms: answer(term=5)
    with pytest.raises(OutcomeUnknown):
        fake.ask(changes=True)


def test_a_member_of_another_cluster_is_not_believed():
    fake = Fake(A, B)
    fake.ask()
    fake.fails(A, EndpointUnreachable("no"))
    fake.says[B] = lambda timeout_ms: answer(term=9, cluster=78)
    with pytest.raises(CoordinatorUnavailable, match="must name members of one cluster"):
        fake.ask()


@pytest.mark.parametrize("code", [3, 5, 7, 8, 16])
def test_a_refusal_is_final(code):
    fake = Fake(A, B)
    fake.says[A] = lambda timeout_ms: refusal(code)
    with pytest.raises(EtcdRefusal, match=f"no! .code {code}"):
        fake.ask(changes=True)
    assert fake.tried == [A]


@pytest.mark.parametrize("code", [1, 2, 4, 13, 14])
def test_another_failure_is_the_members(code):
    fake = Fake(A, B)
    fake.says[A] = lambda timeout_ms: refusal(code, 503)
    fake.ask()
    assert fake.tried == [A, B]
    fake.says[B] = fake.says[A]
    with pytest.raises(OutcomeUnknown):
        fake.ask(changes=True)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"header": 3}', b"[" * 100_000])
def test_what_is_no_answer_is_the_members_failure(body):
    fake = Fake(A, B)
    fake.says[A] = lambda timeout_ms: HttpAnswer(200, body)
    fake.ask()
    assert fake.tried == [A, B]


def test_an_etcd_without_a_gateway_is_named():
    fake = Fake(A)
    fake.says[A] = lambda timeout_ms: HttpAnswer(404, b"Not Found\n")
    with pytest.raises(CoordinatorUnavailable, match="newer, with --enable-grpc-gateway"):
        fake.ask(changes=True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"result": {"canceled": True, "compact_revision": "8"}}, "kept from 8 on"),
        ({"result": {"header": {"cluster_id": "77", "raft_term": "4"}}}, "it is behind"),
        ({"error": {"message": "no leader"}}, "no leader"),
        ({}, "an empty line"),
    ],
)
def test_a_watch_ends_with_an_error(line, why):
    fake = Fake(A)
    fake.ask()
    fake.lines = [json.dumps(line).encode()]
    with pytest.raises(RemoteProtocolError, match=why):
        list(fake.gateway.watch([watch_of(b"a/", b"a0", 3)], 1_000))


@pytest.mark.parametrize(
    "text", ["", "host", "host:x", "host:0", "a@b:1", "h:1/x", "h:1,", "h:99999"]
)
def test_addresses_that_are_none_are_named(text):
    with pytest.raises(ConfigError, match="is no member of etcd"):
        addresses_of(text)


def test_addresses():
    assert addresses_of("h:1, [::1]:2,h:1/") == ("h:1", "[::1]:2")
    with pytest.raises(ConfigError, match="16 at most"):
        addresses_of(",".join(f"h{number}:1" for number in range(17)))


# ---- Keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 256])
def test_names_that_cannot_be_part_of_a_key(name):
    with pytest.raises(InvalidArgument, match="cannot be part of a key"):
        EtcdKeys(name)
    with pytest.raises(InvalidArgument, match="cannot be part of a key"):
        EtcdKeys("c").group(name)


def test_keys():
    keys = EtcdKeys("c")
    assert keys.state("g") == b"/mqmesh/c/g/state"
    assert keys.session("g", 64) == b"/mqmesh/c/g/session/64"
    assert range_end(keys.group("g")) == b"/mqmesh/c/g0"
    assert keys.replica_of("g", keys.session("g", 64)) == 64
    for other in (b"65", b"0", b"-1", b"x", b"", b"001"):
        assert keys.replica_of("g", b"/mqmesh/c/g/session/" + other) is None
    assert keys.replica_of("g", keys.session("gg", 1)) is None


@pytest.mark.parametrize(
    "session", ["", "1", "1/", "/1", "1/x", "1/-1", f"1/{2**63}", "1/" + "1" * 99]
)
def test_what_is_no_session_is_named(session):
    with pytest.raises(InvalidArgument, match="no session of etcd"):
        replica_and_lease(session)
    assert replica_and_lease(session_id(3, 2**63 - 1)) == (3, 2**63 - 1)


# ---- Ages ------------------------------------------------------------------------------


def test_the_same_revision_twice_says_how_old_it_is():
    ages = Ages()
    assert ages.on_read(GROUP, {1: 10, 2: 11}, sent_ms=0, now_ms=5) == {1: 0, 2: 0}
    assert ages.on_read(GROUP, {1: 10, 2: 20}, sent_ms=1_000, now_ms=1_007) == {1: 995, 2: 0}
    assert ages.on_read(GROUP, {1: 10, 2: 20}, sent_ms=1_500, now_ms=1_501) == {1: 1_495, 2: 493}
    assert ages.on_read(GROUP, {2: 20}, sent_ms=1_500, now_ms=1_600) == {2: 493}


def test_a_watch_does_not_prove_an_age():
    ages = Ages()
    ages.on_read(GROUP, {1: 10}, sent_ms=0, now_ms=5)
    assert ages.on_watch(GROUP, {1: 10}, now_ms=9_000) == {1: 0}
    assert ages.on_read(GROUP, {1: 10}, sent_ms=9_000, now_ms=9_001) == {1: 8_995}
    assert ages.on_watch(GROUP, {1: 10}, now_ms=9_100) == {1: 8_995}
    assert ages.on_watch(GROUP, {1: 12}, now_ms=9_200) == {1: 0}


def test_ages_are_bounded():
    ages = Ages()
    for number in range(MAX_GROUPS + 10):
        ages.on_read(f"g{number}", {1: 1}, 0, 0)
    assert ages.on_read("g0", {1: 1}, 100, 100) == {1: 0}, "it was forgotten"
    assert ages.on_read(f"g{MAX_GROUPS}", {1: 1}, 100, 100) == {1: 100}


def test_watched_keys_follow_their_events():
    keys = EtcdKeys("c")
    table = WatchedKeys(keys, GROUP)
    said = encode_presence(presence(2))
    table.replace([EtcdKeyValue(keys.session(GROUP, 2), said, 4, 9), EtcdKeyValue(b"else", b"", 3)])
    table.apply([KeyEvent(EtcdKeyValue(keys.state(GROUP), encode_state(state()), 5))])
    view = table.view({2: 30})
    assert view.record == StateRecord(5, state())
    assert [(one.session, one.age_ms) for one in view.members] == [(session_id(2, 9), 30)]
    table.apply([KeyEvent(EtcdKeyValue(keys.session(GROUP, 2)), "DELETE")])
    assert table.view({}).members == ()
    table.apply([KeyEvent(EtcdKeyValue(keys.state(GROUP), b"?", 6))])
    with pytest.raises(RemoteProtocolError, match="no GroupState"):
        table.view({})


# ---- Records ---------------------------------------------------------------------------


class FakeEtcd:
    """Answers in turn; keeps what was asked."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict]] = []

    def __call__(self, path, request, kind, deadline_ms, *, changes=False):
        self.asked.append((path, request))
        told = self.answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return kind(**told)


def records(*answers) -> tuple[EtcdRecords, FakeEtcd]:
    etcd = FakeEtcd(*answers)
    return EtcdRecords(etcd, ManualClock()), etcd


def test_a_ttl_is_rounded_up_to_seconds():
    made, etcd = records({"ID": 5, "TTL": 3}, {})
    assert made.begin(2_001, b"k", 1, b"said", 0) == session_id(1, 5)
    assert etcd.asked[0][1] == {"TTL": 3}


def test_a_lease_that_ends_between_renewal_and_presence_is_lost():
    kept = {"result": type("Kept", (), {"TTL": 3})()}
    made, _ = records(kept, EtcdRefusal("lease not found", 5))
    with pytest.raises(SessionLost):
        made.keep(session_id(1, 5), b"k", b"said", 0)
    made, _ = records(kept, EtcdRefusal("no space", 8))
    with pytest.raises(CoordinatorUnavailable, match="no space"):
        made.keep(session_id(1, 5), b"k", b"said", 0)


def test_a_lease_that_is_gone_needs_no_end():
    made, _ = records(EtcdRefusal("lease not found", 5))
    made.end(session_id(1, 5), 0)
    made, _ = records(EtcdRefusal("permission denied", 7))
    with pytest.raises(CoordinatorUnavailable, match="permission denied"):
        made.end(session_id(1, 5), 0)


def test_a_change_is_compared_with_version_and_session():
    made, etcd = records({"succeeded": True, "header": Header(revision=12)})
    assert made.change(b"state", b"session", 7, b"new", session_id(1, 5), 0) == 12
    compare = etcd.asked[0][1]["compare"]
    assert [(one["key"], one["target"]) for one in compare] == [
        (b"state", "MOD"),
        (b"session", "LEASE"),
    ]
    assert (compare[0]["mod_revision"], compare[1]["lease"]) == (7, 5)


@pytest.mark.parametrize(
    ("holder", "expected"), [([], SessionLost), ([6], SessionLost), ([5], Conflict)]
)
def test_what_a_refused_change_says(holder, expected):
    def part(*kvs):
        found = type("Part", (), {"response_range": RangeAnswer(kvs=list(kvs))})
        return found()

    old = EtcdKeyValue(b"state", encode_state(state(4)), 8)
    sessions = [EtcdKeyValue(b"session", b"", 3, lease) for lease in holder]
    made, _ = records({"responses": [part(old), part(*sessions)]})
    with pytest.raises(expected) as caught:
        made.change(b"state", b"session", 7, b"new", session_id(1, 5), 0)
    if isinstance(caught.value, Conflict):
        assert caught.value.record == StateRecord(8, state(4))


# ---- The line --------------------------------------------------------------------------


@pytest.fixture
def member():
    """A server whose connections a test serves itself, each by the next of ``serves``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serves: list[Callable[[socket.socket], None]] = []
        ended = threading.Semaphore(0)

        def accept() -> None:
            for serve in serves:
                taken, _ = listener.accept()
                with taken:
                    serve(taken)
                ended.release()

        def begin(*wanted: Callable[[socket.socket], None]) -> tuple[HttpLine, threading.Semaphore]:
            serves.extend(wanted)
            thread.start()
            line = HttpLine(f"127.0.0.1:{listener.getsockname()[1]}")
            return line, ended

        thread = threading.Thread(target=accept, daemon=True)
        yield begin
        thread.join(10)


def asked(taken: socket.socket) -> bool:
    """Takes one request, which may come in pieces."""
    request = b""
    while not request.endswith(b"{}"):
        request += taken.recv(65_536)
    return True


def say(text: bytes, *, times: int = 1) -> Callable[[socket.socket], None]:
    def serve(taken: socket.socket) -> None:
        for _ in range(times):
            asked(taken)
            taken.sendall(text)

    return serve


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_connection_is_kept_and_one_that_ended_is_noticed_before_a_request_is_lost(member):
    line, ended = member(say(OK, times=2), say(OK))
    for _ in range(2):
        assert line.post("/x", b"{}", 5_000) == HttpAnswer(200, b"{}")
    assert ended.acquire(timeout=10)
    assert line.post("/x", b"{}", 5_000) == HttpAnswer(200, b"{}")
    line.close()


def test_a_connection_that_breaks_behind_the_request_is_no_connection_that_was_refused(member):
    line, _ = member(say(b""))
    with pytest.raises(RemoteProtocolError, match="broke"):
        line.post("/x", b"{}", 5_000)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EndpointUnreachable):
        HttpLine(f"127.0.0.1:{port}").post("/x", b"{}", 5_000)


def test_no_answer_is_a_timeout(member):
    line, _ = member(lambda taken: asked(taken) and taken.recv(1))
    with pytest.raises(RequestTimeout, match="within 50 ms"):
        line.post("/x", b"{}", 50)


def test_answers_are_bounded(member):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_ANSWER_BYTES + 1)
    line, _ = member(say(head + b" " * (MAX_ANSWER_BYTES + 1)))
    with pytest.raises(RemoteProtocolError, match="an answer of more than"):
        line.post("/x", b"{}", 5_000)


def test_a_stream_gives_lines_until_it_ends(member):
    body = b'{"a":1}\n\n{"b":2}\n'
    chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk += b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (3, body[:3], len(body) - 3, body[3:])
    line, _ = member(say(chunk))
    lines = line.stream("/x", b"{}", 5_000)
    assert [next(lines), next(lines)] == [b'{"a":1}\n', b'{"b":2}\n']
    with pytest.raises(RemoteProtocolError, match="ended"):
        next(lines)


# ---- The helper ------------------------------------------------------------------------


class Loop:
    """A helper thread, and its loop that a test turns."""

    def __init__(self, timeout_ms: int) -> None:
        self.transport = ZmqTransport()
        self.stuck = threading.Event()
        self.ended = threading.Event()
        self.outcomes: list[object] = []
        self.helper = Helper(self.transport, timeout_ms, self.stuck.set, self.ended.set)

    def until(self, count: int) -> None:
        while len(self.outcomes) < count:
            self.transport.loop.tick(10)

    def close(self) -> None:
        self.helper.close()
        self.stuck.set()
        assert self.ended.wait(10)
        self.transport.loop.close()
        self.transport.close()


@pytest.fixture
def quick():
    loop = Loop(100)
    yield loop
    loop.close()


def test_a_member_that_never_comes_to_an_end_is_interrupted(quick):
    def stuck(deadline_ms: int) -> None:
        quick.stuck.wait(10)

    quick.helper.ask(stuck, quick.outcomes.append, changes=True)
    quick.helper.ask(stuck, quick.outcomes.append, changes=True)
    assert quick.outcomes == []
    quick.until(2)
    begun, not_begun = quick.outcomes
    assert isinstance(begun, OutcomeUnknown)
    assert isinstance(not_begun, CoordinatorUnavailable), "it waited behind the other one"
    quick.helper.ask(lambda deadline_ms: 7, quick.outcomes.append)
    quick.until(3)
    assert quick.outcomes[2] == 7


def test_calls_that_wait_are_bounded_and_after_the_end_only_the_last_words_are_said():
    loop = Loop(60_000)
    done: list[str] = []
    loop.helper.ask(lambda deadline_ms: loop.stuck.wait(10), loop.outcomes.append)
    loop.helper.ask(lambda deadline_ms: done.append("read"), loop.outcomes.append)
    loop.helper.ask(lambda deadline_ms: done.append("end"), loop.outcomes.append, outlives=True)
    for _ in range(MAX_CALLS - 2):
        loop.helper.ask(lambda deadline_ms: None, loop.outcomes.append)
    loop.until(1)
    assert isinstance(loop.outcomes[0], CoordinatorUnavailable)
    loop.close()
    assert (done, len(loop.outcomes)) == (["end"], 1)


def test_the_url_names_the_engine():
    transport = ZmqTransport()
    for url in ("etcd://", "etcd://nowhere"):
        with pytest.raises(ConfigError, match="is no member of etcd"):
            open_coordinator(url, transport, cluster="c")
    with pytest.raises(ConfigError, match="cannot be part of a key"):
        open_coordinator("etcd://h:1", transport, cluster="a/b")
    with pytest.raises(ConfigError, match="there are: embedded, etcd"):
        open_coordinator("zookeeper://h:1", transport, cluster="c")
    transport.loop.close()
    transport.close()
