"""The snapshot that a broker is making: one at a time, never ahead of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqmesh.errors import ConfigError, MQMeshError, StorageError, SystemBusy, UnsupportedCommand
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.snapshots import CreateSnapshotRequest
from mqmesh.roles.broker.config import SnapshotConfig
from mqmesh.roles.broker.features.snapshots.state import (
    SYNC_WAIT_MS,
    SnapshotJobs,
    SnapshotStep,
    snapshot_name,
)
from mqmesh.roles.broker.helper_thread import as_mqmesh_error


@pytest.fixture
def desk():
    desk = SnapshotJobs()
    desk.begin(pending=None, now_ms=5)
    return desk


def test_a_second_snapshot_at_a_time_is_refused(desk):
    with pytest.raises(SystemBusy, match="making a snapshot already"):
        desk.begin(pending=None, now_ms=6)
    desk.end(made=True)
    desk.begin(pending=None, now_ms=7)
    desk.end(made=False)
    assert (desk.made, desk.failed) == (1, 1)


def test_it_ends_where_the_log_did_once_that_is_durable(desk):
    assert desk.ready_offset(1_000, 10) is None
    desk.wait_for_log(500, 10)
    assert desk.ready_offset(499, 11) is None
    assert desk.ready_offset(510, 12) == 510
    assert desk.job.step is SnapshotStep.FINISH
    assert desk.ready_offset(600, 13) is None


def test_a_slow_disk_makes_it_end_earlier(desk):
    desk.wait_for_log(500, 10)
    assert desk.ready_offset(400, 10 + SYNC_WAIT_MS - 1) is None
    assert desk.ready_offset(400, 10 + SYNC_WAIT_MS) == 400


def test_a_broker_that_stops_gives_it_up(desk):
    assert not desk.is_given_up()
    desk.give_up()
    assert desk.is_given_up()


def test_names_of_a_broker_sort_by_time():
    names = [snapshot_name("broker-a", ms, 7) for ms in (0, 999, 1_000, 1_700_000_000_000)]
    assert names == sorted(names)
    assert names[1] == "broker-a.19700101T000000999Z.7"


def test_they_lie_beside_the_store_unless_a_directory_is_given():
    assert SnapshotConfig().root(Path("/data/broker-a")) == Path("/data/snapshots")
    assert SnapshotConfig(root_dir="/backup").root(Path("/data/broker-a")) == Path("/backup")


def test_what_a_helper_thread_meets_is_an_error_of_ours():
    assert isinstance(as_mqmesh_error(ConfigError("x")), ConfigError)
    assert isinstance(as_mqmesh_error(KeyError("x")), StorageError)
    assert isinstance(as_mqmesh_error(KeyError("x")), MQMeshError)


def test_a_store_in_memory_has_no_snapshots(stage):
    with pytest.raises(UnsupportedCommand, match="backend 'commitlog', this one is 'memory'"):
        stage.ask(RequestCode.CREATE_SNAPSHOT, CreateSnapshotRequest())
