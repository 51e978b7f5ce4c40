"""How far groups have come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord, SystemBusy
from mqmesh.roles.broker.features.groups.consumer_offsets import CommittedOffsets
from mqmesh.roles.broker.features.retries.sent_back_marks import MAX_MARKS


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
    before = offsets.changes
    offsets.commit("g", "t", 0, 1)
    assert offsets.changes == before
    offsets.commit("g", "t", 0, 0)
    assert offsets.changes > before


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
    offsets.dump()
    assert offsets.remove_topic("t") == 4
    assert offsets.remove_topic("t") == 0
    assert (offsets.groups(), len(offsets)) == (["g"], 1)
    copy = CommittedOffsets(100)
    copy.load(offsets.dump())
    assert copy.query("g", "t", 0) == copy.query("h", "t", 0) == -1
    assert copy.query("g", "u", 0) == 1


NAMES = st.sampled_from(["a", "b", "%RETRY%a", "x|y"])


@given(
    st.lists(
        st.tuples(NAMES, NAMES, st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.booleans())
    )
)
def test_the_document_brings_everything_back_however_often_it_is_made(commits):
    offsets, copy = CommittedOffsets(1_000), CommittedOffsets(1_000)
    expected = {}
    for group, topic, queue_id, queue_offset, dump in commits:
        offsets.commit(group, topic, queue_id, queue_offset)
        expected[group, topic, queue_id] = queue_offset
        if dump:
            offsets.dump()
    copy.load(offsets.dump())
    assert {key: copy.query(*key) for key in expected} == expected
    assert len(copy) == len(offsets) == len(expected)
    assert copy.dump() == offsets.dump()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{}",
        b'{"version": 3, "groups": {}}',
        b'{"version": 2, "epoch": 1, "groups": {}, "sent_back_from": {}}',
        b'{"version": 1, "groups": {"g": {"t": {"x": 1}}}}',
        b'{"version": 1, "groups": {"g": {"t": {"1": "1"}}}}',
    ],
)
def test_a_document_that_is_none_is_corrupt_and_changes_nothing(document):
    offsets = CommittedOffsets(100)
    offsets.commit("g", "t", 0, 1)
    with pytest.raises(CorruptRecord):
        offsets.load(document)
    assert offsets.query("g", "t", 0) == 1


def test_from_where_on_marks_count_is_saved_with_the_offsets_and_bounded_by_the_log():
    offsets = CommittedOffsets(100)
    offsets.epoch = 5
    assert offsets.sent_back_from("g") == 0
    before = offsets.changes
    offsets.forget_sent_back("g", 20)
    offsets.forget_sent_back("h", 7)
    assert offsets.changes > before
    offsets.remove_group("g")
    copy = CommittedOffsets(100)
    copy.load(offsets.dump())
    before = copy.changes
    copy.bound(lambda topic, queue_id: {("RMQ_SYS_SENT_BACK_TOPIC", 0): 10}[topic, queue_id], 5)
    assert copy.changes > before
    assert [copy.sent_back_from(group) for group in "ghi"] == [10, 7, 0]
    # What is behind all marks that are read is forgotten.
    copy.forget_sent_back("i", 10 + MAX_MARKS)
    assert [copy.sent_back_from(group) for group in "ghi"] == [0, 0, 10 + MAX_MARKS]


def test_offsets_behind_the_end_of_the_log_are_moved_back():
    offsets = CommittedOffsets(100)
    offsets.epoch = 4
    for group, at in (("g", 20), ("h", 7), ("i", 10)):
        offsets.commit(group, "t", 0, at)
    offsets.commit("g", "t", 1, 3)
    asked = []

    def end_of(topic, queue_id):
        asked.append((topic, queue_id))
        return 10 - queue_id

    again = CommittedOffsets(100)
    again.load(offsets.dump())
    assert again.epoch == 4
    before = again.changes
    assert again.bound(end_of, 5) == 1
    assert [again.query(group, "t", 0) for group in "ghi"] == [10, 7, 10]
    assert again.query("g", "t", 1) == 3
    assert asked == [("t", 0), ("t", 1)]
    assert again.changes > before
    last = CommittedOffsets(100)
    last.load(again.dump())
    assert (last.epoch, last.query("g", "t", 0)) == (5, 10)
    before = last.changes
    assert last.bound(end_of, 5) == 0
    assert last.changes == before
