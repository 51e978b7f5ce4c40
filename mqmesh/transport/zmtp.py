"""ZMTP 3 with the mechanism NULL, ZeroMQ's protocol on a plain connection: bytes to frames. Pure.

=========== ================================================================================
piece       layout
=========== ================================================================================
greeting    ff, 8 bytes, 7f, version (u8 major, u8 minor), mechanism (20 bytes, filled with
            zeros), as-server u8, 31 × 00
frame       flags u8, size u8, body; with the flag ``LONG`` size is u64, big endian
command     body of a frame with the flag ``COMMAND``: length of its name u8, name, data
READY       properties: length of the name u8, name, length of the value u32 big endian, value
PING        time to live u16 big endian, tenths of a second; context, up to 16 bytes
PONG        the context of the ping
=========== ================================================================================

Each side sends its greeting and the command READY, and then frames; neither waits for the other.
ZeroMQ RFC 23 (https://rfc.zeromq.org/spec/23/), and RFC 37 for PING and PONG.
"""

import struct
from typing import Final

from mqmesh.errors import RemoteProtocolError

MORE: Final = 1
"""Flag of a frame behind which more of its message follow."""
LONG: Final = 2
COMMAND: Final = 4
GREETING_BYTES: Final = 64
VERSION_BYTES: Final = 11
"""Bytes of a greeting up to the version; a side that has them sends all of its own greeting."""
LONGEST_HEAD_BYTES: Final = 9
MAX_COMMAND_BYTES: Final = 4_096
"""Longest command that is accepted; READY is some 40 bytes long, PING 7 to 23."""
PING_CONTEXT_BYTES: Final = 16

_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)
_FLAGS: Final = MORE | LONG | COMMAND
_LONG_HEAD: Final = struct.Struct(">BQ")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_PEERS: Final = {
    b"ROUTER": frozenset({b"DEALER", b"REQ", b"ROUTER"}),
    b"DEALER": frozenset({b"REP", b"ROUTER"}),
}
"""Kinds of sockets that may connect to one of a kind. No DEALER to a DEALER, which ZeroMQ allows: a
connection to a port of this machine without a listener may become one to itself."""


class WrongMechanism(RemoteProtocolError):
    """The other side does not speak plainly: it wants keys, or a password."""


SHORT_HEADS: Final = tuple(bytes((0, size)) for size in range(256))
"""Heads of short frames without flags, by their sizes."""


def head(size: int, flags: int = 0) -> bytes:
    """Encode the head of a frame of ``size`` bytes."""
    if size > 255:
        return _LONG_HEAD.pack(flags | LONG, size)
    return bytes((flags, size))


def command(name: bytes, data: bytes = b"") -> bytes:
    """Encode a command as a frame."""
    body = bytes((len(name),)) + name + data
    return head(len(body), COMMAND) + body


def opening(kind: bytes) -> bytes:
    """Encode all bytes that a side sends before its first frame.

    Args:
        kind: Kind of its socket, ``ROUTER`` or ``DEALER``.
    """
    value = _property(b"Socket-Type", kind)
    if kind == b"DEALER":
        value += _property(b"Identity", b"")
    return _GREETING + command(b"READY", value)


def ping(ttl_ms: int) -> bytes:
    """Encode a ping.

    Args:
        ttl_ms: Time in which another frame follows, a multiple of 100; 0 to promise nothing.
    """
    return command(b"PING", _U16.pack(ttl_ms // 100))


PING: Final = ping(0)
"""A ping that promises nothing: no other frame need follow."""


def pong(data: bytes | memoryview) -> bytes:
    """Encode the answer to a ping.

    Args:
        data: Data of the ping: time to live and context.
    """
    return command(b"PONG", bytes(data[2 : 2 + PING_CONTEXT_BYTES]))


def ping_ttl_ms(data: bytes | memoryview) -> int:
    """Return the time in ms in which a frame follows a ping; 0 if it promises none."""
    return int(_U16.unpack_from(data)[0]) * 100 if len(data) >= 2 else 0


class FrameReader:
    """Reader of one connection: it is fed with bytes and returns frames, which are views of them.

    Args:
        kind: Kind of the own socket, ``ROUTER`` or ``DEALER``.
        max_frame_bytes: Longest frame that is accepted.

    Attributes:
        is_greeted: The other side's greeting has arrived, and it speaks plainly.
        is_open: The handshake is done.
        identity: Routing id that the other side chose in the handshake.
        missing: Bytes that the begun frame still needs, as far as that is known; 0 between
            frames.
        held: Bytes that are kept of the begun frame.
        rest: Bytes that were fed and that ``take`` has not read yet.
    """

    __slots__ = (
        "_at",
        "_begun",
        "_data",
        "_kind",
        "_max",
        "_view",
        "held",
        "identity",
        "is_greeted",
        "is_open",
        "missing",
        "rest",
    )

    def __init__(self, kind: bytes, max_frame_bytes: int) -> None:
        self._kind = kind
        self._max = max_frame_bytes
        self._data: bytes | bytearray = b""
        self._view = memoryview(b"")
        self._at = 0
        self._begun = bytearray()
        self.is_greeted = self.is_open = False
        self.identity = b""
        self.missing = 0
        self.held = 0
        self.rest = 0

    def feed(self, data: bytes) -> None:
        """Take bytes in, behind those that ``take`` has not read yet."""
        if self.held:
            self._begun += data
            self.held += len(data)
            self.missing -= len(data)
            if self.missing > 0:
                return
            self._data, self._begun = self._begun, bytearray()
            self.held = self.missing = 0
        else:
            self._data = self._data[self._at :] + data if self.rest else data
        self._view = memoryview(self._data).toreadonly()
        self._at = 0
        self.rest = len(self._data)

    def take(self) -> tuple[int, memoryview] | None:
        """Return flags and body of the next frame; None if none is whole.

        Raises:
            WrongMechanism: The other side does not speak NULL.
            RemoteProtocolError: It breaks the protocol; no more frames can be read.
        """
        if not self.is_open and not self._shake():
            return None
        data, at = self._data, self._at
        left = self.rest = len(data) - at
        if left < 2:
            if left:
                self._keep(2 - left)
            return None
        flags = data[at]
        if flags & LONG:
            if left < LONGEST_HEAD_BYTES:
                self._check(flags, 0)
                self._keep(LONGEST_HEAD_BYTES - left)
                return None
            start, size = at + LONGEST_HEAD_BYTES, _LONG_HEAD.unpack_from(data, at)[1]
        else:
            start, size = at + 2, data[at + 1]
        if flags or size > self._max:
            self._check(flags, size)
        end = start + size
        if end > len(data):
            self._keep(end - len(data))
            return None
        self._at = end
        self.rest = len(data) - end
        return flags, self._view[start:end]

    def _check(self, flags: int, size: int) -> None:
        if flags & ~_FLAGS or (flags & COMMAND and flags & MORE):
            raise RemoteProtocolError(f"a ZMTP frame has the flags {flags:#x}")
        limit = MAX_COMMAND_BYTES if flags & COMMAND else self._max
        if size > limit:
            raise RemoteProtocolError(f"a ZMTP frame of {size} bytes is over {limit}")

    def _keep(self, missing: int) -> None:
        """Keep the beginning of a frame until the rest of it comes."""
        rest = self._data[self._at :]
        self._data, self._view, self._at = b"", memoryview(b""), 0
        self._begun += rest
        self.held, self.missing, self.rest = len(rest), missing, 0

    def _shake(self) -> bool:
        """Take the other side's part of the handshake; return True when all of it has arrived."""
        if not self.is_greeted:
            data = self._data
            self._check_greeting(data[:GREETING_BYTES])
            if len(data) < GREETING_BYTES:
                if data:
                    self._keep(GREETING_BYTES - len(data))
                return False
            self._at = GREETING_BYTES
            self.is_greeted = True
        self.is_open = True  # for the one frame that is part of the handshake
        found = self.take()
        self.is_open = False
        if found is None:
            return False
        flags, body = found
        if not flags & COMMAND or bytes(body[:6]) != b"\x05READY":
            command = bytes(body[:64]) if flags & COMMAND else b"a message"
            raise RemoteProtocolError(f"a ZMTP handshake ends with {command!r} instead of READY")
        self._take_properties(bytes(body[6:]))
        self.is_open = True
        return True

    def _check_greeting(self, data: bytes | bytearray) -> None:
        if data[:1] not in (b"", b"\xff") or data[9:10] not in (b"", b"\x7f"):
            raise RemoteProtocolError("a peer speaks no ZMTP 3")
        if len(data) > 10 and data[10] < 3:
            raise RemoteProtocolError(f"a peer speaks ZMTP {data[10]}, and not 3")
        if len(data) >= 32 and data[12:32] != _NULL:
            name = data[12:32].rstrip(b"\0").decode("ascii", "replace")
            raise WrongMechanism(f"a peer speaks {name!r} instead of NULL")

    def _take_properties(self, data: bytes) -> None:
        at, found = 0, {}
        while at < len(data):
            name_end = at + 1 + data[at]
            value_at = name_end + _U32.size
            if value_at > len(data):
                raise RemoteProtocolError("a ZMTP property is cut off")
            end = value_at + _U32.unpack_from(data, name_end)[0]
            if end > len(data):
                raise RemoteProtocolError("a ZMTP property is cut off")
            found[data[at + 1 : name_end].lower()] = data[value_at:end]
            at = end
        kind = found.get(b"socket-type", b"")
        if kind not in _PEERS[self._kind]:
            own = self._kind.decode()
            raise RemoteProtocolError(f"a socket of kind {kind[:32]!r} speaks to a {own}")
        self.identity = found.get(b"identity", b"")


def take_command(body: memoryview) -> tuple[bytes, memoryview]:
    """Return name and data of a command; the name is empty if the bytes are no command."""
    end = 1 + body[0] if body else 0
    return (bytes(body[1:end]), body[end:]) if end <= len(body) else (b"", body[:0])


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + _U32.pack(len(value)) + value
