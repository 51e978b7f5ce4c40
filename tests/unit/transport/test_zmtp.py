"""ZMTP 3: what is read is what was written, in whatever pieces it comes."""

from __future__ import annotations

import random

import pytest
from harness import zmtp as by_hand

from mqmesh.errors import RemoteProtocolError
from mqmesh.transport import zmtp
from mqmesh.transport.zmtp import COMMAND, LONG, MORE, FrameReader, WrongMechanism

MOST = 100_000


def reader(kind=b"ROUTER"):
    return FrameReader(kind, MOST)


def read_all(one, *pieces):
    """Feed pieces; return flags and body of each frame."""
    found = []
    for piece in pieces:
        one.feed(piece)
        while (frame := one.take()) is not None:
            found.append((frame[0], bytes(frame[1])))
        assert one.rest == 0
    return found


def opened(kind=b"ROUTER"):
    one = reader(kind)
    other = b"DEALER" if kind == b"ROUTER" else b"ROUTER"
    assert read_all(one, zmtp.opening(other)) == []
    assert one.is_open
    return one


def frame(body, flags=0):
    return zmtp.head(len(body), flags) + body


def test_both_sides_understand_each_other_and_the_protocol_by_hand():
    for kind, other in ((b"ROUTER", b"DEALER"), (b"DEALER", b"ROUTER")):
        assert opened(kind).identity == b""
        one = by_hand.FrameReader()
        ((flags, body),) = one.feed(zmtp.opening(kind))
        assert flags == COMMAND and body.startswith(b"\x05READY")
        assert read_all(reader(kind), by_hand.greeting() + by_hand.ready(other)) == []
    one = reader()
    read_all(one, by_hand.greeting(version=b"\x03\x01") + by_hand.ready(b"REQ", b"me"))
    assert (one.is_open, one.identity) == (True, b"me")


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_536, MOST])
def test_a_frame_of_any_size_comes_whole(size):
    body = random.Random(1).randbytes(size)
    assert read_all(opened(), frame(body)) == [(LONG if size > 255 else 0, body)]
    assert by_hand.frame(body) == frame(body)


def test_the_pieces_in_which_it_comes_do_not_matter():
    source = random.Random(2)
    bodies = [source.randbytes(source.choice([0, 3, 255, 256, 5_000])) for _ in range(60)]
    data = zmtp.opening(b"DEALER") + b"".join(map(frame, bodies))
    for most in (1, 2, 9, 300, 4_000):
        one, at, found = reader(), 0, []
        while at < len(data):
            size = source.randrange(1, most + 1)
            found += read_all(one, data[at : at + size])
            at += size
        assert [body for _, body in found] == bodies
        assert (one.held, one.rest) == (0, 0)


def test_what_is_kept_and_what_is_missing_of_a_frame_is_known():
    one = opened()
    data = frame(bytes(1_000))
    read_all(one, data[:5])
    assert (one.held, one.missing) == (5, 4)  # of the head
    read_all(one, data[5:100])
    assert (one.held, one.missing) == (100, len(data) - 100)
    read_all(one, data[100:])
    assert (one.held, one.missing) == (0, 0)


def test_bytes_that_come_before_others_were_looked_at_stand_behind_them():
    one, first, second = opened(), bytes(300), b"b" * 300
    data = frame(first) + frame(second)
    one.feed(data[:400])
    assert one.take() == (LONG, first)
    assert one.rest == 400 - len(frame(first))
    one.feed(data[400:])
    assert one.take() == (LONG, second)
    assert (one.take(), one.held, one.rest) == (None, 0, 0)


def test_a_frame_in_very_many_pieces_is_put_together():
    one, body = opened(), random.Random(3).randbytes(5_000)
    data = frame(body) + frame(b"next")
    pieces = [data[at : at + 2] for at in range(0, len(data), 2)]
    assert read_all(one, *pieces) == [(LONG, body), (0, b"next")]


def test_commands_pings_and_pongs():
    one = opened()
    ping = zmtp.command(b"PING", b"\x00\x0cabc")
    ((flags, body),) = read_all(one, ping)
    name, data = zmtp.take_command(memoryview(body))
    assert (flags, name, zmtp.ping_ttl_ms(data)) == (COMMAND, b"PING", 1_200)
    assert zmtp.pong(data) == b"\x04\x08\x04PONGabc"
    assert zmtp.PING == b"\x04\x07\x04PING\x00\x00"
    assert zmtp.pong(b"") == b"\x04\x05\x04PONG"
    assert zmtp.ping_ttl_ms(b"\x01") == 0
    assert zmtp.take_command(memoryview(b"")) == (b"", b"")
    assert zmtp.take_command(memoryview(b"\x09PING")) == (b"", b"")


@pytest.mark.parametrize("mechanism", [b"CURVE", b"PLAIN", b"NULLX"])
def test_other_mechanisms_are_refused_with_their_name(mechanism):
    with pytest.raises(WrongMechanism, match=mechanism.decode()):
        read_all(reader(), by_hand.greeting(mechanism=mechanism))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x00",
        b"\x01\x00",
        by_hand.greeting(version=b"\x01\x00"),
        by_hand.greeting(version=b"\x02\x00"),
        by_hand.greeting() + frame(b"a message"),
        by_hand.greeting() + zmtp.command(b"ERROR", b"\x02no"),
        by_hand.greeting() + by_hand.ready(b"PUB"),
        by_hand.greeting() + zmtp.command(b"READY"),
        by_hand.greeting() + zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\xffDEALER"),
        by_hand.greeting() + zmtp.command(b"READY", b"\xff"),
        by_hand.greeting() + by_hand.long_head(5_000, COMMAND),
        zmtp.opening(b"DEALER") + b"\x08\x00",
        zmtp.opening(b"DEALER") + b"\x05\x00",
        zmtp.opening(b"DEALER") + b"\xfe",
        zmtp.opening(b"DEALER") + b"\xfe\x00",
        zmtp.opening(b"DEALER") + by_hand.long_head(MOST + 1),
        zmtp.opening(b"DEALER") + by_hand.long_head(2**64 - 1, MORE),
        zmtp.opening(b"DEALER") + by_hand.long_head(4_097, COMMAND),
    ],
)
def test_who_breaks_the_protocol_is_found_out(data):
    if data[-1:] == b"\xfe":
        assert read_all(reader(), data) == []  # the size is not there yet
        return
    with pytest.raises(RemoteProtocolError):
        read_all(reader(), data)
