"""A command on the wire: exactly one ZeroMQ frame, beside the routing id.

Layout of the frame, little endian:

======== ===== ==== ============================================================
position bytes type meaning
======== ===== ==== ============================================================
0        1     u8   protocol version, 1
1        1     u8   flags: 1 response, 2 oneway
2        2     u16  request code, or response code
4        4     u32  header_size
8        8     u64  opaque: chosen by the asker, repeated in the response
16       …     …    header: a msgpack array (``protocol/*.py``), or fixed where said
…        …     …    body: the rest of the frame
======== ===== ==== ============================================================

One frame a message keeps a receiver safe from endless multipart messages, and
costs the fewest calls into ZeroMQ. A header is decoded into a typed, bounded
struct; array elements that this version does not know are ignored.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from mqmesh.errors import LocalProtocolError, RemoteProtocolError
from mqmesh.units import KIB, MIB

PROTOCOL_VERSION: Final = 1
PREFIX_SIZE: Final = 16
MAX_FRAME_BYTES: Final = 32 * MIB
"""No frame is longer; also ``ZMQ_MAXMSGSIZE`` of every socket."""
MAX_HEADER_BYTES: Final = 16 * MIB
"""Room for 100,000 topics with the longest names."""
MAX_REMARK_CHARACTERS: Final = 1 * KIB

RESPONSE: Final = 1
ONEWAY: Final = 2

_PREFIX = struct.Struct("<BBHIQ")
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_T = TypeVar("_T")


class Command(msgspec.Struct, frozen=True, gc=False):
    """A decoded frame.

    Attributes:
        code: Request code, or response code when ``is_response``.
        opaque: Number that joins a response to its request.
        flags: ``RESPONSE``, ``ONEWAY``.
        header: Encoded header.
        body: What follows it.
    """

    code: int
    opaque: int
    flags: int
    header: memoryview
    body: memoryview

    @property
    def is_response(self) -> bool:
        """True for a response."""
        return bool(self.flags & RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """True for a request that wants no response."""
        return bool(self.flags & ONEWAY)


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as a server's handler sees it.

    Attributes:
        peer: Routing id of the connection it came by; good for answering, not an identity.
        command: The decoded frame.
    """

    peer: bytes
    command: Command


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What a handler answers at once; handlers that answer later return None instead.

    Attributes:
        header: Encoded header.
        body: What follows it, in pieces.
        code: Response code.
    """

    header: bytes = b""
    body: Sequence[bytes | memoryview] = ()
    code: int = 0


class ErrorHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Header of every response whose code is not ``SUCCESS``.

    Attributes:
        remark: What went wrong, the value, the limit and the setting to change.
        retry_after_ms: When to try again, 0 for unsaid.
    """

    remark: str = ""
    retry_after_ms: int = 0


def encode_frame(
    code: int, opaque: int, *parts: bytes | memoryview, header: bytes = b"", flags: int = 0
) -> bytes:
    """Builds a frame.

    Args:
        code: Request or response code, u16.
        opaque: u64.
        parts: The body, in pieces.
        header: Encoded header.
        flags: ``RESPONSE``, ``ONEWAY``.

    Raises:
        LocalProtocolError: The frame would be over ``MAX_FRAME_BYTES``, or the header over
            ``MAX_HEADER_BYTES``.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(f"a header of {len(header)} bytes is over {MAX_HEADER_BYTES}")
    frame = b"".join(
        (_PREFIX.pack(PROTOCOL_VERSION, flags, code, len(header), opaque), header, *parts)
    )
    if len(frame) > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"a frame of {len(frame)} bytes is over {MAX_FRAME_BYTES}")
    return frame


def decode_frame(frame: bytes | memoryview) -> Command:
    """Takes a frame apart; header and body are views of it.

    Raises:
        RemoteProtocolError: Too short, an unknown version, or a header longer than the frame.
    """
    size = len(frame)
    if size < PREFIX_SIZE:
        raise RemoteProtocolError(f"a frame of {size} bytes has no room for {PREFIX_SIZE}")
    version, flags, code, header_size, opaque = _PREFIX.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"protocol version {version} is unknown; this side speaks 1")
    end = PREFIX_SIZE + header_size
    if end > size or header_size > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header of {header_size} bytes in a frame of {size}")
    view = memoryview(frame)
    return Command(code, opaque, flags, view[PREFIX_SIZE:end], view[end:])


def peek_opaque(frame: bytes | memoryview) -> int | None:
    """The opaque of a frame that may be unreadable otherwise; None when it is too short."""
    if len(frame) < PREFIX_SIZE:
        return None
    opaque: int = _PREFIX.unpack_from(frame)[4]
    return opaque


def encode_header(header: msgspec.Struct) -> bytes:
    """Encodes a header struct.

    Raises:
        LocalProtocolError: It cannot be encoded, for example for a lone surrogate in a text.
    """
    try:
        return _encoder.encode(header)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise LocalProtocolError(f"{type(header).__name__} cannot be encoded: {error}") from error


def reply_with(header: msgspec.Struct) -> Reply:
    """A successful answer of nothing but a header."""
    return Reply(encode_header(header))


EMPTY_REPLY: Final = Reply()
"""Success, and nothing to say."""


def decode_header(kind: type[_T], data: bytes | memoryview) -> _T:
    """Decodes a header into its struct.

    Raises:
        RemoteProtocolError: The bytes are not such a header.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]  # one decoder for each kind
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a {kind.__name__}: {error}") from error
