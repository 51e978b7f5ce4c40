"""The judgement on members that acknowledge each message, with a planted violation of each kind."""

from __future__ import annotations

from harness.receives import ACKED, ACKING, GIVEN, GOT, LEASE_MS, Seen, judge

ONE, OTHER = ("p", 1), ("p", 2)


def seen(*notes):
    return [Seen(float(at), event, member, [key]) for at, event, member, key in notes]


def test_a_message_that_is_acknowledged_or_given_back_breaks_nothing():
    found = judge(
        seen(
            (0, GOT, "a", ONE),
            (1, GIVEN, "a", ONE),
            (2, GOT, "b", ONE),
            (3, ACKING, "b", ONE),
            (4, ACKED, "b", ONE),
            (5, GOT, "a", OTHER),
        )
    )
    assert (found.again, found.twice) == ([], [])
    assert (found.got, found.acked) == ({ONE, OTHER}, {ONE})


def test_a_message_that_comes_after_its_acknowledgement_was_answered_is_found():
    notes = seen((0, GOT, "a", ONE), (1, ACKING, "a", ONE), (4, ACKED, "a", ONE))
    assert len(judge([*notes, *seen((5, GOT, "b", ONE))]).again) == 1
    assert judge([*notes, *seen((3, GOT, "b", ONE))]).again == [], "it was not answered yet"


def test_a_message_that_two_living_members_have_is_found():
    notes = seen((0, GOT, "a", ONE), (10, GOT, "b", ONE))
    assert len(judge(notes).twice) == 1
    assert judge(notes, {"a": 5.0}).twice == [], "the first one was dead by then"
    late = seen((0, GOT, "a", ONE), (LEASE_MS, GOT, "b", ONE))
    assert judge(late).twice == [], "its lease was over"
