"""Who may move a group's offset in a queue."""

from __future__ import annotations

import pytest

from mqmesh.errors import StaleGeneration
from mqmesh.roles.broker.group_state.queue_ownership import NOBODY, Ownership, QueueOwnership


@pytest.fixture
def claims():
    """Member a was given queue 0 of topic t in generation 5."""
    claims = QueueOwnership()
    claims.claim("g", "t", 0, "a", 5)
    return claims


@pytest.mark.parametrize("generation", [4, 5])
def test_within_a_generation_a_queue_has_one_member(claims, generation):
    with pytest.raises(StaleGeneration, match="is with a in generation 5"):
        claims.claim("g", "t", 0, "b", generation)


def test_what_was_given_back_is_free_in_the_same_generation(claims):
    claims.release("g", "t", 0, "b")  # not its own
    claims.release("g", "t", 1, "a")  # never claimed
    assert claims.find("g", "t", 0) == Ownership("a", 5)
    claims.release("g", "t", 0, "a")
    assert claims.find("g", "t", 0) == Ownership(NOBODY, 5)
    claims.claim("g", "t", 0, "b", 5)
    assert claims.find("g", "t", 0) == Ownership("b", 5)


def test_who_was_replaced_by_one_that_gave_the_queue_back_is_replaced_all_the_same(claims):
    claims.claim("g", "t", 0, "b", 6)
    claims.release("g", "t", 0, "b")
    with pytest.raises(StaleGeneration, match="was given to others"):
        claims.commit("g", "t", 0, "a", 9, goes_back=False)
    with pytest.raises(StaleGeneration, match="was given to others after generation 5"):
        claims.check_pull("g", "t", 0, 5)


def test_beyond_the_most_the_oldest_group_is_forgotten():
    claims = QueueOwnership(most=3)
    for group in ("old", "new"):
        for queue_id in range(2):
            claims.claim(group, "t", queue_id, "a", 1)
    assert claims.find("old", "t", 0) is None
    assert claims.find("new", "t", 0) == claims.find("new", "t", 1) == Ownership("a", 1)
    claims.claim("new", "t", 2, "a", 1)
    claims.claim("new", "t", 3, "a", 1)  # one group alone may have more
    assert claims.find("new", "t", 0) is not None
    claims.remove_topic("t")
    claims.claim("other", "t", 0, "a", 1)
    assert claims.find("other", "t", 0) is not None


def test_only_who_has_a_queue_moves_its_offset(claims):
    claims.commit("g", "t", 0, "a", 9, goes_back=False)
    claims.commit("g", "t", 1, "b", 9, goes_back=False)  # nobody has it
    claims.commit("other", "t", 0, "b", 9, goes_back=False)
    with pytest.raises(StaleGeneration, match="was given to a"):
        claims.commit("g", "t", 0, "b", 9, goes_back=False)


@pytest.mark.parametrize("generation", [0, 5, 6])
def test_who_has_a_queue_or_is_no_member_pulls_it(claims, generation):
    claims.check_pull("g", "t", 0, generation)


def test_nothing_is_kept_of_what_is_gone(claims):
    claims.claim("g", "other", 0, "a", 5)
    claims.remove_topic("t")
    assert claims.find("g", "t", 0) is None
    claims.forget_group("g")
    claims.forget_group("g")
    assert claims.find("g", "other", 0) is None


def test_after_a_restart_the_first_to_commit_has_the_queue_unless_it_goes_back():
    claims = QueueOwnership()
    with pytest.raises(StaleGeneration, match="z is behind what group 'g' has committed"):
        claims.commit("g", "t", 0, "z", 5, goes_back=True)
    claims.commit("g", "t", 0, "a", 5, goes_back=False)
    assert claims.find("g", "t", 0) == Ownership("a", 5)
    claims.commit("g", "t", 0, "a", 5, goes_back=True)  # it seeks
    with pytest.raises(StaleGeneration, match="was given to a"):
        claims.commit("g", "t", 0, "z", 5, goes_back=False)
