"""Features of a follower that serves reads: its commands read, and the hooks are the master's."""

from __future__ import annotations

import msgspec

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.all_features import FEATURES, FOLLOWER_FEATURES
from mqmesh.roles.broker.feature import Features
from mqmesh.roles.broker.stats import DAY_MS


def figure(context, name):
    measured = [one for feature in FOLLOWER_FEATURES for one in feature.figures]
    return next(one.read(context) for one in measured if one.figure.name == name)


def test_a_follower_counts_today_and_yesterday_from_midnight_on(stage):
    features, context = Features(FOLLOWER_FEATURES, stage.context), stage.context
    context.stats.total.get_messages = 5
    features.sample()
    stage.clock.advance(DAY_MS)
    features.sample()
    context.stats.total.get_messages = 7
    assert figure(context, "get_messages_today") == 2
    assert figure(context, "get_messages_yesterday") == 5


def test_a_feature_of_a_follower_lacks_nothing_of_the_masters_but_commands():
    for feature in FOLLOWER_FEATURES:
        whole = [msgspec.structs.replace(feature, commands=one.commands) for one in FEATURES]
        (master,) = [one for one, copy in zip(FEATURES, whole, strict=True) if one == copy]
        assert feature.commands.items() <= master.commands.items()


def test_a_follower_changes_nothing():
    codes = {code for feature in FOLLOWER_FEATURES for code in feature.commands}
    assert RequestCode.PULL_MESSAGE in codes
    assert not codes & {RequestCode.SEND_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET}
