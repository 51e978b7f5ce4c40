"""Metrics of `mqmesh up`, read from its run file."""

from __future__ import annotations

from mqmesh.metrics import Readings
from mqmesh.roles.supervisor.run_file import RoleEntry, RunRecord
from mqmesh.roles.supervisor.supervisor_metrics import read_metrics

ENDED = {"killed by SIGKILL": 2, "exit code 1": 1}


def test_they_tell_how_the_processes_are():
    roles = [
        RoleEntry(role="broker", name="a", pid=8, state="running", started_ms=4_000),
        RoleEntry(role="broker", name="b", state="waiting", started_ms=1, restarts=3, exits=ENDED),
        RoleEntry(role="namesrv", name="n", pid=9, state="running", started_ms=9_000),
    ]
    told = Readings(
        read_metrics(RunRecord(pid=7, started_ms=1_000, namesrv="", roles=roles), 6_000)
    )
    assert told["supervisor_uptime_ms"] == 5_000
    assert told.number("supervisor_children", "running") == 2
    assert told.number("supervisor_children", "waiting") == 1
    lived = [told.number("child_uptime_ms", one.role, one.name) for one in roles]
    assert lived == [2_000, 0, 0], "a clock that went back makes no age negative"
    assert told.number("child_restarts_total", "broker", "b") == 3
    for reason, count in ENDED.items():
        assert told.number("child_exits_total", "broker", "b", reason) == count
