"""A command on the wire: one ZeroMQ frame, beside the routing id.

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
costs the fewest calls into ZeroMQ. A client may request that large pieces of a
response's body come in further frames, so that no process needs to copy them together;
with all of its frames a response is no longer than one frame may be. A header is decoded
into a typed, bounded struct; array elements that this version does not know are ignored.
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
MAX_FURTHER_FRAMES: Final = 128
"""Most frames of one response behind the first."""
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
        body: Bytes behind the header.
        further: More of the body, in pieces; empty for a client that did not ask for them.
    """

    code: int
    opaque: int
    flags: int
    header: memoryview
    body: memoryview
    further: tuple[memoryview, ...] = ()

    @property
    def is_response(self) -> bool:
        """True for a response."""
        return bool(self.flags & RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """True for a request that wants no response."""
        return bool(self.flags & ONEWAY)


class Principal(msgspec.Struct, frozen=True, gc=False):
    """User that a request is from, as far as its connection proves it.

    Attributes:
        name: Of the user.
        key: Public key that it proved to have; "" for none.
        namespace: The only namespace whose topics and groups it may see; "" for all.
    """

    name: str
    key: str = ""
    namespace: str = ""


ANYBODY: Final = Principal("anybody")
"""Principal of a connection without a proof."""


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Response that a handler returns at once; handlers that answer later return None instead.

    Attributes:
        header: Encoded header.
        body: Bytes behind the header, in pieces.
        code: Response code.
        apart: The client takes large pieces in frames of their own.
    """

    header: bytes = b""
    body: Sequence[bytes | memoryview] = ()
    code: int = 0
    apart: bool = False


class ErrorHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Header of every response whose code is not ``SUCCESS``.

    Attributes:
        remark: Description of the error, with the value, the limit and the setting to change.
        retry_after_ms: Time after which to try again, ms; 0 if the server names none.
        epoch: Of ``NOT_MASTER``: newest epoch of the broker group that the replica knows, or 0.
        master: Of ``NOT_MASTER``: address of the master, ``host:port``; "" if it is unknown.
    """

    remark: str = ""
    retry_after_ms: int = 0
    epoch: int = 0
    master: str = ""


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


def encode_apart(
    opaque: int, reply: Reply, *, least_bytes: int
) -> tuple[list[bytes | memoryview], int]:
    """Builds a response whose large pieces are frames of their own, not copied.

    Args:
        opaque: Of the request.
        reply: The response.
        least_bytes: Pieces from this size on are large.

    Returns:
        The frames, in order, and how many bytes they have.

    Raises:
        LocalProtocolError: The frames would be over ``MAX_FRAME_BYTES`` together.
    """
    prefix = _PREFIX.pack(PROTOCOL_VERSION, RESPONSE, reply.code, len(reply.header), opaque)
    frames: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = [prefix, reply.header]
    size = PREFIX_SIZE + len(reply.header)
    for piece in reply.body:
        size += len(piece)
        # Two at most are added, and a last one of small pieces.
        if len(piece) < least_bytes or len(frames) > MAX_FURTHER_FRAMES - 2:
            small.append(piece)
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(piece)
    if small:
        frames.append(b"".join(small))
    if size > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"an answer of {size} bytes is over {MAX_FRAME_BYTES}")
    return frames, size


def decode_frame(frame: bytes | memoryview, further: tuple[memoryview, ...] = ()) -> Command:
    """Takes a frame apart; header and body are views of it.

    Args:
        frame: The first, or only, frame of a message.
        further: Those behind it.

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
    return Command(code, opaque, flags, view[PREFIX_SIZE:end], view[end:], further)


def peek_opaque(frame: bytes | memoryview) -> int | None:
    """Return the opaque of a frame that may be unreadable otherwise; None when it is too short."""
    if len(frame) < PREFIX_SIZE:
        return None
    opaque: int = _PREFIX.unpack_from(frame)[4]
    return opaque


def encode_header(header: msgspec.Struct) -> bytes:
    """Encodes a header struct.

    Raises:
        LocalProtocolError: The header cannot be encoded, for example for a lone surrogate in a
            text.
    """
    try:
        return _encoder.encode(header)
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, TypeError) as error:
        raise LocalProtocolError(f"{type(header).__name__} cannot be encoded: {error}") from error


Answer = msgspec.Struct
"""Answer of a handler: the struct of its header, or a ``Reply`` where there is a body."""


def reply_of(answer: Answer) -> Reply:
    """Return the reply of an answer; a struct is the header of a successful one."""
    return answer if isinstance(answer, Reply) else Reply(encode_header(answer))


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
