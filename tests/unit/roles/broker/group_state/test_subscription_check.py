"""One group, one subscription."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.roles.broker.group_state.subscription_check import SubscriptionCheck


def data(*subscriptions, model="CLUSTERING"):
    return ConsumerData("g", model, "LAST_OFFSET", [Subscription(*one) for one in subscriptions])


def check_of(**members):
    check = SubscriptionCheck()
    for client_id, one in members.items():
        check.note(client_id, one)
    return check


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (data(("t", "a || b")), data(("t", "b||a"))),
        (data(("t", "*")), data(("t", " * "))),
        (data(("t",), ("u",)), data(("u",), ("t",))),
        (data(("t",)), data(("t",), ("%RETRY%g",))),
        (data(("t", "x > 1", "SQL92")), data(("t", " x > 1 ", "SQL92"))),
    ],
)
def test_equal_wishes_in_other_words_are_no_difference(one, other):
    check = check_of(a=one, b=other)
    assert (check.differing, check.difference("a"), check.difference("b")) == (0, "", "")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (data(("t", "a")), "topic t: 'a' instead of '*'"),
        (data(("t", "a > 1", "SQL92")), "topic t: 'SQL92 a > 1' instead of '*'"),
        (data(), "topic t: not subscribed to, the others are"),
        (data(("t",), ("u",)), "topic u: the others do not subscribe to it"),
        (data(("t",), model="BROADCASTING"), "BROADCASTING instead of CLUSTERING"),
        (data(("u",)), "topic t: not subscribed to, the others are; topic u: the others do not"),
    ],
)
def test_the_difference_is_told_in_words(other, words):
    check = check_of(a=data(("t",)), b=data(("t",)), c=other)
    assert words in check.difference("c")
    assert (check.difference("a"), check.differing) == ("", 1)


def test_the_first_one_is_right_until_most_say_otherwise():
    check = check_of(a=data(("t", "a")), b=data(("t", "b")))
    assert (check.difference("a"), check.difference("b")) == ("", "topic t: 'b' instead of 'a'")
    check.note("c", data(("t", "b")))
    assert (check.difference("a"), check.difference("b")) == ("topic t: 'a' instead of 'b'", "")


def test_who_leaves_or_changes_his_mind_counts_no_more():
    check = check_of(a=data(("t", "a")), b=data(("t", "b")), c=data(("t", "c")))
    assert check.differing == 2
    check.note("b", data(("t", "a")))
    check.drop("c")
    check.drop("unknown")
    assert check.differing == 0
    check.drop("a")
    check.drop("b")
    assert (check.differing, check.difference("a")) == (0, "")


def test_a_sentence_has_an_end():
    check = check_of(a=data(("t",)), b=data(*((f"t{n}", "x" * 16_000) for n in range(1_000))))
    assert "and 997 more topics" in check.difference("b")
    check = check_of(a=data(("t",)), b=data(("t", "|".join(["x" * 200, "", "y" * 200]))))
    assert len(check.difference("b")) < 200


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcde"), st.one_of(st.none(), st.sampled_from(["x", "y", "x||y"]))
        ),
        max_size=30,
    )
)
def test_it_agrees_with_a_plain_count(steps):
    check, members = SubscriptionCheck(), {}
    for client_id, expression in steps:
        if expression is None:
            check.drop(client_id)
            members.pop(client_id, None)
        else:
            check.note(client_id, data(("t", expression)))
            members[client_id] = expression
        counts = [list(members.values()).count(one) for one in members.values()]
        assert check.differing == len(members) - max(counts, default=0)
        differing = [one for one in members if check.difference(one)]
        assert len(differing) == check.differing
