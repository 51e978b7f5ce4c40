"""Replicas that elect their master, as real processes: what clients see when he dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.failovers import ElectedGroup, run_failovers

from mqmesh.figures import Readings


def test_a_master_that_is_killed_costs_a_pause_and_nothing_else(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path)
    try:
        result = run_failovers(group, 2)
        reports = group.admin.ha_status()
    finally:
        group.close()
    assert result.errors == []
    assert (result.lost, result.twice) == ([], [])
    assert len(result.acked) >= 140
    master = Readings(next(one for one in reports if one.broker_id == 0).figures)
    assert 0 < master.number("ha_failover_ms") < 30_000
    assert master.number("ha_set_changes_total") >= 1, "who was killed left the set"
    assert master.number("ha_failsafe") == 0


def test_a_machine_that_is_gone_costs_a_pause_and_nothing_else():
    command = [sys.executable, "-P", "-m", "harness.failovers", "--fault", "link", "--count", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 of them delivered, 0 twice, 0 errors" in done.stdout
