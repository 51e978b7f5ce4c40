"""Replicas that elect their master, as real processes: what clients see when he dies."""

from __future__ import annotations

from pathlib import Path

from harness.failovers import ElectedGroup, run_failovers


def test_a_master_that_is_killed_costs_a_pause_and_nothing_else(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path)
    try:
        result = run_failovers(group, 2)
    finally:
        group.close()
    assert result.errors == []
    assert (result.lost, result.twice) == ([], [])
    assert result.acked >= 140
