"""Tables while the broker is killed, and while the log is turned over.

Broken when:

* K1: a counter that many increment by its revision is not what they were acknowledged;
* K2: two increments expected the same revision of a counter, or got the same revision;
* K3: a watch misses a revision that was acknowledged, or has revisions of a key out of order;
* K4: a key has another value than its last writer was acknowledged, or a deleted one has one;
* K5: more was carried than 1.3 times what is live, for each time that the log was turned over.
"""

import os
import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final

from harness.chaos_scene import UpCluster
from harness.checker import Report, Verdict
from harness.patience import until
from harness.replica_group import SEGMENT_BYTES, Group
from mqmesh import KeyValue, KvEntry, RevisionConflict
from mqmesh.errors import SystemBusy
from mqmesh.protocol.admin import CleanRequest, CleanResult
from mqmesh.protocol.commands import RequestCode

TABLE: Final = "counters"
WRITERS: Final = 64
COUNTERS: Final = 8
LOAD_S: Final = (0.2, 0.8)
KILLS_A_LIFE: Final = 4
"""After so many kills all is stopped and started again, so that the supervisor does not wait."""
PATIENCE_MS: Final = 60_000
"""Longer than any restart, so that no outcome stays unknown."""

CARRY_KEYS: Final = 2_000
CARRY_KEYS_LONG: Final = 100_000
"""Live keys of a run with ``LONG`` rounds and more."""
LONG: Final = 10
VALUE_BYTES: Final = 600
ROOM: Final = 8
"""The log is turned over when so many times the live bytes were written."""
LONG_AGO_S: Final = 100 * 3_600
CLEANING_S: Final = 600.0
"""A pass of retention removes some ten segments, and begins every few seconds."""


class _Writers:
    """Threads that increment counters, each by its revision.

    Args:
        namesrv_addr: Name server.
        seed: Of their choices.
    """

    def __init__(self, namesrv_addr: str, seed: int) -> None:
        self.acked: Counter[str] = Counter()
        self.revisions: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.conflicts = 0
        self.failures: list[str] = []
        self._namesrv_addr = namesrv_addr
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed * WRITERS + number),))
            for number in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them, each behind the increment that it is at."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        try:
            with KeyValue(TABLE, self._namesrv_addr, patience_ms=PATIENCE_MS) as kv:
                while not self._stopping.is_set():
                    self._increment(kv, f"counter-{chance.randrange(COUNTERS)}")
        except Exception as error:  # a writer that ends would be missed in the sum only
            with self._lock:
                self.failures.append(f"a writer ended: {type(error).__name__}: {error}")

    def _increment(self, kv: KeyValue, key: str) -> None:
        entry = kv.get(key)
        expected = entry.revision if entry is not None else 0
        value = int(entry.value) if entry is not None else 0
        try:
            revision = kv.update(key, b"%d" % (value + 1), revision=expected)
        except RevisionConflict:
            with self._lock:
                self.conflicts += 1
            return
        with self._lock:
            self.acked[key] += 1
            self.revisions[key].append((expected, revision))


def run_table_rounds(
    folder: Path, seed: int, rounds: int, settings: dict[str, str]
) -> tuple[Report, dict[str, float]]:
    """Kills the broker while counters are incremented; returns the judgement and measured values.

    Args:
        folder: For data.
        seed: Of all random choices.
        rounds: Kills.
        settings: Of the broker.
    """
    chance = random.Random(seed)
    seen: list[KvEntry] = []
    with UpCluster(folder / "data", settings) as cluster:
        kv = KeyValue(TABLE, cluster.namesrv_addr, create=True, patience_ms=PATIENCE_MS)
        with kv:
            watch = threading.Thread(target=lambda: seen.extend(kv.watch()))
            watch.start()
            writers = _Writers(cluster.namesrv_addr, seed)
            try:
                for number in range(rounds):
                    if number and number % KILLS_A_LIFE == 0:
                        cluster.restart()
                    time.sleep(chance.uniform(*LOAD_S))
                    cluster.kill_broker()
                    cluster.wait_killed()
                    cluster.wait_ready()
                    acked = writers.acked.total()
                    until(lambda: writers.acked.total() > acked)  # noqa: B023
            finally:
                writers.stop()
            found = {key: int(one.value) for key, one in kv.get_many(writers.acked).items()}
            newest = max(revision for some in writers.revisions.values() for _, revision in some)
            until(lambda: bool(seen) and max(one.revision for one in seen[-100:]) >= newest)
            kv.close()
            watch.join()
    broken = {
        "K1": [
            f"{key} is {found.get(key)}, and {count} increments were acknowledged"
            for key, count in writers.acked.items()
            if found.get(key) != count
        ]
        + writers.failures,
        "K2": _doubles(writers),
        "K3": _missed(writers, seen),
    }
    counts = {"acked": writers.acked.total(), "conflicts": writers.conflicts, "seen": len(seen)}
    report = Report([Verdict(name, problems) for name, problems in broken.items()], counts)
    return report, {"kills": rounds, "increments": writers.acked.total()}


def _doubles(writers: _Writers) -> list[str]:
    found = []
    for key, some in writers.revisions.items():
        for what, numbers in (
            ("expected revision", [expected for expected, _ in some]),
            ("outcome", [revision for _, revision in some]),
        ):
            found += [
                f"revision {number} of {key} is the {what} of {count} increments"
                for number, count in Counter(numbers).items()
                if count > 1
            ]
    return found


def _missed(writers: _Writers, seen: list[KvEntry]) -> list[str]:
    found = []
    revisions: defaultdict[str, list[int]] = defaultdict(list)
    for one in seen:
        revisions[one.key].append(one.revision)
    for key, some in writers.revisions.items():
        got = revisions[key]
        if got != sorted(got):
            found.append(f"revisions of {key} came out of order")
        missed = {revision for _, revision in some if revision >= got[0]} - set(got)
        found += [f"revision {one} of {key} was not seen" for one in sorted(missed)]
    return found


def run_carry_rounds(folder: Path, seed: int, rounds: int) -> tuple[Report, dict[str, float]]:
    """Turns the log of a master over, and makes a new replica the master then.

    Args:
        folder: For data.
        seed: Of all random choices.
        rounds: How often the log is turned over.
    """
    chance = random.Random(seed)
    count = CARRY_KEYS_LONG if rounds >= LONG else CARRY_KEYS
    wanted: dict[str, bytes | None] = {}
    group = Group(folder)
    try:
        group.start(0)
        with KeyValue(TABLE, group.namesrv.endpoint, create=True, patience_ms=PATIENCE_MS) as kv:
            keys = [f"key/{number:08}" for number in range(count)]
            _write(kv, {key: chance.randbytes(VALUE_BYTES) for key in keys}, wanted)
            segments = folder / "r0" / "commitlog"
            readings = _readings(group)
            began = readings["log"]
            for _ in range(rounds):
                goal = readings["log"] + ROOM * readings["live"]
                while readings["log"] < goal:
                    some = chance.sample(keys, 20)
                    _write(kv, {key: chance.randbytes(VALUE_BYTES) for key in some}, wanted)
                    gone = chance.choice(keys)
                    kv.delete(gone)
                    wanted[gone] = None
                    for number in range(10):
                        _write(kv, {f"filler-{number % 3}": chance.randbytes(200_000)}, wanted)
                    readings = _readings(group)
                _turn_over(group, segments)
            turns = (readings["log"] - began) / (ROOM * readings["live"])
            readings = _readings(group)
            carried = readings["carried"] / (readings["live"] * turns)
            lost = _wrong(kv, wanted)
        _promote_a_new_one(group)
        with KeyValue(TABLE, group.namesrv.endpoint, patience_ms=PATIENCE_MS) as kv:
            lost += _wrong(kv, wanted)
    finally:
        group.close()
    much = [f"{carried:.2f} times the live bytes were carried a turn"] if carried > 1.3 else []
    counts = {"acked": len(wanted), "live": sum(one is not None for one in wanted.values())}
    report = Report([Verdict("K4", lost), Verdict("K5", much)], counts)
    return report, {"turns": turns, "carried a turn": carried, "live": readings["live"]}


def _write(kv: KeyValue, values: dict[str, bytes], wanted: dict[str, bytes | None]) -> None:
    kv.put_many(values)
    wanted.update(values)


def _wrong(kv: KeyValue, wanted: dict[str, bytes | None]) -> list[str]:
    found = kv.get_many(wanted)
    return [
        f"{key} has another value than was written last"
        for key, value in wanted.items()
        if (found[key].value if key in found else None) != value
    ]


def _readings(group: Group) -> dict[str, float]:
    (readings,) = group.admin.runtime_info().values()
    return {
        "log": float(readings.number("store_max_commitlog_offset")),
        "live": float(readings.number("table_live_bytes", TABLE)),
        "carried": float(readings.number("table_carried_bytes_total")),
    }


def _turn_over(group: Group, segments: Path) -> None:
    """Have retention remove all full segments; what is carried stands behind them."""
    began = int(_readings(group)["log"]) // SEGMENT_BYTES * SEGMENT_BYTES
    long_ago = time.time() - LONG_AGO_S

    def is_gone() -> bool:
        # Each time: the system gives a mapped file the time when it writes the last pages.
        for path in segments.iterdir():
            if path.name.isdigit() and int(path.name) < began:
                with suppress(FileNotFoundError):
                    os.utime(path, (long_ago, long_ago))
        code = RequestCode.DELETE_EXPIRED_COMMITLOG
        with suppress(SystemBusy):
            group.admin.ask_masters(code, CleanRequest(), CleanResult)
        (found,) = group.admin.runtime_info().values()
        return found.number("store_min_commitlog_offset") >= began

    until(is_gone, CLEANING_S)


def _promote_a_new_one(group: Group) -> None:
    group.start(1, group.endpoints[0])
    until(group.is_caught_up)
    group.replicas[0].stop()
    group.admin.promote("broker-a", 1)
    until(lambda: TABLE in group.admin.topics())
