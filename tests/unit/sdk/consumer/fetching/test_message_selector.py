"""What a consumer says it wants."""

from __future__ import annotations

import pytest

from mqmesh import MessageSelector
from mqmesh.errors import InvalidArgument
from mqmesh.sdk.consumer.fetching.message_selector import as_selector


def test_a_text_is_a_tag_expression():
    assert as_selector("A || B") == MessageSelector.by_tag("A || B")
    assert as_selector("A || B").wanted_tags() == {"A", "B"}
    assert not as_selector("A").selects_all


@pytest.mark.parametrize("expression", ["*", " * "])
def test_a_star_is_no_filter(expression):
    assert as_selector(expression).selects_all
    assert as_selector(expression).wanted_tags() is None


def test_sql_is_the_brokers_alone():
    selector = as_selector(MessageSelector.by_sql("a > 5"))
    assert (selector.expression, selector.expression_type) == ("a > 5", "SQL92")
    assert selector.wanted_tags() is None
    assert not selector.selects_all


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("A ||", "character 5"),
        (MessageSelector.by_sql("a > "), "SQL92 expression 'a > ', character 5"),
        (MessageSelector(expression="x", expression_type="LUA"), "LUA"),
        (5, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(expression, reason):
    with pytest.raises(InvalidArgument, match=reason):
        as_selector(expression)
