"""Metrics of a store, whichever backend it has, and of its index.

An index is measured by its process; the broker gives the values of the process's last report.
"""

from typing import Final

from mqmesh.metrics import Measured, counter, gauge, text
from mqmesh.protocol.queries import IndexProgress
from mqmesh.storage.interface import StoreStats

STORE_METRICS: Final[tuple[Measured[StoreStats], ...]] = (
    text("store_backend", "which kind of store", lambda store: store.backend),
    text(
        "store_store_id", "identity of the store, in every batch", lambda store: str(store.store_id)
    ),
    gauge(
        "store_disk_bytes",
        "what its files take, room taken ahead included",
        lambda store: store.disk_bytes,
        rocketmq_name="rocketmq_storage_size_bytes",
    ),
    gauge("store_segments", "files of the log", lambda store: store.segments),
    gauge(
        "store_min_commitlog_offset",
        "where the oldest stored batch may begin",
        lambda store: store.min_commitlog_offset,
        unit="bytes",
    ),
    gauge(
        "store_oldest_timestamp",
        "wall clock where the log begins; 0 for unknown",
        lambda store: store.oldest_timestamp,
        unit="ms",
    ),
    gauge(
        "store_max_commitlog_offset",
        "where the next batch will begin",
        lambda store: store.max_commitlog_offset,
        unit="bytes",
    ),
    gauge(
        "store_durable_offset",
        "synced through to here",
        lambda store: store.durable_offset,
        unit="bytes",
    ),
    gauge(
        "store_flush_behind_bytes",
        "bytes of the log that are not synced yet",
        lambda store: store.max_commitlog_offset - store.durable_offset,
        rocketmq_name="rocketmq_storage_flush_behind_bytes",
    ),
    gauge("store_topics", "topics with a queue", lambda store: store.topics),
    gauge("store_queues", "message queues", lambda store: store.queues),
    counter(
        "store_put_batches",
        "batches stored since it was opened",
        lambda store: store.put_batches,
        unit="batches",
    ),
    counter(
        "store_put_messages", "messages in them", lambda store: store.put_messages, unit="messages"
    ),
    counter(
        "store_duplicates",
        "batches answered as stored before",
        lambda store: store.duplicates,
        unit="batches",
    ),
    gauge(
        "store_unwritten_queue_bytes",
        "entries of queues that are only in memory",
        lambda store: store.unwritten_queue_bytes,
    ),
    counter("store_flushes", "syncs of the log", lambda store: store.flushes),
    counter(
        "store_flush_errors",
        "syncs that failed; the store stops at the first",
        lambda store: store.flush_errors,
    ),
    gauge("store_epoch", "grows whenever a tail is cut", lambda store: store.epoch),
    gauge(
        "store_started_clean",
        "whether the last stop was an orderly one",
        lambda store: store.started_clean,
    ),
    gauge(
        "store_recovered_bytes",
        "bytes of the log that the start checked",
        lambda store: store.recovered_bytes,
    ),
    gauge(
        "store_cut_bytes",
        "bytes of a torn tail that the start cut off",
        lambda store: store.cut_bytes,
    ),
    gauge(
        "store_damaged",
        "ranges of the log that are lost to damage",
        lambda store: len(store.damaged),
    ),
    gauge("store_writable", "whether it still writes", lambda store: store.writable),
    gauge(
        "store_disk_used_percent",
        "how full the disk is",
        lambda store: store.disk_used_percent,
        unit="percent",
    ),
    gauge("store_disk_full", "whether sends are refused for that", lambda store: store.disk_full),
    counter(
        "store_deleted_segments",
        "segments that retention removed",
        lambda store: store.deleted_segments,
    ),
    counter("store_deleted_bytes", "their size", lambda store: store.deleted_bytes),
    counter(
        "store_forcibly_deleted_segments",
        "of them, segments removed before their time",
        lambda store: store.forcibly_deleted_segments,
    ),
    counter("store_clock_jumps", "leaps of the wall clock", lambda store: store.clock_jumps),
    gauge("store_mapped_bytes", "size of the mapped segments", lambda store: store.mapped_bytes),
    gauge(
        "store_log_views",
        "answers that are being sent out of mapped segments",
        lambda store: store.log_views,
    ),
    gauge(
        "store_held_bytes",
        "removed segments whose room such answers keep",
        lambda store: store.held_bytes,
    ),
)

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
