"""Op records, as bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.batch.record_batch import Attributes, check_batch, encode_batch, read_meta
from mqmesh.errors import CorruptBatch
from mqmesh.message import TRANS_OP_HALF_TOPIC, Message
from mqmesh.roles.broker.features.transactions.op_records import (
    Op,
    OpKind,
    decode_ops,
    encode_ops,
    runs_of,
)

OPS = st.builds(
    Op,
    st.integers(0, 2**63 - 1),
    st.integers(0, 65_535),
    st.integers(1, 65_536),
    st.sampled_from(list(map(int, OpKind))),
    st.integers(0, 65_535),
)


@given(st.lists(OPS, min_size=1, max_size=30))
def test_records_come_back_equal(ops):
    data = encode_ops(ops, producer_id=1, first_sequence=2, born_timestamp=3)
    header = check_batch(data)
    assert decode_ops(data, header) == ops
    assert read_meta(data, header).topic == TRANS_OP_HALF_TOPIC
    assert header.attributes == Attributes.REDELIVERED


def test_very_many_records_fit_into_one_batch():
    ops = [Op(number, 0, 1, OpKind.COMMIT) for number in range(120_000)]
    data = encode_ops(ops, producer_id=1, first_sequence=2, born_timestamp=3)
    header = check_batch(data)
    assert header.message_count == 3
    assert decode_ops(data, header) == ops


def test_bytes_that_are_none_are_refused():
    data = encode_batch(
        [Message(TRANS_OP_HALF_TOPIC, b"12345")],
        topic=TRANS_OP_HALF_TOPIC,
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=1,
    )
    with pytest.raises(CorruptBatch, match="5 bytes"):
        decode_ops(data, check_batch(data))


@given(st.sets(st.integers(0, 200)))
def test_runs_cover_exactly_what_they_should(ordinals):
    runs = runs_of(sorted(ordinals))
    covered = [one for first, count in runs for one in range(first, first + count)]
    assert covered == sorted(ordinals)
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(runs))
