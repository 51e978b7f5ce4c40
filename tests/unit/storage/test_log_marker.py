"""Markers: written, read, and told from anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.log.marker import (
    MARKER_SIZE,
    MAX_MARKER_DATA,
    Marker,
    MarkerKind,
    decode_marker,
    encode_marker,
)

NUMBERS = {"commitlog_offset": 1 << 40, "epoch": 7, "store_id": 0xDEADBEEF, "store_timestamp": -5}


def test_marker_is_these_bytes_for_ever() -> None:
    data = encode_marker(MarkerKind.TOPIC_DELETED, **NUMBERS, data=b"topic")
    assert data.hex() == (
        "4d514d31bdf365d60000000000010000350000000300000007000000efbeaddefbffffffffffffff0000000000000000746f706963"
    )


@given(st.sampled_from(MarkerKind), st.binary(max_size=MAX_MARKER_DATA), st.binary(max_size=20))
def test_marker_comes_back(kind: MarkerKind, data: bytes, behind: bytes) -> None:
    encoded = encode_marker(kind, **NUMBERS, data=data)
    assert len(encoded) == MARKER_SIZE + len(data)
    expected = Marker(1 << 40, len(encoded), kind, 7, 0xDEADBEEF, -5, data)
    assert decode_marker(b"xy" + encoded + behind, 2) == expected


def test_every_changed_bit_and_every_cut_is_noticed() -> None:
    good = encode_marker(MarkerKind.EPOCH, **NUMBERS)
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode_marker(bytes(bad))
    for size in range(len(good)):
        with pytest.raises(CorruptRecord):
            decode_marker(good[:size])


@given(st.binary(max_size=200))
def test_other_bytes_are_no_marker(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_marker(data)
