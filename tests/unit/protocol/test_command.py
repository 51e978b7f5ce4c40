"""Frames: their layout byte by byte, and their bounds."""

from __future__ import annotations

import re
import struct

import pytest
from harness.batches import PRODUCER_KEY
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import LocalProtocolError, RemoteProtocolError
from mqmesh.protocol import command
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    ONEWAY,
    PREFIX_SIZE,
    PROTOCOL_VERSION,
    RESPONSE,
    decode_frame,
    encode_frame,
    peek_opaque,
)
from mqmesh.protocol.messaging import (
    MAX_BATCHES_PER_REQUEST,
    BatchOutcome,
    SendStatus,
    decode_outcomes,
    decode_send,
    encode_outcomes,
    encode_send,
)

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)


def test_a_frame_never_changes():
    frame = encode_frame(0x0A0B, 0x1122334455667788, b"body", header=b"hea", flags=ONEWAY)
    assert frame.hex(" ") == (
        "01 02 0b 0a 03 00 00 00 88 77 66 55 44 33 22 11 68 65 61 62 6f 64 79"
    )


@given(U16, U64, st.binary(max_size=50), st.lists(st.binary(max_size=50)), st.integers(0, 3))
def test_a_frame_comes_back_equal(code, opaque, header, parts, flags):
    frame = encode_frame(code, opaque, *parts, header=header, flags=flags)
    decoded = decode_frame(frame)
    assert (decoded.code, decoded.opaque, decoded.flags) == (code, opaque, flags)
    assert bytes(decoded.header) == header
    assert bytes(decoded.body) == b"".join(parts)
    assert decoded.is_response == bool(flags & RESPONSE)
    assert decoded.is_oneway == bool(flags & ONEWAY)
    assert peek_opaque(frame) == opaque
    again = decode_frame(memoryview(frame))
    assert bytes(again.header) == header
    assert bytes(again.body) == b"".join(parts)


def test_frames_that_break_the_layout_are_refused():
    good = encode_frame(1, 2, b"body", header=b"header")
    for size in range(PREFIX_SIZE):
        with pytest.raises(RemoteProtocolError, match=f"frame of {size} bytes"):
            decode_frame(good[:size])
        assert peek_opaque(good[:size]) is None
    with pytest.raises(RemoteProtocolError, match="header of 6 bytes"):
        decode_frame(good[: PREFIX_SIZE + 5])
    for version in (0, 2, 255):
        with pytest.raises(RemoteProtocolError, match=f"version {version} "):
            decode_frame(bytes([version]) + good[1:])


def test_headers_and_frames_have_a_largest_size():
    largest = encode_frame(1, 2, bytes(MAX_FRAME_BYTES - PREFIX_SIZE))
    assert len(largest) == MAX_FRAME_BYTES
    with pytest.raises(LocalProtocolError):
        encode_frame(1, 2, bytes(MAX_FRAME_BYTES - PREFIX_SIZE + 1))
    decode_frame(encode_frame(1, 2, header=bytes(MAX_HEADER_BYTES)))
    with pytest.raises(LocalProtocolError):
        encode_frame(1, 2, header=bytes(MAX_HEADER_BYTES + 1))
    hostile = struct.pack("<BBHIQ", 1, 0, 1, MAX_HEADER_BYTES + 1, 2) + bytes(MAX_HEADER_BYTES + 1)
    with pytest.raises(RemoteProtocolError):
        decode_frame(hostile)


def test_the_table_in_the_module_is_the_layout_of_the_struct():
    rows = re.findall(r"^(\d+) +(\d+) +(u\d+) ", command.__doc__ or "", re.MULTILINE)
    assert [(int(position), int(size)) for position, size, _ in rows] == [
        (0, 1),
        (1, 1),
        (2, 2),
        (4, 4),
        (8, 8),
    ]
    kinds = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}
    assert [kind for _, _, kind in rows] == [kinds[c] for c in command._PREFIX.format[1:]]
    assert command._PREFIX.size == PREFIX_SIZE
    assert PROTOCOL_VERSION == 1


# ---- The fixed headers of SEND_MESSAGE ------------------------------------------------------


def test_a_send_header_never_changes():
    header = encode_send(0x01020304, 0x0506, PRODUCER_KEY)
    assert header.hex(" ", 8) == "0403020106050000 746865206b657920 6f66207465737473"


@given(U32, st.integers(1, MAX_BATCHES_PER_REQUEST), st.binary(min_size=16, max_size=16))
def test_a_send_header_comes_back_equal(timeout_ms, batch_count, key):
    header = memoryview(encode_send(timeout_ms, batch_count, key))
    assert decode_send(header) == (timeout_ms, batch_count, key)


@pytest.mark.parametrize("count", [0, MAX_BATCHES_PER_REQUEST + 1, 65_535])
def test_a_send_header_has_one_to_4096_batches(count):
    with pytest.raises(RemoteProtocolError, match=f"{count} batches"):
        decode_send(memoryview(encode_send(1, count, PRODUCER_KEY)))


@pytest.mark.parametrize("size", [0, 8, 23, 25])
def test_a_send_header_has_24_bytes(size):
    with pytest.raises(RemoteProtocolError):
        decode_send(memoryview(bytes(size)))


OUTCOMES = st.lists(
    st.builds(
        BatchOutcome,
        U16,
        st.sampled_from(SendStatus).map(int),
        U32,
        I64,
        I64,
        I64,
        st.text(max_size=20),
    ),
    min_size=1,
)


@given(OUTCOMES)
def test_outcomes_come_back_equal(outcomes):
    header, body = encode_outcomes(outcomes)
    assert len(header) == 32 * len(outcomes)
    decoded = decode_outcomes(memoryview(header), memoryview(body))
    if any(one.code for one in outcomes):
        assert decoded == outcomes
    else:
        assert body == b""
        assert [one.base_queue_offset for one in decoded] == [
            one.base_queue_offset for one in outcomes
        ]


def test_outcomes_never_change():
    header, body = encode_outcomes([BatchOutcome(0, 1, 2, 3, 4, 5), BatchOutcome(2, remark="no")])
    assert header.hex(" ", 4) == (
        "00000100 02000000 03000000 00000000 04000000 00000000 05000000 00000000 "
        "02000000 00000000 ffffffff ffffffff ffffffff ffffffff 00000000 00000000"
    )
    assert body == b"\x92\xa0\xa2no"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"", b""),
        (bytes(31), b""),
        (bytes(33), b""),
        (bytes(2) + b"\x04" + bytes(29), b""),
        (bytes(32), b"\x90"),
        (bytes(32), b"\x92\xa0\xa0"),
        (bytes(32), b"\xc1"),
        (bytes(32), b"\x91\x05"),
        (bytes(32), b"\x91\xa2\xff\xff"),
    ],
)
def test_outcomes_that_do_not_fit_are_refused(header, body):
    with pytest.raises(RemoteProtocolError):
        decode_outcomes(memoryview(header), memoryview(body))
