"""ZMTP 3.0 by hand: what ZeroMQ would send, and what it never would.

=========== ================================================================
piece       layout
=========== ================================================================
greeting    ff, 8 × 00, 7f, version 03 00, mechanism (20 bytes), 32 × 00
frame       flags u8, size u8, body; with flag 2, size is u64 big endian
=========== ================================================================

Flags: 1 more frames follow, 2 long, 4 a command of ZMTP's own. The first frame of each side is
the command READY.
"""

import struct
from typing import Final

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
GREETING_BYTES: Final = 64

_LONG = struct.Struct(">BQ")


def greeting(*, version: bytes = b"\x03\x00", mechanism: bytes = b"NULL") -> bytes:
    """Makes the first 64 bytes of a connection."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Encodes a frame; with the flag ``LONG`` if it needs it."""
    if len(body) > 255:
        return _LONG.pack(flags | LONG, len(body)) + body
    return bytes((flags, len(body))) + body


def long_head(size: int, flags: int = 0) -> bytes:
    """Encodes the head of a frame of so many bytes, u64."""
    return _LONG.pack(flags | LONG, size)


def ready(kind: bytes = b"DEALER", routing_id: bytes = b"") -> bytes:
    """Encodes the command that ends the handshake."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", routing_id)):
        body += bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
    return frame(body, COMMAND)


class FrameReader:
    """Cuts what comes behind the greeting into frames."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._greeted = False

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Takes bytes in.

        Returns:
            Flags and body of each frame that is whole now.
        """
        self._data += data
        if not self._greeted:
            if len(self._data) < GREETING_BYTES:
                return []
            del self._data[:GREETING_BYTES]
            self._greeted = True
        found: list[tuple[int, bytes]] = []
        position = 0
        while len(self._data) - position >= 2:
            flags, size, start = self._data[position], self._data[position + 1], position + 2
            if flags & LONG:
                start = position + _LONG.size
                if len(self._data) < start:
                    break
                size = _LONG.unpack_from(self._data, position)[1]
            if len(self._data) < start + size:
                break
            found.append((flags, bytes(self._data[start : start + size])))
            position = start + size
        del self._data[:position]
        return found
