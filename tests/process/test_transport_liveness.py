"""Peers that die, stop, return, and connections that reuse one another's descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import zmq
from harness.stopwatch import Stopwatch

from mqmesh.errors import EndpointUnreachable
from mqmesh.protocol.command import EMPTY_REPLY, ONEWAY, encode_frame
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.server import CommandServer
from mqmesh.units import MIB

HELLO, HOLD = 1, 2

CLIENT = """
import sys
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.loop import EventLoop
loop = EventLoop()
client = CommandClient(sockets.new_context(), loop, sys.argv[1])
client.request(1, lambda answer: None)
print("ready", flush=True)
loop.run()
"""

CLIENT_THAT_GOES_ON = """
import sys
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.loop import EventLoop
loop = EventLoop()
client = CommandClient(sockets.new_context(), loop, sys.argv[1])
loop.call_every(20, lambda: client.request(1, lambda answer: None))
loop.call_later(1_000, lambda: client.request(2, lambda answer: None))
print("ready", flush=True)
loop.run()
"""

BUSY_CLIENT = """
import ctypes
import sys
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.loop import EventLoop
loop = EventLoop()
client = CommandClient(sockets.new_context(), loop, sys.argv[1])
client.request(1, lambda answer: client.request(1, work))
def work(answer):
    ctypes.PyDLL(None).usleep(3_500_000)  # without giving the interpreter's lock away
    client.request(2, print)
print("ready", flush=True)
loop.run()
"""

SERVER = """
import sys
from mqmesh.protocol.command import EMPTY_REPLY
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.server import CommandServer
loop = EventLoop()
server = CommandServer(
    sockets.new_context(), loop, {1: lambda request: EMPTY_REPLY, 2: lambda request: None}
)
server.bind(sys.argv[1])
print("ready", flush=True)
loop.run()
"""

LISTENER = """
import sys
from mqmesh.protocol.command import EMPTY_REPLY
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.server import CommandServer
loop = EventLoop()
server = CommandServer(
    sockets.new_context(),
    loop,
    {1: lambda request: EMPTY_REPLY, 2: lambda request: print("left", flush=True)},
)
server.bind(sys.argv[1])
print("ready", flush=True)
loop.run()
"""

BUSY_SERVER = """
import time
import zmq
from mqmesh.protocol.command import EMPTY_REPLY, ONEWAY, encode_frame
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.server import CommandServer
from harness.stopwatch import Stopwatch
loop = EventLoop()
server = CommandServer(sockets.new_context(), loop, {1: lambda request: EMPTY_REPLY})
where = server.bind("tcp://127.0.0.1:0")
context = zmq.Context()
flood = context.socket(zmq.DEALER)
flood.linger = 0
flood.connect(where)
flood.send(encode_frame(1, 0, flags=ONEWAY))
while not server.requests:
    loop.tick(20)
for _ in range(200):
    flood.send(encode_frame(1, 0, bytes(100_000), flags=ONEWAY))
# The server is busy and reads nothing: wait until ZeroMQ takes no more, then break the connection.
while flood.poll(300, zmq.POLLOUT):
    flood.send(encode_frame(1, 0, bytes(100_000), flags=ONEWAY))
flood.close()
begin = time.monotonic()
flood = context.socket(zmq.DEALER)
while time.monotonic() < begin + 3 * sockets.HEARTBEAT_INTERVAL_MS / 1_000:
    flood.poll(100)
while server.peer_count:
    loop.tick(20)
print("ready", flush=True)
loop.run()
"""


@pytest.fixture(params=["streams", "libzmq", "streams of loops"])
def served_by(request):
    """Serve by plain streams, to clients of both kinds, and by libzmq as where there are keys."""
    return request.param


def hello(_request):
    return EMPTY_REPLY


def addresses(folder) -> tuple[str, str]:
    """Return one of each kind: tests that wait serve both, and wait once."""
    return "tcp://127.0.0.1:0", f"ipc://{folder}/s"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_last_word_waits_for_a_server_that_stands_still(peer_process, monkeypatch):
    monkeypatch.setattr(sockets, "CLIENT_LINGER_MS", 20_000)  # the test's machine may stand still
    context = zmq.Context()
    where = f"tcp://127.0.0.1:{free_port()}"
    with peer_process(LISTENER, where) as server:
        one = sockets.dealer(context)
        one.connect(where)
        one.send(encode_frame(1, 7))
        one.recv()
        os.kill(server.pid, signal.SIGSTOP)
        one.send(encode_frame(1, 8, bytes(16 * MIB), flags=ONEWAY))  # more than the system buffers
        one.send(encode_frame(2, 9, flags=ONEWAY))
        one.close()
        closing = threading.Thread(target=context.term)
        closing.start()
        closing.join(0.5)
        assert closing.is_alive()
        os.kill(server.pid, signal.SIGCONT)
        closing.join(30)
        assert server.stdout.readline().strip() == "left"


@pytest.mark.parametrize(
    ("signal_number", "limit_s"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 2.0)]
)
def test_servers_learn_of_dead_or_stopped_clients(
    wire, peer_process, short_tmp_path, signal_number, limit_s
):
    gone = []
    both = [wire.server({HELLO: hello}, gone.append, one) for one in addresses(short_tmp_path)]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(peer_process(CLIENT, where)) for _, where in both]
        wire.until(lambda: all(server.peer_count == 1 for server, _ in both))
        # A client that stops before its first ping leaves nothing to miss.
        wire.turn_for(3 * sockets.HEARTBEAT_INTERVAL_MS / 1_000)
        for process in processes:
            os.kill(process.pid, signal_number)
        assert wire.until(lambda: len(gone) == 2) < limit_s
        assert [server.peer_count for server, _ in both] == [0, 0]


def test_servers_learn_of_clients_that_stop_right_after_a_request(
    wire, peer_process, short_tmp_path
):
    """ZeroMQ forgets with each frame what the ping before it has promised."""
    stopped_s, gone_s, processes, both = {}, {}, [], []

    def goes(peer):
        gone_s[peer] = time.monotonic()

    for number, address in enumerate(addresses(short_tmp_path)):

        def stop(request, number=number):
            os.kill(processes[number].pid, signal.SIGSTOP)
            stopped_s[request.peer] = time.monotonic()
            return EMPTY_REPLY

        both.append(wire.server({HELLO: hello, HOLD: stop}, goes, address))
    with contextlib.ExitStack() as stack:
        for _, where in both:
            processes.append(stack.enter_context(peer_process(CLIENT_THAT_GOES_ON, where)))
        wire.until(lambda: len(gone_s) == 2)
        assert gone_s.keys() == stopped_s.keys()
        # 1.5 s of silence, and what a busy machine adds.
        assert all(gone_s[peer] - stopped_s[peer] < 5.0 for peer in gone_s)
        assert [(server.peer_count, server.silent) for server, _ in both] == [(0, 1)] * 2


def test_clients_whose_interpreter_is_busy_keep_their_connections(
    wire, peer_process, short_tmp_path
):
    gone, done = [], []
    handlers = {HELLO: hello, HOLD: done.append}
    both = [wire.server(handlers, gone.append, one) for one in addresses(short_tmp_path)]
    with contextlib.ExitStack() as stack:
        for _, where in both:
            stack.enter_context(peer_process(BUSY_CLIENT, where))
        assert wire.until(lambda: len(done) == 2) > 3
        assert gone == []
        assert [server.silent for server, _ in both] == [0, 0]


def test_idle_clients_and_those_that_send_no_pings_keep_their_connections(wire, short_tmp_path):
    gone, idle = [], []
    both = [wire.server({HELLO: hello}, gone.append, one) for one in addresses(short_tmp_path)]
    for _, where in both:
        one = wire.closing(wire.context.socket(zmq.DEALER))
        one.connect(where)
        one.send(encode_frame(HELLO, 1))
        idle.append(wire.client(where))
        wire.ask(idle[-1], HELLO)
    wire.until(lambda: all(server.requests == 2 for server, _ in both))
    wire.turn_for(3)
    assert gone == []
    assert [server.peer_count for server, _ in both] == [2, 2]
    for client in idle:
        wire.ask(client, HELLO)


def test_a_channel_passes_over_the_probes_of_its_pauses(wire, channel_to, short_tmp_path):
    server, where = wire.server({HELLO: hello}, None, f"ipc://{short_tmp_path}/s")
    channel = channel_to(where)
    for _ in range(2):
        done = []
        asked = threading.Thread(
            target=lambda done=done: done.append(channel.request(HELLO, timeout_ms=9_000))
        )
        asked.start()
        wire.until(lambda done=done: done)
        asked.join()
        wire.turn_for(1)
    assert server.requests == 2
    assert server.silent == 0


@pytest.mark.parametrize(
    ("signal_number", "limit_s"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 2.0)]
)
def test_a_client_learns_of_a_dead_or_stopped_server(wire, peer_process, signal_number, limit_s):
    where = f"tcp://127.0.0.1:{free_port()}"
    news = []
    done = []
    with peer_process(SERVER, where) as process:
        client = wire.client(where, on_connection=news.append)
        wire.ask(client, HELLO)
        client.request(HOLD, done.append, timeout_ms=30_000)
        wire.turn_for(0.1)
        os.kill(process.pid, signal_number)
        assert wire.until(lambda: done) < limit_s
        assert isinstance(done[0], EndpointUnreachable)
        assert "unknown" in str(done[0])
        assert news == [True, False]
        assert client.unreachable


def test_a_blocking_channel_learns_of_a_dead_server(channel_to, peer_process):
    where = f"tcp://127.0.0.1:{free_port()}"
    with peer_process(SERVER, where) as process:
        channel = channel_to(where)
        channel.request(HELLO, timeout_ms=5_000)
        os.kill(process.pid, signal.SIGSTOP)
        watch = Stopwatch()
        with pytest.raises(EndpointUnreachable):
            channel.request(HOLD, timeout_ms=30_000)
        assert watch.seconds < 2


def test_a_client_connects_again_by_itself_when_the_server_is_back(wire, peer_process):
    where = f"tcp://127.0.0.1:{free_port()}"
    news = []
    with peer_process(SERVER, where):
        client = wire.client(where, on_connection=news.append)
        wire.ask(client, HELLO)
    wire.until(lambda: client.unreachable)
    done = []
    client.request(HELLO, done.append, timeout_ms=9_000)
    with peer_process(SERVER, where):
        wire.until(lambda: done)
        assert not isinstance(done[0], Exception), done
        assert news == [True, False, True]
        assert client.connected and not client.unreachable


def rebind(wire, where):
    """Bind a server at a place that another one of this process has just left."""
    made = []

    def bind():
        server = CommandServer(wire.context, wire.loop, {HELLO: hello, HOLD: lambda request: None})
        try:
            server.bind(where)
        except OSError:
            server.close()
            return False  # ZeroMQ lets go of a port a moment after it was asked to
        made.append(wire.closing(server))
        return True

    wire.until(bind)
    return made[0]


def test_a_request_repeated_at_once_when_its_connection_broke_is_not_lost(wire):
    """The news of a break comes a moment before ZeroMQ stops taking frames for the dead."""
    where = f"tcp://127.0.0.1:{free_port()}"
    client = wire.client(where)
    for _ in range(15):
        server = rebind(wire, where)
        wire.ask(client, HELLO)
        done = []
        client.request(
            HOLD,
            lambda failure, done=done: client.request(HELLO, done.append, timeout_ms=9_000),
            timeout_ms=9_000,
        )
        wire.turn_for(0.02)
        server.close()
        wire.until(lambda: not client.connected)
        server = rebind(wire, where)
        assert wire.until(lambda done=done: done) < 2
        assert not isinstance(done[0], Exception), done
        server.close()
        wire.until(lambda: not client.connected)


def test_a_channel_asked_again_at_once_when_its_connection_broke_loses_nothing(
    channel_to, peer_process
):
    where = f"tcp://127.0.0.1:{free_port()}"
    channel = channel_to(where)
    for _ in range(5):
        with peer_process(SERVER, where) as server:
            channel.request(HELLO, timeout_ms=5_000)
            timer = threading.Timer(0.1, server.kill)
            timer.start()
            with pytest.raises(EndpointUnreachable):
                channel.request(HOLD, timeout_ms=9_000)
            timer.join()
            with pytest.raises(EndpointUnreachable, match="no connection"):
                channel.request(HELLO, timeout_ms=100)
        asked = threading.Thread(
            target=lambda: channel.request(HELLO, timeout_ms=9_000), daemon=True
        )
        asked.start()
        with peer_process(SERVER, where):
            asked.join(5)
            assert not asked.is_alive()


def test_a_client_that_pauses_for_less_than_the_timeout_keeps_its_connection(wire, peer_process):
    gone = []
    server, where = wire.server({HELLO: hello}, gone.append)
    with peer_process(CLIENT, where) as process:
        wire.until(lambda: server.peer_count == 1)
        os.kill(process.pid, signal.SIGSTOP)
        wire.turn_for(0.7)
        os.kill(process.pid, signal.SIGCONT)
        wire.turn_for(2)
        assert gone == []


def test_a_connection_that_says_nothing_at_all_is_closed(wire):
    _, where = wire.server({HELLO: hello})
    host, _, port = where.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.setblocking(False)

        def is_closed():
            with contextlib.suppress(BlockingIOError):
                return not silent.recv(64)

        assert wire.until(is_closed) < sockets.HANDSHAKE_TIMEOUT_MS / 1_000 + 1


def test_every_peer_that_was_met_is_reported_gone_and_no_ghost_stays(wire):
    """Peers speak and leave at once, so that descriptors are reused and frames are read late."""
    met, gone = set(), set()

    def hello(request):
        met.add(request.peer)
        return EMPTY_REPLY

    server, where = wire.server({HELLO: hello}, gone.add)
    other = zmq.Context()
    stays = wire.client(where)
    wire.ask(stays, HELLO)
    (staying,) = met
    frame = encode_frame(HELLO, 1)
    for _ in range(40):
        dealers = [other.socket(zmq.DEALER) for _ in range(5)]
        for dealer in dealers:
            dealer.connect(where)
            for _ in range(3):
                dealer.send(frame)
        # The loop stands still while they come and go: nobody is answered.
        assert not dealers[0].poll(50)
        for dealer in dealers:
            dealer.close(linger=1_000)
        wire.loop.tick(0)
    other.term()
    wire.until(lambda: len(met) > 100 and server.peer_count == 1)
    wire.turn_for(0.3)
    assert server.peer_count == 1
    assert met - gone == {staying}
    wire.ask(stays, HELLO)


def test_a_server_outlives_a_peer_that_breaks_off_while_its_frames_wait(peer_process):
    with peer_process(BUSY_SERVER) as process:
        assert process.poll() is None
