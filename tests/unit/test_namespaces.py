"""Names with their namespace, and without it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import InvalidArgument
from mqmesh.message import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, TRACE_TOPIC
from mqmesh.namespaces import (
    MAX_NAMESPACE_LENGTH,
    add_namespace,
    check_namespace,
    drop_namespace,
    is_trace_topic,
    is_within,
    namespace_of,
    prefix_of,
    shown_name,
)

NAMES = [
    ("orders", "shop%orders"),
    ("a%b", "shop%a%b"),
    ("shop%orders", "shop%shop%orders"),
    ("%RETRY%billing", "%RETRY%shop%billing"),
    ("%DLQ%billing", "%DLQ%shop%billing"),
    (TRACE_TOPIC, f"shop%{TRACE_TOPIC}"),
]


@pytest.mark.parametrize(("own", "whole"), NAMES)
def test_a_name_has_its_namespace_in_front_as_rocketmqs_have_it(own, whole):
    assert add_namespace("shop", own) == whole
    assert drop_namespace("shop", whole) == own
    assert shown_name("shop", whole) == own
    assert is_within("shop", whole)
    assert namespace_of(whole) == "shop"


@pytest.mark.parametrize("name", ["", AUTO_CREATE_TOPIC, SCHEDULE_TOPIC])
def test_topics_of_the_cluster_and_no_name_stay_as_they_are(name):
    assert add_namespace("shop", name) == name


@pytest.mark.parametrize("name", ["orders", "bank%orders", "shopping%x", "%RETRY%bank%g", "shop"])
def test_what_is_not_in_a_namespace_has_no_name_in_it(name):
    assert drop_namespace("shop", name) is None
    assert shown_name("shop", name) == name
    assert not is_within("shop", name)


@pytest.mark.parametrize("name", ["orders", "%RETRY%billing", "shop%orders", ""])
def test_without_a_namespace_all_names_are_themselves(name):
    assert add_namespace("", name) == drop_namespace("", name) == shown_name("", name) == name
    assert is_within("", name)
    assert prefix_of("") == ""


@given(name=st.text("ab%RETYDLQ", min_size=1, max_size=12))
def test_every_name_comes_back(name):
    whole = add_namespace("shop", name)
    assert drop_namespace("shop", whole) == name
    assert is_within("shop", whole)
    assert not is_within("bank", whole)


@pytest.mark.parametrize("name", ["shop", "a|b", "Shop-1.eu", "x" * MAX_NAMESPACE_LENGTH])
def test_legal_namespaces(name):
    assert check_namespace(name) == name


@pytest.mark.parametrize(
    "name", ["", "%", "a%b", ".", "..", "é", "a b", "x" * (MAX_NAMESPACE_LENGTH + 1), None, 5]
)
def test_illegal_namespaces(name):
    with pytest.raises(InvalidArgument, match="namespace"):
        check_namespace(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RMQ_SYS_TRACE_TOPIC", True),
        ("shop%RMQ_SYS_TRACE_TOPIC", True),
        ("%RETRY%RMQ_SYS_TRACE_TOPIC", False),
        ("orders", False),
    ],
)
def test_each_namespace_has_a_topic_of_the_trace(name, expected):
    assert is_trace_topic(name) == expected
