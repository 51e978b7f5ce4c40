"""Which replicas may make up a group, and who counts in it then."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest

from mqmesh.coordination.interface import AckReplicas, MemberIncarnation, Presence
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.confirm import rule_of
from mqmesh.roles.broker.ha.member.bootstrap import GroupBootstrap
from mqmesh.roles.broker.ha.member.process import LogPosition
from mqmesh.roles.broker.ha.replica_state import first_state
from mqmesh.roles.broker.ha.vote_state import KeptVoteState
from mqmesh.roles.broker.ha_config import HaConfig, HaMode

STORE_ID = 77


class Session:
    """One whose record nobody else changes."""

    is_open = True

    def __init__(self):
        self.made = []

    def change_record(self, group, version, state, on_done):
        self.made.append((group, version, state))


def founding(mode=AckReplicas.ALL, *, broker_id=1, promised=0):
    """A replica of a group of three, and its session."""
    state = first_state(STORE_ID, broker_id, identity="i", boot_id="b", place="p", drawn=broker_id)
    promises = KeptVoteState(msgspec.structs.replace(state, promised_epoch=promised), None, None)
    at = LogPosition(store_id=STORE_ID, last_epoch=4, end=100, synced=100)
    replica = SimpleNamespace(position=lambda: at)
    ha = HaConfig(mode=HaMode.AUTO, ack_replicas=mode, total_replicas=3)
    config = BrokerConfig(broker_id=broker_id, ha=ha)
    session = Session()
    return GroupBootstrap(config, session, replica, promises), session


def present(*ends):
    """Replicas 1, 2, … whose logs end there."""
    return [
        Presence(
            group="broker-a",
            replica_id=number,
            incarnation=number + 1,
            address="h:1",
            replica_address="h:1",
            last_epoch=4 if end else 0,
            end_offset=end,
            synced_offset=end,
        )
        for number, end in enumerate(ends, 1)
    ]


@pytest.mark.parametrize("mode", AckReplicas)
def test_a_broker_that_gets_replicas_is_alone_in_sync_until_they_have_its_messages(mode):
    group, session = founding(mode)
    group.make_group(present(100, 0, 0))
    ((_, version, state),) = session.made
    assert (version, state.log_id, state.voters) == (0, STORE_ID, (1, 2, 3))
    assert state.in_sync == (MemberIncarnation(1, 2),)
    # An election asks replica 1 and nobody else; mode one confirms when a second one has come in.
    assert rule_of(state).copies == (2 if mode is AckReplicas.ONE else 1)
    assert (state.epoch, state.master, state.reason) == (4, None, "a broker got replicas")


@pytest.mark.parametrize("mode", AckReplicas)
def test_a_new_group_begins_with_all_that_count(mode):
    group, session = founding(mode)
    group.make_group(present(0, 0, 0))
    ((_, _, state),) = session.made
    all_count = mode in (AckReplicas.QUORUM, AckReplicas.ONE)
    assert [one.replica_id for one in state.in_sync] == ([1, 2, 3] if all_count else [1])
    assert (state.epoch, state.reason) == (1, "the group is new")


@pytest.mark.parametrize(
    ("there", "options"),
    [
        (present(100, 0), {}),  # not all are there
        (present(100, 0, 0), {"broker_id": 2}),  # not for this one to do
        (present(100, 0, 0), {"promised": 4}),  # it was in a group whose record is lost
        (present(100, 0, 5), {}),
        (present(0, 0, 5), {}),
        (present(0, 100, 0), {}),
    ],
)
def test_nobody_makes_up_a_group_of_which_others_may_have_messages(there, options, caplog):
    group, session = founding(**options)
    with caplog.at_level(logging.ERROR):
        group.make_group(there)
        group.make_group(there)
    assert session.made == []
    is_said = len(there) == 3 and options.get("broker_id", 1) == 1
    full = [one.replica_id for one in there if one.end_offset]
    assert [f"broker-a, and replicas {full} have messages: nobody leads" in one.message
            for one in caplog.records] == [True] * is_said  # fmt: skip
