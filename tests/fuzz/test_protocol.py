"""Any bytes at the protocol's decoders: an equal value or ``RemoteProtocolError``, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqmesh.protocol
from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.command import decode_frame, decode_header, encode_frame, peek_opaque
from mqmesh.protocol.messaging import decode_outcomes, decode_send

HEADERS = [
    value
    for info in pkgutil.iter_modules(mqmesh.protocol.__path__)
    for value in vars(importlib.import_module(f"mqmesh.protocol.{info.name}")).values()
    if isinstance(value, type)
    and issubclass(value, msgspec.Struct)
    and value.__module__ == f"mqmesh.protocol.{info.name}"
    and value.__struct_config__.array_like
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=10),
    st.binary(max_size=10),
    st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=16)),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 99)), inner, max_size=4),
    ),
    max_leaves=30,
)
# A header is nearly right: an array whose elements may be of any type.
NEARLY = st.lists(TREES, max_size=12).map(msgspec.msgpack.encode)


@st.composite
def damaged(draw, good=NEARLY):
    """Good bytes with some of them changed, cut, or repeated."""
    data = bytearray(draw(good))
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            break
        position = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["change", "cut", "repeat", "insert"])):
            case "change":
                data[position] = draw(st.integers(0, 255))
            case "cut":
                del data[position:]
            case "repeat":
                data[position:position] = data[position:]
            case "insert":
                data[position:position] = draw(st.binary(max_size=6))
    return bytes(data)


HOSTILE = [
    b"\x91" * 100_000,  # deep
    b"\x81\xa1a" * 100_000,
    b"\xdd\xff\xff\xff\xff",  # 4 G elements
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x99" + b"\xdc\xff\xff" * 8,
    b"\xd6\xff\xff\xff\xff\xff",  # a time
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\x92\xa1\xff\xa2\xc3\x28",  # no UTF-8
    b"\x94\xa1g\xa1t\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x91\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xc1",
    b"",
]


def survives(decode, *arguments) -> None:
    try:
        decode(*arguments)
    except RemoteProtocolError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers_raise_only_protocol_errors(data):
    for kind in HEADERS:
        for prefix in (b"", b"\x91", b"\x92\xa1t", b"\x95\xa1c\xa1b\x00\x91\xa1a"):
            survives(decode_header, kind, prefix + data)


@given(data=st.one_of(st.binary(max_size=200), NEARLY, damaged()))
def test_any_bytes_as_a_header_raise_only_protocol_errors(data):
    for kind in HEADERS:
        survives(decode_header, kind, data)


@given(
    st.one_of(
        st.binary(max_size=100),
        damaged(
            st.binary(max_size=60).map(lambda body: encode_frame(10, 7, body, header=b"\x91\x01"))
        ),
    )
)
def test_any_bytes_as_a_frame_raise_only_protocol_errors(data):
    survives(decode_frame, data)
    peek_opaque(data)


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=64))
def test_a_frame_that_lies_about_its_header_raises_only_protocol_errors(
    version, flags, header_size, rest
):
    frame = struct.pack("<BBHIQ", version, flags, 1, header_size, 1) + rest
    try:
        command = decode_frame(frame)
    except RemoteProtocolError:
        return
    assert len(command.header) + len(command.body) == len(rest)


@given(st.binary(max_size=200), st.one_of(st.binary(max_size=100), NEARLY))
def test_any_bytes_as_the_headers_of_a_send_raise_only_protocol_errors(header, body):
    survives(decode_send, memoryview(header))
    survives(decode_outcomes, memoryview(header), memoryview(body))
    whole = bytes(32 * (len(header) // 32 + 1))
    survives(decode_outcomes, memoryview(whole), memoryview(body))
