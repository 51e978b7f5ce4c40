"""Index entries of a batch: 20 bytes each.

Layout of an entry, big endian, so that sorted bytes are sorted entries (the
same table stands in ``docs/storage-format.md``):

======== ===== ===== ===========================================================
position bytes type  meaning
======== ===== ===== ===========================================================
0        16    bytes hash of what can be looked up
16       4     u32   place: where the batch begins in its log segment
======== ===== ===== ===========================================================

There are two kinds of hash, both BLAKE2b-128. Each distinct key of a batch has a hash of the
physical topic, a zero byte and the key. The message ids of a batch have a hash of a zero byte (no
topic begins with one), the producer id, a width w, and the number n of a stretch of 2**w sequences:
those from n * 2**w on. The width of a batch is the smallest with which one stretch could hold the
whole batch. So the batch lies in one or two stretches, and a search for an id looks up one stretch
for each existing width.
"""

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import msgspec

from mqmesh.batch.payload import MAX_MESSAGES, MAX_STRINGS, Buffer
from mqmesh.batch.payload_check import keys_in
from mqmesh.batch.record_batch import (
    Attributes,
    BatchHeader,
    decode_messages,
    read_payload,
)
from mqmesh.errors import CorruptBatch

HASH_SIZE: Final = 16
ENTRY_SIZE: Final = 20
WIDTHS: Final = (MAX_MESSAGES - 1).bit_length() + 1
"""Number of widths, which begin at 0."""

_HAS_KEYS: Final = int(Attributes.HAS_KEYS)
_STRETCH = struct.Struct("<xQBQ")
_PLACE = struct.Struct(">I")


class _Keys(msgspec.Struct, array_like=True, gc=False):
    # A message of which only the keys are made into objects.
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw = msgspec.Raw()
    keys: tuple[str, ...] = ()


class _RawKeys(msgspec.Struct, array_like=True, gc=False):
    # A message of which not even the keys are made into objects.
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw = msgspec.Raw()
    keys: msgspec.Raw = msgspec.Raw(b"\x90")


_keys_decoder = msgspec.msgpack.Decoder(list[_Keys])
_raw_keys_decoder = msgspec.msgpack.Decoder(list[_RawKeys])
_lists_decoder = msgspec.msgpack.Decoder(list[tuple[str, ...]])
_encoder = msgspec.msgpack.Encoder()


def key_hash(topic: str, key: str) -> bytes:
    """Return the hash of a key, under which its batches are found. On disk: never changes.

    Args:
        topic: Physical topic of the batch.
        key: A key of one of its messages.
    """
    found = _topic_hash(topic).copy()
    found.update(key.encode())
    return found.digest()


def id_hash(producer_id: int, sequence: int, width: int) -> bytes:
    """Return the hash of a message id for batches of a width. On disk: never changes.

    Args:
        producer_id: First half of the id.
        sequence: Second half of the id.
        width: 0 to ``WIDTHS`` - 1.
    """
    stretch = _STRETCH.pack(producer_id, width, sequence >> width)
    return hashlib.blake2b(stretch, digest_size=HASH_SIZE).digest()


def width_of(message_count: int) -> int:
    """Return the width of a batch."""
    return (message_count - 1).bit_length()


def id_entries(header: BatchHeader, place: int) -> list[bytes]:
    """Return the entries of a batch's message ids.

    Args:
        header: Header of the batch.
        place: Start of the batch in its segment, u32.

    Returns:
        One or two entries. Layout: entries.
    """
    suffix = _PLACE.pack(place)
    first, producer_id = header.first_sequence, header.producer_id
    width = width_of(header.message_count)
    last = first + header.message_count - 1
    found = [id_hash(producer_id, first, width) + suffix]
    if first >> width != last >> width:
        found.append(id_hash(producer_id, last, width) + suffix)
    return found


def key_entries(topic: str, keys: Iterable[str], place: int) -> list[bytes]:
    """Return the entries of a batch's keys.

    Args:
        topic: Physical topic of the batch.
        keys: Distinct keys.
        place: Start of the batch in its segment, u32.

    Returns:
        Entries, in the order of the keys. Layout: entries.
    """
    suffix = _PLACE.pack(place)
    copy = _topic_hash(topic).copy
    found = []
    for key in keys:
        hasher = copy()
        hasher.update(key.encode())
        found.append(hasher.digest() + suffix)
    return found


def has_keys(header: BatchHeader) -> bool:
    """Return True when a message of the batch has a key."""
    return bool(header.attributes & _HAS_KEYS)


def distinct_keys(data: Buffer, header: BatchHeader) -> set[str]:
    """Return all keys of a batch's messages.

    Raises:
        CorruptBatch: The keys cannot be decoded.
    """
    if header.raw_size > MAX_STRINGS:
        # The batch may have more strings than one reader may make; this way is slower, and safe.
        return {key for message in decode_messages(data, header) for key in message.keys}
    payload = read_payload(data, header)
    try:
        messages = _keys_decoder.decode(payload)
        return set().union(*[message.keys for message in messages])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"keys cannot be decoded: {error}") from error


def raw_keys(data: Buffer, header: BatchHeader) -> tuple[bytes, int]:
    """Return the encoded keys of a batch's messages: a tenth of the work of ``distinct_keys``.

    Returns:
        Msgpack arrays of texts, one behind the other; and the number of arrays.

    Raises:
        CorruptBatch: The keys cannot be found.
    """
    payload = read_payload(data, header)
    found = keys_in(payload, header.message_count)
    if found is not None:
        return found
    if header.raw_size > MAX_STRINGS:
        return _encoder.encode(sorted(distinct_keys(data, header))), 1
    try:
        messages = _raw_keys_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"keys cannot be decoded: {error}") from error
    return b"".join([message.keys for message in messages]), header.message_count


def distinct_of_raw(raw: bytes, count: int) -> set[str]:
    """Return the set that ``distinct_keys`` would have made of the result of ``raw_keys``.

    Raises:
        CorruptBatch: The keys cannot be decoded.
    """
    try:
        lists = _lists_decoder.decode(b"\xdd" + count.to_bytes(4, "big") + raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"keys cannot be decoded: {error}") from error
    return set().union(*lists)


@lru_cache(maxsize=4096)
def _topic_hash(topic: str) -> hashlib.blake2b:
    # The hash is only copied: a copy costs less than hashing the topic again.
    return hashlib.blake2b(topic.encode() + b"\0", digest_size=HASH_SIZE)
