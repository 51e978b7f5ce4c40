"""Messages as RocketMQ's clients write and read them.

A record, big endian, by RocketMQ's ``MessageDecoder``:

======== ===== ======= ==========================================================
position bytes type    meaning
======== ===== ======= ==========================================================
0        4     i32     bytes of the record
4        4     i32     magic
8        4     i32     CRC-32 of the body, without its highest bit
12       4     i32     queue id
16       4     i32     flag
20       8     i64     queue offset
28       8     i64     offset in the log
36       4     i32     system flag
40       8     i64     born time, ms
48       8             born host: IPv4 and i32 port
56       8     i64     store time, ms
64       8             store host: IPv4 and i32 port
72       4     i32     how often it was tried again
76       8     i64     offset of the half message
84       4     i32     bytes of the body, which follows
…        1     u8      bytes of the topic, which follows (2 bytes with the second magic)
…        2     i16     bytes of the properties, which follow
======== ===== ======= ==========================================================

Properties are pairs of name and value, joined by the character 1, each ended by the character 2.

A batch of a producer is a row of: size i32, magic i32, CRC i32, flag i32, bytes of the body i32 and
body, bytes of the properties i16 and properties.
"""

import binascii
import struct
import zlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import msgspec
import zstandard

from mqmesh.errors import RemoteProtocolError

lz4_frame: Any = import_module("lz4.frame") if find_spec("lz4") else None
"""Package that decompresses LZ4, which may be missing."""

MAGIC_V1: Final = -626843481
MAGIC_V2: Final = -626843477
COMPRESSED: Final = 1
"""Bit of the system flag: the body is compressed, by zlib unless the bits of ``COMPRESSION`` say
otherwise."""
COMMITTED: Final = 8
"""Bit of the system flag: the message was committed in a transaction."""
COMPRESSION: Final = 0x7 << 8
LZ4: Final = 0x1 << 8
ZSTD: Final = 0x2 << 8
MOST_PROPERTIES_BYTES: Final = 32_767

NAME_END: Final = "\x01"
PAIR_END: Final = "\x02"

_HEAD = struct.Struct(">iiiiiqqiq4siq4siiqi")
_TAIL_V1 = struct.Struct(">B")
_TAIL_V2 = struct.Struct(">H")
_I16 = struct.Struct(">h")
_BATCH_HEAD = struct.Struct(">iiiii")
_MOST_TOPIC_V1: Final = 127


class RecordPlace(msgspec.Struct, frozen=True, gc=False):
    """Place of a stored message, and the values that its broker added.

    Attributes:
        queue_id: Message queue.
        queue_offset: Position in it.
        log_offset: Offset in the log as RocketMQ's clients see it; see ``ids``.
        born_ms: When the producer made it.
        store_ms: When it was stored.
        store_ip: Address of the broker group's port, 4 bytes.
        store_port: The port.
        reconsume_times: How often it was sent back.
        prepared_offset: Where its half message is; 0 without.
        system_flag: ``COMMITTED`` or 0.
    """

    queue_id: int
    queue_offset: int
    log_offset: int
    born_ms: int
    store_ms: int
    store_ip: bytes
    store_port: int
    reconsume_times: int = 0
    prepared_offset: int = 0
    system_flag: int = 0


def encode_record(
    topic: str, body: bytes, properties: Mapping[str, str], flag: int, place: RecordPlace
) -> bytes:
    """Encode a stored message for a consumer.

    Args:
        topic: Topic that it was pulled from.
        body: Its body, not compressed.
        properties: Its properties, RocketMQ's own among them; without characters 1 and 2.
        flag: The user's number.
        place: Where it is.

    Returns:
        Layout: record, see the head of the module.
    """
    name = topic.encode()
    if len(name) <= _MOST_TOPIC_V1:
        magic, named = MAGIC_V1, _TAIL_V1.pack(len(name))
    else:
        magic, named = MAGIC_V2, _TAIL_V2.pack(len(name))
    data = encode_properties(properties)
    size = _HEAD.size + len(body) + len(named) + len(name) + _I16.size + len(data)
    head = _HEAD.pack(
        size,
        magic,
        binascii.crc32(body) & 0x7FFFFFFF,
        place.queue_id,
        flag,
        place.queue_offset,
        place.log_offset,
        place.system_flag,
        place.born_ms,
        _NOWHERE,
        0,
        place.store_ms,
        place.store_ip,
        place.store_port,
        place.reconsume_times,
        place.prepared_offset,
        len(body),
    )
    return b"".join((head, body, named, name, _I16.pack(len(data)), data))


_NOWHERE: Final = bytes((127, 0, 0, 1))
"""Born host: mqmesh has a name there, which needs not be an address."""


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode properties; those that a record has no room for are left out, the last first."""
    pieces: list[bytes] = []
    size = 0
    for name, value in properties.items():
        piece = f"{name}{NAME_END}{value}{PAIR_END}".encode()
        size += len(piece)
        if size > MOST_PROPERTIES_BYTES:
            break
        pieces.append(piece)
    return b"".join(pieces)


def decode_properties(text: str) -> dict[str, str]:
    """Read properties as clients write them; a part that is no pair is left out."""
    found = {}
    for pair in text.split(PAIR_END):
        name, mark, value = pair.partition(NAME_END)
        if name and mark:
            found[name] = value
    return found


class BatchedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a producer's batch.

    Attributes:
        body: Its body.
        properties: Its properties.
        flag: The user's number.
    """

    body: bytes
    properties: dict[str, str]
    flag: int


def decode_batch(data: bytes, max_count: int) -> list[BatchedMessage]:
    """Read the body of SEND_BATCH_MESSAGE.

    Raises:
        RemoteProtocolError: It is no row of messages, or there are more than ``max_count``.
    """
    position, found = 0, list[BatchedMessage]()
    while position < len(data):
        if len(found) == max_count:
            raise RemoteProtocolError(f"more than {max_count} messages in a batch")
        try:
            size, _, _, flag, body_size = _BATCH_HEAD.unpack_from(data, position)
            start = position + _BATCH_HEAD.size
            properties_size = _I16.unpack_from(data, start + body_size)[0] if body_size >= 0 else -1
        except struct.error as error:
            raise RemoteProtocolError(f"a batch that is cut off: {error}") from error
        middle = start + body_size + _I16.size
        end = middle + properties_size
        if body_size < 0 or properties_size < 0 or end != position + size or end > len(data):
            raise RemoteProtocolError(
                f"message {len(found)} of a batch says {size} bytes, and has a body of {body_size} "
                f"and properties of {properties_size}"
            )
        try:
            text = data[middle:end].decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"properties of message {len(found)}: {error}") from error
        body = data[start : start + body_size]
        found.append(BatchedMessage(body, decode_properties(text), flag))
        position = end
    return found


def decompress(body: bytes, system_flag: int, max_bytes: int) -> bytes:
    """Return a body as its producer gave it.

    Args:
        body: As it came.
        system_flag: Of the request.
        max_bytes: Largest body, decompressed.

    Raises:
        RemoteProtocolError: It cannot be decompressed, or is larger.
    """
    if not system_flag & COMPRESSED:
        return body
    form = system_flag & COMPRESSION
    if form == LZ4 and lz4_frame is None:
        raise RemoteProtocolError(
            "bodies compressed by LZ4 need the package lz4 beside the gateway; use ZLIB or ZSTD"
        )
    is_whole = True
    try:
        if form == ZSTD:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                found = reader.read(max_bytes + 1)
        else:
            one: Any = lz4_frame.LZ4FrameDecompressor() if form == LZ4 else zlib.decompressobj()
            found = one.decompress(body, max_bytes + 1)
            is_whole = one.eof
    except (zlib.error, zstandard.ZstdError, RuntimeError) as error:
        raise RemoteProtocolError(f"a body that cannot be decompressed: {error}") from error
    if len(found) > max_bytes:
        raise RemoteProtocolError(f"a decompressed body is over {max_bytes} bytes")
    if not is_whole:
        raise RemoteProtocolError(f"a body that cannot be decompressed: {len(body)} bytes, cut off")
    return bytes(found)
