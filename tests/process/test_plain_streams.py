"""Connections without keys, which the own loop serves: ZeroMQ's sockets, limits, slow peers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import zmq
from harness import zmtp

from mqmesh.errors import AuthenticationFailed, EndpointUnreachable, MQMeshError, RequestTimeout
from mqmesh.protocol.command import (
    ONEWAY,
    RESPONSE,
    Reply,
    decode_frame,
    encode_frame,
)
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.zmq import plain_server as plain_server_module
from mqmesh.transport.zmq.plain_channel import PlainChannel
from mqmesh.transport.zmq.sockets import HEARTBEAT_TIMEOUT_MS
from mqmesh.units import KIB, MIB

ECHO, BIG, HOLD = range(1, 4)


def echo(request):
    return Reply(bytes(request.command.header), [request.command.body])


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request, short_tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{short_tmp_path}/s"


@pytest.fixture
def foreign():
    """ZeroMQ's own sockets, without any option of ours."""
    context = zmq.Context()
    made = []

    def make(kind, **options):
        one = context.socket(kind)
        one.linger = 0
        for name, value in options.items():
            setattr(one, name, value)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
    context.term()


def connect(where):
    """Open a connection that speaks ZMTP by hand, behind its handshake."""
    if where.startswith("ipc://"):
        one = socket.socket(socket.AF_UNIX)
        one.connect(where.removeprefix("ipc://"))
    else:
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        one = socket.create_connection((host, int(port)))
    one.sendall(zmtp.greeting() + zmtp.ready())
    return one


@pytest.mark.parametrize("size", [10, 70 * KIB, 3 * MIB])
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_zeromqs_sockets_are_served(wire, foreign, endpoint, kind, size):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint)
    one = foreign(kind)
    one.connect(where)
    one.send(encode_frame(ECHO, 7, bytes(size)))
    if kind == zmq.REQ:
        # It sends an empty frame before each message.
        wire.until(lambda: server.malformed_frames == 1)
        return
    wire.until(lambda: one.poll(0))
    assert len(decode_frame(one.recv()).body) == size


@pytest.mark.parametrize("size", [10, 70 * KIB, 3 * MIB])
def test_a_channel_is_served_by_zeromqs_sockets(wire, foreign, endpoint, size):
    router = foreign(zmq.ROUTER)
    router.bind(endpoint.replace(":0", ":*"))
    channel = wire.closing(PlainChannel(router.last_endpoint.decode()))
    answers = []

    def ask():
        for _ in range(3):
            answers.append(channel.request(ECHO, bytes(size), timeout_ms=20_000))

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(3):
        assert router.poll(20_000)
        peer, frame = router.recv_multipart()
        command = decode_frame(frame)
        # An answer to nothing, and one of many frames, are passed over.
        router.send_multipart([peer, encode_frame(0, 77, flags=RESPONSE)])
        router.send_multipart([peer, b"x", b"y", b"z"])
        router.send_multipart([peer, encode_frame(0, command.opaque, command.body, flags=RESPONSE)])
    asking.join(20)
    assert [len(one.body) for one in answers] == [size] * 3


def test_a_channel_to_a_server_with_keys_says_what_is_missing(wire, foreign):
    router = foreign(zmq.ROUTER, curve_server=1)
    _, router.curve_secretkey = zmq.curve_keypair()
    channel = wire.closing(
        PlainChannel(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    )
    for _ in range(2):
        with pytest.raises(AuthenticationFailed, match="wants CURVE; pass credentials"):
            channel.request(ECHO, timeout_ms=20_000)


@pytest.mark.parametrize("size", [10, 70 * KIB, 3 * MIB])
def test_a_client_of_a_loop_is_served_by_zeromqs_sockets(wire, foreign, endpoint, size):
    router = foreign(zmq.ROUTER)
    router.bind(endpoint.replace(":0", ":*"))
    client = wire.transport.connect(router.last_endpoint.decode(), by_loop=True)
    wire.closing(client)
    done = []
    for number in range(3):
        client.request(ECHO, done.append, bytes(size), timeout_ms=20_000)
        wire.until(lambda: router.poll(0))
        peer, frame = router.recv_multipart()
        command = decode_frame(frame)
        assert len(command.body) == size
        router.send_multipart([peer, b"x", b"y", b"z"])  # is passed over
        answer = encode_frame(0, command.opaque, b"abc", flags=RESPONSE)
        router.send_multipart([peer, answer, bytes(size), b"d"])
        wire.until(lambda number=number: len(done) > number)
    assert [bytes(one.body) for one in done] == [b"abc"] * 3
    assert [list(map(len, one.further)) for one in done] == [[size, 1]] * 3


def test_a_client_of_a_loop_to_a_server_with_keys_says_what_is_missing(wire, foreign):
    router = foreign(zmq.ROUTER, curve_server=1)
    _, router.curve_secretkey = zmq.curve_keypair()
    where = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    client = wire.closing(wire.transport.connect(where, by_loop=True))
    for _ in range(2):
        with pytest.raises(AuthenticationFailed, match="wants CURVE; pass credentials"):
            wire.ask(client, ECHO, timeout_ms=20_000)
    assert client.unreachable


def test_a_client_of_a_loop_pings_and_leaves_a_server_that_says_nothing(wire, endpoint):
    listening = socket.socket(socket.AF_UNIX if endpoint.startswith("ipc") else socket.AF_INET)
    with contextlib.closing(listening):
        if endpoint.startswith("ipc"):
            where = endpoint
            listening.bind(endpoint.removeprefix("ipc://"))
        else:
            listening.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.listen()
        seen, got = [], bytearray()
        client = wire.closing(
            wire.transport.connect(where, by_loop=True, on_connection=seen.append)
        )
        server, _ = listening.accept()
        with contextlib.closing(server):
            server.sendall(zmtp.greeting() + zmtp.ready(b"ROUTER"))
            server.setblocking(False)
            wire.until(lambda: seen)
            done = []
            client.request(ECHO, done.append, timeout_ms=60_000)
            silent_s = wire.until(lambda: len(seen) == 2)
            with contextlib.suppress(BlockingIOError):
                got += server.recv(64 * KIB)
    assert seen == [True, False]
    assert isinstance(done[0], EndpointUnreachable)
    assert silent_s >= HEARTBEAT_TIMEOUT_MS / 1_000
    assert got.count(b"\x04PING\x00\x1e") >= 3, "each promises a further one within 3 s"


def test_a_server_and_a_channel_that_want_plain_words_let_in_no_key(wire, foreign):
    server, where = wire.server({ECHO: echo})
    one = foreign(zmq.DEALER)
    one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
    one.curve_serverkey, _ = zmq.curve_keypair()
    watcher = one.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
    one.connect(where)
    one.send(encode_frame(ECHO, 1))
    wire.until(lambda: watcher.poll(0))
    one.disable_monitor()
    watcher.close()
    assert server.peer_count == server.requests == 0


def test_a_channel_finds_a_server_that_came_back(wire, short_tmp_path):
    for where in (f"ipc://{short_tmp_path}/s", "tcp://127.0.0.1:0"):
        server, where = wire.server({ECHO: echo}, endpoint=where)
        channel = wire.closing(PlainChannel(where))
        wire.until(channel.is_connected)
        for _ in range(3):
            server.close()
            server, _ = wire.server({ECHO: echo}, endpoint=where)
            done = []
            asking = threading.Thread(
                target=lambda ask=channel.request, done=done: done.append(
                    ask(ECHO, b"x", timeout_ms=20_000)
                )
            )
            asking.start()
            wire.until(lambda done=done: done)
            asking.join()
        assert bytes(done[0].body) == b"x"


def test_a_channel_gives_up_a_request_that_nobody_reads_and_goes_on(wire, short_tmp_path):
    where = f"ipc://{short_tmp_path}/s"
    server, _ = wire.server({ECHO: echo}, endpoint=where)
    channel = wire.closing(PlainChannel(where))
    wire.until(channel.is_connected)
    with pytest.raises(RequestTimeout):
        channel.request(ECHO, bytes(20 * MIB), timeout_ms=100)  # the loop stands still
    wire.until(channel.is_connected)
    assert not channel.post(ECHO, b"x", timeout_ms=9_000)
    taken = []
    wire.until(lambda: taken.append(channel.take()) or taken[-1])
    assert bytes(taken[-1].body) == b"x"
    assert server.requests == 1, "half of a request is none"


def test_a_server_answers_pings(wire, endpoint):
    _, where = wire.server({ECHO: echo}, endpoint=endpoint)
    with connect(where) as one:
        one.sendall(zmtp.frame(b"\x04PING\x00\x00hello", zmtp.COMMAND))
        one.setblocking(False)
        reader, found = zmtp.FrameReader(), []

        def read():
            with contextlib.suppress(BlockingIOError):
                found.extend(reader.feed(one.recv(1_000)))
            return len(found) == 2

        wire.until(read)
        assert found[1] == (zmtp.COMMAND, b"\x04PONGhello")


@pytest.mark.parametrize("answers", [True, False])
def test_who_sends_no_pings_is_asked(wire, endpoint, answers):
    gone = []
    server, where = wire.server({ECHO: echo}, gone.append, endpoint)
    with connect(where) as one:
        one.sendall(zmtp.frame(encode_frame(ECHO, 1)))
        one.setblocking(False)
        reader, pings = zmtp.FrameReader(), []

        def asked_twice_or_gone():
            with contextlib.suppress(BlockingIOError):
                for flags, body in reader.feed(one.recv(1_000)):
                    if flags == zmtp.COMMAND and body.startswith(b"\x04PING"):
                        pings.append(body)
                        if answers:
                            one.sendall(zmtp.frame(b"\x04PONG", zmtp.COMMAND))
            return gone or len(pings) == 2

        wire.until(asked_twice_or_gone)
    assert server.silent == (0 if answers else 1)


def test_who_says_its_first_words_late_is_watched_as_well(wire, endpoint):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint)
    with connect(where) as one:
        wire.turn_for(2.2)  # longer than a look at connections without a request
        one.sendall(zmtp.frame(encode_frame(ECHO, 1)))
        wire.until(lambda: server.requests == 1)
        wire.until(lambda: server.silent == 1)


def test_who_spoke_while_the_server_stood_still_is_heard(wire, endpoint):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint)
    words = zmtp.frame(encode_frame(ECHO, 1, flags=ONEWAY))
    ping = zmtp.frame(b"\x04PING\x00\x0c", zmtp.COMMAND)  # and answer, within 1.2 s
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(where)) for _ in range(20)]
        for peer in peers:
            peer.sendall(words + ping)
        wire.until(lambda: server.requests == len(peers))
        for peer in peers:
            peer.sendall(words * 300 + ping)
        stands_still_until = time.monotonic() + 1.8
        while time.monotonic() < stands_still_until:
            pass
        wire.until(lambda: server.requests + server.silent >= len(peers) * 301)
        assert (server.silent, server.peer_count) == (0, len(peers))


def test_pings_behind_requests_are_answered_before_them(wire, endpoint):
    clock = wire.loop.clock = ManualClock()

    def slow(request):
        clock.advance(300)
        return Reply()

    server, where = wire.server({ECHO: slow}, endpoint=endpoint)
    words = zmtp.frame(encode_frame(ECHO, 1, flags=ONEWAY))
    ping = zmtp.frame(b"\x04PING\x00\x0c", zmtp.COMMAND)  # and answer, within 1.2 s
    with contextlib.ExitStack() as stack:
        peers = {stack.enter_context(connect(where)): zmtp.FrameReader() for _ in range(4)}
        pongs = dict.fromkeys(peers, 0)

        def all_have(count):
            for peer, reader in peers.items():
                with contextlib.suppress(BlockingIOError):
                    for _, body in reader.feed(peer.recv(1_000)):
                        pongs[peer] += body.startswith(b"\x04PONG")
            return min(pongs.values()) >= count

        for peer in peers:
            peer.sendall(words + ping)
            peer.setblocking(False)
        wire.until(lambda: all_have(1) and server.requests == 4)
        pongs = dict.fromkeys(peers, 0)
        for peer in peers:
            peer.sendall(words * 10 + ping)
        wire.until(lambda: all_have(1))
        assert server.requests < 4 + 20, "the requests come after the pings"
        assert server.silent == 0


def test_a_name_is_looked_up_beside_the_request_that_needs_it(wire, monkeypatch):
    _, where = wire.server({ECHO: echo})
    go_on, look_up = threading.Event(), socket.getaddrinfo

    def slow_look_up(*question, **options):
        assert go_on.wait(20)
        return look_up(*question, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_look_up)
    channel = wire.closing(PlainChannel(where.replace("127.0.0.1", "localhost")))
    began = time.monotonic()
    with pytest.raises(EndpointUnreachable, match=r"localhost.* in time"):
        channel.request(ECHO, timeout_ms=100)
    assert time.monotonic() - began < 10
    go_on.set()
    wire.until(channel.is_connected)


def test_a_channel_does_not_count_the_time_of_connecting_as_silence(wire, short_tmp_path):
    where = f"ipc://{short_tmp_path}/s"
    channel = wire.closing(PlainChannel(where))
    answers = []

    def ask():
        try:
            answers.append(channel.request(ECHO, b"x", timeout_ms=9_000))
        except MQMeshError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wire.turn_for(2.0)  # longer than the peer of a connection may be silent

    def slow_echo(request):
        late = time.monotonic() + 0.3
        while time.monotonic() < late:
            pass
        return echo(request)

    wire.server({ECHO: slow_echo}, endpoint=where)
    wire.until(lambda: answers)
    thread.join()
    assert bytes(answers[0].body) == b"x"


def test_a_channel_waits_though_a_forked_child_keeps_its_former_connection(wire, short_tmp_path):
    server, where = wire.server(
        {ECHO: echo, HOLD: lambda request: None}, endpoint=f"ipc://{short_tmp_path}/s"
    )
    channel = wire.closing(PlainChannel(where))
    wire.until(channel.is_connected)
    child = os.fork()
    while not child:
        signal.pause()  # until it is killed
    try:
        server.close()
        wire.turn_for(0.1)
        wire.server({ECHO: echo, HOLD: lambda request: None}, endpoint=where)
        wire.until(channel.is_connected)
        began_s = time.thread_time()
        with pytest.raises(RequestTimeout):
            channel.request(HOLD, timeout_ms=500)
        assert time.thread_time() - began_s < 0.2, "it asks for events in vain"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_channel_is_not_asked_between_two_requests(wire, endpoint):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint)
    channel = wire.closing(PlainChannel(where))
    wire.until(channel.is_connected)
    channel.post(ECHO, timeout_ms=9_000)
    wire.until(channel.take)
    wire.turn_for(3.5)
    assert (server.silent, server.peer_count) == (0, 1)


def test_what_was_sent_before_the_end_is_served(wire, endpoint):
    seen, gone = [], []
    server, where = wire.server(
        {ECHO: lambda request: seen.append(request.command.opaque) or Reply()},
        gone.append,
        endpoint,
    )
    with connect(where) as one:
        one.sendall(b"".join(zmtp.frame(encode_frame(ECHO, opaque)) for opaque in range(500)))
    wire.until(lambda: gone)
    assert seen == list(range(500))
    assert server.peer_count == 0


def test_who_sends_without_end_leaves_others_their_turns(wire, endpoint, monkeypatch):
    monkeypatch.setattr(plain_server_module, "FRAMES_PER_TICK", 4)
    order = []
    server, where = wire.server(
        {ECHO: lambda request: order.append(request.peer) or Reply()}, endpoint=endpoint
    )
    one_frame = zmtp.frame(encode_frame(ECHO, 0, flags=ONEWAY))
    with connect(where) as greedy, connect(where) as other:
        greedy.sendall(one_frame)
        other.sendall(one_frame)
        wire.until(lambda: server.requests == 2)
        order.clear()
        greedy.sendall(one_frame * 400)
        other.sendall(one_frame)
        wire.until(lambda: len(order) == 401)
    (place,) = {order.index(peer) for peer in order if order.count(peer) == 1}
    assert place < 20


def test_who_does_not_read_is_answered_in_bounds_and_then_ended(wire, endpoint):
    body, peers = bytes(MIB), set()

    def big(request):
        peers.add(request.peer)
        return Reply(body=[body])

    server, where = wire.server(
        {ECHO: echo, BIG: big}, endpoint=endpoint, max_pending_bytes=2 * MIB
    )
    good = wire.client(where)
    with connect(where) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        lazy.sendall(zmtp.frame(encode_frame(BIG, 1)) * 100)
        wire.until(lambda: server.requests == 100)
        assert 0 < server.held_bytes <= 4 * MIB
        assert server.refusals.counts["SYSTEM_BUSY"] > 50
        wire.ask(good, ECHO)
        # Answers that nobody counts on the room for are dropped in the end, and it with them.
        (peer,) = peers
        while not server.dropped_replies:
            peer.notify(9, b"", bytes(100 * KIB))
        wire.until(lambda: server.hung_up == 1)
    assert server.held_bytes == 0
    wire.ask(good, ECHO)


def test_who_takes_nothing_for_too_long_is_ended(wire, endpoint, monkeypatch):
    monkeypatch.setattr(plain_server_module, "MOST_UNTAKEN_MS", 100)
    monkeypatch.setattr(plain_server_module, "LONGEST_LOOK_MS", 100)
    server, where = wire.server(
        {BIG: lambda request: Reply(b"", [bytes(8 * MIB)], apart=True)}, endpoint=endpoint
    )
    with connect(where) as lazy:
        lazy.sendall(zmtp.frame(encode_frame(BIG, 1)) * 2)
        wire.until(lambda: server.hung_up)
    assert server.held_bytes == server.peer_count == 0


def test_the_worst_go_when_all_take_too_much(wire, endpoint):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint, max_total_pending_bytes=16 * MIB)
    good = wire.client(where)
    wire.ask(good, ECHO)
    begun = zmtp.long_head(30 * MIB) + bytes(9 * MIB)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            one = stack.enter_context(connect(where))
            sending = threading.Thread(target=lambda one=one: send_all(one, begun))
            sending.start()
            stack.callback(sending.join)
        wire.until(lambda: server.hung_up)
        assert server.hung_up == 1
        wire.ask(good, ECHO)
        wire.until(lambda: server.held_bytes > 9 * MIB)  # all that the other one sends
    wire.until(lambda: server.held_bytes == 0)


def send_all(one, data):
    with contextlib.suppress(OSError):  # its connection is ended
        one.sendall(data)


def test_a_large_frame_takes_no_memory_before_it_comes(wire, endpoint):
    server, where = wire.server({ECHO: echo}, endpoint=endpoint)
    with connect(where) as one:
        one.sendall(zmtp.long_head(30 * MIB))
        wire.until(lambda: server.held_bytes)
        assert server.held_bytes < 100


def test_places_to_listen_at(wire, short_tmp_path):
    handlers = {ECHO: echo}
    for asked in ("tcp://localhost:0", "tcp://*:0", "tcp://127.0.0.1:*", "tcp://[::1]:0"):
        _, where = wire.server(handlers, endpoint=asked)
        wire.ask(wire.client(where.replace("0.0.0.0", "127.0.0.1")), ECHO)
        with pytest.raises(OSError, match="cannot listen on"):
            wire.server(handlers, endpoint=where)
    for wrong in ("tcp://127.0.0.1", "udp://127.0.0.1:5", "tcp://no.such.host.invalid:0"):
        with pytest.raises(OSError, match="cannot listen on"):
            wire.server(handlers, endpoint=wrong)
    path = short_tmp_path / "s"
    first, where = wire.server(handlers, endpoint=f"ipc://{path}")
    second, _ = wire.server(handlers, endpoint=where)  # as over what a killed one left
    first.close()
    assert path.exists(), "the next one's"
    wire.ask(wire.client(where), ECHO)
    second.close()
    assert not path.exists()


def test_a_server_that_is_closed_lets_its_peers_go(wire, endpoint):
    held = []
    server, where = wire.server({HOLD: held.append}, endpoint=endpoint)
    with connect(where) as one:
        one.sendall(zmtp.frame(encode_frame(HOLD, 1)))
        wire.until(lambda: held)
        peer = held[0].peer
        assert peer.address
        server.close()
        assert (peer.is_gone, peer.address, peer.room()) == (True, "", 1)
        held[0].later().done(Reply())
        assert server.dropped_replies == 1
        one.settimeout(10)
        while one.recv(1_000):
            continue
