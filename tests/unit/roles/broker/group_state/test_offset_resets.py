"""Offsets moved under running consumers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets


def test_a_consumer_is_told_once_and_has_followed_with_its_next_pull():
    resets = OffsetResets()
    resets.begin("g", "t", 0, 5)
    assert resets.holds_commit("g", "t", 0)
    assert resets.on_pull("g", "t", 0, 90) == 5
    assert resets.holds_commit("g", "t", 0)
    assert resets.on_pull("g", "t", 0, 5) is None
    assert not resets.holds_commit("g", "t", 0)
    assert resets.on_pull("g", "t", 0, 90) is None
    assert len(resets) == 0


def test_who_happens_to_stand_at_the_target_is_told_too():
    resets = OffsetResets()
    resets.begin("g", "t", 0, 5)
    assert resets.on_pull("g", "t", 0, 5) == 5  # it may hold messages before 5
    assert resets.on_pull("g", "t", 0, 5) is None


def test_who_does_not_follow_is_told_again():
    resets = OffsetResets()
    resets.begin("g", "t", 0, 5)
    assert [resets.on_pull("g", "t", 0, at) for at in (90, 91, 92)] == [5, 5, 5]


def test_a_second_reset_takes_the_place_of_the_first():
    resets = OffsetResets()
    resets.begin("g", "t", 0, 5)
    assert resets.on_pull("g", "t", 0, 90) == 5
    resets.begin("g", "t", 0, 7)
    assert resets.on_pull("g", "t", 0, 5) == 7
    assert resets.on_pull("g", "t", 0, 7) is None


def test_other_groups_and_queues_are_not_concerned():
    resets = OffsetResets()
    resets.begin("g", "t", 0, 5)
    for other in (("h", "t", 0), ("g", "u", 0), ("g", "t", 1)):
        assert resets.on_pull(*other, 90) is None
        assert not resets.holds_commit(*other)
    resets.begin("g", "u", 0, 5)
    resets.forget_topic("t")
    assert not resets.holds_commit("g", "t", 0)
    resets.forget("g")
    assert len(resets) == 0


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=20))
def test_commits_count_again_only_after_a_pull_at_the_target_that_came_after_the_notice(
    target, pulls
):
    resets = OffsetResets()
    resets.begin("g", "t", 0, target)
    followed = False
    for number, offset in enumerate(pulls):
        answer = resets.on_pull("g", "t", 0, offset)
        followed = followed or (number > 0 and offset == target)
        assert resets.holds_commit("g", "t", 0) is not followed
        assert answer == (None if followed else target)
