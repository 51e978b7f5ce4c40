"""Keys and values of the ``lmdb`` backend: the content of its environment.

Keys begin with a letter; numbers in keys are big endian, so that they sort:

======================================== =========================================
key                                      value
======================================== =========================================
``H``                                    msgpack, see ``Head``
``L`` commit-log offset u64              a stored batch, or a marker
``T`` blake2b-128 of the topic's name    msgpack ``[topic id, name]``
``Q`` topic id u64, queue id u32         empty: the queue has messages
``E`` topic id, queue id, queue offset   an entry: ``_ENTRY``, then its tag hashes
``P`` topic id, queue id, producer u64   msgpack, list of ``StoredBatch``
``D`` topic id                           empty: the topic was deleted, its ``Q``, ``E``
                                         and ``P`` are being removed
======================================== =========================================

A topic that is made again after its deletion gets a new topic id, so deleting a topic of any size
is one small transaction. The ``L`` pairs are the source of truth: everything else can be derived
from them.
"""

import hashlib
import struct
from typing import Final, NamedTuple, TypeVar

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.storage.queues.producer_states import StoredBatch

FORMAT: Final = 2

_T = TypeVar("_T")

HEAD_KEY: Final = b"H"
LOG: Final = b"L"
TOPIC: Final = b"T"
QUEUE: Final = b"Q"
ENTRY: Final = b"E"
PRODUCER: Final = b"P"
DELETED: Final = b"D"

# Commit-log offset, size, message count, store timestamp.
_ENTRY: Final = struct.Struct("<QIIq")
_U64: Final = struct.Struct(">Q")
_QUEUE: Final = struct.Struct(">QI")
_IN_QUEUE: Final = struct.Struct(">QIQ")

_windows: Final = msgspec.msgpack.Decoder(list[StoredBatch])
_topics: Final = msgspec.msgpack.Decoder(tuple[int, str])


class EnvironmentHead(msgspec.Struct, array_like=True, frozen=True):
    """State that a store notes when it is opened and closed. Array positions never change.

    Attributes:
        format: ``FORMAT``.
        store_id: Identity of the store, in every batch.
        epoch: Epoch of new batches.
        next_topic_id: Lower bound of the next topic's id; larger ids may be in use.
        clean: The store was closed in order.
        durable: Its commits were synced one by one, so no power cut can damage it.
        boot_id: Boot id of the system that wrote this.
    """

    format: int
    store_id: int
    epoch: int
    next_topic_id: int
    clean: bool
    durable: bool
    boot_id: bytes


_heads: Final = msgspec.msgpack.Decoder(EnvironmentHead)


class Entry(NamedTuple):
    """Queue entry of a batch."""

    base: int
    commitlog_offset: int
    size: int
    message_count: int
    store_timestamp: int
    tag_hashes: bytes

    @property
    def end(self) -> int:
        """Queue offset behind its last message."""
        return self.base + self.message_count

    def fits(self, wanted: frozenset[int], queue_offset: int) -> bool:
        """Return True if a message at or behind an offset has one of the tags."""
        hashes = self.tag_hashes
        if len(hashes) <= 8:
            return int.from_bytes(hashes, "little") in wanted
        skipped = max(0, queue_offset - self.base) * 8
        return not wanted.isdisjoint(memoryview(hashes)[skipped:].cast("Q"))


def log_key(commitlog_offset: int) -> bytes:
    """Return the key of a batch or control record."""
    return LOG + _U64.pack(commitlog_offset)


def log_offset(key: bytes) -> int:
    """Return the commit-log offset in a key."""
    offset: int = _U64.unpack(key[1:])[0]
    return offset


def topic_key(topic: str) -> bytes:
    """Return the key of a topic's name."""
    return TOPIC + hashlib.blake2b(topic.encode(), digest_size=16).digest()


def encode_topic(topic_id: int, topic: str) -> bytes:
    """Encode the value of a topic's name."""
    return msgspec.msgpack.encode((topic_id, topic))


def decode_topic(value: bytes) -> tuple[int, str]:
    """Return the topic id and name.

    Raises:
        CorruptRecord: The value is damaged.
    """
    return _decode(_topics, value, "name of a topic")


def queue_key(topic_id: int, queue_id: int) -> bytes:
    """Return the key of a queue."""
    return QUEUE + _QUEUE.pack(topic_id, queue_id)


def split_queue_key(key: bytes) -> tuple[int, int]:
    """Split a key into topic id and queue id."""
    topic_id, queue_id = _QUEUE.unpack(key[1:])
    return topic_id, queue_id


def entry_key(topic_id: int, queue_id: int, queue_offset: int) -> bytes:
    """Return the key of the entry of the batch that begins at a queue offset."""
    return ENTRY + _IN_QUEUE.pack(topic_id, queue_id, queue_offset)


def split_entry_key(key: bytes) -> tuple[int, int, int]:
    """Split a key into topic id, queue id and queue offset."""
    topic_id, queue_id, queue_offset = _IN_QUEUE.unpack(key[1:])
    return topic_id, queue_id, queue_offset


def encode_entry(
    commitlog_offset: int, size: int, message_count: int, store_timestamp: int, hashes: bytes
) -> bytes:
    """Encode the value of an entry."""
    return _ENTRY.pack(commitlog_offset, size, message_count, store_timestamp) + hashes


def decode_entry(key: bytes, value: bytes) -> Entry:
    """Decode an entry.

    Raises:
        CorruptRecord: The entry is damaged.
    """
    hashes = value[_ENTRY.size :]
    if len(value) >= _ENTRY.size:
        offset, size, count, timestamp = _ENTRY.unpack_from(value)
        if count > 0 and len(hashes) in (0, 8, 8 * count):
            return Entry(_U64.unpack(key[-8:])[0], offset, size, count, timestamp, hashes)
    raise CorruptRecord(f"the entry {key.hex()} of a queue is damaged")


def producer_key(topic_id: int, queue_id: int, producer_id: int) -> bytes:
    """Return the key of the last batches of a producer."""
    return PRODUCER + _IN_QUEUE.pack(topic_id, queue_id, producer_id)


def split_producer_key(key: bytes) -> tuple[int, int, int]:
    """Split a key into topic id, queue id and producer id."""
    return split_entry_key(key)


def decode_window(value: bytes) -> list[StoredBatch]:
    """Decode the last batches of a producer.

    Raises:
        CorruptRecord: The value is damaged.
    """
    return _decode(_windows, value, "last batches of a producer")


def deleted_key(topic_id: int) -> bytes:
    """Return the key of the note that a topic was deleted."""
    return DELETED + _U64.pack(topic_id)


def of_topic(kind: bytes, topic_id: int) -> tuple[bytes, bytes]:
    """Return the first key of a topic's pairs of a kind, and the key behind the last."""
    return kind + _U64.pack(topic_id), kind + _U64.pack(topic_id + 1)


def of_kind(kind: bytes) -> tuple[bytes, bytes]:
    """Return the first possible key of a kind, and the key behind the last."""
    return kind, bytes([kind[0] + 1])


def decode_head(value: bytes) -> EnvironmentHead:
    """Decode the head.

    Raises:
        CorruptRecord: The head is damaged, or a later program wrote it.
    """
    head = _decode(_heads, value, "head")
    if head.format != FORMAT:
        raise CorruptRecord(f"the environment has format {head.format}, known is {FORMAT}")
    return head


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", value: bytes, what: str) -> _T:
    try:
        return decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"the {what} in the environment is damaged: {error}") from error
