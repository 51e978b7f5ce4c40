"""Hostile frames are the same for the same seed, and of all kinds."""

from __future__ import annotations

from harness.hostile_frames import HEADERS, OPAQUE_BIT, HostileFrames

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.command import decode_frame, decode_header
from mqmesh.protocol.commands import RequestCode


def some(seed, count=2_000):
    frames = HostileFrames(seed)
    return [(frames.command(), frames.handshake() + frames.after_handshake()) for _ in range(count)]


def test_many_are_understood_so_that_they_get_as_far_as_the_handlers():
    understood = set()
    for (kind, frame), _ in some(5, 30_000):
        if kind == "plausible request":
            command = decode_frame(memoryview(frame))
            assert command.opaque & OPAQUE_BIT
            try:
                decode_header(HEADERS[RequestCode(command.code)], command.header)
            except RemoteProtocolError:
                continue
            understood.add(command.code)
    assert understood == set(map(int, HEADERS))
