"""Tag expressions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.tags import expression_hashes, parse_tags
from mqmesh.message import Message, tag_hash
from mqmesh.message_checks import check_messages


@pytest.mark.parametrize("expression", ["*", " * ", "\t*"])
def test_a_star_means_every_message(expression):
    assert parse_tags(expression) is None
    assert expression_hashes(expression) is None


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TagA", {"TagA"}),
        ("TagA || TagB", {"TagA", "TagB"}),
        ("A||B||A", {"A", "B"}),
        ("  two words  ||x", {"two words", "x"}),
        ("a|b", {"a|b"}),
        ("a**", {"a**"}),
        ("Ж || 日本", {"Ж", "日本"}),
    ],
)
def test_tags_are_joined_by_two_bars(expression, tags):
    assert parse_tags(expression) == tags
    assert expression_hashes(expression) == {tag_hash(tag) for tag in tags}


@pytest.mark.parametrize(
    ("expression", "character", "why"),
    [
        ("", 1, "missing"),
        ("   ", 4, "missing"),
        ("A ||", 5, "missing"),
        ("A || || B", 6, "missing"),
        ("|| B", 1, "missing"),
        ("A || *", 6, "stands alone"),
        ("A ||| B", 5, "exactly two"),
        ("A || B|", 6, "exactly two"),
        ("A || " + "x" * 256, 6, "over 255"),
        ("A || \ud800", 6, "no text"),
    ],
)
def test_nonsense_is_refused_with_its_place(expression, character, why):
    with pytest.raises(InvalidArgument, match=f"character {character}: .*{why}"):
        parse_tags(expression)


def test_an_endless_expression_is_refused():
    with pytest.raises(InvalidArgument, match="over 16384"):
        expression_hashes("A||" * 10_000)


def test_a_long_expression_is_understood_too():
    expression = " || ".join(f"tag{number}" for number in range(1_000))
    assert len(expression_hashes(expression) or ()) == 1_000


@given(st.text(min_size=1, max_size=300))
def test_every_tag_that_may_be_sent_may_be_subscribed_to(tag):
    try:
        check_messages([Message("t", b"x", tag=tag)], max_message_size=10)
    except InvalidArgument:
        return
    if tag != "*":
        assert parse_tags(f"other || {tag}") == {"other", tag}
