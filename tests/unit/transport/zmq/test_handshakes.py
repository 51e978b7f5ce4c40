"""What the news of a connection that never stands come to."""

from __future__ import annotations

import errno

import pytest
import zmq
from harness.keys import credentials, ring

from mqmesh.errors import AuthenticationFailed
from mqmesh.transport.zmq.handshakes import HandshakeWatch

SERVER = credentials("server")
HUNG_UP = [
    (zmq.EVENT_CONNECTED, 13),
    (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE),
    (zmq.EVENT_DISCONNECTED, 13),
    (zmq.EVENT_CONNECT_RETRIED, 100),
]
NOBODY_THERE = [(zmq.EVENT_CONNECT_RETRIED, 200)]


@pytest.fixture
def take():
    watch = HandshakeWatch("tcp://127.0.0.1:1", ring(credentials("shop", SERVER)))
    return lambda news: [found for one in news if (found := watch.take(*one)) is not None]


def test_a_server_that_hangs_up_three_times_has_another_key(take):
    assert take(2 * HUNG_UP) == []
    (found,) = take(HUNG_UP)
    assert isinstance(found, AuthenticationFailed)
    assert "does not have the server key" in str(found)


def test_a_server_that_dies_in_handshakes_again_and_again_may_have_the_key(take):
    assert take(10 * (HUNG_UP + NOBODY_THERE)) == []


def test_who_has_no_keys_and_is_hung_up_on_learns_that_security_may_be_on():
    watch = HandshakeWatch("tcp://127.0.0.1:1", None)
    plain = "no connection to tcp://127.0.0.1:1 in time"
    assert str(watch.no_connection()) == plain
    assert [watch.take(*one) for one in 10 * HUNG_UP] == [None] * 40
    assert str(watch.no_connection()) == (
        f"{plain}: it ends each handshake; where security is on, pass credentials "
        "(MQMESH_CREDENTIALS)"
    )
    for one in NOBODY_THERE:
        watch.take(*one)
    assert str(watch.no_connection()) == plain


def test_a_server_that_hangs_in_handshakes_may_have_the_key(take):
    late = [(event, errno.EAGAIN if value == errno.EPIPE else value) for event, value in HUNG_UP]
    assert take(10 * late) == []
    assert take(2 * HUNG_UP) == []
