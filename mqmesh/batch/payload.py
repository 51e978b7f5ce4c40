"""The messages of a batch as bytes: the part of a record batch behind its header.

A msgpack array of messages, as a whole compressed by zstd or not. Reading is
bounded before anything is inflated or made: the number of messages, the size
and the number of strings.
"""

import struct
import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec
import zstandard

from mqmesh.errors import CorruptBatch, LocalProtocolError
from mqmesh.message import (
    Message,
    StoredMessage,
    tag_hash,
)
from mqmesh.message_checks import Extras
from mqmesh.units import MIB

MAX_MESSAGES: Final = 65_536
MAX_RAW_BYTES: Final = 16 * MIB
"""No reader inflates or decodes a payload larger than this."""
MAX_STRINGS: Final = 1 * MIB
"""Keys, names and values of properties in one batch. Each costs a reader 50 bytes and more
for as little as 3 bytes of payload, and 16 MiB of them compress to 1 KiB."""
COMPRESS_OVER_BYTES: Final = 4_096
"""Size from which payloads are compressed, unless a producer's options say otherwise."""
CODEC_NONE: Final = 0
CODEC_ZSTD: Final = 1
Buffer = memoryview | bytes | bytearray
"""Buffer that a batch may be read from."""

_get_tag = attrgetter("tag")
_get_keys = attrgetter("keys")


class _Shape(msgspec.Struct, array_like=True, gc=False):
    # A message whose strings are still bytes: to count them before they are made.
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw = msgspec.Raw()
    keys: msgspec.Raw = msgspec.Raw()
    properties: msgspec.Raw = msgspec.Raw()


class Payload(msgspec.Struct, frozen=True, gc=False):
    """The messages of a batch, encoded.

    Attributes:
        data: Bytes as stored.
        codec: ``CODEC_NONE`` or ``CODEC_ZSTD``.
        raw_size: Size of the data without compression.
        message_count: Number of messages, 1 to 65,536.
        has_keys: A message has keys.
        tag_hashes: See ``record_batch.BatchMeta``.
        places: Start of each message without compression, and the end of the last one, as numbers
            of C's ``unsigned``; empty if they were not noted.
    """

    data: bytes
    codec: int
    raw_size: int
    message_count: int
    has_keys: bool
    tag_hashes: bytes
    places: bytes = b""


class _Contexts(threading.local):
    """zstd contexts of one thread: costly to make, not shareable."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_RAW_BYTES)


_contexts = _Contexts()
_encoder = msgspec.msgpack.Encoder()
_messages_decoder = msgspec.msgpack.Decoder(list[StoredMessage])
_message_decoder = msgspec.msgpack.Decoder(Message)
_raws_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_shapes_decoder = msgspec.msgpack.Decoder(list[_Shape])


def encode_payload(
    messages: Sequence[Message],
    *,
    compress_over_bytes: int | None = None,
    extras: Extras = Extras.ANY,
    prefix: str = "",
) -> Payload:
    """Encodes messages: the part of a batch that does not depend on its destination.

    Args:
        messages: As for ``record_batch.encode_batch``.
        compress_over_bytes: As for ``record_batch.encode_batch``.
        extras: Optional properties that the messages may have.
        prefix: Text put in front of the topic of each message.

    Raises:
        LocalProtocolError: No message, too many, over ``MAX_RAW_BYTES`` or ``MAX_STRINGS``.
    """
    count = len(messages)
    if not 0 < count <= MAX_MESSAGES:
        raise LocalProtocolError(f"a batch holds 1 to {MAX_MESSAGES} messages, not {count}")
    if prefix:
        messages = [msgspec.structs.replace(one, topic=prefix + one.topic) for one in messages]
    data = _encoder.encode(messages)
    raw_size = len(data)
    if raw_size > MAX_RAW_BYTES:
        raise LocalProtocolError(f"a payload of {raw_size} bytes is over {MAX_RAW_BYTES}")
    has_keys = False
    hashes = b""
    if extras is not Extras.NONE:
        if raw_size > MAX_STRINGS:  # else there cannot be as many
            _check_strings(
                (len(m.keys) + 2 * len(m.properties or ()) for m in messages), LocalProtocolError
            )
        has_keys = any(map(_get_keys, messages))
    if extras is Extras.ANY:
        hashes = pack_tag_hashes(messages)
    codec = CODEC_NONE
    if compress_over_bytes is not None and raw_size >= compress_over_bytes * count:
        data, codec = compress_payload(data)
    return Payload(data, codec, raw_size, count, has_keys, hashes)


def compress_payload(data: bytes) -> tuple[bytes, int]:
    """Compresses an array of messages if that makes it smaller.

    Returns:
        Bytes to store, and their codec.
    """
    packed = _contexts.compressor.compress(data)
    return (packed, CODEC_ZSTD) if len(packed) < len(data) else (data, CODEC_NONE)


def pack_tag_hashes(messages: Sequence[Message]) -> bytes:
    """Pack the hashes of messages' tags, as ``record_batch.BatchMeta`` has them."""
    tags = set(map(_get_tag, messages))
    if len(tags) > 1:
        return struct.pack(f"<{len(messages)}Q", *map(tag_hash, map(_get_tag, messages)))
    tag = tags.pop()
    return b"" if tag is None else tag_hash(tag).to_bytes(8, "little")


def slice_payload(payload: Buffer, start: int, stop: int) -> Buffer:
    """Cut some messages of an opened payload out, as a payload of their own.

    It costs 60 ns for each message of the whole and is worth it where decoding costs more.

    Raises:
        CorruptBatch: The payload is no array.
    """
    return join_messages(split_payload(payload)[start:stop])


def join_messages(raws: Sequence[msgspec.Raw]) -> bytes:
    """Join messages from ``split_payload`` to an opened payload."""
    return _encoder.encode(raws)


def open_payload(
    stored: memoryview, codec: int, raw_size: int, message_count: int
) -> memoryview | bytes:
    """Open a stored payload: return the uncompressed array of so many messages.

    Args:
        stored: Payload as the batch has it.
        codec, raw_size, message_count: Values of the batch's header.

    Raises:
        CorruptBatch: The payload does not inflate, or has another number of messages.
    """
    payload = _inflate(stored, raw_size) if codec == CODEC_ZSTD else stored
    if _array_size(payload) != message_count:
        raise CorruptBatch(
            f"payload of {_array_size(payload)} messages in a batch of {message_count}"
        )
    return payload


def decode_payload(payload: Buffer) -> list[StoredMessage]:
    """Decode the messages of an opened payload; their places are not filled in.

    Raises:
        CorruptBatch: The payload does not decode to messages. Memory stays within ten times
            ``MAX_RAW_BYTES`` whatever the bytes are.
    """
    try:
        if len(payload) > MAX_STRINGS:  # else there cannot be as many
            shapes = _shapes_decoder.decode(payload)
            _check_strings(map(_string_count, shapes), CorruptBatch)
        return _messages_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"messages cannot be decoded: {error}") from error


def pick_messages(payload: Payload, chosen: Iterable[int]) -> list[Message]:
    """Return some messages of a payload encoded here; it costs little where it has ``places``.

    Args:
        payload: Payload from ``encode_payload``.
        chosen: Ordinals of the messages, from 0.
    """
    raw: Buffer = payload.data
    if payload.codec != CODEC_NONE:
        raw = _inflate(memoryview(raw), payload.raw_size)
    if not payload.places:
        raws = split_payload(raw)
        return [_message_decoder.decode(raws[at]) for at in chosen]
    places = memoryview(payload.places).cast("I")
    return [_message_decoder.decode(raw[places[at] : places[at + 1]]) for at in chosen]


def split_payload(payload: Buffer) -> list[msgspec.Raw]:
    """Split an opened payload into its messages, still encoded; nothing in them is looked at.

    Raises:
        CorruptBatch: The payload is no array.
    """
    try:
        return _raws_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptBatch(f"messages cannot be separated: {error}") from error


def find_messages(payload: Buffer, text: bytes) -> tuple[list[int], bytes]:
    """Find the messages of an opened payload whose encoding contains some bytes.

    Where few do, it takes a quarter of the time of decoding all of them.

    Returns:
        Ordinals of these messages in the payload, from 0, and a payload of them.

    Raises:
        CorruptBatch: The payload is no array.
    """
    raws = split_payload(payload)
    found = [place for place, raw in enumerate(raws) if text in bytes(raw)]
    return found, join_messages([raws[place] for place in found])


def join_payload(raws: Sequence[msgspec.Raw], *, compress_over_bytes: int | None = None) -> Payload:
    """Join messages that are encoded already to a payload.

    Args:
        raws: Messages from ``split_payload``.
        compress_over_bytes: As for ``record_batch.encode_batch``.

    Raises:
        CorruptBatch: One of them is no message.
    """
    data, codec = join_messages(raws), CODEC_NONE
    raw_size, count = len(data), len(raws)
    messages = decode_payload(data)
    has_keys, hashes = any(map(_get_keys, messages)), pack_tag_hashes(messages)
    if compress_over_bytes is not None and raw_size >= compress_over_bytes * count:
        data, codec = compress_payload(data)
    return Payload(data, codec, raw_size, count, has_keys, hashes)


def _inflate(payload: memoryview, raw_size: int) -> bytes:
    # A frame's own statement of its size is checked before a byte is inflated: the
    # decompressor ignores max_output_size when the frame states one.
    try:
        if zstandard.frame_content_size(payload) != raw_size:
            raise CorruptBatch(f"the zstd frame does not declare {raw_size} bytes")
        return _contexts.decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptBatch(f"payload does not inflate: {error}") from error


def _array_size(buffer: Buffer) -> int:
    # Read before decoding, so that a payload cannot claim more messages than its header.
    # 0 also for what is no array at all.
    first = buffer[0] if len(buffer) else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(buffer[1 : 1 + width], "big")


def _map_size(buffer: Buffer) -> int:
    first = buffer[0] if len(buffer) else 0
    if first & 0xF0 == 0x80:
        return first & 0x0F
    width = {0xDE: 2, 0xDF: 4}.get(first, 0)
    return int.from_bytes(buffer[1 : 1 + width], "big")


def _string_count(shape: _Shape) -> int:
    return _array_size(memoryview(shape.keys)) + 2 * _map_size(memoryview(shape.properties))


def _check_strings(counts: Iterable[int], error: type[CorruptBatch | LocalProtocolError]) -> None:
    if (count := sum(counts)) > MAX_STRINGS:
        raise error(f"{count} keys and properties in one batch are over {MAX_STRINGS}")
