"""Bytes of anybody on a plain connection: frames, or the one error, and never much memory."""

from __future__ import annotations

import random

from harness import zmtp as by_hand
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import RemoteProtocolError
from mqmesh.transport import zmtp

MOST = 10_000


def feed(data: bytes, cuts: random.Random) -> None:
    """Feed bytes in pieces until they break the protocol."""
    one, at = zmtp.FrameReader(b"ROUTER", MOST), 0
    while at < len(data):
        size = cuts.choice([1, 2, 7, 64, 1_000])
        one.feed(data[at : at + size])
        at += size
        try:
            while (found := one.take()) is not None:
                flags, body = found
                assert len(body) <= MOST
                if flags & zmtp.COMMAND:
                    name, rest = zmtp.take_command(body)
                    assert len(name) + len(rest) <= len(body)
                    assert len(zmtp.pong(rest)) <= 23
                    assert zmtp.ping_ttl_ms(rest) <= 6_553_500
        except RemoteProtocolError:
            return
        assert one.held <= MOST + zmtp.LONGEST_HEAD_BYTES
        assert one.rest == 0


@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 2**16))
def test_any_bytes_are_frames_or_the_documented_error(data, stage, seed):
    begin = [b"", by_hand.greeting()[:20], by_hand.greeting(), zmtp.opening(b"DEALER")][stage]
    feed(begin + data, random.Random(seed))


@given(st.integers(0, 2**16))
def test_a_good_conversation_with_damage_is_read_or_refused(seed):
    source = random.Random(seed)
    parts = [zmtp.opening(b"DEALER")]
    for _ in range(source.randrange(1, 8)):
        body = source.randbytes(source.choice([0, 1, 100, 255, 256, 3_000]))
        parts.append(zmtp.head(len(body), source.choice([0, 0, zmtp.MORE])) + body)
        parts.append(source.choice([zmtp.PING, b"", zmtp.command(b"SUBSCRIBE", b"x")]))
    data = bytearray(b"".join(parts))
    for _ in range(source.randrange(0, 6)):
        data[source.randrange(len(data))] = source.randrange(256)
    feed(bytes(data), source)
