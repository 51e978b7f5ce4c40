"""Refusals are counted and told."""

from __future__ import annotations

from mqmesh.refusals import Refusals


def test_each_code_gets_one_line_with_its_number_and_last_remark():
    refusals = Refusals()
    refusals.note("SYSTEM_BUSY", "first")
    refusals.note("SYSTEM_BUSY", "second")
    refusals.note("DISK_FULL", "no room")
    assert refusals.take_lines() == [
        "refused with SYSTEM_BUSY: 2 (2 so far), the last: second",
        "refused with DISK_FULL: 1 (1 so far), the last: no room",
    ]
    assert refusals.take_lines() == []
    refusals.note("SYSTEM_BUSY", "third")
    assert refusals.take_lines() == ["refused with SYSTEM_BUSY: 1 (3 so far), the last: third"]
    assert refusals.counts == {"SYSTEM_BUSY": 3, "DISK_FULL": 1}
