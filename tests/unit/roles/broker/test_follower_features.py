"""Features of a follower that serves reads: its commands read, and the hooks are the master's."""

from __future__ import annotations

import pytest
from harness.served import features_on

from mqmesh.protocol.commands import RequestCode
from mqmesh.roles.broker.features.traffic.feature import TrafficFeature
from mqmesh.roles.broker.stats import DAY_MS


@pytest.fixture
def follower(stage):
    return features_on(stage.store, stage.config, stage.clock, is_follower=True)


def metric(features, name):
    traffic = features.of(TrafficFeature)
    return next(one.read(traffic) for one in traffic.metrics if one.metric.name == name)


def test_a_follower_counts_today_and_yesterday_from_midnight_on(stage, follower):
    follower.core.stats.total.get_messages = 5
    follower.sample()
    stage.clock.advance(DAY_MS)
    follower.sample()
    follower.core.stats.total.get_messages = 7
    assert metric(follower, "get_messages_today") == 2
    assert metric(follower, "get_messages_yesterday") == 5


def test_a_follower_changes_nothing(stage, follower):
    codes = set(follower.commands())
    assert codes < set(stage.features.commands())
    assert RequestCode.PULL_MESSAGE in codes
    assert not codes & {RequestCode.SEND_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET}
