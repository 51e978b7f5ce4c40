"""The short form of ``scripts/chaos --ha``: faults of groups that elect their master."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness.ha_matrix import all_cells, pairwise


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "cell",
    [
        "master:cut-in:all:SYNC_FLUSH",
        "master:cut-out-replicas:quorum:ASYNC_FLUSH",
        "master:sync-fails:one:SYNC_FLUSH",
        "slave:wiped:quorum:ASYNC_FLUSH",
        "master+coordinator:kill:none:ASYNC_FLUSH",
        "all:power:all:SYNC_FLUSH",
        "all:power:all:ASYNC_FLUSH",
    ],
)
def test_a_cell_holds(cell):
    command = [sys.executable, "-P", "-m", "harness.ha_matrix", "--cell", cell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout + done.stderr


def test_few_cells_have_each_pair_of_their_parts():
    cells = pairwise(1)
    assert len(cells) < len(all_cells()) / 4
    assert {(cell.fault, cell.mode) for cell in cells} == {
        (cell.fault, cell.mode) for cell in all_cells()
    }
