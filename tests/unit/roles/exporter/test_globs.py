"""Which topics and groups are told."""

from __future__ import annotations

import fnmatch
import itertools

import pytest

from mqmesh.message import TRANS_HALF_TOPIC, dlq_topic, retry_topic
from mqmesh.metrics import OTHER, MetricKind
from mqmesh.roles.exporter.families import ExportedMetric, Series
from mqmesh.roles.exporter.globs import Globs, matches


def words(letters, most):
    for length in range(most + 1):
        yield from map("".join, itertools.product(letters, repeat=length))


@pytest.mark.parametrize("glob", [one for one in words("ab*", 4) if one])
def test_a_glob_matches_what_the_shell_s_does(glob):
    names = list(words("ab", 5))
    assert [matches(glob, name) for name in names] == [
        fnmatch.fnmatchcase(name, glob) for name in names
    ]


def test_other_characters_stand_for_themselves():
    assert matches("shop.*", "shop.orders")
    assert not matches("shop.*", "shopping")
    assert not matches("[ab]?", "ab")
    assert matches("", "anything")


def test_a_glob_that_would_take_a_backtracking_search_for_ever_is_quick():
    assert not matches("*a" * 127 + "*", "a" * 126 + "b" * 129)


def series(**labels):
    return Series(
        ExportedMetric("m", MetricKind.GAUGE, "h", tuple(labels)), tuple(labels.values()), 1.0
    )


def test_what_names_another_topic_or_group_is_left_out():
    mine = [
        series(node_id="broker-a"),
        series(node_id="broker-a", topic="shop-orders"),
        series(topic="shop-orders", consumer_group="billing"),
        series(topic=retry_topic("billing"), group="billing"),
        series(topic=dlq_topic("billing")),
        series(topic=TRANS_HALF_TOPIC),
        series(topic=OTHER, consumer_group=OTHER),
    ]
    others = [
        series(topic="stock"),
        series(topic="shop-orders", consumer_group="mail"),
        series(topic="shop-orders", group="mail"),
        series(topic="stock", group="billing"),
        series(topic=retry_topic("mail")),
        series(topic=dlq_topic("mail")),
    ]
    assert list(Globs("shop-*", "bill*").kept(mine + others)) == mine
    assert list(Globs("", "").kept(mine + others)) == mine + others
