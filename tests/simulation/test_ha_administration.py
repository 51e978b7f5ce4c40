"""What administrators do to a group of replicas: who belongs to it, and that nobody stands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.simulation.election import GROUP, leadership_of
from simulation.test_election import Site

from mqmesh.errors import BrokerNotAvailable, MessageIllegal, NotMaster
from mqmesh.protocol.replication import HaStatus
from mqmesh.roles.broker.config import BrokerConfig


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def start_another(site: Site, number: int) -> None:
    """A replica that is new, with the settings of the others but for how many there are."""
    config: BrokerConfig = site.replicas[0].server._config
    ha = msgspec.structs.replace(config.ha, total_replicas=number)
    made = site.world.add_broker(GROUP, ha, broker_id=number)
    site.replicas.append(made)
    made.start()
    site.run(3_000)


def status(site: Site, number: int) -> HaStatus:
    found = [one.status for one in site.admin.ha_status(GROUP)]
    return next(one for one in found if one is not None and one.broker_id == number)


def followers(site: Site) -> list[int]:
    return [one for one in (1, 2, 3) if one != site.leader()]


def test_a_replica_comes_in_when_it_is_added_and_goes_when_it_is_removed(site):
    site.admin.create_topic("t", queues=1)
    start_another(site, 4)
    assert leadership_of(site.replicas[site.leader() - 1]).members == [1, 2, 3]
    told = status(site, 4)
    assert (told.role, told.log_end) == ("OUTSIDE", 0)
    assert "replica 4 does not belong to broker-a, [1, 2, 3] do" in told.problem
    with pytest.raises(MessageIllegal, match="the epoch is 2 by now, not 9"):
        site.admin.add_replica(GROUP, 4, epoch=9)
    answer = site.admin.add_replica(GROUP, 4, epoch=2)
    assert answer.voters == [1, 2, 3, 4]
    assert site.admin.add_replica(GROUP, 4) == answer, "whoever got no answer asks again"
    site.run(3_000)
    leader = leadership_of(site.replicas[site.leader() - 1])
    assert leader.members == [1, 2, 3, 4]
    gone = followers(site)[0]
    assert site.admin.remove_replica(GROUP, gone).voters == sorted({1, 2, 3, 4} - {gone})
    site.run(1_000)
    assert leader.members == sorted({1, 2, 3, 4} - {gone})
    told = status(site, gone)
    assert (told.role, told.connected) == ("OUTSIDE", False)
    end = told.log_end
    site.admin.create_topic("later", queues=1)
    site.run(3_000)
    assert status(site, gone).log_end == end, "it gets nothing more"
    site.admin.add_replica(GROUP, gone)
    site.run(3_000)
    assert leader.members == [1, 2, 3, 4]


def test_the_new_replica_leads_when_the_others_are_gone(site):
    site.admin.create_topic("t", queues=1)
    start_another(site, 4)
    site.admin.add_replica(GROUP, 4)
    site.run(3_000)
    site.admin.switch_over(GROUP, 4)
    site.run(1_000)
    assert site.leader() == 4
    for number in (1, 2):
        site.admin.remove_replica(GROUP, number)
    with pytest.raises(MessageIllegal, match=r"1 replicas would be in sync, 2 must be"):
        site.admin.remove_replica(GROUP, 3)
    with pytest.raises(MessageIllegal, match="replica 4 is the master"):
        site.admin.remove_replica(GROUP, 4)
    site.replicas[2].kill()
    site.run(8_000)
    assert leadership_of(site.replicas[3]).members == [4], "nobody else comes in"


def test_a_removed_replica_leads_nobody_even_if_it_is_told_to(site):
    gone = followers(site)[0]
    site.admin.remove_replica(GROUP, gone)
    for number, one in enumerate(site.replicas, 1):
        if number != gone:
            one.kill()
    site.run(8_000)
    assert site.leader() == 0
    with pytest.raises(MessageIllegal, match="does not belong to broker-a"):
        site.admin.elect_unclean(GROUP, gone)


def test_while_failover_is_paused_nobody_takes_the_masters_place_but_by_hand(site):
    first = site.leader()
    site.admin.pause_failover(GROUP, epoch=2)
    site.replicas[first - 1].kill()
    site.run(10_000)
    assert site.leader() == 0
    assert all(status(site, one).paused for one in followers(site) if one != first)
    site.replicas[first - 1].start()
    site.run(4_000)
    assert site.leader() == first, "who is started again leads again"
    wanted = followers(site)[0]
    site.admin.switch_over(GROUP, wanted)
    site.run(1_000)
    assert site.leader() == wanted
    site.replicas[wanted - 1].kill()
    site.run(8_000)
    assert site.leader() == 0
    site.admin.pause_failover(GROUP, paused=False)
    site.run(2_000)
    assert site.leader() not in (0, wanted)
    assert status(site, site.leader()).reason == "the leader's session has ended"
    assert status(site, site.leader()).switched_ms > 0


def test_a_change_whose_answer_is_lost_is_known_in_the_end(site):
    leader, coordinator = site.replicas[site.leader() - 1], site.world.coordinators[0]
    gone, epoch = followers(site)[0], leadership_of(leader).epoch
    site.world.network.cut(coordinator.node, leader.node)
    with pytest.raises(BrokerNotAvailable, match="nobody knows yet"):
        site.admin.remove_replica(GROUP, gone, epoch=epoch)
    assert gone in leadership_of(leader).in_sync.state.voters
    site.world.network.heal()
    site.run(10_000)
    assert gone not in site.admin.remove_replica(GROUP, gone).voters
    assert status(site, gone).role == "OUTSIDE"


def test_only_the_master_changes_who_belongs_to_the_group(site):
    site.world.network.cut(site.replicas[site.leader() - 1].node, site.world.coordinators[0].node)
    site.run(500)
    address = {one.broker_id: one.endpoint for one in site.admin.ha_status(GROUP)}
    follower = next(one for one in followers(site))
    site.admin._master = lambda name: f"tcp://{address[follower]}"
    with pytest.raises(NotMaster, match="does not lead"):
        site.admin.add_replica(GROUP, 4)


def test_settings_of_the_cluster_stand_above_those_of_replicas(site):
    first = site.leader()
    before = site.admin.cluster_settings()
    assert (before.version, before.settings) == (0, [])
    with pytest.raises(MessageIllegal, match="coordinator' is no setting of a cluster"):
        site.admin.change_cluster_settings({"coordinator": "x"})
    with pytest.raises(MessageIllegal, match="4 is more than there are"):
        site.admin.change_cluster_settings({"min_in_sync_replicas": "4"})
    wanted = {"lease_ttl_ms": "5000", "replica_lag_max_ms": "900", "min_in_sync_replicas": "3"}
    told = site.admin.change_cluster_settings(wanted)
    assert {one.name: one.value for one in told.settings} == wanted
    with pytest.raises(MessageIllegal, match=f"have version {told.version} by now, not 999"):
        site.admin.change_cluster_settings({"lease_ttl_ms": None}, version=999)
    site.run(6_000)
    leader = leadership_of(site.replicas[first - 1])
    assert (leader.policy.minimum, leader.in_sync.lag_max_ms) == (3, 900)
    for number in (1, 2, 3):
        one = status(site, number)
        assert {each.name: each.value for each in one.settings}["lease_ttl_ms"] == "5000"
        assert ("lease_ttl_ms", "3000", "5000") in [
            (each.name, each.own, each.in_force) for each in one.differing
        ]
    gone = followers(site)[0]
    site.replicas[gone - 1].kill()
    site.run(2_500)
    assert leader.members == [one for one in (1, 2, 3) if one != gone]
    with pytest.raises(BrokerNotAvailable, match="3 must be"):
        leader.check()  # before a send is taken
    site.admin.change_cluster_settings({"min_in_sync_replicas": None})
    leader.check()
    site.admin.create_topic("t", queues=1)
    site.replicas[first - 1].kill()
    site.replicas[gone - 1].start()
    site.run(8_000)
    second = leadership_of(site.replicas[site.leader() - 1])
    assert (second.policy.minimum, second.in_sync.lag_max_ms) == (2, 900)
    session = site.replicas[site.leader() - 1].server._member.status()
    assert session.lease_ms + session.lease_age_ms == 5_000


def test_a_lost_record_is_made_anew_of_the_replicas_that_there_are(site):
    site.admin.create_topic("t", queues=1)
    gone = followers(site)[0]
    kept = [one for one in (1, 2, 3) if one != gone]
    site.admin.remove_replica(GROUP, gone)
    coordinator = site.world.coordinators[0]
    coordinator.kill()
    shutil.rmtree(site.world.folder / "coordinator")
    site.replicas[site.leader() - 1].kill()
    site.run(500)
    coordinator.start()
    site.run(2_000)
    for number, one in enumerate(site.replicas, 1):
        if not one.up and number != gone:
            one.start()
    site.run(2_000)
    with pytest.raises(MessageIllegal, match="and nobody else"):
        site.admin.init_group(GROUP, kept)
    site.replicas[gone - 1].kill()
    site.run(5_000)
    site.admin.init_group(GROUP, kept)
    site.run(3_000)
    assert leadership_of(site.replicas[site.leader() - 1]).in_sync.state.voters == tuple(kept)
    assert site.admin.topic_configs("t")
