"""Sides of the rows about a follower that catches up, alone and beside a load."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.protocol.replication import HaStatus
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.units import MIB
from rows.processes import BenchError, Child
from rows.replica_sides import Pair
from rows.sides import RUN_TIMEOUT_S, Conditions, Load, Sample, fill, measure_alone, new_crew
from rows.store_sides import wait_at_rest
from rows.workload import Report, Task, percentile

CAUGHT_UP_BYTES: Final = 16 * MIB
"""A follower that lacks no more is one like any other: so much may be on its way to it."""
BEFORE_S: Final = 20.0
"""How long the load is measured before the follower comes, at scale 1."""
ALONE_MESSAGES: Final = 200_000
"""By which is measured what a producer reaches alone."""
_LOOK_S: Final = 0.25


def product_catch_up(load: Load, conditions: Conditions) -> Sample:
    """A follower that has nothing gets a log; the value is in MB/s from when it serves."""
    with new_crew(conditions) as crew:
        pair = Pair(crew, load, conditions)
        count = fill(crew, pair, load, conditions, load.messages)
        before = pair.child.usage()
        follower = pair.start_follower()
        begin_s = time.monotonic()
        size = pair.wait_caught_up()
        taken_s = time.monotonic() - begin_s
        used_s = {
            "broker": pair.child.usage().cpu_s - before.cpu_s,
            "slave": follower.usage().cpu_s,
        }
        sample = Sample(
            value=size / taken_s / 1e6,
            message_count=count,
            cpu_s_per_million={name: used * 1e6 / count for name, used in used_s.items()},
            extra={"log_mib": size / MIB},
        )
        return pair.memory(sample)


def limit_catch_up(load: Load, conditions: Conditions) -> Sample:
    """As many bytes: read, sent by TCP, written; the value is in MB/s."""
    size = conditions.count(load.messages * load.body_bytes, MIB)
    with new_crew(conditions) as crew:
        reading = Task(
            kind="copy_log",
            address="tcp://127.0.0.1:*",
            folder=str(crew.folder),
            message_count=size,
        )
        reader = crew.limit(reading)
        writing = Task(
            kind="write_log",
            address=reader.wait_ready(),
            folder=str(crew.folder),
            log_bytes=size,
        )
        sample = measure_alone("producer", reader, crew.limit(writing), conditions)
        sample.value /= 1e6
        return sample


def product_catch_up_loaded(load: Load, conditions: Conditions, *, cold: bool = False) -> Sample:
    """A follower that was away gets what was stored meanwhile, and a producer goes on.

    The producer sends half of what it reached without a follower. The value is what the follower
    adds, in MiB/s, from when it serves until it lacks no more than what is on its way.

    Args:
        load: The messages that are stored while it is away.
        conditions: Of the call.
        cold: Nothing of the log is in memory when it comes back.
    """
    with new_crew(conditions) as crew:
        pair = Pair(crew, load, conditions)
        pair.start_follower().stop()
        count = fill(crew, pair, load, conditions, load.messages)
        alone = msgspec.structs.replace(load, messages=ALONE_MESSAGES, window=64)
        singles = crew.client(alone.task("produce_singles", pair.namesrv, conditions))
        capacity = measure_alone("producer", singles, pair.child, conditions).value
        wait_at_rest(pair)
        if cold:
            _forget_pages(crew.folder / "broker" / "commitlog")
        task = load.task("produce_steady", pair.namesrv, conditions)
        task.rate = max(int(capacity / 2), 1)
        before = _Phase(crew.client(task), pair.child)
        before.begin()
        ends_s = time.monotonic() + max(BEFORE_S * conditions.scale, 1.0)
        before.run(lambda: time.monotonic() > ends_s)
        during = _Phase(crew.client(task), pair.child)
        during.begin()
        follower = pair.start_follower()
        lag = _Lag(pair)
        used_s = follower.usage().cpu_s
        during.run(lag.is_over)
        used_s = follower.usage().cpu_s - used_s
        return _sample(before, during, lag, used_s, count, capacity)


class _Lag:
    """How far a follower is behind, and since when it has not been."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.begin_s = time.monotonic()
        self.taken_s = 0.0
        self.first: HaStatus | None = None
        self.last: HaStatus | None = None

    def is_over(self) -> bool:
        """Looks at the master; True once the follower has caught up.

        Raises:
            BenchError: It takes too long.
        """
        self.taken_s = time.monotonic() - self.begin_s
        if self.taken_s > RUN_TIMEOUT_S:
            raise BenchError(f"the follower does not catch up in {RUN_TIMEOUT_S:.0f} s")
        with HaAdmin(self._pair.namesrv) as admin:
            statuses = [one.status for one in admin.ha_status() if one.broker_id == 0]
        status = statuses[0] if statuses else None
        if status is None or not status.replicas:
            return False
        self.first = self.first or status
        self.last = status
        return status.log_end - status.replicas[0].written <= CAUGHT_UP_BYTES


class _Phase:
    """A producer with a steady load, and what the master needs beside."""

    def __init__(self, producer: Child, master: Child) -> None:
        self._producer, self._master = producer, master
        self.seconds = self.master_cpu_s = 0.0
        self.most_private_bytes = 0
        self.report = Report(message_count=0, begin_s=0, end_s=0, cpu_s=0)

    def begin(self) -> None:
        """The load begins."""
        self._producer.wait_ready()
        self._producer.go()

    def run(self, is_over: Callable[[], bool]) -> None:
        """The load goes on until that."""
        begin_s, before = time.monotonic(), self._master.usage()
        while not is_over():
            self._look()
            time.sleep(_LOOK_S)
        self._look()
        self.seconds = time.monotonic() - begin_s
        self.master_cpu_s = self._master.usage().cpu_s - before.cpu_s
        self._producer.enough()
        self.report = self._producer.wait_report(RUN_TIMEOUT_S)
        self._producer.stop()

    def _look(self) -> None:
        self.most_private_bytes = max(self.most_private_bytes, self._master.usage().private_bytes)


def _sample(
    before: _Phase, during: _Phase, lag: _Lag, follower_cpu_s: float, count: int, capacity: float
) -> Sample:
    assert lag.first is not None
    assert lag.last is not None
    missing = lag.first.log_end - lag.first.replicas[0].written
    added = lag.last.replicas[0].written - lag.first.replicas[0].written
    extra = {
        "lag_mib": missing / MIB,
        "caught_up_s": lag.taken_s,
        "alone_msg_s": capacity,
        "load_ratio": during.report.rate / before.report.rate,
        "master_growth_mib": (during.most_private_bytes - before.most_private_bytes) / MIB,
        "master_private_mib": during.most_private_bytes / MIB,
        "slave_cpu_percent": follower_cpu_s / during.seconds * 100,
    }
    for name, phase in (("before", before), ("during", during)):
        extra[f"{name}_msg_s"] = phase.report.rate
        extra[f"{name}_master_cpu_percent"] = phase.master_cpu_s / phase.seconds * 100
        for percent in (50.0, 99.0, 100.0):
            value = percentile(phase.report.latencies_us, percent)
            extra[f"{name}_p{percent:g}_us"] = value
    return Sample(value=added / MIB / lag.taken_s, message_count=count, extra=extra)


def _forget_pages(folder: Path) -> None:
    """Takes what is on the disk out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
