"""All the way: flights through a cluster, snapshots while they arrive, ingests that are killed.

Small by itself; ``pytest tests/spark/test_flights_killed.py --archive-flights 336776
--archive-kills 30`` is the long form, with more flights and kills. Both engines write to one table
in turn; each kill finds a snapshot that is not in it yet.
"""

from __future__ import annotations

import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from harness.archives import EachOnce

from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.spark import tables
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import query, verify
from mqmesh.storage.tools.snapshot_reading import Snapshot
from mqmesh.testing.processes import ProcessCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(14_400),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BATCH = 200
ENGINES = ("spark", "local")
START_TIMEOUT_S = 180.0
DONE_TIMEOUT_S = 1_800.0
"""For all flights, on a machine that has other work."""
SETTINGS = {"storage.mapped_file_size_commit_log": str(4 << 20), "snapshot.keep": "0"}

# Says when its engine is there, ingests one snapshot for each line of its input, says how it went.
WORKER = """
import sys
archive, engine = sys.argv[1:]
from mqmesh.spark.ingest import ingest
from mqmesh.spark.session import session
spark = session(memory="1g", cores=1, is_short=True) if engine == "spark" else None
print("ready", flush=True)
for line in sys.stdin:
    report = ingest(spark, line.strip(), archive)
    print("done", report.to_offset - report.from_offset, flush=True)
"""


class Worker:
    """A process with an engine of its own, with whose Java it is one process group."""

    def __init__(self, archive: str, engine: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, archive, engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.expect(START_TIMEOUT_S) == "ready"

    def begin(self, path) -> None:
        """Has it ingest a snapshot."""
        self.process.stdin.write(f"{path}\n".encode())
        self.process.stdin.flush()

    def expect(self, timeout_s: float) -> str:
        """What it says within some time; empty if it says nothing, or has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return ""
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """Ends it and its Java as a crash would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def flights_module(project_root):
    sys.path.insert(0, str(project_root / "examples"))
    try:
        import flights
    finally:
        sys.path.pop(0)
    return flights


@pytest.fixture(scope="module")
def sent(flights_module, tmp_path_factory, request):
    """Snapshots that were taken while flights arrived, and the totals of the file."""
    count, kills = (request.config.getoption(f"--archive-{name}") for name in ("flights", "kills"))
    rows = list(islice(flights_module.rows(), count))
    folder = tmp_path_factory.mktemp("f")
    snapshots = []
    with (
        ProcessCluster(folder, broker_settings=SETTINGS) as cluster,
        AdminClient(cluster.namesrv_addr) as admin,
        Producer("flights", namesrv_addr=cluster.namesrv_addr) as producer,
    ):
        admin.create_topic(TopicConfig(flights_module.TOPIC, 4, 4))
        waiting = []
        for number, row in enumerate(rows, 1):
            waiting.append(producer.send_async(flights_module.to_message(row)))
            if number * (kills + 2) // len(rows) > len(snapshots):
                if number == len(rows):
                    for one in waiting:
                        one.result(60)
                snapshots.append(admin.create_snapshot("broker-a").path)
    return snapshots, Counter(row["carrier"] for row in rows)


def test_every_version_has_each_flight_once_whenever_an_ingest_is_killed(
    spark, sent, tmp_path, request
):
    snapshots, carriers = sent
    kills, seed = (request.config.getoption(f"--archive-{name}") for name in ("kills", "seed"))
    chance = random.Random(seed)
    print(f"seed {seed}")
    ends = [Snapshot(Path(path)).manifest.end_offset for path in snapshots]
    assert ends == sorted(set(ends))
    took_s = {engine: timed(str(tmp_path / engine), engine, snapshots[0]) for engine in ENGINES}
    archive = str(tmp_path / "archive")
    committed = Counter()
    seen = EachOnce(archive)
    for number in range(kills):
        engine = ENGINES[number % 2]
        before = seen.rows
        kill_one(archive, engine, chance, snapshots[: number + 1], took_s[engine])
        seen.look()
        committed[engine, "in time" if seen.rows > before else "nothing"] += 1
        print(f"{committed.total()} kills, {seen.rows:,} messages")
    print(f"{kills} kills, undisturbed ingests take {took_s} s: {committed}")
    at_once(spark, seen, chance, snapshots)
    check_totals(spark, archive, carriers)
    seen.check_keys()


def timed(archive, engine, path):
    """Seconds of the first ingest of a worker that nobody disturbs."""
    worker = Worker(archive, engine)
    try:
        worker.begin(path)
        began = time.monotonic()
        assert worker.expect(DONE_TIMEOUT_S).startswith("done ")
        return time.monotonic() - began
    finally:
        worker.kill()


def kill_one(archive, engine, chance, snapshots, took_s):
    """One ingest, sometimes beside another one of any engine, and a kill at any point of it."""
    others = [chance.choice(ENGINES)] * chance.choice((0, 0, 1))
    workers = [Worker(archive, one) for one in (engine, *others)]
    try:
        for worker in workers:
            worker.begin(snapshots[-1] if worker is workers[0] else chance.choice(snapshots))
        # Killed at any moment up to a bit behind its usual end; it may be done by then.
        workers[0].expect(chance.uniform(0, took_s * 1.2))
        workers.pop(0).kill()
        for worker in workers:
            # The other one does not mind.
            assert worker.expect(DONE_TIMEOUT_S).startswith("done ")
    finally:
        for worker in workers:
            worker.kill()


def at_once(spark, seen, chance, snapshots):
    """Takes everything in, in any order, two at a time, by both engines."""
    errors = []

    def work(engine, path):
        try:
            ingest(engine, path, seen.archive)
        except BaseException as error:
            errors.append(error)

    paths = [*chance.sample(snapshots, 3), snapshots[-1]]
    for two in zip(paths[::2], paths[1::2], strict=True):
        jobs = zip((spark, None), two, strict=True)
        threads = [threading.Thread(target=work, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        seen.look()


def check_totals(spark, archive, carriers):
    """SQL of Spark, of DuckDB, and the archive's own check say what the file says."""
    import duckdb

    text = "select tag, count(*) from messages where topic = 'flights' group by tag"
    assert dict(map(tuple, query(spark, archive, text).collect())) == carriers
    report = verify(spark, archive)
    assert report.sound
    assert report.rows == carriers.total()
    messages = tables.require_table(archive, tables.MESSAGES)
    files = messages.file_uris()
    found = duckdb.sql(f"select tag, count(*) from read_parquet({files}) group by tag").fetchall()
    assert dict(found) == carriers
    assert tables.sources(archive)[0].gaps == []
