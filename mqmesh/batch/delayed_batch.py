"""Record batches of delayed messages: their due times, and their destination.

A batch with ``Attributes.HAS_DELAY`` has more in its meta than others (readers that do not
support it skip the rest of the array). A producer gives the wait of the messages: a delay level,
or points in time. The broker adds their destination and stores the batch in
``SCHEDULE_TOPIC_XXXX``; the payload is not touched.

A batch with ``Attributes.HAS_EXPIRY`` has one element more, ``expires_ms`` of ``ExpiringMeta``, and
the elements before it empty where nothing is delayed. All its messages expire at once.

A batch with ``Attributes.HAS_EXPECTED``, of a table, has another one, ``expected`` of
``ExpectingMeta``; the elements before it are empty where they do not apply.

That topic has a queue for each level, one for arbitrary times, and one for the records of
completed actions (``schedule_record.py``).
"""

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from mqmesh.batch.payload import Buffer, Payload
from mqmesh.batch.record_batch import HEADER_SIZE, Attributes, BatchHeader, BatchMeta, batch_parts
from mqmesh.errors import ConfigError, CorruptBatch, MessageIllegal
from mqmesh.message import MAX_DELAY_MS, SCHEDULE_TOPIC
from mqmesh.units import MAX_TIMESTAMP_MS

DEFAULT_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
MAX_DELAY_LEVELS: Final = 64
ANY_TIME_QUEUE: Final = MAX_DELAY_LEVELS
"""Queue of messages with a point in time; a level's is the level minus one. On disk."""
RECORD_QUEUE: Final = MAX_DELAY_LEVELS + 1
"""Queue of the records of completed actions. On disk."""
SCHEDULE_QUEUES: Final = MAX_DELAY_LEVELS + 2

_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"([0-9]{1,9})([smhd])\Z")


class DelayedMeta(BatchMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch of delayed messages. Array positions are on disk and never change.

    Attributes:
        level: Delay level, 0 for points in time.
        due_times: Little-endian i64 of wall-clock ms: none (then it is the store time plus
            ``delay_ms``), one for all messages, or one a message.
        real_topic: Physical topic that the messages are written to when they are due; empty
            on the way from a producer, where ``topic`` names it.
        real_queue_id: Queue that the messages are written to.
        delay_ms: Delay of the level when the batch was stored, ms.
    """

    level: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    due_times: bytes = b""
    real_topic: str = ""
    real_queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_DELAY_MS)] = 0


class ExpiringMeta(DelayedMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch of messages that expire, delayed or not. Array positions are on disk.

    Attributes:
        expires_ms: Time of expiry of the messages, wall clock, ms. Of delayed messages, as
            a producer sends them: minus how long they live from their delivery on.
    """

    expires_ms: Annotated[int, msgspec.Meta(ge=-MAX_DELAY_MS, le=MAX_TIMESTAMP_MS)] = 0


class ExpectingMeta(ExpiringMeta, array_like=True, frozen=True, gc=False):
    """The meta of a batch for a table that compares revisions. Array positions are on disk.

    Attributes:
        expected: Little-endian i64 a message: the newest revision of its key, 0 for a key that has
            no value.
    """

    expected: bytes = b""


_decoder = msgspec.msgpack.Decoder(DelayedMeta)
_expiring_decoder = msgspec.msgpack.Decoder(ExpiringMeta)
_expecting_decoder = msgspec.msgpack.Decoder(ExpectingMeta)
_HAS_EXPIRY: Final = int(Attributes.HAS_EXPIRY)
_HAS_EXPECTED: Final = int(Attributes.HAS_EXPECTED)


@lru_cache(maxsize=16)
def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Parse the levels of a setting like ``1s 5s 2m`` into ms; level 1 first.

    Raises:
        ConfigError: The text is malformed; the message names the form.
    """
    words = text.split()
    if not 1 <= len(words) <= MAX_DELAY_LEVELS:
        raise ConfigError(
            f"message_delay_level has {len(words)} levels; 1 to {MAX_DELAY_LEVELS} are allowed"
        )
    found = []
    for word in words:
        match = _LEVEL.match(word)
        delay_ms = int(match[1]) * _UNIT_MS[match[2]] if match else 0
        if not 0 < delay_ms <= MAX_DELAY_MS:
            raise ConfigError(
                f"message_delay_level: {word!r} is no delay; write a number from 1 and s, m, h "
                "or d, like 30s"
            )
        found.append(delay_ms)
    return tuple(found)


def read_delayed_meta(buffer: Buffer, header: BatchHeader) -> DelayedMeta:
    """Decodes the meta of a batch with one of ``HAS_DELAY``, ``HAS_EXPIRY`` and ``HAS_EXPECTED``.

    Returns:
        The meta; an ``ExpiringMeta`` where the messages expire, an ``ExpectingMeta`` where
        revisions are compared.

    Raises:
        CorruptBatch: The meta does not have the format.
    """
    decode: Callable[[Buffer], DelayedMeta] = _decoder.decode
    if header.attributes & _HAS_EXPECTED:
        decode = _expecting_decoder.decode
    elif header.attributes & _HAS_EXPIRY:
        decode = _expiring_decoder.decode
    try:
        meta = decode(memoryview(buffer)[HEADER_SIZE : HEADER_SIZE + header.meta_size])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"meta of delayed messages cannot be decoded: {error}") from error
    count = header.message_count
    for name, size in (
        ("tag hashes", len(meta.tag_hashes)),
        ("due times", len(meta.due_times)),
    ):
        if size not in (0, 8, 8 * count):
            raise CorruptBatch(f"{size} bytes of {name} for {count} messages")
    if isinstance(meta, ExpectingMeta) and len(meta.expected) != 8 * count:
        raise CorruptBatch(f"{len(meta.expected)} bytes of revisions for {count} messages")
    return meta


def expires_ms(buffer: Buffer, header: BatchHeader) -> int:
    """Return when the messages of a batch expire, as ``ExpiringMeta`` has it; 0 for never.

    A batch whose meta cannot be read never expires: its reader reports the damage.
    """
    if not header.attributes & _HAS_EXPIRY:
        return 0
    try:
        meta = read_delayed_meta(buffer, header)
    except CorruptBatch:
        return 0
    return meta.expires_ms if isinstance(meta, ExpiringMeta) else 0


def has_expired(buffer: Buffer, header: BatchHeader, now_ms: int) -> bool:
    """Return whether no consumer may get the messages of a batch any more; wall clock, ms."""
    return bool(header.attributes & _HAS_EXPIRY) and 0 < expires_ms(buffer, header) <= now_ms


def due_times(meta: DelayedMeta, header: BatchHeader) -> tuple[int, ...]:
    """Return the due times of a stored batch, wall-clock ms: one for all messages, or one each."""
    if not meta.due_times:
        return (header.store_timestamp + meta.delay_ms,)
    return struct.unpack(f"<{len(meta.due_times) // 8}q", meta.due_times)


def pack_due_times(times: tuple[int, ...] | list[int]) -> bytes:
    """Pack due times for a meta: one when all are the same."""
    if len(set(times)) == 1:
        times = times[:1]
    return struct.pack(f"<{len(times)}q", *times)


def check_wish(meta: DelayedMeta) -> None:
    """Checks the delay that a producer requests.

    Raises:
        MessageIllegal: Neither a level nor points in time, both, or impossible times.
    """
    if bool(meta.level) == bool(meta.due_times):
        raise MessageIllegal("delayed messages need a level, or points in time, and not both")
    times = struct.unpack(f"<{len(meta.due_times) // 8}q", meta.due_times)
    if times and not (min(times) > 0 and max(times) <= MAX_TIMESTAMP_MS):
        raise MessageIllegal(f"a delivery time is not between 1 and {MAX_TIMESTAMP_MS}")


def _expiry_of(meta: DelayedMeta) -> int:
    return _HAS_EXPIRY if isinstance(meta, ExpiringMeta) else 0


def scheduled_batch(
    buffer: Buffer, header: BatchHeader, meta: DelayedMeta, *, queue_id: int
) -> bytes:
    """Puts a batch under a meta with its due times; the payload stays as it is.

    Args:
        buffer: Buffer that holds the batch.
        header: Header of the batch.
        meta: The new meta, whose topic is ``SCHEDULE_TOPIC_XXXX``.
        queue_id: Queue of that topic.

    Returns:
        Layout: record batch, its broker part blank.

    Raises:
        LocalProtocolError: The result would be larger than a batch may be.
    """
    assert meta.topic == SCHEDULE_TOPIC
    start = HEADER_SIZE + header.meta_size
    payload = Payload(
        bytes(memoryview(buffer)[start : start + header.payload_size]),
        header.codec,
        header.raw_size,
        header.message_count,
        bool(header.attributes & Attributes.HAS_KEYS),
        meta.tag_hashes,
    )
    parts = batch_parts(
        payload,
        topic=SCHEDULE_TOPIC,
        queue_id=queue_id,
        producer_id=header.producer_id,
        first_sequence=header.first_sequence,
        born_timestamp=header.born_timestamp,
        born_host=meta.born_host,
        attributes=header.attributes | Attributes.HAS_DELAY | _expiry_of(meta),
        meta=meta,
    )
    return b"".join(parts)
