"""Message records and batches of RocketMQ; the golden batch is of its Java classes."""

import struct
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.remoting import records
from mqmesh.protocol.remoting.records import (
    COMPRESSED,
    LZ4,
    MAGIC_V1,
    MAGIC_V2,
    MOST_PROPERTIES_BYTES,
    ZSTD,
    BatchedMessage,
    RecordPlace,
    decode_batch,
    decode_properties,
    decompress,
    encode_properties,
    encode_record,
)

BATCH = bytes.fromhex(
    "0000003c000000000000000000000005000000036f6e6500234b455953016b31206b3202746f014652025741495401"
    "747275650254414753016e6577000000220000000000000000000000000000000374776f0009574149540174727565"
)
PLACE = RecordPlace(3, 42, 7 << 16, 1_000, 2_000, bytes((10, 0, 0, 1)), 20_911, 2, 99)


def test_a_batch_that_java_encoded_is_read():
    assert decode_batch(BATCH, 2) == [
        BatchedMessage(b"one", {"KEYS": "k1 k2", "to": "FR", "WAIT": "true", "TAGS": "new"}, 5),
        BatchedMessage(b"two", {"WAIT": "true"}, 0),
    ]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (BATCH[:-1], "message 1 of a batch"),
        (BATCH[:10], "cut off"),
        (BATCH[:12] + b"\xff" * 4 + BATCH[16:], ""),
        (BATCH[:16] + struct.pack(">i", -1) + BATCH[20:], "a body of -1"),
        (BATCH[:16] + struct.pack(">i", 4) + BATCH[20:], "message 0 of a batch|cut off"),
        (BATCH * 2, "more than 2 messages"),
    ],
)
def test_a_batch_that_is_none_is_refused(data, why):
    if not why:
        assert decode_batch(data, 2)[0].flag == -1
        return
    with pytest.raises(RemoteProtocolError, match=why):
        decode_batch(data, 2)


@given(st.binary(max_size=100))
def test_bytes_that_nobody_meant_are_refused(data):
    try:
        decode_batch(data, 5)
    except RemoteProtocolError:
        pass


def test_a_record_has_each_field_at_its_place():
    data = encode_record("orders", b"body", {"TAGS": "new"}, 5, PLACE)
    head = struct.unpack_from(">iiiiiqqiq4siq4siiqi", data)
    assert head == (
        *(len(data), MAGIC_V1, zlib.crc32(b"body") & 0x7FFFFFFF, 3, 5, 42, 7 << 16, 0, 1_000),
        *(bytes((127, 0, 0, 1)), 0, 2_000, bytes((10, 0, 0, 1)), 20_911, 2, 99, 4),
    )
    assert data[88:] == b"body\x06orders\x00\x09TAGS\x01new\x02"


def test_a_long_topic_has_two_bytes_for_its_length():
    data = encode_record("t" * 200, b"b", {}, 0, PLACE)
    assert struct.unpack_from(">i", data, 4)[0] == MAGIC_V2
    assert data[89:] == b"\x00\xc8" + b"t" * 200 + b"\x00\x00"


def test_properties_that_a_record_has_no_room_for_are_left_out():
    data = encode_properties({"a": "b", "long": "x" * MOST_PROPERTIES_BYTES})
    assert data == b"a\x01b\x02"


def test_properties_come_back():
    properties = {"KEYS": "k1 k2", "größe": "XL", "empty": ""}
    assert decode_properties(encode_properties(properties).decode()) == properties
    assert decode_properties("no pair\x02\x01x\x02") == {}


def test_bodies_are_decompressed_within_a_bound(monkeypatch):
    body = b"abc" * 1_000
    assert decompress(body, 0, 10) == body, "what is not compressed is not looked at"
    assert decompress(zlib.compress(body), COMPRESSED, 3_000) == body
    assert decompress(zstandard.compress(body), COMPRESSED | ZSTD, 3_000) == body
    for data, flag in ((zlib.compress(body), 0), (zstandard.compress(body), ZSTD)):
        with pytest.raises(RemoteProtocolError, match="over 2999 bytes"):
            decompress(data, COMPRESSED | flag, 2_999)
        with pytest.raises(RemoteProtocolError, match="cannot be decompressed"):
            decompress(b"rubbish", COMPRESSED | flag, 10)
    with pytest.raises(RemoteProtocolError, match="cut off"):
        decompress(zlib.compress(body)[:-5], COMPRESSED, 3_000)
    monkeypatch.setattr(records, "lz4_frame", None)
    with pytest.raises(RemoteProtocolError, match="LZ4"):
        decompress(b"x", COMPRESSED | LZ4, 10)
