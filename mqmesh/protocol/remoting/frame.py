"""Frames of RocketMQ's remoting protocol.

Layout, big endian, by RocketMQ's ``RemotingCommand``:

======== ===== ======= ==========================================================
position bytes type    meaning
======== ===== ======= ==========================================================
0        4     u32     bytes that follow these four
4        1     u8      form of the header: 0 JSON, 1 ROCKETMQ
5        3     u24     bytes of the header
8        …             header
…        …             body: the rest
======== ===== ======= ==========================================================

A header of the form ROCKETMQ:

======== ===== ======= ==========================================================
0        2     i16     code
2        1     u8      language
3        2     i16     version
5        4     i32     opaque
9        4     i32     flag
13       4     u32     bytes of the remark, which follow
…        4     u32     bytes of the fields, which follow: each an i16 length and a
                       name, an i32 length and a text
======== ===== ======= ==========================================================

A header in JSON is an object with ``code``, ``language``, ``version``, ``opaque``, ``flag``,
``remark`` and ``extFields``, an object of texts.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.remoting.codes import VERSION
from mqmesh.units import KIB

RESPONSE: Final = 1
"""Bit of ``flag``: an answer."""
ONEWAY: Final = 2
"""Bit of ``flag``: the client waits for no answer."""
MAX_HEADER_BYTES: Final = 64 * KIB
MAX_FIELDS: Final = 128

_JSON: Final = 0
_ROCKETMQ: Final = 1
_LENGTHS = struct.Struct(">II")
_FIXED = struct.Struct(">hBhiiI")
_U32 = struct.Struct(">I")
_I16 = struct.Struct(">h")
_PYTHON: Final = 3
"""Language of the answers, by RocketMQ's ``LanguageCode``."""
_SMALLEST: Final = 4


_I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _JsonHeader(msgspec.Struct, gc=False):
    code: _I32
    opaque: _I32 = 0
    flag: _I32 = 0
    version: _I32 = 0
    language: str | int | None = ""
    remark: str | None = None
    extFields: dict[str, str | int | float | bool | None] | None = None


_decoder = msgspec.json.Decoder(_JsonHeader)
_encoder = msgspec.json.Encoder()


class RemotingCommand(msgspec.Struct):
    """A request or an answer.

    Attributes:
        code: ``RemotingCode`` of a request, ``RemotingStatus`` of an answer.
        opaque: Number that joins an answer to its request.
        flag: ``RESPONSE`` and ``ONEWAY``.
        fields: The header's own fields; at most 128.
        body: The body.
        remark: Sentence about the error.
        version: Of the sender, RocketMQ's ``MQVersion``.
        language: Of the sender.
        is_json: Form of the header; an answer has that of its request.
        is_parked: Of a request: it waits for a message, and may for long.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    fields: dict[str, str] = {}
    body: bytes = b""
    remark: str = ""
    version: int = VERSION
    language: str = "PYTHON"
    is_json: bool = True
    is_parked: bool = False

    @property
    def is_oneway(self) -> bool:
        """True if the client waits for no answer."""
        return bool(self.flag & ONEWAY)

    def answer(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        *,
        body: bytes = b"",
        remark: str = "",
    ) -> "RemotingCommand":
        """Return the answer to this request."""
        return RemotingCommand(
            code, self.opaque, RESPONSE, fields or {}, body, remark, is_json=self.is_json
        )


class RemotingReader:
    """Reader of the frames of one connection.

    Args:
        max_frame_bytes: Longest frame that may come.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._wanted = _SMALLEST

    def feed(self, data: bytes) -> Iterator[RemotingCommand]:
        """Read received bytes.

        Args:
            data: Next bytes of the connection.

        Yields:
            Each command that is whole now.

        Raises:
            RemoteProtocolError: A frame is too long or malformed; the connection is of no use any
                more.
        """
        self._pieces.append(data)
        self._held += len(data)
        if self._held < self._wanted:
            return  # pieces are joined once for a frame, however small they are
        view = memoryview(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces))
        position, self._wanted = 0, _SMALLEST
        while len(view) - position >= _SMALLEST:
            size = _U32.unpack_from(view, position)[0]
            if not _SMALLEST <= size <= self._max_frame_bytes:
                raise RemoteProtocolError(
                    f"a frame of {size} bytes; {_SMALLEST} to {self._max_frame_bytes} are allowed "
                    "(max_frame_bytes)"
                )
            end = position + _SMALLEST + size
            if end > len(view):
                self._wanted = _SMALLEST + size
                break
            yield decode_frame(view[position + _SMALLEST : end])
            position = end
        rest = bytes(view[position:])
        self._pieces = [rest] if rest else []
        self._held = len(rest)


def decode_frame(frame: memoryview) -> RemotingCommand:
    """Decode a frame behind its length.

    Raises:
        RemoteProtocolError: It is malformed.
    """
    if len(frame) < _SMALLEST:
        raise RemoteProtocolError(f"a frame of {len(frame)} bytes has no header")
    word = _U32.unpack_from(frame)[0]
    form, header_size = word >> 24, word & 0xFFFFFF
    if header_size > min(MAX_HEADER_BYTES, len(frame) - _SMALLEST):
        raise RemoteProtocolError(
            f"a header of {header_size} bytes in a frame of {len(frame)}; it may have "
            f"{MAX_HEADER_BYTES}"
        )
    header = frame[_SMALLEST : _SMALLEST + header_size]
    body = bytes(frame[_SMALLEST + header_size :])
    if form == _JSON:
        return _decode_json(header, body)
    if form == _ROCKETMQ:
        return _decode_binary(header, body)
    raise RemoteProtocolError(f"a header of the form {form}; 0 (JSON) and 1 (ROCKETMQ) are known")


def encode_frame(command: RemotingCommand) -> tuple[bytes, bytes]:
    """Encode a command: its frame up to the body, and the body.

    Returns:
        Both pieces; to be sent one behind the other.
    """
    if command.is_json:
        form = _JSON
        header = _encoder.encode(
            {
                "code": command.code,
                "extFields": command.fields,
                "flag": command.flag,
                "language": command.language,
                "opaque": command.opaque,
                "remark": command.remark or None,
                "serializeTypeCurrentRPC": "JSON",
                "version": command.version,
            }
        )
    else:
        form = _ROCKETMQ
        header = _encode_binary(command)
    size = _SMALLEST + len(header) + len(command.body)
    return _LENGTHS.pack(size, form << 24 | len(header)) + header, command.body


def _decode_json(header: memoryview, body: bytes) -> RemotingCommand:
    try:
        found = _decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"a header that is no JSON of a command: {error}") from error
    fields = found.extFields or {}
    _check_count(len(fields))
    # Clients in other languages than Java send numbers as numbers.
    texts = {name: _text(value) for name, value in fields.items() if value is not None}
    return RemotingCommand(
        found.code,
        found.opaque,
        found.flag,
        texts,
        body,
        found.remark or "",
        found.version,
        str(found.language or ""),
    )


def _text(value: str | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _decode_binary(header: memoryview, body: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag, size = _FIXED.unpack_from(header)
        remark, position = _take(header, _FIXED.size, size)
        fields_size = _U32.unpack_from(header, position)[0]
        position += _U32.size
        if fields_size > len(header) - position:
            raise RemoteProtocolError(f"fields of {fields_size} bytes do not fit into the header")
        fields: dict[str, str] = {}
        end = position + fields_size
        while position < end:
            name, position = _take(
                header, position + _I16.size, _I16.unpack_from(header, position)[0]
            )
            fields[name], position = _take(
                header, position + _U32.size, _U32.unpack_from(header, position)[0]
            )
            _check_count(len(fields))
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"a header that is cut off or no text: {error}") from error
    return RemotingCommand(
        code, opaque, flag, fields, body, remark, version, str(language), is_json=False
    )


def _take(header: memoryview, start: int, size: int) -> tuple[str, int]:
    end = start + size
    if size < 0 or end > len(header):
        raise RemoteProtocolError(f"a text of {size} bytes does not fit into the header")
    return str(header[start:end], "utf-8"), end


def _check_count(count: int) -> None:
    if count > MAX_FIELDS:
        raise RemoteProtocolError(f"more than {MAX_FIELDS} fields in a header")


def _encode_binary(command: RemotingCommand) -> bytes:
    pairs = []
    for name, value in command.fields.items():
        data, text = name.encode(), value.encode()
        pairs += [_I16.pack(len(data)), data, _U32.pack(len(text)), text]
    fields = b"".join(pairs)
    remark = command.remark.encode()
    fixed = _FIXED.pack(
        command.code, _PYTHON, command.version, command.opaque, command.flag, len(remark)
    )
    return b"".join((fixed, remark, _U32.pack(len(fields)), fields))
