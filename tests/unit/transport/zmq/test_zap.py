"""What ZeroMQ is told of connections; also of questions that are none."""

from __future__ import annotations

import pytest
from harness.keys import credentials, guard, user
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from mqmesh.transport.zmq.zap import MAX_FRAMES, MAX_PART_BYTES, answer

OWN_UID = 1_000
SHOP = credentials("shop")
GUARD = guard(user(SHOP))
KEY = z85.decode(SHOP.public_key)


def question(mechanism=b"CURVE", *proofs, domain=b"network", address=b"10.0.0.1"):
    return [b"", b"1.0", b"7", domain, address, b"", mechanism, *proofs]


SHOP_KEY = SHOP.public_key.encode()


def local(uid, address=b"localhost:%d:100:4711", key=SHOP_KEY):
    address = address % uid if b"%" in address else address
    return question(b"PLAIN", key, b"-", domain=b"local", address=address)


def status(frames):
    reply, why = answer(frames, GUARD, OWN_UID)
    assert bool(why) == (reply[3:4] != [b"200"])
    assert reply[:3] == [b"", b"1.0", b"7"]
    return reply[3], reply[5].decode()


def test_a_known_key_is_let_in_and_named():
    assert status(question(b"CURVE", KEY)) == (b"200", SHOP.public_key)


@pytest.mark.parametrize("uid", [OWN_UID, 0])
def test_local_processes_of_the_server_s_user_and_of_root_are_let_in(uid):
    assert status(local(uid)) == (b"200", SHOP.public_key)


@pytest.mark.parametrize(
    "frames",
    [
        question(b"CURVE", bytes(32)),
        question(b"CURVE", KEY, domain=b"local"),
        question(b"CURVE", KEY, domain=b"*"),
        question(b"CURVE", KEY, KEY),
        question(b"CURVE", KEY[:-1]),
        local(OWN_UID, key=b"\xff" * 40),
        local(OWN_UID, key=b""),
        question(b"PLAIN", SHOP.public_key.encode(), b"-"),
        question(b"PLAIN", SHOP.public_key.encode(), domain=b"local", address=b"localhost:0:0:1"),
        question(b"CURVE"),
        question(b"NULL"),
        question(b"NULL", domain=b"local"),
        question(b"PLAIN", b"root", b"secret"),
        question(b"GSSAPI", b"root"),
        local(OWN_UID + 1),
        local(OWN_UID, b"localhost:1000"),
        local(OWN_UID, b"localhost:-0:0:1"),
        local(OWN_UID, b"otherhost:%d:0:1"),
        local(OWN_UID, b"localhost:%d:0:1:1"),
        local(OWN_UID, b""),
    ],
)
def test_whatever_proves_nothing_is_refused(frames):
    assert status(frames) == (b"400", "")


@pytest.mark.parametrize(
    "frames",
    [
        question(b"CURVE", KEY)[:6],
        question(b"CURVE", KEY, *[b""] * (MAX_FRAMES - 7)),
        [b"", b"2.0", *question(b"CURVE", KEY)[2:]],
        [b"x", *question(b"CURVE", KEY)[1:]],
        question(b"CURVE", bytes(MAX_PART_BYTES + 1)),
        question(b"CURVE", KEY, address=bytes(MAX_PART_BYTES + 1)),
    ],
)
def test_what_is_no_question_is_answered_so(frames):
    assert status(frames) == (b"500", "")


@given(st.lists(st.one_of(st.binary(max_size=300), st.sampled_from(question(b"CURVE", KEY)))))
def test_no_frames_let_anybody_in_but_the_right_ones(frames):
    reply, why = answer(frames, GUARD, OWN_UID)
    let_in = reply[3:4] == [b"200"]
    assert let_in == (not why)
    if let_in:
        assert frames[3] == b"network"
        assert frames[6:] == [b"CURVE", KEY]
    assert reply[3:4] != [b"300"]
