"""Sides of the rows about the store: index, look-ups, restarts."""

import random
import time
from typing import Final

from mqmesh.metrics import Readings
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.units import MIB
from rows.processes import BenchError
from rows.sides import (
    Cluster,
    Conditions,
    Load,
    Sample,
    fill,
    measure_alone,
    new_crew,
    product_produce,
)
from rows.workload import TOPIC, make_keys, percentile

LOOKUPS: Final = 500
INDEX_TIMEOUT_S: Final = 300.0
"""How long an index may take to have everything."""
_LOOK_S: Final = 0.02
_REST_S: Final = 0.5
_REST_SHARE: Final = 0.05
"""A broker that uses less of a processor has nothing to do."""


def product_indexed(load: Load, conditions: Conditions) -> Sample:
    """A producer alone, and how far the index is behind when the last message is stored."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        task = load.task("produce_batches", cluster.namesrv, conditions)
        sample = measure_alone("producer", crew.client(task), cluster.child, conditions)
        begin_s = time.monotonic()
        figures = _figures(cluster)
        sample.extra["index_lag_ms"] = figures.number("index_lag_ms")
        sample.extra["index_lag_mib"] = figures.number("index_lag_bytes") / MIB
        wait_indexed(cluster)
        sample.extra["index_catch_up_ms"] = (time.monotonic() - begin_s) * 1_000
        return cluster.memory(sample)


def product_backlog(load: Load, conditions: Conditions, *, elsewhere: bool = False) -> Sample:
    """A producer alone, beside a backlog; the store is at rest when it begins.

    Args:
        load: With a backlog.
        conditions: Of the call.
        elsewhere: The backlog lies in another store, which is stopped, on the same disk. It
            fills the page cache as much: in a virtual machine, pages that the host must give
            first cost more than everything else, whatever is in them.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        before = fill(crew, cluster, load, conditions, load.backlog)
        wait_at_rest(cluster)
        if elsewhere:
            cluster.child.stop()
            return product_produce("produce_batches", load, conditions)
        task = load.task("produce_batches", cluster.namesrv, conditions)
        sample = measure_alone("producer", crew.client(task), cluster.child, conditions)
        cluster.check_stored(sample.message_count + before)
        return cluster.memory(sample)


def product_lookup(load: Load, conditions: Conditions) -> Sample:
    """Looks up messages by key, anywhere in the log; the value is the 99th percentile in us."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        count = fill(crew, cluster, load, conditions, load.messages)
        wait_indexed(cluster, at_rest=True)
        chance = random.Random(count)
        latencies_us = []
        with QueryClient(cluster.namesrv) as queries:
            for _ in range(LOOKUPS):
                key = make_keys(chance.randrange(count), load.keys)[-1]
                begin_ns = time.perf_counter_ns()
                found = queries.by_key(TOPIC, key)
                latencies_us.append((time.perf_counter_ns() - begin_ns) / 1_000)
                if [key in message.keys for message in found.messages] != [True] or found.notes:
                    raise BenchError(f"key {key}: {len(found.messages)} messages, {found.notes}")
        sample = Sample(value=percentile(latencies_us, 99.0), message_count=count)
        for percent in (50.0, 99.0, 100.0):
            sample.extra[f"p{percent:g}_us"] = percentile(latencies_us, percent)
        sample.extra["index_disk_mib"] = _figures(cluster).number("index_disk_bytes") / MIB
        return cluster.memory(sample)


def product_restart(load: Load, conditions: Conditions, *, kill: bool) -> Sample:
    """Fills a store, ends the broker, and starts it again; the value is the start in ms."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        count = fill(crew, cluster, load, conditions, load.messages)
        begin_s = time.monotonic()
        if kill:
            cluster.child.kill()
        else:
            cluster.child.stop()
        stop_ms = (time.monotonic() - begin_s) * 1_000
        start_ms = cluster.restart() * 1_000
        cluster.check_stored(count)
        sample = Sample(value=start_ms, message_count=count, extra={"stop_ms": stop_ms})
        return cluster.memory(sample)


def wait_indexed(cluster: Cluster, *, at_rest: bool = False) -> None:
    """Waits until the index has everything.

    Args:
        cluster: Its broker's index.
        at_rest: Also until it is sorted and merged, and the parts of full segments are sealed.

    Raises:
        BenchError: That took longer than ``INDEX_TIMEOUT_S``.
    """
    deadline_s = time.monotonic() + INDEX_TIMEOUT_S
    while not _is_indexed(_figures(cluster), at_rest=at_rest):
        if time.monotonic() > deadline_s:
            raise BenchError(f"the index is not complete after {INDEX_TIMEOUT_S:.0f} s")
        time.sleep(_LOOK_S)


def wait_at_rest(cluster: Cluster) -> None:
    """Waits until the index is at rest, and what was stored before is written and synced.

    Raises:
        BenchError: That took longer than ``INDEX_TIMEOUT_S``.
    """
    wait_indexed(cluster, at_rest=True)
    deadline_s = time.monotonic() + INDEX_TIMEOUT_S
    while True:
        before = cluster.child.usage().cpu_s
        time.sleep(_REST_S)
        used_s = cluster.child.usage().cpu_s - before
        written = not _figures(cluster).number("store_unwritten_queue_bytes")
        if written and used_s < _REST_SHARE * _REST_S:
            return
        if time.monotonic() > deadline_s:
            raise BenchError(f"the broker has no rest after {INDEX_TIMEOUT_S:.0f} s")


def _is_indexed(figures: Readings, *, at_rest: bool) -> bool:
    # A broker whose index is off has neither figure.
    return not figures.number("index_lag_bytes", default=0) and (
        not at_rest or bool(figures.number("index_at_rest", default=0))
    )


def _figures(cluster: Cluster) -> Readings:
    with AdminClient(cluster.namesrv) as admin:
        (figures,) = admin.runtime_info().values()
    return figures
