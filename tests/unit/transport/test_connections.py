"""What the system says of a connection."""

from __future__ import annotations

import os
import socket

import pytest

from mqmesh.transport.connections import Received, hang_up, measure


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
    assert measure(other.fileno()) == Received(3_000, 2_000)


def test_of_a_local_connection_only_what_was_not_read_is_known():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x" * 500)
        assert measure(other.fileno()) == Received(None, 500)


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
