"""Messages of a batch that differ in bodies and keys of the same sizes only.

Most batches of a program are like that: its messages are records of one kind. Their
bytes then repeat with a fixed step, and one look at all the bytes that stand at the same
place tells as much of all messages as a look at each field of each of them.
"""

import struct
from functools import lru_cache
from typing import Final

import msgspec

from mqmesh.message import Message
from mqmesh.message_checks import check_keys
from mqmesh.payload import (
    CODEC_NONE,
    MAX_MESSAGES,
    MAX_RAW_BYTES,
    MAX_STRINGS,
    Buffer,
    Payload,
    compress_payload,
)

UNIFORM_MESSAGES: Final = 8
"""Fewer are as quickly looked at one by one."""
UNIFORM_KEY_BYTES: Final = 128
"""More bytes of keys a message are as quickly looked at key by key."""
MOST_FIELD_BYTES: Final = 512
"""The same of everything beside bodies and keys."""

_AT_ONCE: Final = 64
_KEY_LISTS: Final = (tuple, list)
_LONG_ARRAY: Final = 16
"""From so many on, msgpack writes the number in three bytes."""
_ARRAY_HEADERS: Final = {0xDC: 3, 0xDD: 5}
_BIN_HEADERS: Final = {0xC4: 2, 0xC5: 3, 0xC6: 5}


class _RawMessage(msgspec.Struct, array_like=True, gc=False):
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw = msgspec.Raw()
    keys: msgspec.Raw = msgspec.Raw()


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(_RawMessage)
_raws_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode_uniform(
    messages: object, *, max_body_bytes: int, compress_over_bytes: int | None = None
) -> Payload | None:
    """Encodes messages that differ in bodies and keys of the same sizes only, and proves it.

    The proof looks at the encoded bytes, a few per message, of all messages at once: where
    the fields of each message must stand, they stand. That takes a quarter of a look at
    each field of each object. The topic's name is not checked.

    Args:
        messages: Anything.
        max_body_bytes: Largest body.
        compress_over_bytes: As for ``encode_payload``.

    Returns:
        None when they are not such messages, or there is no telling so quickly.
    """
    if type(messages) is not list or not UNIFORM_MESSAGES <= len(messages) <= MAX_MESSAGES:
        return None
    count = len(messages)
    first, middle, last = messages[0], messages[count // 2], messages[-1]
    if type(first) is not Message or type(middle) is not Message or type(last) is not Message:
        return None
    topic, body, keys = first.topic, first.body, first.keys
    if first.tag is not None or first.properties is not None:
        return None
    if type(topic) is not str or type(body) is not bytes or type(keys) not in _KEY_LISTS:
        return None
    size = len(body)
    if not 0 < size <= max_body_bytes or len(keys) * count > MAX_STRINGS:
        return None
    try:
        key_sizes = tuple(map(len, keys))
        if (
            not size == len(middle.body) == len(last.body)
            or not key_sizes == tuple(map(len, middle.keys)) == tuple(map(len, last.keys))
            or sum(key_sizes) > UNIFORM_KEY_BYTES
        ):
            return None
        data = _encoder.encode(messages)
        shape = _shape_of(topic, size, key_sizes)
    except Exception:
        return None  # whoever looks at each message will say what is wrong
    step = shape.size
    start = 1 if count < _LONG_ARRAY else 3
    raw_size = start + count * step
    if len(data) != raw_size or raw_size > MAX_RAW_BYTES:
        return None
    for position, value in shape.fields:
        if data[start + position :: step] != value * count:
            return None
    for position in shape.texts:
        if not data[start + position :: step].isascii():
            return None
    codec = CODEC_NONE
    if compress_over_bytes is not None and raw_size >= compress_over_bytes * count:
        data, codec = compress_payload(data)
    return Payload(data, codec, raw_size, count, bool(keys), b"")


class _Uniform(msgspec.Struct, frozen=True, gc=False):
    # Of an encoded message: its size, each byte beside its body's and its keys' with its
    # position, and the positions of its keys' bytes.
    size: int
    fields: list[tuple[int, bytes]]
    texts: list[int]


@lru_cache(maxsize=1024)
def _shape_of(topic: str, body_bytes: int, key_sizes: tuple[int, ...]) -> _Uniform:
    check_keys(keys := ["k" * size for size in key_sizes])
    data: bytes = _encoder.encode(Message(topic, bytes(body_bytes), None, keys))
    body_end = 1 + len(_encoder.encode(topic)) + len(_encoder.encode(bytes(body_bytes)))
    body = range(body_end - body_bytes, body_end)
    texts: list[int] = []
    position = body_end + len(_encoder.encode(None)) + len(_encoder.encode([None] * len(keys)))
    position -= len(keys)
    for key in keys:
        position += len(_encoder.encode(key))
        texts += range(position - len(key), position)
    places = {*range(body.start), *range(body.stop, len(data))}.difference(texts)
    fields = [(at, data[at : at + 1]) for at in sorted(places)]
    return _Uniform(len(data), fields, texts)


def uniform_keys(payload: Buffer, message_count: int) -> bytes | None:
    """The keys of uniform messages as they stand in a payload; a fifth of the work of decoding.

    Args:
        payload: An array of so many messages, from ``payload.open_payload``; of any origin.
        message_count: How many.

    Returns:
        Layout: the messages' arrays of keys in msgpack, one behind the other. None when the
        messages are not uniform, or there is no telling so quickly.
    """
    if message_count < UNIFORM_MESSAGES:
        return None
    data = bytes(payload)  # pieces of a memory view take twenty times as long to compare
    start = _ARRAY_HEADERS.get(data[0], 1)
    step, rest = divmod(len(data) - start, message_count)
    layout = None if rest or not step else _layout_of(data[start : start + step])
    if layout is None:
        return None
    # All messages begin like the first one, so all are as long, so all end like it.
    for place in layout.fields:
        if data[start + place :: step] != data[start + place : start + place + 1] * message_count:
            return None
    return _cut(data, start, step, layout.keys_begin, layout.keys_end)


class _Layout(msgspec.Struct, frozen=True, gc=False):
    # Where in an encoded message its keys are, and everything but the bytes of body and keys.
    keys_begin: int
    keys_end: int
    fields: list[int]


def _layout_of(encoded: bytes) -> _Layout | None:
    """Of an encoded message; None if it is none, or an unusual one."""
    try:
        message = _message_decoder.decode(encoded)
        keys = _raws_decoder.decode(message.keys)
    except (msgspec.MsgspecError, RecursionError):
        return None
    body_begin = 1 + len(memoryview(message.topic))
    body_end = body_begin + len(memoryview(message.body))
    keys_begin = body_end + len(memoryview(message.tag))
    keys_end = keys_begin + len(memoryview(message.keys))
    body_header = _BIN_HEADERS.get(encoded[body_begin])
    key_sizes = tuple(len(memoryview(key)) for key in keys)
    if encoded[0] & 0xF0 != 0x90 or body_header is None or keys_end > len(encoded):
        return None
    texts = []
    end = keys_end
    for size in reversed(key_sizes):
        header = encoded[end - size]
        if header & 0xE0 != 0xA0 and header != 0xD9:
            return None
        texts.append((end - size + (2 if header == 0xD9 else 1), end))
        end -= size
    fields = _fields(body_begin + body_header, body_end, tuple(texts), len(encoded))
    return _Layout(keys_begin, keys_end, fields) if len(fields) <= MOST_FIELD_BYTES else None


@lru_cache(maxsize=1024)
def _fields(
    body_begin: int, body_end: int, texts: tuple[tuple[int, int], ...], size: int
) -> list[int]:
    around = {*range(body_begin), *range(body_end, min(size, body_end + 4 * MOST_FIELD_BYTES))}
    if size - body_end > 4 * MOST_FIELD_BYTES:
        return list(around)  # too many in any case
    for begin, end in texts:
        around.difference_update(range(begin, end))
    return sorted(around)


def _cut(data: bytes, start: int, step: int, begin: int, end: int) -> bytes:
    """The same piece of each message, one behind the other."""
    cutter = _cutter(begin, end, step)
    pieces: list[bytes] = []
    while len(data) - start >= cutter.size:
        pieces += cutter.unpack_from(data, start)
        start += cutter.size
    pieces += [data[at + begin : at + end] for at in range(start, len(data), step)]
    return b"".join(pieces)


@lru_cache(maxsize=64)
def _cutter(begin: int, end: int, step: int) -> struct.Struct:
    return struct.Struct(f"<{f'{begin}x{end - begin}s{step - end}x' * _AT_ONCE}")
