"""END_TRANSACTION's entries: they come back equal, and nothing else passes for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.transactions import (
    Decision,
    End,
    EndOutcome,
    decode_end_outcomes,
    decode_ends,
    encode_end_outcomes,
    encode_ends,
)

ENDS = st.builds(
    End,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(1, 65_536),
    st.sampled_from([1, 2]),
    st.binary(min_size=16, max_size=16),
)


@given(st.lists(ENDS, min_size=1, max_size=20))
def test_entries_come_back_equal(ends):
    data = encode_ends(ends)
    assert len(data) == 56 * len(ends)
    assert decode_ends(memoryview(data)) == ends


@pytest.mark.parametrize(
    "end",
    [
        End(-1, 0, 0, 0, 1, 1),
        End(0, 0, 0, 0, 0, 1),
        End(0, 0, 0, 0, 65_537, 1),
        End(0, 0, 0, 0, 1, 0),
        End(0, 0, 0, 0, 1, 3),
    ],
)
def test_an_entry_that_cannot_be_is_refused_and_its_proof_not_shown(end):
    end = msgspec.structs.replace(end, proof=b"nobody may see i")
    with pytest.raises(RemoteProtocolError) as caught:
        decode_ends(encode_ends([end]))
    assert "nobody" not in str(caught.value)
    assert "nobody" not in repr(end)


@given(st.binary(max_size=200))
def test_foreign_bytes_raise_only_what_is_documented(data):
    try:
        decode_ends(data)
    except RemoteProtocolError:
        assert data is not None


def test_outcomes_come_back_equal():
    outcomes = list(EndOutcome)
    assert decode_end_outcomes(encode_end_outcomes(outcomes), len(outcomes)) == outcomes
    assert list(Decision) == [1, 2]


@pytest.mark.parametrize(("data", "count"), [(b"", 1), (b"\0\0", 1), (b"\xff", 1)])
def test_outcomes_that_cannot_be_are_refused(data, count):
    with pytest.raises(RemoteProtocolError):
        decode_end_outcomes(data, count)
