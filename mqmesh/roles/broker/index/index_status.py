"""Status of a broker's index, as far as the broker knows; and its metrics."""

from typing import Final

import msgspec

from mqmesh.metrics import Measured, counter, gauge, text
from mqmesh.protocol.queries import IndexProgress


class IndexStatus(msgspec.Struct, frozen=True):
    """The index process and its work.

    Attributes:
        state: ``running``, ``down``, ``off``, or ``waiting:`` and for what.
        pid: Of the process, 0 while there is none.
        starts: How often it was started.
        lag_bytes: How far it is behind the log.
        lag_ms: The same as time.
        refused: Queries that were refused.
        progress: Last report of the process.
    """

    state: str = "off"
    pid: int = 0
    starts: int = 0
    lag_bytes: int = 0
    lag_ms: int = 0
    refused: int = 0
    progress: IndexProgress = IndexProgress()


INDEX_STATE: Final[Measured[IndexStatus]] = text(
    "index_state",
    "of the index process: running, down, off, or why it waits",
    lambda index: index.state,
)
"""Metrics that are there without an index, too."""

INDEX_PROCESS_METRICS: Final[tuple[Measured[IndexStatus], ...]] = (
    gauge(
        "index_pid",
        "process id of the index process, 0 while there is none",
        lambda index: index.pid,
    ),
    counter(
        "index_starts_total", "how often the index process was started", lambda index: index.starts
    ),
    gauge(
        "index_lag_bytes",
        "how far the index is behind the log",
        lambda index: index.lag_bytes,
        rocketmq_name="rocketmq_storage_dispatch_behind_bytes",
    ),
    gauge("index_lag_ms", "how far the index is behind the log", lambda index: index.lag_ms),
    counter("index_query_refusals_total", "queries that were refused", lambda index: index.refused),
)
