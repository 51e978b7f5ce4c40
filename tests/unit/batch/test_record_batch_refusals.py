"""Bytes that are no batch, or a hostile one, are refused with CorruptBatch."""

import struct
import zlib
from typing import Any

import msgspec
import pytest
import zstandard
from harness.batches import decode_sent, encode_flights, join_batch, stored_batch

from mqmesh.batch.payload import CODEC_ZSTD, MAX_MESSAGES, MAX_RAW_BYTES, MAX_STRINGS
from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    HEADER_SIZE,
    MAX_BATCH_BYTES,
    MAX_META_BYTES,
    check_batch,
    check_stored,
    decode_messages,
    read_header,
    read_meta,
)
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message


def forge(batch: bytes, position: int, format_: str, *values: int | bytes) -> bytes:
    """Overwrites header fields of the producer and makes the checksum right again."""
    forged = bytearray(batch)
    struct.pack_into("<" + format_, forged, position, *values)
    return seal(forged)


def seal(batch: bytearray) -> bytes:
    struct.pack_into("<I", batch, 48, zlib.crc32(batch[52:]))
    return bytes(batch)


# --- what may not be read


def test_batch_cut_off_anywhere_is_refused() -> None:
    batch = stored_batch(
        encode_flights(Message("flights", b"a", "t"), Message("flights", b"b", "t"))
    )
    for size in range(len(batch)):
        with pytest.raises(CorruptBatch):
            check_batch(batch[:size])
        with pytest.raises(CorruptBatch):
            check_stored(memoryview(batch)[:size])
        with pytest.raises(CorruptBatch):
            check_batch(b"\0" * 9 + batch[:size], 9)


def test_position_behind_the_end_is_refused() -> None:
    batch = encode_flights()
    for position in (len(batch), len(batch) + 1, 1 << 40):
        with pytest.raises(CorruptBatch, match="too few"):
            read_header(batch, position)


def test_flip_of_any_bit_is_found() -> None:
    batch = stored_batch(encode_flights(Message("flights", b"a", "t", ["k"], {"p": "v"})))
    for bit in range(8 * len(batch)):
        flipped = bytearray(batch)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBatch):
            check_stored(flipped)
        if bit // 8 >= BROKER_PART_SIZE:
            with pytest.raises(CorruptBatch):
                check_batch(flipped)


def test_flip_of_any_bit_under_a_right_checksum_is_decoded_or_refused() -> None:
    batch = encode_flights(
        Message("flights", b"a", "t", ["k"], {"p": "v"}), Message("flights", b"b")
    )
    refused = 0
    for bit in range(8 * 52, 8 * len(batch)):
        flipped = bytearray(batch)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            messages = decode_sent(seal(flipped))
        except CorruptBatch:
            refused += 1
        else:
            assert len(messages) == 2
    assert refused > 300


@pytest.mark.parametrize(
    ("position", "format_", "value", "match"),
    [
        (0, "4s", b"MQB2", "magic"),
        (56, "B", 0, "version 0 is unknown"),
        (56, "B", 2, "version 2 is unknown"),
        (57, "B", 2, "impossible"),
        (57, "B", 255, "impossible"),
        (52, "I", 0, "impossible"),
        (52, "I", 2**32 - 1, "impossible"),
        (52, "I", MAX_BATCH_BYTES + 1, "impossible"),
        (60, "I", 0, "impossible"),
        (60, "I", MAX_MESSAGES + 1, "impossible"),
        (60, "I", 2**32 - 1, "impossible"),
        (68, "I", 0, "impossible"),
        (68, "I", 2**32 - 1, "impossible"),
        (72, "I", 0, "impossible"),
        (72, "I", 2**32 - 1, "impossible"),
        (76, "I", 0, "impossible"),
        (76, "I", 2**32 - 1, "impossible"),
        (88, "Q", 2**64 - 1, "sequence"),
        (96, "q", -1, "born"),
        (96, "q", 253_402_300_800_000, "born"),
        (8, "Q", 2**63, "log offset"),
        (16, "Q", 2**63 - 1, "queue offset"),
        (24, "q", -1, "stored"),
        (24, "q", 2**63 - 1, "stored"),
    ],
)
def test_hostile_header_field_is_refused(
    position: int, format_: str, value: int | bytes, match: str
) -> None:
    with pytest.raises(CorruptBatch, match=match):
        check_batch(
            forge(encode_flights(*[Message("flights", b"b")] * 2), position, format_, value)
        )


def test_sizes_that_shift_bytes_between_meta_and_payload_are_refused() -> None:
    batch = encode_flights()
    header = read_header(batch)
    for shift in (-header.meta_size, -1, 1, header.payload_size):
        sizes = (header.meta_size + shift, header.payload_size - shift, header.raw_size - shift)
        with pytest.raises(CorruptBatch):
            decode_sent(forge(batch, 68, "III", *sizes))


def test_meta_over_its_limit_is_refused() -> None:
    batch = encode_flights()
    header = read_header(batch)
    more = MAX_META_BYTES + 1 - header.meta_size
    end = HEADER_SIZE + header.meta_size
    large = bytearray(batch[:end] + bytes(more) + batch[end:])
    struct.pack_into("<I", large, 4, header.total_size + more)
    struct.pack_into("<I", large, 68, MAX_META_BYTES + 1)
    with pytest.raises(CorruptBatch, match=f"impossible.* meta {MAX_META_BYTES + 1}"):
        check_batch(seal(large))


@pytest.mark.parametrize(
    "meta",
    [
        None,
        [],
        {},
        "flights",
        ["flights", b"1234567"],
        ["flights", bytes(16)],
        ["flights", "12345678"],
        ["flights", b"", 1],
        ["flights", b"", "h" * 256],
        [b"flights"],
        [None],
        [""],
        ["../../etc/passwd"],
        ["with space"],
        ["a\n"],
        ["t" * 128],
        ["%RETRY%" + "g" * 257],
        [["flights"]],
    ],
)
def test_hostile_meta_is_refused(meta: Any) -> None:
    batch = bytearray(join_batch(b"\x91\x92\xa1t\xc4\x01b"))
    old = read_header(batch).meta_size
    encoded = msgspec.msgpack.encode(meta)
    batch[HEADER_SIZE : HEADER_SIZE + old] = encoded
    struct.pack_into("<I", batch, 52, len(batch))
    struct.pack_into("<I", batch, 68, len(encoded))
    header = check_batch(seal(batch))
    with pytest.raises(CorruptBatch):
        read_meta(batch, header)
    with pytest.raises(CorruptBatch):
        decode_messages(batch, header)


def message_with(position: int, value: Any) -> bytes:
    fields: list[Any] = ["flights", b"b", None, [], None, 0, None, 0, 0]
    fields[position] = value
    return msgspec.msgpack.encode([fields])


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, None),
        (0, b"flights"),
        (0, ""),
        (0, "a/b"),
        (0, "t" * 128),
        (1, "b"),
        (1, None),
        (1, 1),
        (1, msgspec.msgpack.Ext(1, b"b")),
        (2, b"tag"),
        (2, ""),
        (2, "t" * 256),
        (3, None),
        (3, "key"),
        (3, {"a": "b"}),
        (3, [1]),
        (3, [None]),
        (3, [["k"]]),
        (3, [""]),
        (3, ["k" * 256]),
        (3, ["k"] * 65),
        (4, []),
        (4, "a=b"),
        (4, {"a": 1}),
        (4, {1: "a"}),
        (4, {"a": None}),
        (4, {"a": ["b"]}),
        (4, {"a": "v" * 32_769}),
        (4, {"n" * 32_769: "v"}),
        (5, None),
        (5, -1),
        (5, 2**31),
        (5, 2**64 - 1),
        (5, True),
        (5, 1.0),
        (5, float("nan")),
        (5, "1"),
        (6, ""),
        (6, "s" * 256),
        (6, b"s"),
        (7, -1),
        (7, float("inf")),
        (8, -1),
        (8, 253_402_300_800_000),
        (8, msgspec.msgpack.Ext(-1, bytes(4))),
    ],
)
def test_hostile_message_field_is_refused(position: int, value: Any) -> None:
    with pytest.raises(CorruptBatch):
        decode_sent(join_batch(message_with(position, value)))


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe6\x9d"]
)
@pytest.mark.parametrize("position", [0, 2, 3, 4, 6])
def test_text_that_is_not_utf8_is_refused(text: bytes, position: int) -> None:
    marker = "M" * len(text)
    value: Any = {3: [marker], 4: {marker: marker}}.get(position, marker)
    payload = message_with(position, value).replace(marker.encode(), text)
    with pytest.raises(CorruptBatch):
        decode_sent(join_batch(payload))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\xdc",
        b"\xdc\x00",
        b"\xdc\x00\x01",
        b"\xdd\x00\x00\x00\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\x81\xa1a\xc4\x01b",
        b"\xa7flights",
        b"\xc1",
        b"\x91\xc1",
        b"\x91\x90",
        b"\x91\xa1b",
        b"\x91\x91\xa1t",
        b"\x91\x92\xa1t\xc6\xff\xff\xff\xffb",
        b"\x91\x92\xdb\xff\xff\xff\xfft",
        b"\x91\xdd\xff\xff\xff\xff\xa1t\xc4\x01b",
        b"\x91\x94\xa1t\xc4\x01b\xc0\xdd\xff\xff\xff\xff",
        b"\x91\x95\xa1t\xc4\x01b\xc0\x90\xdf\xff\xff\xff\xff",
        b"\x91\x92\xa1t\xc4\x01b\x00",
        b"\x92\x92\xa1t\xc4\x01b\x92\xa1t\xc4\x01b",
    ],
)
def test_payload_that_is_not_one_message_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode_sent(join_batch(payload))


def test_header_that_lies_about_the_count_is_refused() -> None:
    batch = encode_flights(*[Message("flights", b"b")] * 20)
    for count in (1, 19, 21, 76):
        with pytest.raises(CorruptBatch, match=f"payload of 20 messages in a batch of {count}"):
            decode_sent(forge(batch, 60, "I", count))


def test_more_messages_than_bytes_for_them_are_refused_without_decoding() -> None:
    batch = encode_flights(*[Message("flights", b"b")] * 20)
    most = read_header(batch).raw_size // 5
    check_batch(forge(batch, 60, "I", most))
    with pytest.raises(CorruptBatch, match="impossible"):
        check_batch(forge(batch, 60, "I", most + 1))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01", b"\x81"])
@pytest.mark.parametrize(
    "before",
    [
        b"\x91",  # instead of a message
        b"\x91\x92",  # instead of the topic
        b"\x91\x94\xa1t\xc4\x01b\xc0\x91",  # instead of a key
        b"\x91\x95\xa1t\xc4\x01b\xc0\x90\x81\xa1k",  # instead of a property's value
        b"\x91\x9c\xa1t\xc4\x01b\xc0\x90\xc0\x00\xc0\x00\x00\x00\xc0",  # as an unknown field
    ],
)
def test_deep_nesting_is_refused(before: bytes, opening: bytes) -> None:
    payload = before + opening * 100_000 + b"\xc0"
    with pytest.raises(CorruptBatch):
        decode_sent(join_batch(payload))
    with pytest.raises(CorruptBatch):
        decode_sent(join_batch(payload + bytes(MAX_STRINGS)))


def compressed(frame: bytes, raw_size: int, **options: Any) -> bytes:
    return join_batch(frame, raw_size=raw_size, codec=CODEC_ZSTD, **options)


@pytest.fixture(scope="module")
def payload() -> bytes:
    return msgspec.msgpack.encode([Message("flights", bytes(10_000))])


def test_frame_without_a_declared_size_is_refused(payload: bytes) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(payload)
    with pytest.raises(CorruptBatch, match="does not declare"):
        decode_sent(compressed(frame, len(payload)))


@pytest.mark.parametrize("lie", [-10_000, -1, 1, MAX_RAW_BYTES - 20_000])
def test_frame_that_declares_another_size_than_the_header_is_refused(
    payload: bytes, lie: int
) -> None:
    frame = zstandard.ZstdCompressor().compress(payload)
    with pytest.raises(CorruptBatch, match="does not declare"):
        decode_sent(compressed(frame, len(payload) + lie))


@pytest.mark.parametrize("lie", [-9_000, -1, 1, 20_000])
def test_frame_that_declares_another_size_than_it_has_is_refused(payload: bytes, lie: int) -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(payload))
    assert struct.unpack_from("<H", frame, 5)[0] + 256 == len(payload)
    struct.pack_into("<H", frame, 5, len(payload) + lie - 256)
    with pytest.raises(CorruptBatch, match="inflate"):
        decode_sent(compressed(bytes(frame), len(payload) + lie))


def test_second_frame_or_rubbish_behind_the_frame_is_refused(payload: bytes) -> None:
    frame = zstandard.ZstdCompressor().compress(payload)
    skippable = b"\x50\x2a\x4d\x18\x01\x00\x00\x00x"
    for behind in (frame, b"\0", skippable):
        with pytest.raises(CorruptBatch, match="inflate"):
            decode_sent(compressed(frame + behind, len(payload)))
    with pytest.raises(CorruptBatch):
        decode_sent(compressed(skippable + frame, len(payload)))
    with pytest.raises(CorruptBatch):
        decode_sent(compressed(skippable, 0))


def test_frame_cut_off_anywhere_or_changed_is_refused(payload: bytes) -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(payload)
    for size in range(len(frame)):
        with pytest.raises(CorruptBatch):
            decode_sent(compressed(frame[:size], len(payload)))
    for position in range(len(frame)):
        changed = bytearray(frame)
        changed[position] ^= 0x55
        with pytest.raises(CorruptBatch):
            decode_sent(compressed(bytes(changed), len(payload)))


def test_frame_with_a_huge_window_is_refused(payload: bytes) -> None:
    # Frame header by hand: no single segment, 8 bytes of content size, a window of 2 GiB.
    frame = b"\x28\xb5\x2f\xfd\xc0\xa8" + struct.pack("<Q", len(payload)) + b"\x01\x00\x00"
    with pytest.raises(CorruptBatch, match="inflate"):
        decode_sent(compressed(frame, len(payload)))


def test_frame_that_needs_a_dictionary_is_refused(payload: bytes) -> None:
    plain = zstandard.ZstdCompressor().compress(payload)
    assert plain[4] == 0x60
    frame = plain[:4] + b"\x61\x07" + plain[5:]  # says: dictionary number 7
    with pytest.raises(CorruptBatch, match="inflate"):
        decode_sent(compressed(frame, len(payload)))


def test_header_checksum_is_not_valid_for_another_batch() -> None:
    one, two = (
        stored_batch(encode_flights()),
        stored_batch(encode_flights(Message("flights", b"BODY"))),
    )
    with pytest.raises(CorruptBatch, match="header checksum"):
        check_stored(one[:BROKER_PART_SIZE] + two[BROKER_PART_SIZE:])
