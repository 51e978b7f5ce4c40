"""Metrics of `mqmesh up`: its processes, how often they were started again, and why they ended.

The supervisor has no port that could be queried. Its values are in the run file, so a process that
can read that file reads its metrics; see ``read_record``.
"""

from collections import Counter
from typing import Final

import msgspec

from mqmesh.metrics import LabelValues, Measured, MetricBoard, MetricReading, counter, gauge
from mqmesh.roles.supervisor.run_file import RunRecord


class Supervised(msgspec.Struct, frozen=True):
    """A running cluster at a moment.

    Attributes:
        record: Run file that its supervisor wrote.
        now_ms: Wall clock.
    """

    record: RunRecord
    now_ms: int


def _by_state(cluster: Supervised) -> dict[LabelValues, int]:
    return {(state,): n for state, n in Counter(o.state for o in cluster.record.roles).items()}


def _restarts(cluster: Supervised) -> dict[LabelValues, int]:
    return {(one.role, one.name): one.restarts for one in cluster.record.roles}


def _exits(cluster: Supervised) -> dict[LabelValues, int]:
    return {
        (one.role, one.name, reason): count
        for one in cluster.record.roles
        for reason, count in one.exits.items()
    }


def _lived_ms(cluster: Supervised) -> dict[LabelValues, int]:
    return {
        (one.role, one.name): max(cluster.now_ms - one.started_ms, 0) if one.pid else 0
        for one in cluster.record.roles
    }


METRICS: Final[tuple[Measured[Supervised], ...]] = (
    gauge(
        "supervisor_uptime_ms",
        "since mqmesh up was started",
        lambda cluster: max(cluster.now_ms - cluster.record.started_ms, 0),
    ),
    gauge("supervisor_children", "processes, by what they are", _by_state, labels=("state",)),
    gauge(
        "child_uptime_ms",
        "since a process was started; 0 while there is none",
        _lived_ms,
        labels=("role", "name"),
    ),
    counter(
        "child_restarts_total", "starts again of a process", _restarts, labels=("role", "name")
    ),
    counter(
        "child_exits_total",
        "ends of a process that was not asked to stop",
        _exits,
        labels=("role", "name", "reason"),
    ),
)


def read_metrics(record: RunRecord, now_ms: int) -> list[MetricReading]:
    """Return the metrics of a supervisor.

    Args:
        record: Run file of the supervisor.
        now_ms: Wall clock.
    """
    board = MetricBoard()
    board.add(METRICS, lambda: Supervised(record, now_ms))
    return board.read()
