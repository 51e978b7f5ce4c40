"""How far groups have come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import SystemBusy
from mqmesh.roles.broker.features.retries.sent_back_marks import MAX_MARKS
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets, SentBackStarts


def replay(table, copy):
    """What was written of a table comes into another one."""
    for key in table.changed:
        for record in table.records_of(key):
            copy.apply(record)
    table.changed.clear()


def copied(offsets):
    """A table with all that is true of another one."""
    copy = CommittedOffsets(10_000)
    for key in offsets.state_keys():
        for record in offsets.records_of(key):
            copy.apply(record)
    return copy


def test_groups_topics_and_queues_are_kept_apart():
    offsets = CommittedOffsets(100)
    offsets.commit("g", "t", 0, 1)
    offsets.commit("g", "t", 1, 2)
    offsets.commit("g", "u", 0, 3)
    offsets.commit("h", "t", 0, 4)
    found = [offsets.query(*one) for one in (("g", "t", 0), ("g", "t", 1), ("g", "u", 0))]
    assert (found, offsets.query("h", "t", 0), len(offsets)) == ([1, 2, 3], 4, 4)
    assert offsets.query("h", "u", 0) == -1
    assert offsets.groups() == ["g", "h"]


def test_only_what_moves_is_a_change():
    offsets = CommittedOffsets(100)
    offsets.commit("g", "t", 0, 1)
    offsets.changed.clear()
    offsets.commit("g", "t", 0, 1)
    assert not offsets.changed
    offsets.commit("g", "t", 0, 0)
    assert list(offsets.changed) == [("g", "t")]


def test_there_is_an_end_of_offsets():
    offsets = CommittedOffsets(2)
    offsets.commit("g", "t", 0, 1)
    offsets.commit("g", "t", 1, 1)
    with pytest.raises(SystemBusy, match="max_consumer_offsets"):
        offsets.commit("h", "t", 0, 1)
    assert offsets.groups() == ["g"]
    offsets.commit("g", "t", 1, 2)


def test_a_removed_topic_takes_its_offsets_along():
    offsets = CommittedOffsets(100)
    for group in ("g", "h"):
        offsets.commit(group, "t", 0, 1)
        offsets.commit(group, "t", 1, 1)
    offsets.commit("g", "u", 0, 1)
    assert offsets.remove_topic("t") == 4
    assert offsets.remove_topic("t") == 0
    assert (offsets.groups(), len(offsets)) == (["g"], 1)
    copy = copied(offsets)
    assert copy.query("g", "t", 0) == copy.query("h", "t", 0) == -1
    assert copy.query("g", "u", 0) == 1


NAMES = st.sampled_from(["a", "b", "%RETRY%a", "x|y"])


@given(
    st.lists(
        st.tuples(NAMES, NAMES, st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.booleans())
    )
)
def test_records_bring_everything_back_however_often_they_are_made(commits):
    offsets, copy = CommittedOffsets(1_000), CommittedOffsets(1_000)
    expected = {}
    for group, topic, queue_id, queue_offset, is_written in commits:
        offsets.commit(group, topic, queue_id, queue_offset)
        expected[group, topic, queue_id] = queue_offset
        if is_written:
            replay(offsets, copy)
    replay(offsets, copy)
    assert {key: copy.query(*key) for key in expected} == expected
    assert len(copy) == len(offsets) == len(expected)
    again = copied(offsets)
    assert {key: again.query(*key) for key in expected} == expected


def test_what_is_deleted_and_there_again_has_nothing_of_before():
    offsets, copy = CommittedOffsets(100), CommittedOffsets(100)
    offsets.commit("g", "t", 0, 7)
    offsets.commit("g", "t", 1, 7)
    replay(offsets, copy)
    offsets.remove_topic("t")
    offsets.commit("g", "t", 0, 1)
    replay(offsets, copy)
    assert (copy.query("g", "t", 0), copy.query("g", "t", 1), len(copy)) == (1, -1, 1)
    offsets.remove_group("g")
    replay(offsets, copy)
    assert (copy.groups(), len(copy)) == ([], 0)


def test_offsets_of_many_queues_are_divided_among_records():
    offsets = CommittedOffsets(10_000)
    for queue_id in range(4_500):
        offsets.commit("g", "t", queue_id, queue_id)
    records = list(offsets.records_of(("g", "t")))
    assert [(len(one.offsets), one.adds) for one in records] == [
        (2_000, False),
        (2_000, True),
        (500, True),
    ]
    copy = copied(offsets)
    assert (len(copy), copy.query("g", "t", 4_499)) == (4_500, 4_499)


def test_from_where_on_marks_count_comes_back():
    starts = SentBackStarts()
    assert starts.counts_from("g") == 0
    starts.forget("g", 20)
    starts.forget("h", 7)
    assert list(starts.changed) == ["g", "h"]
    copy = SentBackStarts()
    replay(starts, copy)
    assert [copy.counts_from(group) for group in "ghi"] == [20, 7, 0]
    # What is behind all marks that are read is forgotten.
    starts.forget("i", 20 + MAX_MARKS)
    replay(starts, copy)
    assert [copy.counts_from(group) for group in "ghi"] == [0, 0, 20 + MAX_MARKS]


def test_offsets_behind_the_end_of_the_log_are_moved_back():
    offsets = CommittedOffsets(100)
    for group, at in (("g", 20), ("h", 7), ("i", 10)):
        offsets.commit(group, "t", 0, at)
    offsets.commit("g", "t", 1, 3)
    again = copied(offsets)
    assert again.bound(lambda topic, queue_id: 10 - queue_id) == 1
    assert [again.query(group, "t", 0) for group in "ghi"] == [10, 7, 10]
    assert again.query("g", "t", 1) == 3
    assert list(again.changed) == [("g", "t")]
    assert again.bound(lambda topic, queue_id: 10 - queue_id) == 0
