"""Which start may lead with a store, by the roles that it had."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from mqmesh.errors import ConfigError
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.replica_state import ReplicaState
from mqmesh.roles.broker.ha.store_history import StoreHistory
from mqmesh.roles.broker.ha_config import HaConfig, HaMode

ROOT = Path("/data/broker-a")
ALONE = BrokerConfig()
MASTER = BrokerConfig(ha=HaConfig(mode=HaMode.MANUAL))
FOLLOWER = BrokerConfig(broker_id=1, ha=HaConfig(mode=HaMode.MANUAL, master_addr="h:1"))
FIRST = BrokerConfig(broker_id=1, ha=HaConfig(mode=HaMode.AUTO, total_replicas=3))
SECOND = BrokerConfig(broker_id=2, ha=HaConfig(mode=HaMode.AUTO, total_replicas=3))
STARTS = {
    "alone": ALONE,
    "master": MASTER,
    "follower": FOLLOWER,
    "first": FIRST,
    "second": SECOND,
}

NEW = ReplicaState(
    log_id=1, replica_id=2, identity="i", incarnation=1, boot_id="b", place="p", promised_epoch=0
)
JOINED = msgspec.structs.replace(NEW, promised_epoch=4)

NOTHING = StoreHistory()
FOLLOWED = StoreHistory(follows=True)
PROMOTED = StoreHistory(follows=True, is_promoted=True)
WAITED = StoreHistory(replica=NEW)
ELECTED = StoreHistory(replica=JOINED)
CHANGED = StoreHistory(follows=True, replica=JOINED)
STORES = {
    "nothing": NOTHING,
    "followed": FOLLOWED,
    "promoted": PROMOTED,
    "waited": WAITED,
    "elected": ELECTED,
    "changed": CHANGED,
}

REFUSED = {
    ("followed", "alone"): "of a follower",
    ("followed", "master"): "of a follower",
    # The first replica of a new group has its messages become the group's.
    ("followed", "first"): "of a follower",
    ("elected", "alone"): "of replica 2 of a group that elects",
    ("elected", "master"): "of replica 2 of a group that elects",
    ("changed", "alone"): "of replica 2 of a group that elects",
    ("changed", "master"): "of replica 2 of a group that elects",
}


@pytest.mark.parametrize(("store", "start"), list(itertools.product(STORES, STARTS)))
def test_a_store_that_may_lack_messages_does_not_lead_alone(store, start):
    expected = REFUSED.get((store, start))
    if expected is None:
        STORES[store].check_start(ROOT, STARTS[start])
        return
    with pytest.raises(ConfigError, match=rf"^/data/broker-a is the store {expected}"):
        STORES[store].check_start(ROOT, STARTS[start])


def test_an_error_says_what_to_remove_where_the_others_are_gone():
    with pytest.raises(ConfigError, match=r"remove /data/broker-a/replica-state$"):
        ELECTED.check_start(ROOT, ALONE)
    with pytest.raises(ConfigError, match=r"remove /data/broker-a/started-as.json$"):
        FOLLOWED.check_start(ROOT, ALONE)


@pytest.mark.parametrize(
    ("history", "config", "follows"),
    [
        (NOTHING, ALONE, False),
        (NOTHING, MASTER, False),
        (NOTHING, FOLLOWER, True),
        (NOTHING, FIRST, False),
        (PROMOTED, FOLLOWER, False),
        # As replica 2 it has another log soon; until it has promised something it may go back.
        (FOLLOWED, SECOND, True),
        (CHANGED, SECOND, False),
    ],
)
def test_a_follower_is_remembered(history, config, follows):
    assert history.follows_next(config) is follows
