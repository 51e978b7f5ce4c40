"""Foreign bytes raise CorruptBatch and nothing else, and cost bounded memory."""

import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
import zstandard
from harness.batches import decode_sent, join_batch, split_batches
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mqmesh.batch.payload import CODEC_NONE, CODEC_ZSTD, MAX_MESSAGES, MAX_RAW_BYTES, MAX_STRINGS
from mqmesh.batch.record_batch import (
    HEADER_SIZE,
    BatchMeta,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    read_header,
    read_meta,
    stamp,
)
from mqmesh.errors import CorruptBatch, InvalidArgument
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, RESERVED_PROPERTIES, Message, StoredMessage
from mqmesh.message_checks import check_messages
from mqmesh.units import MAX_TIMESTAMP_MS

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TIMES = st.integers(0, MAX_TIMESTAMP_MS)
LABELS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=255)
TAGS = LABELS.filter(lambda tag: tag.strip() == tag and "||" not in tag and tag.strip("|") == tag)
TOPICS = st.from_regex(r"[%|a-zA-Z0-9_-]{1,127}", fullmatch=True).map(
    lambda topic: topic.lstrip("%") or "t"
)
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Hypothesis draws words of the code under test, too: names that only mqmesh sets are among them.
PROPERTY_NAMES = PLAIN_TEXT.filter(lambda name: name and name not in RESERVED_PROPERTIES)


@st.composite
def messages(draw: st.DrawFn, topic: str) -> Message:
    level = draw(st.integers(0, 18))
    return Message(
        topic,
        draw(st.binary(min_size=1, max_size=200)),
        draw(st.none() | TAGS),
        draw(st.just(()) | st.lists(LABELS, max_size=5)),
        draw(st.none() | st.dictionaries(PROPERTY_NAMES, PLAIN_TEXT, max_size=4)),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.none() | LABELS),
        level,
        0 if level else draw(TIMES),
    )


@st.composite
def message_lists(draw: st.DrawFn) -> list[Message]:
    return draw(st.lists(messages(draw(TOPICS)), min_size=1, max_size=20))


# Anything that msgpack can say, wherever a batch may say something.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    | st.binary(max_size=10)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=13)),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=30,
)
# The same, but as Python objects that a careless user might put into a message.
OBJECTS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=20)
    | st.lists(st.text(max_size=3) | st.none(), max_size=70)
    | st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.none(), max_size=3)
)


def encode(sent: list[Message], **options: Any) -> bytes:
    values: dict[str, Any] = {
        "topic": sent[0].topic,
        "queue_id": 3,
        "producer_id": 5,
        "first_sequence": 7,
        "born_timestamp": 11,
    }
    return encode_batch(sent, **(values | options))


def seal(batch: bytearray) -> bytes:
    """Makes the checksum right again, as an attacker would."""
    struct.pack_into("<I", batch, 48, zlib.crc32(batch[52:]))
    return bytes(batch)


def attempt(batch: bytes) -> list[StoredMessage]:
    """The messages of what may be anything, or none at all when it is refused."""
    try:
        header = check_batch(batch)
        decoded = decode_messages(batch, header)
    except CorruptBatch as error:
        refusal = str(error)
    else:
        assert len(decoded) == header.message_count
        return decoded
    assert 0 < len(refusal) < 1000
    return []


def survive(batch: bytes) -> None:
    """What is not refused must keep every promise of the types."""
    decoded = attempt(batch)
    for number, message in enumerate(decoded):
        assert message.queue_offset == number
        assert len(message.message_id) == 32
        assert type(message.body) is bytes
        # Whatever is delivered can be looked at, printed and sent on.
        assert repr(message)
        plain = message.to_message()
        assert type(plain) is Message
        try:
            check_messages([plain], max_message_size=MAX_MESSAGE_BYTES_DEFAULT, allow_system=True)
        except InvalidArgument:
            continue
        encode([plain])


@pytest.mark.timeout(300)  # drawing lists of messages takes most of it, on a busy machine a minute
@given(message_lists(), U32, U64, st.integers(0, 2**64 - 21), TIMES, PLAIN_TEXT, st.booleans())
def test_batch_makes_the_round_trip(
    sent: list[Message],
    queue_id: int,
    producer_id: int,
    first_sequence: int,
    born_timestamp: int,
    born_host: str,
    compress: bool,
) -> None:
    checked = check_messages(sent, max_message_size=MAX_MESSAGE_BYTES_DEFAULT, allow_system=True)
    batch = encode_batch(
        checked,
        topic=sent[0].topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=born_timestamp,
        born_host=born_host,
        compress_over_bytes=0 if compress else None,
    )
    header = check_batch(batch)
    assert header.codec in ((CODEC_NONE, CODEC_ZSTD) if compress else (CODEC_NONE,))
    assert header.total_size == len(batch)
    got = decode_messages(batch, header)
    for number, (before, after) in enumerate(zip(sent, got, strict=True)):
        expected = msgspec.structs.replace(before, keys=tuple(before.keys))
        assert after.to_message() == expected
        assert after.message_id == f"{producer_id:016X}{first_sequence + number:016X}"
        assert after.queue_id == queue_id
        assert after.born_timestamp == born_timestamp
        assert after.born_host == born_host


@given(
    message_lists(),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    TIMES,
    U32,
    U32,
)
def test_stamped_batch_keeps_every_byte_of_the_producer(
    sent: list[Message],
    commitlog_offset: int,
    base_queue_offset: int,
    store_timestamp: int,
    epoch: int,
    store_id: int,
) -> None:
    batch = encode(sent)
    part = stamp(
        read_header(batch),
        commitlog_offset=commitlog_offset,
        base_queue_offset=base_queue_offset,
        store_timestamp=store_timestamp,
        epoch=epoch,
        store_id=store_id,
    )
    header = check_stored(part + batch[len(part) :])
    assert header.commitlog_offset == commitlog_offset
    assert header.next_queue_offset == base_queue_offset + len(sent)
    assert (header.store_timestamp, header.epoch) == (store_timestamp, epoch)
    assert header.store_id == store_id


@settings(max_examples=30)
@given(st.lists(message_lists(), min_size=1, max_size=5))
def test_joined_batches_are_split_again(lists: list[list[Message]]) -> None:
    batches = [encode(sent) for sent in lists]
    found = split_batches(b"".join(batches), most=5)
    assert [header.message_count for _, header in found] == list(map(len, lists))


@given(st.binary(max_size=300))
@example(b"")
@example(b"MQB1")
@example(b"MQB1" + bytes(100))
@example(b"MQB1" + b"\xff" * 200)
def test_any_bytes_are_refused_as_a_batch(rubbish: bytes) -> None:
    for function in (read_header, check_batch, check_stored):
        with pytest.raises(CorruptBatch):
            function(rubbish)
    with pytest.raises(CorruptBatch):
        split_batches(rubbish, most=10)


@given(message_lists(), st.booleans(), st.data())
def test_changed_batch_under_a_right_checksum_is_decoded_or_refused(
    sent: list[Message], compress: bool, data: st.DataObject
) -> None:
    batch = bytearray(encode(sent, compress_over_bytes=0 if compress else None))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(52, len(batch) - 1))
        batch[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        assume(len(batch) > HEADER_SIZE)
    if data.draw(st.booleans()):  # or else nearly everything fails at the sizes
        header = bytearray(encode(sent, compress_over_bytes=0 if compress else None))[:HEADER_SIZE]
        meta_size = struct.unpack_from("<I", header, 68)[0]
        payload_size = len(batch) - HEADER_SIZE - meta_size
        assume(payload_size >= 0)
        struct.pack_into("<I", header, 52, len(batch))
        struct.pack_into("<I", header, 72, payload_size)
        if not header[57]:
            struct.pack_into("<I", header, 76, payload_size)
        batch[:HEADER_SIZE] = header
    survive(seal(batch))


@given(VALUES)
def test_any_msgpack_value_as_payload_is_decoded_or_refused(value: Any) -> None:
    survive(join_batch(msgspec.msgpack.encode(value)))
    survive(join_batch(msgspec.msgpack.encode([value])))


@given(st.integers(0, 12), VALUES)
def test_any_msgpack_value_as_a_field_is_decoded_or_refused(position: int, value: Any) -> None:
    fields: list[Any] = ["t", b"b", None, [], None, 0, None, 0, 0, 0, None, None, None]
    fields[position] = value
    payload = msgspec.msgpack.encode([fields])
    survive(join_batch(payload))
    # The same where strings are counted before they are made.
    padded = msgspec.msgpack.encode([fields, ["t", bytes(MAX_STRINGS)]])
    survive(join_batch(padded, message_count=2))


@given(st.binary(max_size=200), st.integers(1, 3))
def test_any_bytes_as_payload_are_decoded_or_refused(payload: bytes, count: int) -> None:
    survive(join_batch(payload, message_count=count))
    survive(join_batch(bytes([0x90 + count]) + payload, message_count=count))
    survive(
        join_batch(payload, raw_size=len(payload) * count, message_count=count, codec=CODEC_ZSTD)
    )


@given(VALUES | st.lists(VALUES, max_size=4))
def test_any_msgpack_value_as_meta_is_decoded_or_refused(value: Any) -> None:
    batch = bytearray(join_batch(b"\x91\x92\xa1t\xc4\x01b"))
    meta = msgspec.msgpack.encode(value)
    batch[HEADER_SIZE : HEADER_SIZE + read_header(batch).meta_size] = meta
    struct.pack_into("<I", batch, 52, len(batch))
    struct.pack_into("<I", batch, 68, len(meta))
    survive(seal(batch))


@given(st.sampled_from(Message.__struct_fields__), OBJECTS)
@example("flag", False)
@example("keys", "abc")
@example("tag", "\ud800")
def test_what_passes_the_producers_check_can_be_sent_and_read(field: str, value: Any) -> None:
    message = Message("t", b"b")
    setattr(message, field, value)
    try:
        checked = check_messages([message], max_message_size=1000, allow_system=True)
    except InvalidArgument:
        return
    [got] = decode_sent(encode(checked))
    assert got.to_message() == msgspec.structs.replace(message, keys=tuple(message.keys))


# --- memory


def bomb(raw: bytes, count: int) -> bytes:
    frame = zstandard.ZstdCompressor(level=1).compress(raw)
    return join_batch(frame, raw_size=len(raw), message_count=count, codec=CODEC_ZSTD)


def array(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def hostile_batches() -> dict[str, bytes]:
    """Small on the wire, and as large for the reader as the format permits."""
    limit, head = MAX_RAW_BYTES, b"\xa1t\xc4\x01b"
    count = MAX_MESSAGES
    message = b"\x94" + head + b"\xc0\xdc\x00\x40" + b"\xa2ab" * 64
    many_keys = array(count) + message * count
    few_keys = array(count) + (b"\x94" + head + b"\xc0\xdc\x00\x10" + b"\xa2ab" * 16) * count
    names = b"".join(b"\xa2%c%c\xa2vv" % (32 + n // 90, 32 + n % 90) for n in range(40))
    message = b"\x95" + head + b"\xc0\x90\xde\x00\x28" + names
    fitting = min((limit - 5) // len(message), count)
    many_properties = array(fitting) + message * fitting
    pairs = b"".join(msgspec.msgpack.encode(str(n)) + b"\xa0" for n in range(1_900_000))
    one_dict = b"\x91\x95" + head + b"\xc0\x90\xdf" + struct.pack(">I", 1_900_000) + pairs
    wide = "a" * (limit - 100) + "\U0001f600"
    return {
        "keys": bomb(many_keys, count),
        "as many keys as allowed": bomb(few_keys, count),
        "properties": bomb(many_properties, fitting),
        "one message's properties": bomb(one_dict, 1),
        "wide text": bomb(msgspec.msgpack.encode([[wide, b"b"]]), 1),
        "least messages": bomb(array(count) + (b"\x92" + head) * count, count),
        "one body": bomb(msgspec.msgpack.encode([["t", bytes(limit - 10)]]), 1),
        "nested arrays": bomb(b"\x91" * limit, 1),
        "nested in an unknown field": bomb(
            b"\x91\x9c" + head + b"\xc0\x90\xc0\x00\xc0\x00\x00\x00\xc0" + b"\x91" * (limit - 20), 1
        ),
        "an array that claims 4 G": bomb(b"\x91\x94" + head + b"\xc0\xdd\xff\xff\xff\xff", 1),
        "a map that claims 4 G": bomb(b"\x91\x95" + head + b"\xc0\x90\xdf\xff\xff\xff\xff", 1),
        "a body that claims 4 G": bomb(b"\x91\x92\xa1t\xc6\xff\xff\xff\xff", 1),
        "zeros": bomb(bytes(limit), 1),
        "count claims all": bomb(array(2**32 - 1) + bytes(limit - 5), count),
    }


@pytest.mark.timeout(300)  # at a load of 18 it took 80 s
def test_memory_stays_bounded_whatever_inflates() -> None:
    for name, batch in hostile_batches().items():
        tracemalloc.start()
        try:
            attempt(batch)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10 * MAX_RAW_BYTES, f"{name}: {peak >> 20} MiB of {len(batch)} bytes"


def test_frame_that_lies_about_its_size_allocates_nothing_of_it() -> None:
    # Says 1,000 bytes, in the header and in the frame, and holds 100 MiB.
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(100 << 20)))
    assert frame[4] >> 6 == 2, "a frame header with 4 bytes of content size"
    offset = 5 if frame[4] & 0x20 else 6
    assert struct.unpack_from("<I", frame, offset)[0] == 100 << 20
    struct.pack_into("<I", frame, offset, 1000)
    batch = join_batch(bytes(frame), raw_size=1000, codec=CODEC_ZSTD)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            decode_sent(batch)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_meta_of_the_largest_size_is_read_in_bounded_memory() -> None:
    hashes = bytes(8 * MAX_MESSAGES)
    batch = join_batch(
        array(MAX_MESSAGES) + bytes(5 * MAX_MESSAGES),
        BatchMeta("t", hashes),
        raw_size=5 + 5 * MAX_MESSAGES,
        message_count=MAX_MESSAGES,
        queue_id=0,
        producer_id=0,
        first_sequence=0,
        born_timestamp=0,
        attributes=0,
    )
    assert read_meta(batch, check_batch(batch)).tag_hashes == hashes
    with pytest.raises(CorruptBatch):
        decode_sent(batch)
