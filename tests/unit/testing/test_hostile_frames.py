"""Hostile frames are the same for the same seed, and of all kinds."""

from __future__ import annotations

import collections

from harness.hostile_frames import HEADERS, OPAQUE_BIT, HostileFrames

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import MAX_FRAME_BYTES, decode_frame, decode_header


def some(seed, count=2_000):
    frames = HostileFrames(seed)
    return [(frames.command(), frames.handshake() + frames.after_handshake()) for _ in range(count)]


def test_a_seed_makes_the_same_frames_again():
    assert some(3) == some(3)
    assert some(3) != some(4)


def test_all_kinds_come_and_none_is_too_long():
    kinds = collections.Counter(kind for (kind, _), _ in some(1))
    assert set(kinds) == set(HostileFrames(1).kinds)
    assert min(kinds.values()) > 100
    assert max(len(frame) for (_, frame), _ in some(1)) < MAX_FRAME_BYTES


def test_many_are_understood_so_that_they_get_as_far_as_the_handlers():
    understood = set()
    for (kind, frame), _ in some(2, 20_000):
        if kind == "plausible request":
            command = decode_frame(memoryview(frame))
            assert command.opaque & OPAQUE_BIT
            try:
                decode_header(HEADERS[RequestCode(command.code)], command.header)
            except RemoteProtocolError:
                continue
            understood.add(command.code)
    assert understood == set(map(int, HEADERS))
