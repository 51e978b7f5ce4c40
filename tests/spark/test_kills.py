"""Ingests that are killed, each at another point: the next one ends what they began, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from deltalake import DeltaTable
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles

from mqmesh.message import Message
from mqmesh.spark import tables
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import vacuum, verify
from mqmesh.units import TimestampMs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

COUNT = 400

# The process and its Java are one group, which kills itself at a named point.
SOURCE = """
import os, signal, sys
point, path, archive = sys.argv[1:]
from mqmesh.spark.ingest import ingest
from mqmesh.spark.session import session
from mqmesh.spark.spark_engine import SparkEngine

def die(*arguments, **options):
    os.killpg(os.getpgid(0), signal.SIGKILL)

spark = session(memory="512m", cores=1, is_short=True)
if point == "before the messages":
    SparkEngine.write_messages = die
elif point == "before the keys":
    SparkEngine.write_keys = die
else:
    # In the middle of a commit: when the log of the table has so many entries, whoever writes.
    import threading
    def watch():
        wanted = os.path.join(archive, point, "_delta_log")
        # Turning without a pause would take the processor from the ingest.
        pause = threading.Event()
        while not os.path.isdir(wanted):
            pause.wait(0.001)
        die()
    threading.Thread(target=watch, daemon=True).start()
ingest(spark, path, archive)
"""


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    files = StoreFiles(root / "store")
    store = files.open()
    for number in range(COUNT):
        batch = make_messages_batch(
            [Message("t", f"{number} {'x' * 500}".encode(), keys=[f"k-{number}"])],
            first_sequence=number,
        )
        store.put([batch], TimestampMs(1_770_000_000_000 + number * 600_000))
    path = take_snapshot(store, files.directory, root / "snapshots")[0]
    files.close()
    return path


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before the messages", marks=pytest.mark.long),
        "messages",
        pytest.param("before the keys", marks=pytest.mark.long),
        pytest.param("keys", marks=pytest.mark.long),
    ],
)
def test_what_a_killed_ingest_began_is_ended_once(spark, snapshot, tmp_path, point):
    archive = str(tmp_path / "archive")
    done = subprocess.run(
        [sys.executable, "-c", SOURCE, point, str(snapshot), archive],
        check=False,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == -signal.SIGKILL
    assert os.path.isdir(archive)
    before = tables.open_table(archive, tables.MESSAGES)
    if before is not None:
        rows = before.to_pyarrow_table(columns=["commitlog_offset", "ordinal"])
        assert rows.num_rows in (0, COUNT)
    ingest(spark, str(snapshot), archive)
    assert ingest(spark, str(snapshot), archive).gap_before == 0
    report = verify(spark, archive)
    assert report.sound
    assert report.rows == COUNT
    for version in range(DeltaTable(f"{archive}/messages").version() + 1):
        table = DeltaTable(f"{archive}/messages", version=version)
        places = Counter(
            table.to_pyarrow_table(columns=["commitlog_offset"])["commitlog_offset"].to_pylist()
        )
        assert set(places.values()) <= {1}
    vacuum(archive, hours=1, dry_run=False)
    assert verify(spark, archive).rows == COUNT
