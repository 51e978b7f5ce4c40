"""Frames of ZMTP; tests/process/test_fuzz.py compares them with ZeroMQ's own."""

from __future__ import annotations

from harness import zmtp


def test_frames_are_read_byte_by_byte():
    wire = zmtp.greeting() + zmtp.ready() + zmtp.frame(b"x" * 300) + zmtp.frame(b"y")
    reader = zmtp.FrameReader()
    found = [frame for n in range(len(wire)) for frame in reader.feed(wire[n : n + 1])]
    assert [body for _, body in found[1:]] == [b"x" * 300, b"y"]
