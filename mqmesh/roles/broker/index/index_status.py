"""How the index of a broker is, as far as the broker knows; and its figures."""

from typing import Final

import msgspec

from mqmesh.figures import Measured, counter, gauge, text
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
        progress: What it said last.
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
"""Told also where there is no index."""

INDEX_FIGURES: Final[tuple[Measured[IndexStatus], ...]] = (
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
        unit="bytes",
        metric="rocketmq_storage_dispatch_behind_bytes",
    ),
    gauge(
        "index_lag_ms", "how far the index is behind the log", lambda index: index.lag_ms, unit="ms"
    ),
    gauge(
        "index_missing_bytes",
        "bytes of the log that a query would not search",
        lambda index: index.progress.missing_bytes,
        unit="bytes",
    ),
    gauge(
        "index_segments", "segments of the log with an index", lambda index: index.progress.segments
    ),
    gauge(
        "index_sealed_segments",
        "of them, segments whose index is finished",
        lambda index: index.progress.sealed,
    ),
    gauge(
        "index_unsorted_texts",
        "stretches of keys that are not sorted yet",
        lambda index: index.progress.texts,
    ),
    gauge(
        "index_at_rest",
        "everything is indexed, sorted and merged",
        lambda index: index.progress.at_rest,
    ),
    gauge(
        "index_disk_bytes",
        "size of the index",
        lambda index: index.progress.disk_bytes,
        unit="bytes",
    ),
    counter(
        "index_discarded_total",
        "parts of the index made anew",
        lambda index: index.progress.discarded,
    ),
    counter(
        "index_skipped_bytes_total",
        "damaged bytes of the log that were passed over",
        lambda index: index.progress.skipped_bytes,
        unit="bytes",
    ),
    counter(
        "index_queries_total", "queries that were answered", lambda index: index.progress.queries
    ),
    counter("index_query_refusals_total", "queries that were refused", lambda index: index.refused),
    counter(
        "index_mismatches_total",
        "places where the log had nothing of what the index said",
        lambda index: index.progress.mismatches,
    ),
)
