"""What the system says of a connection."""

from __future__ import annotations

import os
import socket
import time

import pytest

from mqmesh.transport.zmq.connections import Received, hang_up, measure, not_taken


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def test_what_was_read_is_told_apart_from_what_was_not(pair):
    one, other = pair
    one.sendall(b"x" * 5_000)
    other.recv(3_000, socket.MSG_WAITALL)
    other.recv(2_000, socket.MSG_PEEK | socket.MSG_WAITALL)
    found = measure(other.fileno())
    assert (found.taken_bytes, found.waiting_bytes) == (3_000, 2_000)
    assert found.silent_ms is not None


def test_of_a_local_connection_only_what_was_not_read_is_known():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x" * 500)
        assert measure(other.fileno()) == Received(None, 500)


def test_by_tcp_it_is_known_for_how_long_nothing_came(pair):
    one, other = pair
    one.sendall(b"x")
    began = time.monotonic()
    while measure(other.fileno()).silent_ms < 200:
        assert time.monotonic() < began + 10
    waited_ms = (time.monotonic() - began) * 1_000
    assert waited_ms > 150
    other.sendall(b"x")
    silent_ms = measure(other.fileno()).silent_ms
    assert silent_ms >= 200  # what is sent does not count
    one.sendall(b"x")
    other.recv(2, socket.MSG_WAITALL)
    assert measure(other.fileno()).silent_ms < silent_ms


def test_of_a_local_connection_it_is_known_what_the_other_side_has_not_read():
    one, other = socket.socketpair()
    with one, other:
        assert not_taken(one.fileno()) == 0
        one.sendall(b"x" * 500)
        assert not_taken(one.fileno()) > 0
        other.recv(500, socket.MSG_WAITALL)
        assert not_taken(one.fileno()) == 0
        number = one.fileno()
    assert not_taken(number) is None


def test_hanging_up_ends_both_ways_and_leaves_the_descriptor_alone(pair):
    one, other = pair
    hang_up(other.fileno())
    assert one.recv(1) == b""
    assert other.recv(1) == b""
    os.fstat(other.fileno())


def test_a_descriptor_that_is_gone_or_a_files_does_no_harm(tmp_path):
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert measure(number) is None or measure(number).taken_bytes is None
    hang_up(number)
    os.close(number)
    assert measure(number) is None
    hang_up(number)
