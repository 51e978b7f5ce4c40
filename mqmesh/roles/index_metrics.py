"""Metrics of an index: as its process reports them, and its broker by the last report."""

from typing import Final

from mqmesh.metrics import Measured, counter, gauge
from mqmesh.protocol.queries import IndexProgress

INDEX_METRICS: Final[tuple[Measured[IndexProgress], ...]] = (
    gauge(
        "index_missing_bytes",
        "bytes of the log that a query would not search",
        lambda index: index.missing_bytes,
    ),
    gauge("index_segments", "segments of the log with an index", lambda index: index.segments),
    gauge(
        "index_sealed_segments",
        "of them, segments whose index is finished",
        lambda index: index.sealed,
    ),
    gauge(
        "index_unsorted_texts",
        "stretches of keys that are not sorted yet: until then a look-up takes tens of ms",
        lambda index: index.texts,
    ),
    gauge(
        "index_at_rest",
        "everything is indexed, sorted and merged",
        lambda index: index.at_rest,
    ),
    gauge("index_disk_bytes", "size of the index", lambda index: index.disk_bytes),
    counter(
        "index_discarded_total",
        "parts of the index made anew",
        lambda index: index.discarded,
    ),
    counter(
        "index_skipped_bytes_total",
        "damaged bytes of the log that were passed over",
        lambda index: index.skipped_bytes,
    ),
    counter("index_queries_total", "queries that were answered", lambda index: index.queries),
    counter(
        "index_mismatches_total",
        "places where the log had nothing of what the index said",
        lambda index: index.mismatches,
    ),
    counter("index_batches_total", "batches that were indexed", lambda index: index.batches),
)
