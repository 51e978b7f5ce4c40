"""Positions and gaps of an archive, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import ConfigError
from mqmesh.spark.steps import Ingest, Step, chain_to, next_step


def step_of(position, start, end, *, allow_gap=False):
    return next_step(position, start, end, broker="broker-a", allow_gap=allow_gap)


def ingest(start, end, gap=0, snapshot="s"):
    return Ingest(
        broker="b",
        store_id=1,
        epoch=1,
        from_offset=start,
        to_offset=end,
        gap_before=gap,
        snapshot=snapshot,
        last_offset=-1,
        mark="",
    )


def test_the_first_snapshot_is_taken_whole_and_later_ones_from_the_position():
    assert step_of(None, 100, 500) == Step(100, 500, 0)
    assert step_of(500, 100, 800) == Step(500, 800, 0)
    assert step_of(800, 100, 500) == Step(800, 800, 0)
    assert step_of(800, 300, 800) == Step(800, 800, 0)


def test_a_gap_is_refused_with_both_numbers_unless_it_is_allowed():
    with pytest.raises(ConfigError) as caught:
        step_of(4_711, 9_000, 9_999)
    assert str(caught.value) == (
        "the archive is at 4711 of broker-a, this snapshot begins at 9000: 4,289 bytes are "
        "missing; --allow-gap goes on without them"
    )
    assert step_of(4_711, 9_000, 9_999, allow_gap=True) == Step(9_000, 9_999, 4_289)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=20))
def test_snapshots_in_any_order_give_each_byte_once(snapshots):
    position, taken, gaps, begun = None, [], [], []
    for start, end in snapshots:
        if start == end:
            continue
        step = step_of(position, start, end, allow_gap=True)
        if step.to_offset > step.from_offset:
            taken += range(step.from_offset, step.to_offset)
            gaps += range(step.from_offset - step.gap_before, step.from_offset)
            begun.append(ingest(step.from_offset, step.to_offset, step.gap_before))
            position = step.to_offset
    assert len(taken) == len(set(taken))
    assert not set(taken) & set(gaps)
    if taken:
        assert sorted(taken + gaps) == list(range(taken[0], position))
        assert chain_to(begun, position) == begun


def test_steps_that_were_begun_and_given_up_are_not_told():
    first, last = ingest(0, 10), ingest(20, 30, gap=10)
    given_up = [ingest(10, 15), ingest(10, 40), ingest(20, 45, gap=10)]
    assert chain_to([first, *given_up, last], 30) == [first, last]
    assert chain_to([first], 10) == [first]
    assert chain_to([first], 99) == []
