"""What every socket gets that mqmesh makes."""

import os
import socket
from contextlib import contextmanager

import pytest
import zmq

from mqmesh.transport.zmq import sockets


@contextmanager
def connected(context, endpoint):
    """A server and a client; yields the descriptors that their monitors told of."""
    server, client = sockets.router(context), sockets.dealer(context)
    watchers = [sockets.monitor(server), sockets.monitor(client)]
    try:
        client.connect(sockets.bind(server, endpoint))
        yield [first_descriptor(watcher) for watcher in watchers]
    finally:
        sockets.close(server, watchers[0])
        sockets.close(client, watchers[1])


def first_descriptor(watcher):
    while watcher.poll(5_000):
        for event, value in sockets.read_monitor(watcher):
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                return value
    raise AssertionError("nobody connected")


@pytest.fixture
def context():
    with sockets.new_context() as made:
        yield made


def send_buffer(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_both_ends_of_a_local_connection_get_a_large_send_buffer(context, tmp_path):
    plain, other = socket.socketpair()
    with plain, other:
        usual = send_buffer(plain.fileno())
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sockets.LOCAL_SEND_BUFFER_BYTES)
        most = send_buffer(plain.fileno())
    assert most > usual
    with connected(context, f"ipc://{tmp_path}/s") as descriptors:
        assert [send_buffer(descriptor) for descriptor in descriptors] == [most, most]


def test_the_buffer_of_a_tcp_connection_is_left_to_the_system():
    # A size of our own: the system's may be any, by what went over this machine's loopback before.
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
        own = send_buffer(connection.fileno())
        sockets._widen(connection.fileno())
        assert send_buffer(connection.fileno()) == own


def test_a_descriptor_that_is_gone_or_no_socket_does_no_harm(context, tmp_path):
    watcher, teller = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    with watcher, teller, (tmp_path / "file").open("wb") as file:
        teller.bind(f"ipc://{tmp_path}/m")
        watcher.connect(f"ipc://{tmp_path}/m")
        gone = os.dup(file.fileno())
        os.close(gone)
        events = [(int(zmq.EVENT_ACCEPTED), value) for value in (gone, file.fileno(), 1 << 30)]
        for event in events:
            teller.send_multipart([sockets._EVENT.pack(*event), b"endpoint"])
        opened = os.listdir("/proc/self/fd")
        found = []
        while len(found) < len(events) and watcher.poll(5_000):
            found += sockets.read_monitor(watcher)
        assert found == events
        assert os.listdir("/proc/self/fd") == opened


@pytest.mark.parametrize(
    ("endpoint", "allowed"), [("tcp://[::1]:1", 1), ("tcp://127.0.0.1:1", 0), ("ipc:///x", 0)]
)
def test_ipv6_is_for_addresses_that_are_of_it(context, endpoint, allowed):
    socket = sockets.dealer(context)
    sockets.connect(socket, endpoint)
    assert socket.getsockopt(zmq.IPV6) == allowed
    sockets.close(socket)
