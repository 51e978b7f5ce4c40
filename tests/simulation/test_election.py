"""Seeds in which replicas elect their master: what is acknowledged stays, whoever leads."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from harness.simulation import run
from harness.simulation.election import ElectionRun, knows_owners, leadership_of, start_group
from harness.simulation.real_disk import RealDisk
from harness.simulation.run import run_seed
from harness.simulation.world import Process, World
from simulation.test_seeds import simulate

from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import DiskFull, InvalidArgument, MessageIllegal, MQMeshError, TopicNotFound
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.replication import FenceRequest, FenceResponse
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.roles.broker.ha.confirm import ConfirmedLog
from mqmesh.roles.broker.ha.lead import switch_over
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.member.group_member import GroupMember
from mqmesh.roles.broker.ha.vote_state import KeptVoteState
from mqmesh.roles.schedule.server import ScheduleServer
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.transport.endpoints import endpoint_of

SEEDS = {0: 9, 12: 1}
"""So many from each: four of mode all, four of quorum, one of one; one of none."""
MOST_SEEDS = 60
LATE_MS = 1_000
QUORUM_SEED = 5


def first_violation(*bugs, hint: int) -> str | None:
    """What the first seed says that finds a bug, from the one that found it once; None if none."""
    for seed in range(hint, hint + MOST_SEEDS):
        for bug in bugs:
            bug.start()
        try:
            outcome = run_seed(seed, kind=ElectionRun)
        finally:
            for bug in bugs:
                bug.stop()
        if outcome.violations:
            return outcome.violations[0]
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "count"), SEEDS.items())
def test_nothing_acknowledged_is_lost_whoever_leads_whatever_the_seed(seed, count):
    done = simulate("--election", "--seed", str(seed), "--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} seeds, 0 failed" in done.stdout


def test_a_leader_that_goes_on_though_it_promised_to_another_is_found():
    def promise(self, epoch):
        at, state = self._replica.position(), self._promises.state
        return FenceResponse(
            state.replica_id, epoch, state.incarnation, at.last_epoch, at.end, at.can_lead
        )

    bugs = (
        mock.patch.object(GroupMember, "promise", promise),
        mock.patch.object(GroupMember, "step_down", return_value=None),
        mock.patch.object(KeptVoteState, "promise", return_value=None),
    )
    assert first_violation(*bugs, hint=4) is not None


@pytest.mark.timeout(300)
def test_a_leader_that_shows_too_little_or_goes_back_is_found():
    show_to, confirmed = CommitLogStore.show_to, Leadership.confirmed
    calls = itertools.count()

    def too_little(self, position):
        show_to(self, None if position is None else lambda: max(position() - 2_000, 0))

    def goes_back(self):
        return max(confirmed(self) - next(calls) % 2, 0)

    with (
        mock.patch.object(CommitLogStore, "show_to", too_little),
        mock.patch.object(Leadership, "confirmed", goes_back),
        mock.patch.object(run, "PATIENCE_MS", 0),
    ):
        found = run_seed(1, kind=ElectionRun).violations
    assert any("for readers" in one for one in found if one.startswith("H4"))
    assert any("went back in epoch" in one for one in found if one.startswith("H3"))


class CutOffRun(ElectionRun):
    """Leaders are cut off from their followers, and nothing else goes wrong."""

    @property
    def profile(self):
        return {"leader cut off": 3}


@pytest.mark.timeout(300)
def test_a_leader_that_answers_what_is_not_confirmed_is_found():
    """With a status that says so, and without an error: it may be gone after the next election."""
    confirmed, status_of = CommitPoint.confirmed, CommitPoint.status_of

    def early(self, now_ms):
        late = [send for send, _ in self.expired(now_ms + self.timeout_ms - LATE_MS)]
        for send in late:
            if send.pending is None:  # of the broker itself, which nobody is told of
                self.wait(send, send.end_offset, now_ms)
        return [*confirmed(self, now_ms), *(send for send in late if send.pending is not None)]

    def status(self, end_offset):
        is_late = end_offset > self.offset()
        return SendStatus.FLUSH_SLAVE_TIMEOUT if is_late else status_of(self, end_offset)

    with (
        mock.patch.object(CommitPoint, "confirmed", early),
        mock.patch.object(CommitPoint, "status_of", status),
    ):
        found = run_seed(QUORUM_SEED, kind=CutOffRun).violations
    assert any(one.startswith("C13: the send of") for one in found)


class Site:
    """Three replicas that elect their master, and an administrator."""

    def __init__(
        self,
        folder: Path,
        mode: AckReplicas = AckReplicas.ALL,
        preferred: int = 0,
        minimum: int = 2,
    ) -> None:
        self.world, self.mode = World(1, folder, real_store=True), mode
        self.replicas = start_group(self.world, mode, preferred, minimum=minimum)
        self.admin = HaAdmin(self.world.namesrv_addr, transport=self.world.transport("admin"))

    def leader(self) -> int:
        """Id of the replica that leads, 0 for nobody."""
        return next(
            (
                number
                for number, one in enumerate(self.replicas, 1)
                if (found := leadership_of(one)) is not None and found.is_confirmed
            ),
            0,
        )

    def leaders(self) -> list[int]:
        """Epochs of those who would answer sends now."""
        found = [leadership_of(one) for one in self.replicas]
        return [
            one.epoch
            for one in found
            if one is not None and one.may_answer() and not one.is_isolated
        ]

    def cut(self, one: Process, *others: Process) -> None:
        for other in others:
            self.world.network.cut(one.node, other.node)
            self.world.network.cut(other.node, one.node)

    def run(self, span_ms: int) -> None:
        self.world.simulation.run(span_ms)

    def run_until(self, condition: Callable[[], bool], most_ms: int) -> None:
        """Runs, and where nobody confirms looks all the time that no two lead who answer."""
        for _ in range(most_ms // 20):
            if condition():
                return
            self.run(20)
            assert self.mode is not AckReplicas.NONE or len(self.leaders()) < 2
        raise AssertionError(f"not within {most_ms} ms")

    def close(self) -> None:
        self.admin.close()
        for process in self.world.processes():
            process.release()
        for disk in self.world.disks.values():
            disk.release()
        assert self.world.failures == 0


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, getattr(request, "param", AckReplicas.ALL))
    yield site
    site.close()


def test_a_record_that_a_coordinator_lost_is_made_anew_with_all_replicas_there(site):
    first = site.leader()
    site.admin.create_topic("t", queues=1)
    coordinator = site.world.coordinators[0]
    coordinator.kill()
    shutil.rmtree(site.world.folder / "coordinator")
    site.replicas[first - 1].kill()
    site.run(500)
    coordinator.start()
    site.run(3_000)
    assert site.leader() == 0, "nobody makes up a group that may have had messages"
    with pytest.raises(MessageIllegal, match=r"all 3 replicas have to be there.*\[2, 3\]"):
        site.admin.init_group("broker-a")
    site.replicas[first - 1].start()
    site.run(2_000)
    site.admin.init_group("broker-a")
    site.run(2_000)
    assert not knows_owners(site.replicas[site.leader() - 1]), "nor when it was confirmed"
    assert site.admin.topic_configs("t")


def test_a_replica_that_is_not_in_sync_leads_only_when_told(site):
    first = site.leader()
    away, lost = (one for number, one in enumerate(site.replicas, 1) if number != first)
    away.kill()
    site.run(5_000)  # it leaves the replicas in sync
    site.admin.create_topic("t", queues=1)
    lost.kill()
    site.replicas[first - 1].kill()
    away.start()
    site.run(8_000)
    assert site.leader() == 0
    number = site.replicas.index(away) + 1
    with pytest.raises(MessageIllegal, match="the epoch is 2 by now, not 9"):
        site.admin.elect_unclean("broker-a", number, epoch=9)
    site.admin.elect_unclean("broker-a", number)
    site.run(3_000)
    assert site.leader() == number
    assert not knows_owners(away)
    lost.start()
    site.replicas[first - 1].start()
    site.run(8_000)
    assert leadership_of(away).members == [1, 2, 3], "those that come back are cut, and follow"
    with pytest.raises(TopicNotFound):
        site.admin.topic_configs("t")
    away.kill()
    site.run_until(lambda: site.leader() not in (0, number), 5_000)
    successor = site.replicas[site.leader() - 1]
    assert knows_owners(successor), "the one before has waited for those that it did not know"


def test_a_new_leader_knows_what_was_acknowledged_a_moment_before(site):
    """Also what no follower was told yet that it is confirmed (seed 23000852)."""
    for queues in (1, 2, 3):
        site.admin.put_topic(TopicConfig("t", queues, queues))
        first = site.leader()
        site.replicas[first - 1].kill()
        site.run_until(lambda: site.leader() not in (0, first), 5_000)  # noqa: B023
        assert knows_owners(site.replicas[site.leader() - 1])
        site.run(1_000)
        ((found,),) = site.admin.topic_configs("t").values()
        assert found.read_queue_nums == queues
        site.replicas[first - 1].start()
        site.run(2_000)


def test_an_administrator_unseats_no_master_that_lives(site):
    follower = 1 if site.leader() != 1 else 2
    with pytest.raises(MessageIllegal, match="has a master that lives"):
        site.admin.elect_unclean("broker-a", follower)
    with pytest.raises(MessageIllegal, match="knows this group"):
        site.admin.init_group("broker-a")
    with pytest.raises(MessageIllegal, match="leads already"):
        site.admin.switch_over("broker-a", site.leader())
    with pytest.raises(InvalidArgument, match="is there"):
        site.admin.promote("broker-a", follower)


def test_a_schedule_service_follows_a_new_master_also_when_it_heard_of_none(site):
    schedule = site.world.schedules["broker-a"].server._service
    assert schedule.in_session
    first = site.leader()
    # The former master goes on to answer, so that no connection breaks.
    with mock.patch.object(ScheduleServer, "_on_hint"):
        site.admin.switch_over("broker-a", 1 if first != 1 else 2)
        site.run(5_000)
    assert site.leader() != first
    assert schedule.in_session
    assert schedule.status().sessions >= 2


def test_a_replica_that_promised_for_an_election_that_came_to_nothing_comes_back(site):
    first = site.leader()
    number = 1 if first != 1 else 2
    fence = encode_header(FenceRequest("broker-a", 3, 6 - first - number))
    address = {one.broker_id: one.endpoint for one in site.admin.ha_status("broker-a")}[number]
    site.admin._request(endpoint_of(address), RequestCode.FENCE, fence)
    site.run(10_000)
    leader = leadership_of(site.replicas[site.leader() - 1])
    assert leader.epoch >= 3
    assert leader.members == [1, 2, 3]
    site.admin.create_topic("t", queues=1)


def test_a_follower_whose_copy_cannot_be_made_is_started_again_and_tries_again(tmp_path):
    copier, failures = RealDisk.copier, [DiskFull("no room")]

    def copy(disk, directory, beginning, **more):
        if failures:
            raise failures.pop()
        return copier(disk, directory, beginning, **more)

    with mock.patch.object(RealDisk, "copier", copy):
        site = Site(tmp_path)
        site.run(3_000)
    leader = leadership_of(site.replicas[site.leader() - 1])
    assert leader.members == [1, 2, 3]
    assert not list(tmp_path.rglob("replaced-*")), "a store without a record is not kept"
    site.close()


def comes_back_as_another(site: Site, number: int, harm: Callable[[], None]) -> None:
    """Does something to a follower's files while it is down; it is another member then."""
    follower, leader = site.replicas[number - 1], leadership_of(site.replicas[site.leader() - 1])
    before = {one.replica_id: one for one in leader.log.rule.members}
    follower.kill()
    harm()
    follower.start()
    site.run(2_000)
    assert leader is leadership_of(site.replicas[site.leader() - 1])
    after = {one.replica_id: one for one in leader.log.rule.members}
    assert sorted(after) == [1, 2, 3]
    assert [one for one in after if after[one] != before[one]] == [number]


def test_a_log_that_was_put_back_from_a_backup_is_filled_again_for_another_member(site, tmp_path):
    number = 1 if site.leader() != 1 else 2
    follower = site.replicas[number - 1]
    disk = site.world.disks[follower.name]
    follower.kill()
    shutil.copytree(disk.files, tmp_path / "backup")
    follower.start()
    site.run(2_000)
    site.admin.create_topic("t", queues=1)

    def put_back() -> None:
        shutil.rmtree(disk.files)
        shutil.copytree(tmp_path / "backup", disk.files)

    comes_back_as_another(site, number, put_back)
    site.replicas[site.leader() - 1].kill()
    site.run(5_000)
    assert site.admin.topic_configs("t")


def test_a_folder_that_was_put_back_makes_another_member_before_anybody_is_told(site):
    number = 1 if site.leader() != 1 else 2
    place = site.world.folder / site.replicas[number - 1].name / "replica-place"

    def put_back() -> None:
        before = place.rename(place.with_name("before"))
        shutil.copy2(before, place)

    comes_back_as_another(site, number, put_back)


def part_from_followers(site: Site) -> None:
    leader, network = site.replicas[site.leader() - 1], site.world.network
    for other in site.replicas:
        if other is not leader:
            network.cut(leader.node, other.node)
            network.cut(other.node, leader.node)


def test_a_leader_without_its_followers_acknowledges_nothing(site):
    part_from_followers(site)
    with pytest.raises(MQMeshError):
        site.admin.create_topic("t", queues=1)


def test_a_leader_that_confirms_alone_is_found(site):
    def confirmed(self, position):
        self.confirmed = max(self.confirmed, position)
        return self.confirmed

    part_from_followers(site)
    with mock.patch.object(ConfirmedLog, "on_own", confirmed):
        site.admin.create_topic("t", queues=1)  # what the test before expects to fail


def test_a_leader_that_is_stopped_hands_over_before_it_ends(site):
    first = site.replicas[site.leader() - 1]
    epoch = leadership_of(first).epoch
    first.stop()
    assert not first.up
    site.run(500)
    second = leadership_of(site.replicas[site.leader() - 1])
    assert second.epoch == epoch + 1
    assert second.in_sync.state.reason == "the master is stopped"


def test_where_all_replicas_are_stopped_nobody_takes_over_and_all_stay_in_sync(site):
    first = site.replicas[site.leader() - 1]
    others = [one for one in site.replicas if one is not first]
    began_ms = site.world.now_ms
    for number, one in enumerate(others, 1):
        site.world.simulation.after(30 * number, one.stop)
    state = leadership_of(first).in_sync.state
    first.stop()
    assert site.world.now_ms - began_ms < 500
    site.run(500)
    assert not any(one.up for one in site.replicas)
    for one in site.replicas:
        one.start()
    site.run(3_000)
    after = leadership_of(site.replicas[site.leader() - 1]).in_sync.state
    assert after.epoch == state.epoch + 1
    assert {one.replica_id for one in after.in_sync} == {1, 2, 3}


def test_a_preferred_replica_gets_the_lead_back_but_not_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(switch_over, "IN_SET_MS", 3_000)
    site = Site(tmp_path, preferred=3)
    try:
        favourite = site.replicas[2]
        assert site.leader() == 1, "of a new group only that one is in sync"
        site.run(8_000)
        assert site.leader() == 3
        favourite.stop()
        site.run(2_000)
        assert site.leader() == 1
        favourite.start()
        site.run(8_000)
        assert site.leader() == 1, "ten minutes are not over"
        state = leadership_of(site.replicas[0]).in_sync.state
        assert {one.replica_id for one in state.in_sync} == {1, 2, 3}
    finally:
        site.close()


# ---- A leader that keeps its coordinator and loses its followers ---------------------------

COPIES = pytest.mark.parametrize(
    "site", [AckReplicas.ALL, AckReplicas.QUORUM, AckReplicas.ONE], indirect=True
)
WAYS = ("both", "from the leader", "to the leader")
REPLACED_MS = 6_000


@COPIES
@pytest.mark.parametrize("way", WAYS)
def test_a_leader_that_hears_no_follower_is_replaced_where_another_one_can_confirm(site, way):
    first, network = site.replicas[site.leader() - 1], site.world.network
    epoch = leadership_of(first).epoch
    for other in site.replicas:
        if other is not first and way != "to the leader":
            network.cut(first.node, other.node)
        if other is not first and way != "from the leader":
            network.cut(other.node, first.node)
    site.run_until(lambda: site.leaders() == [epoch + 1], REPLACED_MS)
    site.run(1_000)  # name servers hear of it
    site.admin.create_topic("t", queues=1)
    site.run(5 * REPLACED_MS)
    assert site.leaders() == [epoch + 1], "and leads on for as long as the cut lasts"
    network.heal()
    site.run(5_000)
    second = site.replicas[site.leader() - 1]
    assert leadership_of(second).epoch == epoch + 1
    assert leadership_of(second).members == [1, 2, 3]


@COPIES
def test_a_leader_whose_followers_are_dead_leads_on_and_takes_sends_when_they_are_back(site):
    first = site.replicas[site.leader() - 1]
    epoch, others = leadership_of(first).epoch, [one for one in site.replicas if one is not first]
    for other in others:
        other.kill()
    site.run(20_000)
    assert leadership_of(first).is_cut_off
    with pytest.raises(MQMeshError):
        site.admin.create_topic("t", queues=1)
    for other in others:
        other.start()
    site.run(3_000)
    assert leadership_of(first).epoch == epoch
    site.admin.create_topic("t", queues=1)


@COPIES
def test_a_leader_is_not_replaced_by_a_follower_that_could_not_confirm_either(site):
    """The other follower is dead, or each of the three hears the coordinator only."""
    first = site.replicas[site.leader() - 1]
    near, far = (one for one in site.replicas if one is not first)
    epoch = leadership_of(first).epoch
    far.kill()
    site.cut(first, near)
    site.run(15_000)
    assert leadership_of(first).epoch == epoch
    site.world.network.heal()
    site.run(2_000)
    assert leadership_of(first).epoch == epoch, "nobody has promised anything meanwhile"
    site.admin.create_topic("t", queues=1)
    far.start()
    site.run(3_000)
    site.cut(first, near, far)
    site.cut(near, far)
    site.run(15_000)
    assert leadership_of(first).epoch == epoch
    assert len(leadership_of(first).members) >= 2, "else nobody else could be elected"
    site.world.network.heal()
    site.run(10_000)
    assert leadership_of(site.replicas[site.leader() - 1]).members == [1, 2, 3]
    site.admin.create_topic("u", queues=1)


def test_with_a_minimum_of_one_a_leader_goes_on_alone(tmp_path):
    site = Site(tmp_path, minimum=1)
    try:
        first = site.replicas[site.leader() - 1]
        part_from_followers(site)
        site.run(10_000)
        assert leadership_of(first).members == [site.replicas.index(first) + 1]
        site.admin.create_topic("t", queues=1)
    finally:
        site.close()


# ---- Without the coordinator -------------------------------------------------------------

NONE = pytest.mark.parametrize("site", [AckReplicas.NONE], indirect=True)
TTL_MS = 3_000


@NONE
def test_without_the_coordinator_a_leader_goes_on_while_all_in_sync_promise_to_hold_still(site):
    first = site.replicas[site.leader() - 1]
    epoch, coordinator = leadership_of(first).epoch, site.world.coordinators[0]
    coordinator.kill()
    site.run(4 * TTL_MS)
    assert site.leaders() == [epoch]
    assert first.server._member.status().is_failsafe
    other = next(one for one in site.replicas if one is not first)
    site.cut(first, other)
    site.run_until(lambda: site.leaders() == [], 2 * TTL_MS)
    site.world.network.heal()
    coordinator.start()
    site.run_until(lambda: site.leaders() != [], 4 * TTL_MS)


@NONE
def test_a_leader_that_alone_misses_the_coordinator_is_replaced_only_once_it_has_stopped(site):
    first = site.replicas[site.leader() - 1]
    epoch, coordinator = leadership_of(first).epoch, site.world.coordinators[0]
    site.cut(first, coordinator)
    site.run(4 * TTL_MS)
    assert site.leaders() == [epoch], "its session ended long ago, and nobody stands"
    site.cut(first, *(one for one in site.replicas if one is not first))
    site.run_until(lambda: site.leaders() == [], 2 * TTL_MS)
    site.run_until(lambda: site.leaders() == [epoch + 1], 3 * TTL_MS)
    site.world.network.heal()
    site.run_until(lambda: leadership_of(first) is None, TTL_MS)


def test_a_leader_that_hears_neither_coordinator_nor_followers_takes_nothing(site):
    first = site.replicas[site.leader() - 1]
    epoch = leadership_of(first).epoch
    site.cut(first, site.world.coordinators[0], *(one for one in site.replicas if one is not first))
    site.run_until(lambda: leadership_of(first).is_isolated, 2 * TTL_MS)
    assert first.server._ha_status().role == "ISOLATED"
    site.run_until(lambda: site.leaders() == [epoch + 1], 2 * TTL_MS)
    site.world.network.heal()
    site.run_until(lambda: leadership_of(first) is None, TTL_MS)


def test_an_isolated_leader_goes_on_when_its_followers_are_back(site):
    first = site.replicas[site.leader() - 1]
    epoch, coordinator = leadership_of(first).epoch, site.world.coordinators[0]
    other = next(one for one in site.replicas if one is not first)
    coordinator.kill()
    site.cut(first, other)
    site.run_until(lambda: leadership_of(first).is_isolated, 2 * TTL_MS)
    site.world.network.heal()
    site.run_until(lambda: site.leaders() == [epoch], 2 * TTL_MS)
    coordinator.start()
    site.run(2 * TTL_MS)
    assert site.leaders() == [epoch]
