"""What a follower does first: two logs compared by what both say of themselves."""

from __future__ import annotations

import pytest
from harness.served import features_on

from mqmesh.errors import InvalidArgument
from mqmesh.log_identity import EpochStart, LogIdentity
from mqmesh.protocol.replication import (
    OLDEST_REPLICATION_VERSION,
    REPLICATION_VERSION,
    OpenReplicationRequest,
    ReplicationMode,
    agreed_version,
)
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.features.replication.feature import how_to_go_on
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.storage.memory import MemoryStore
from mqmesh.testing.clock import ManualClock

STREAM, TRUNCATE, COPY, _ = ReplicationMode


def log(start: int, end: int, *epochs: tuple[int, int], store: int = 7, key: bytes = b"k"):
    return LogIdentity(store, key, start, end, [EpochStart(*one) for one in epochs])


def master(config: BrokerConfig):
    """Replication of a master without a process."""
    clock = ManualClock()
    store = MemoryStore(config.storage, clock=clock)
    return features_on(store, config, clock).replication


LEADER = log(0, 1_000, (1, 0), (3, 400), (4, 800))


@pytest.mark.parametrize(
    ("follower", "mode", "offset"),
    [
        (log(0, 1_000, (1, 0), (3, 400), (4, 800)), STREAM, 1_000),
        (log(0, 900, (1, 0), (3, 400), (4, 800)), STREAM, 900),
        (log(0, 300, (1, 0)), STREAM, 300),
        (log(0, 400, (1, 0)), STREAM, 400),
        (log(0, 0), STREAM, 0),
        # It went on alone in an epoch that ended elsewhere, or that nobody else knows.
        (log(0, 900, (1, 0), (3, 400)), TRUNCATE, 800),
        (log(0, 500, (1, 0)), TRUNCATE, 400),
        (log(0, 700, (1, 0), (2, 300)), TRUNCATE, 300),
        (log(0, 1_200, (1, 0), (3, 400), (4, 800)), TRUNCATE, 1_000),
        (log(0, 1_200, (1, 0), (3, 400), (4, 800), (5, 900)), TRUNCATE, 900),
        # Nothing in common.
        (log(0, 500, (1, 0), store=8), COPY, 0),
        (log(0, 500, (1, 0), key=b"x"), COPY, 0),
        (log(0, 500, (9, 0)), COPY, 0),
    ],
)
def test_a_follower_goes_on_where_both_logs_are_the_same(follower, mode, offset):
    assert how_to_go_on(LEADER, follower) == (mode, offset)


@pytest.mark.parametrize(
    ("follower", "mode", "offset"),
    [
        (log(500, 500, (1, 0), (3, 400)), STREAM, 500),
        (log(0, 600, (1, 0), (3, 400)), STREAM, 600),
        (log(500, 500), STREAM, 500),
        # It ends before the leader's log begins, or would have to be cut before its own does.
        (log(0, 450, (1, 0), (3, 400)), COPY, 500),
        (log(700, 900, (1, 0), (2, 300)), COPY, 500),
    ],
)
def test_a_leader_gives_what_it_has(follower, mode, offset):
    leader = log(500, 1_000, (1, 0), (3, 400), (4, 800))
    assert how_to_go_on(leader, follower) == (mode, offset)


def test_a_broker_without_replicas_gives_its_log_and_key_to_nobody():
    replication = master(BrokerConfig())
    asked = OpenReplicationRequest("broker-a", 1, 9, 1, LogIdentity(7, b"k", 0, 0, []))
    with pytest.raises(InvalidArgument, match=r"ha\.mode"):
        replication.open_replication(None, asked)


def test_two_replicas_speak_the_smaller_of_their_versions():
    assert agreed_version(REPLICATION_VERSION) == REPLICATION_VERSION
    assert agreed_version(REPLICATION_VERSION + 3) == REPLICATION_VERSION
    assert agreed_version(OLDEST_REPLICATION_VERSION) == OLDEST_REPLICATION_VERSION


def test_a_follower_of_a_version_that_is_not_spoken_any_more_is_refused_with_what_to_do():
    replication = master(BrokerConfig(ha=HaConfig(mode=HaMode.MANUAL)))
    old = OLDEST_REPLICATION_VERSION - 1
    asked = OpenReplicationRequest("broker-a", 1, 9, old, LogIdentity(7, b"k", 0, 0, []))
    with pytest.raises(InvalidArgument, match=rf"speaks version {old} .*upgrade the other"):
        replication.open_replication(None, asked)
