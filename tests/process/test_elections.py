"""Replicas that elect their master, as real processes: what clients see when he dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.failovers import GROUP, ElectedGroup, Load, run_failovers, wait_acked
from harness.patience import until

from mqmesh.errors import BrokerNotAvailable
from mqmesh.metrics import Readings
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.roles.exporter.names import numbers
from mqmesh.sdk.admin.group_admin import GroupAdmin


@pytest.mark.timeout(120)
def test_a_master_that_is_killed_costs_a_pause_and_nothing_else(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path)
    try:
        result = run_failovers(group, 2, receive=True)
        reports = group.admin.ha_status()
    finally:
        group.close()
    assert result.errors == []
    assert (result.lost, result.twice) == ([], [])
    assert len(result.acked) >= 140
    assert result.received is not None
    assert (result.received.never, result.received.again) == ([], [])
    assert result.received.acked > 0
    master = Readings(next(one for one in reports if one.broker_id == 0).metrics)
    assert 0 < master.number("ha_failover_ms") < 30_000
    assert master.number("ha_set_changes_total") >= 1, "who was killed left the set"
    assert dict(numbers(master, "ha_elections_total"))["failover",] >= 1
    assert master.number("ha_failsafe") == 0


@pytest.mark.timeout(180)
def test_all_replicas_are_upgraded_one_after_the_other_and_nobody_notices(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path)
    try:
        master = group.master()
        others = [one for one in (1, 2, 3) if one != master]
        result = run_failovers(group, 3, fault="end", whom=[*others, master])
        led = (short_tmp_path / f"r{master}.log").read_text()
        leads = group.master()
        reports = group.admin.ha_status()
    finally:
        group.close()
    (told,) = [
        dict(numbers(one.metrics, "ha_elections_total")) for one in reports if not one.broker_id
    ]
    assert told == {("founding",): 0, ("failover",): 0, ("handed_over",): 1, ("unclean",): 0}
    assert (result.errors, result.lost, result.twice) == ([], [], [])
    assert len(result.acked) >= 210
    assert "to take over: the master is stopped" in led
    assert leads in others
    assert (
        "stands for election"
        not in "".join((short_tmp_path / f"r{one}.log").read_text() for one in others).partition(
            "leads epoch 2"
        )[2]
    ), "nobody had to"


def test_a_master_that_has_time_to_come_back_leads_again(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path, ha__restart_before_failover_ms="30000")
    try:
        master = group.master()
        group.replicas[master].kill()
        group.start(master)
        until(lambda: group.master() == master)
    finally:
        group.close()
    for one in {1, 2, 3} - {master}:
        assert "the leader's session has ended" not in (short_tmp_path / f"r{one}.log").read_text()


def is_created(admin: GroupAdmin, topic: str) -> bool:
    """Whether a topic can be created."""
    try:
        admin.create_topic(topic)
    except BrokerNotAvailable:
        return False
    return True


def test_what_too_few_replicas_would_keep_is_refused_before_anything_is_changed(short_tmp_path):
    group = ElectedGroup(short_tmp_path)
    try:
        master = group.master()
        followers = [one for one in (1, 2, 3) if one != master]
        group.admin.create_topic("t")
        with GroupAdmin(group.namesrv.endpoint) as admin:
            admin.create_group(GroupConfig("billing"))
        for one in followers:
            group.replicas[one].kill()
        until(lambda: group.in_sync() == [master])
        with GroupAdmin(group.namesrv.endpoint) as admin:
            for change in (
                lambda: admin.create_topic("u"),
                lambda: admin.delete_topic("t"),
                lambda: admin.create_group(GroupConfig("shipping")),
                lambda: admin.delete_group("billing"),
                lambda: admin.reset_offset("billing", "t", ResetWhere.LAST),
            ):
                with pytest.raises(BrokerNotAvailable, match="1 replicas are in sync, 2 must be"):
                    change()
            topics = {one.topic for one in admin.topic_configs()[GROUP]}
            assert "t" in topics
            assert "u" not in topics
            group.start(followers[0])
            # The master hears the follower a moment after the coordinator has it in the set.
            until(lambda: is_created(admin, "u"))
            assert len(group.in_sync()) == 2
    finally:
        group.close()


def test_without_a_coordinator_a_master_that_asks_nobody_goes_on_by_promises(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path, ha__ack_replicas="none", ha__min_in_sync_replicas="1")
    load = Load(group.namesrv.endpoint)

    def is_failsafe() -> bool:
        masters = (one for one in group.admin.ha_status() if one.broker_id == 0)
        return next(one.status.failsafe for one in masters)

    try:
        wait_acked(load, 10)
        master = group.master()
        group.coordinator.kill()
        until(is_failsafe)
        wait_acked(load, 50)
        group.start_coordinator()
        until(lambda: not is_failsafe())
        wait_acked(load, 10)
        assert group.master() == master
    finally:
        load.close()
        group.close()
    assert load.errors == []


def test_a_machine_that_is_gone_costs_a_pause_and_nothing_else():
    command = [sys.executable, "-P", "-m", "harness.failovers", "--fault", "link", "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 of them delivered, 0 twice, 0 errors" in done.stdout
