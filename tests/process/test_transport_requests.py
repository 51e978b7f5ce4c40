"""Requests and answers over real sockets."""

from __future__ import annotations

import threading
import time

import pytest
from harness.stopwatch import Stopwatch

from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    LocalProtocolError,
    MessageIllegal,
    MQMeshError,
    RequestTimeout,
    SystemBusy,
    UnsupportedCommand,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import EMPTY_REPLY, MAX_FRAME_BYTES, MAX_HEADER_BYTES, Reply
from mqmesh.transport.zmq import plain_server as plain_server_module
from mqmesh.transport.zmq import server as server_module
from mqmesh.transport.zmq.busy_poll import BusyPoll
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.plain_server import PlainServer
from mqmesh.transport.zmq.server import CommandServer

ECHO, HOLD, FAIL, BUG, TELL, BIG = range(1, 7)
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(params=["streams", "libzmq", "streams of loops"])
def served_by(request):
    """Serve by plain streams, to clients of both kinds, and by libzmq as where there are keys."""
    return request.param


def echo(request):
    return Reply(bytes(request.command.header), [request.command.body])


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request, short_tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{short_tmp_path}/s"


def test_header_and_body_go_there_and_back(wire, endpoint):
    _, where = wire.server({ECHO: echo}, endpoint=endpoint)
    client = wire.client(where)
    done = []
    client.request(ECHO, done.append, b"one", memoryview(b"two"), header=b"head")
    assert done == [], "never before request returns"
    wire.until(lambda: done)
    assert bytes(done[0].header) == b"head"
    assert bytes(done[0].body) == b"onetwo"
    assert client.in_flight == 0


def test_answers_find_their_requests_in_any_order(wire):
    held = []
    _, where = wire.server({HOLD: held.append})
    client = wire.client(where)
    outcomes = {}
    for number in range(100):
        client.request(
            HOLD,
            lambda answer, number=number: outcomes.__setitem__(number, bytes(answer.body)),
            b"%d" % number,
        )
    wire.until(lambda: len(held) == 100)
    assert client.in_flight == 100
    for request in reversed(held):
        request.later().done(Reply(body=[request.command.body]))
    wire.until(lambda: len(outcomes) == 100)
    assert outcomes == {number: b"%d" % number for number in range(100)}


def test_slow_requests_share_the_loop_with_everything_else(wire):
    turns, served = [], []

    def work(request):
        served.append(len(turns))
        done_s = time.monotonic() + 0.004
        while time.monotonic() < done_s:
            pass
        return EMPTY_REPLY

    _, where = wire.server({HOLD: work})
    clients = [wire.client(where) for _ in range(2)]
    wire.loop.at_tick_end(lambda: turns.append(None))
    answers = []
    for _ in range(40):
        for client in clients:
            client.request(HOLD, answers.append)
    wire.until(lambda: len(answers) == 80)
    # Two of 4 ms and no third one begin within the 5 ms of a turn.
    assert max(served.count(turn) for turn in set(served)) <= 2


def test_a_second_answer_to_the_same_request_is_ignored(wire):
    held = []
    _, where = wire.server({HOLD: held.append, ECHO: echo})
    client = wire.client(where)
    done = []
    client.request(HOLD, done.append)
    wire.until(lambda: held)
    held[0].later().done(EMPTY_REPLY)
    held[0].later().done(EMPTY_REPLY)
    wire.ask(client, ECHO)
    assert len(done) == 1


@pytest.mark.parametrize(
    ("raised", "expected", "code"),
    [
        (SystemBusy("slow", retry_after_ms=70), SystemBusy, ResponseCode.SYSTEM_BUSY),
        (InvalidArgument("bad"), MessageIllegal, ResponseCode.MESSAGE_ILLEGAL),
        (BrokerError("odd", code=22), BrokerError, 22),
        (MQMeshError("x" * 5_000), BrokerError, ResponseCode.SYSTEM_ERROR),
        (MQMeshError("\udcff"), BrokerError, ResponseCode.SYSTEM_ERROR),
    ],
)
def test_what_a_handler_raises_is_told(wire, raised, expected, code):
    def fail(_request):
        raise raised

    _, where = wire.server({FAIL: fail})
    with pytest.raises(expected) as caught:
        wire.ask(wire.client(where), FAIL)
    assert caught.value.code == code
    assert caught.value.retry_after_ms == getattr(raised, "retry_after_ms", 0)
    assert len(caught.value.remark) <= 1_024


def test_a_bug_in_a_handler_is_told_without_its_text_and_the_server_lives(wire, caplog):
    def bug(_request):
        raise RuntimeError("secret")

    _, where = wire.server({BUG: bug, ECHO: echo})
    client = wire.client(where)
    with pytest.raises(BrokerError, match="internal error") as caught:
        wire.ask(client, BUG)
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text
    wire.ask(client, ECHO)


def test_an_unknown_command_is_refused(wire):
    _, where = wire.server({})
    with pytest.raises(UnsupportedCommand, match="request code 9"):
        wire.ask(wire.client(where), 9)


def test_a_oneway_request_is_served_and_not_answered(wire):
    served = []
    server, where = wire.server({ECHO: lambda request: served.append(request) or echo(request)})
    client = wire.client(where)
    client.oneway(ECHO, b"x")
    client.oneway(9, b"unknown to the server")
    wire.until(lambda: server.requests == 2)
    wire.turn_for(0.1)
    assert len(served) == 1
    assert client.in_flight == 0


def test_a_server_speaks_first(wire):
    told = []

    def tell(request):
        request.peer.notify(40, b"news")
        return EMPTY_REPLY

    _, where = wire.server({TELL: tell})
    client = wire.client(where, on_command=told.append)
    wire.ask(client, TELL)
    wire.until(lambda: told)
    assert (told[0].code, bytes(told[0].header), told[0].is_oneway) == (40, b"news", True)


def test_an_answer_that_is_too_large_becomes_an_error(wire):
    _, where = wire.server({BIG: lambda request: Reply(body=[bytes(MAX_FRAME_BYTES)])})
    with pytest.raises(MessageIllegal, match="over"):
        wire.ask(wire.client(where), BIG)


def test_a_request_that_is_too_large_is_not_sent(wire):
    _, where = wire.server({ECHO: echo})
    client = wire.client(where)
    with pytest.raises(LocalProtocolError):
        client.request(ECHO, list, bytes(MAX_FRAME_BYTES))
    with pytest.raises(LocalProtocolError):
        client.request(ECHO, list, header=bytes(MAX_HEADER_BYTES + 1))
    assert client.in_flight == 0
    body = bytes(MAX_FRAME_BYTES - 16)
    done = []
    client.request(ECHO, done.append, body)
    wire.until(lambda: done)
    assert len(done[0].body) == len(body)


# ---- Deadlines and bounds ------------------------------------------------------------------


def test_an_answer_that_does_not_come_is_a_timeout_of_unknown_outcome(wire):
    held = []
    _, where = wire.server({HOLD: held.append, ECHO: echo})
    client = wire.client(where)
    wire.ask(client, ECHO)
    done = []
    client.request(HOLD, done.append, timeout_ms=200)
    watch = Stopwatch()
    took_s = wire.until(lambda: done)
    assert isinstance(done[0], RequestTimeout)
    assert "unknown" in str(done[0])
    assert took_s > 0.19
    assert watch.seconds < 1
    held[0].later().done(EMPTY_REPLY)
    wire.ask(client, ECHO)
    assert len(done) == 1, "the late answer is nobody's"


def test_without_a_connection_a_request_was_certainly_not_carried_out(wire):
    client = wire.client(NOWHERE)
    done = []
    client.request(ECHO, done.append, timeout_ms=150)
    wire.until(lambda: done)
    assert isinstance(done[0], EndpointUnreachable)
    assert "unknown" not in str(done[0])
    wire.until(lambda: client.unreachable)
    assert not client.connected


def test_a_request_made_before_the_server_is_there_waits_for_it(wire, short_tmp_path):
    where = f"ipc://{short_tmp_path}/s"
    client = wire.client(where)
    done = []
    client.request(ECHO, done.append, b"x", timeout_ms=8_000)
    client.oneway(ECHO, b"y")
    wire.turn_for(0.15)
    server, _ = wire.server({ECHO: echo}, endpoint=where)
    wire.until(lambda: done and server.requests == 2)
    assert bytes(done[0].body) == b"x"


def test_a_client_may_be_closed_inside_any_callback(wire):
    _, where = wire.server({ECHO: echo, HOLD: lambda request: None})
    client = wire.client(where)
    outcomes = []
    client.request(HOLD, outcomes.append)
    client.request(ECHO, lambda _: client.close())
    wire.until(lambda: outcomes)
    assert isinstance(outcomes[0], ClientClosed)
    other = wire.client(where, on_connection=lambda up: other.close())
    other.request(ECHO, outcomes.append)
    wire.until(lambda: len(outcomes) == 2)
    late = wire.client(NOWHERE)
    late.request(ECHO, lambda _: late.close(), timeout_ms=50)
    late.request(ECHO, outcomes.append, timeout_ms=50)
    wire.until(lambda: len(outcomes) == 3)


def test_more_connections_than_the_limit_are_refused_and_room_comes_back(wire):
    server, where = wire.server({ECHO: echo}, max_connections=2)
    clients = [wire.client(where) for _ in range(2)]
    for client in clients:
        wire.ask(client, ECHO)
    third = wire.client(where)
    with pytest.raises(SystemBusy, match=r"2 connections .*max_connections"):
        wire.ask(third, ECHO)
    clients[0].close()
    wire.until(lambda: server.peer_count == 1)
    wire.ask(third, ECHO)


def test_connections_beyond_the_limit_are_ended_after_they_were_told(wire):
    server, where = wire.server({ECHO: echo}, max_connections=1)
    wire.ask(wire.client(where), ECHO)
    news = []
    wire.client(where, on_connection=news.append)
    silent = wire.client(where, on_connection=news.append)
    wire.until(lambda: news.count(True) == 2)
    with pytest.raises(SystemBusy):
        wire.ask(silent, ECHO)
    server.tick(wire.loop.clock.monotonic_ms() + server_module.SURPLUS_MS)
    wire.until(lambda: news.count(False) == 2)


def test_a_crowd_beyond_the_limit_is_ended_at_once(wire, monkeypatch):
    for module in (server_module, plain_server_module):
        monkeypatch.setattr(module, "MAX_SURPLUS", 1)
    server, where = wire.server({ECHO: echo}, max_connections=1)
    good = wire.client(where)
    wire.ask(good, ECHO)
    news = []
    for _ in range(5):
        wire.client(where, on_connection=news.append)
    wire.until(lambda: server.refusals.counts.get("SYSTEM_BUSY", 0) >= 4)
    assert len(server._peers) <= 6
    wire.ask(good, ECHO)


@pytest.mark.parametrize("served_by", ["libzmq"])  # streams are looked after by their pings
@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_idle_servers_and_clients_need_no_timer(wire, short_tmp_path, kind):
    address = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{short_tmp_path}/s"
    _, where = wire.server({ECHO: echo}, None, address)
    client = wire.client(where)
    wire.ask(client, ECHO, timeout_ms=1_000)
    # The server looks for a moment whether the client lives on.
    wire.until(lambda: wire.loop._timers == [])


# ---- The blocking channel ------------------------------------------------------------------


@pytest.fixture
def served(wire, served_by):
    """A server in a thread of its own; what it holds is answered before the next ECHO."""
    loop, held = EventLoop(), []

    def answer(request):
        while held:
            held.pop().later().done(Reply(body=(b"late",)))
        return echo(request)

    handlers = {ECHO: answer, HOLD: held.append}
    if served_by == "libzmq":
        server = CommandServer(wire.context, loop, handlers)
    else:
        server = PlainServer(loop, handlers)
    where = server.bind("tcp://127.0.0.1:0")
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield where
    loop.stop()
    thread.join()
    server.close()
    loop.close()


@pytest.fixture(params=[None, 0, 200, 1_000_000])
def busy_poll(request) -> BusyPoll | None:
    return None if request.param is None else BusyPoll(request.param)


def test_a_channel_asks_and_is_answered(channel_to, served, busy_poll):
    channel = channel_to(served, busy_poll)
    watch = Stopwatch()
    for number in range(20):
        answer = channel.request(ECHO, b"%d" % number, header=b"h", timeout_ms=2_000)
        assert bytes(answer.body) == b"%d" % number
    with pytest.raises(UnsupportedCommand):
        channel.request(99, timeout_ms=2_000)
    # An answer that was overlooked would wait for a window of a second to end.
    assert watch.seconds < 1


def test_a_channel_gives_up_in_time_and_goes_on(channel_to, served, busy_poll):
    channel = channel_to(served, busy_poll)
    watch = Stopwatch()
    with pytest.raises(RequestTimeout):
        channel.request(HOLD, timeout_ms=200)
    assert watch.seconds < 1.5
    assert bytes(channel.request(ECHO, b"x", timeout_ms=2_000).body) == b"x", "not the late answer"


def test_a_channel_takes_what_was_posted_when_its_descriptor_shows_it(wire, channel_to, served):
    channel = channel_to(served)
    channel.request(ECHO, timeout_ms=2_000)
    assert channel.is_connected()
    loop = wire.closing(EventLoop())
    loop.tick(0)
    loop.call_later(10_000, lambda: loop.fail(TimeoutError("no answer")))
    taken = []

    def take() -> None:
        taken.append(channel.take())
        if taken[-1] is None:
            loop.watch_once(channel.fileno(), take)
        else:
            loop.stop()

    if channel.post(ECHO, b"later", timeout_ms=9_000):
        loop.call_soon_threadsafe(take)
    loop.watch_once(channel.fileno(), take)
    loop.run()
    assert bytes(taken[-1].body) == b"later"
    channel.post(HOLD, timeout_ms=1)
    with pytest.raises(RequestTimeout):
        while channel.take() is None:
            continue


def test_a_channel_without_a_server_says_so(channel_to):
    channel = channel_to(NOWHERE)
    assert not channel.is_connected()
    with pytest.raises(EndpointUnreachable):
        channel.request(ECHO, timeout_ms=150)
    channel.close()
    with pytest.raises(ClientClosed):
        channel.request(ECHO, timeout_ms=150)
