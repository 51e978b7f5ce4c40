"""What a follower shows to those who read from it, and when it answers them."""

from mqmesh.roles.broker.follower.follower_reads import FollowerReads
from mqmesh.units import MAX_OFFSET


def reads(log_end=100, **settings) -> FollowerReads:
    return FollowerReads(
        log_end, 0, **{"enabled": True, "elects": True, "lag_max_ms": 3_000} | settings
    )


def test_what_it_began_with_is_shown_once_all_of_it_is_confirmed():
    one = reads()
    assert not one.answers(0, streaming=False)
    one.note_leader(150, 99, 10)
    assert not one.answers(10, streaming=True)
    one.note_leader(150, 100, 20)
    assert one.answers(20, streaming=True)
    assert one.shown_to() == 100
    one.note_leader(150, 130, 30)
    assert one.shown_to() == 130
    one.note_leader(150, 120, 40)
    assert one.shown_to() == 130, "another leader may know less"


def test_without_elections_it_shows_what_it_has():
    one = reads(elects=False)
    assert one.answers(0, streaming=False)
    assert one.shown_to() == MAX_OFFSET


def test_settings_may_forbid_it():
    assert not reads(enabled=False, elects=False).answers(0, streaming=True)


def test_who_is_too_far_behind_answers_nobody_until_it_has_caught_up():
    one = reads(elects=False)
    one.note_leader(200, 0, 1_000)
    one.has(199)
    assert one.answers(3_000, streaming=True)
    assert not one.answers(3_001, streaming=True)
    assert one.answers(9_000, streaming=False), "without a leader it is all that there is"
    one.note_leader(300, 0, 9_000)
    one.has(200)
    assert one.answers(9_000, streaming=True), "it has what there was a second after the beginning"
    one.note_leader(300, 0, 9_100)
    assert not one.answers(9_101, streaming=True)
    one.has(300)
    assert one.answers(9_102, streaming=True)


def test_a_new_leader_begins_anew():
    one = reads(elects=False)
    one.note_leader(200, 0, 1_000)
    assert not one.answers(5_000, streaming=True)
    one.begin_leader(5_000)
    one.note_leader(150, 0, 5_100)
    assert one.answers(8_000, streaming=True)
    assert not one.answers(8_001, streaming=True)


def test_what_is_derived_for_good_is_confirmed_and_never_less_than_before():
    one = reads()
    assert one.kept_to(150) is None
    one.note_leader(150, 99, 10)
    assert one.kept_to(150) is None, "an index may have come to 100"
    one.note_leader(150, 130, 20)
    assert (one.kept_to(150), one.kept_to(120)) == (130, 120)
    assert reads(elects=False).kept_to(150) == 150
