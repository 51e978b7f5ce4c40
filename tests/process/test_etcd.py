"""The one suite on a real etcd, and a real cluster of three that loses members."""

from __future__ import annotations

import itertools
import signal

import pytest
from harness.coordinator_sites import RealSite
from harness.etcd_processes import QUICK, EtcdCluster

from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.etcd.stream import SILENCE_MS
from mqmesh.coordination.interface import (
    Conflict,
    Coordinator,
    CoordinatorUnavailable,
    OutcomeUnknown,
    StateRecord,
)
from mqmesh.testing.coordinator_contract import (
    GROUP,
    CoordinatorContract,
    Seen,
    ask,
    failure,
    presence,
    state,
)

NUMBERS = itertools.count()


class EtcdSite(RealSite):
    """Clusters of other names for each test, so that one etcd is enough.

    Attributes:
        number: In those names.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.number = next(NUMBERS)

    def open(self, cluster: str = "c1", timeout_ms: int = 5_000) -> Coordinator:
        return super().open(f"{cluster}-{self.number}", timeout_ms)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"), options=QUICK)
    yield cluster
    cluster.close()


@pytest.fixture
def site(etcd):
    site = EtcdSite(etcd.url)
    yield site
    site.close()


class TestEtcd(CoordinatorContract):
    """The suite."""


def test_the_stream_tells_of_changes_without_groups_being_read_again(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    seen = Seen(site, site.open())
    before_ms = site.clock.monotonic_ms()
    for number in range(1, 6):
        ask(site, one.keep_alive, session, presence(end_offset=number))
        seen.until(lambda view, number=number: view.members[0].presence.end_offset == number)
    assert site.clock.monotonic_ms() - before_ms < 4 * SILENCE_MS, "each was found by a read"


def _changed(site, one, version, wanted, session, *, perhaps=None):
    """Changes the record; returns its version.

    Args:
        site, one, session: By whom.
        version: That it has.
        wanted: What it is to be.
        perhaps: What it may have become meanwhile, by a change whose outcome is not known.
    """
    while True:
        try:
            return ask(site, one.change, GROUP, version, wanted, session)
        except OutcomeUnknown:  # a member that is stopped, or a busy machine, took too long
            found = ask(site, one.read, GROUP)
        except Conflict as error:
            found = error.record
        if found.state == wanted:
            return found.version
        assert found.version == version or found.state == perhaps
        version = found.version


def test_a_cluster_of_three_loses_members(tmp_path):
    cluster = EtcdCluster(tmp_path, 3, QUICK)
    site = EtcdSite(cluster.url)
    try:
        one = site.open(timeout_ms=3_000)
        session = ask(site, one.begin_session, 60_000, presence())
        version = ask(site, one.change, GROUP, 0, state(1), session)
        seen = Seen(site, one)

        cluster.signal(0, signal.SIGSTOP)  # whom it asks and watches
        assert ask(site, one.read, GROUP) == StateRecord(version, state(1))
        version = _changed(site, one, version, state(2), session)
        seen.until(lambda view: view.record == StateRecord(version, state(2)))
        assert seen.views[-1].members[0].session == session
        cluster.signal(0, signal.SIGCONT)

        gone = cluster.leader()
        cluster.kill(gone)
        assert ask(site, one.read, GROUP) == StateRecord(version, state(2))
        ask(site, one.keep_alive, session, presence(end_offset=7))
        seen.until(lambda view: view.members[0].presence.end_offset == 7)

        still = (gone + 1) % 3  # nobody can decide anything without it
        cluster.signal(still, signal.SIGSTOP)
        quick = open_coordinator(
            cluster.url, site.transport, cluster=f"c1-{site.number}", timeout_ms=1_000
        )
        before_ms = site.clock.monotonic_ms()
        assert isinstance(failure(site, quick.read, GROUP), CoordinatorUnavailable)
        error = failure(site, quick.change, GROUP, version, state(3), session)
        assert isinstance(error, OutcomeUnknown | CoordinatorUnavailable)
        assert site.clock.monotonic_ms() - before_ms < 2_500
        quick.close()

        cluster.signal(still, signal.SIGCONT)
        record = ask(site, one.read, GROUP)
        assert record.state in (state(2), state(3))
        # What had an unknown outcome may still be made behind a read, but never behind a change.
        version = _changed(site, one, record.version, state(4), session, perhaps=state(3))
        seen.until(lambda view: view.record == StateRecord(version, state(4)))
    finally:
        site.close()
        cluster.close()
