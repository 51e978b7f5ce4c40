"""Markers: written, read, and told from anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_SIZE,
    GROUP_DATA,
    MAX_CONTROL_DATA,
    ControlKind,
    ControlRecord,
    decode_control_record,
    encode_control_record,
)

NUMBERS = {"commitlog_offset": 1 << 40, "epoch": 7, "store_id": 0xDEADBEEF, "store_timestamp": -5}


def test_marker_is_these_bytes_for_ever() -> None:
    data = encode_control_record(ControlKind.TOPIC_DELETED, **NUMBERS, data=b"topic")
    assert data.hex() == (
        "4d514d31bdf365d60000000000010000350000000300000007000000efbeaddefbffffffffffffff0000000000000000746f706963"
    )


@given(st.sampled_from(ControlKind), st.binary(max_size=MAX_CONTROL_DATA), st.binary(max_size=20))
def test_marker_comes_back(kind: ControlKind, data: bytes, behind: bytes) -> None:
    if kind is ControlKind.GROUP:
        data = data[: GROUP_DATA.size].ljust(GROUP_DATA.size, b"\0")
    encoded = encode_control_record(kind, **NUMBERS, data=data)
    assert len(encoded) == CONTROL_RECORD_SIZE + len(data)
    expected = ControlRecord(1 << 40, len(encoded), kind, 7, 0xDEADBEEF, -5, data)
    assert decode_control_record(b"xy" + encoded + behind, 2) == expected


def test_every_changed_bit_and_every_cut_is_noticed() -> None:
    good = encode_control_record(ControlKind.EPOCH, **NUMBERS)
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode_control_record(bytes(bad))
    for size in range(len(good)):
        with pytest.raises(CorruptRecord):
            decode_control_record(good[:size])


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_marker_of_a_group_says_its_bytes_and_its_number(size: int) -> None:
    data = encode_control_record(ControlKind.GROUP, **NUMBERS, data=bytes(size))
    with pytest.raises(CorruptRecord, match="marker of a group"):
        decode_control_record(data)


@given(st.binary(max_size=200))
def test_other_bytes_are_no_marker(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_control_record(data)
