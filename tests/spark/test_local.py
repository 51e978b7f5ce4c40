"""The engine without Java: its tables and files, beside other ingests and after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from harness.archives import EachOnce
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles

from mqmesh.cli import main
from mqmesh.errors import ConfigError, CorruptRecord, DiskFull, StorageError
from mqmesh.message import Message
from mqmesh.spark import ingest as ingest_module
from mqmesh.spark import local_engine, message_files, partition_files, tables
from mqmesh.spark import session as session_module
from mqmesh.spark.addition import Addition
from mqmesh.spark.find import find
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import verify
from mqmesh.spark.message_columns import COLUMNS
from mqmesh.spark.settings import ArchiveConfig
from mqmesh.storage.tools.snapshot_reading import Batch, Snapshot
from mqmesh.units import TimestampMs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

START_MS = 1_770_000_000_123
HOUR_MS = 3_600_000
TOPICS = ("orders", "pay", "a%b|c")
COUNT = 120
"""Messages until the first snapshot, of six days, and as many again until the second one."""
DAYS = 6


def put(store, start, stop):
    for number in range(start, stop):
        topic = TOPICS[number % len(TOPICS)]
        message = Message(
            topic,
            f'{{"number":{number}}}'.encode(),
            "tag" if number % 2 else None,
            (f"k-{number}", "all") if number % 4 else (),
            {"number": str(number)} if number % 5 else {},
        )
        batch = make_messages_batch([message], topic=topic, first_sequence=number)
        store.put([batch], TimestampMs(START_MS + number * HOUR_MS))


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """Two of one store, the later one with twice as many messages."""
    root = tmp_path_factory.mktemp("local")
    files = StoreFiles(root / "store")
    store = files.open()
    paths = []
    for number in range(2):
        put(store, number * COUNT, (number + 1) * COUNT)
        name = f"broker-a.{number}.0"
        path, _ = take_snapshot(store, files.directory, root / "snapshots", name=name)
        paths.append(str(path))
    files.close()
    return paths


@pytest.fixture
def archive(tmp_path):
    return str(tmp_path / "archive")


def rows_of(archive):
    return tables.require_table(archive, tables.MESSAGES).to_pyarrow_table()


def places(archive):
    rows = rows_of(archive).select(["commitlog_offset", "ordinal"]).to_pylist()
    return sorted((row["commitlog_offset"], row["ordinal"]) for row in rows)


def files_of(archive, name=tables.MESSAGES):
    """Paths of data files on disk, and of those that belong to the table."""
    root = tables.table_path(archive, name)
    there = {
        os.path.join(folder, file)
        for folder, _, files in os.walk(root)
        for file in files
        if "_delta_log" not in folder
    }
    return there, set(tables.require_table(archive, name).file_uris())


def test_messages_come_in_with_their_keys_once_and_are_found(snapshots, archive):
    seen = EachOnce(archive)
    assert ingest(None, snapshots[0], archive).from_offset == 0
    assert seen.look() == COUNT
    report = ingest(None, snapshots[1], archive)
    assert report.to_offset > report.from_offset > 0
    for path in (*snapshots, snapshots[1]):
        again = ingest(None, path, archive)
        assert again.from_offset == again.to_offset == report.to_offset
    assert seen.look() == 2 * COUNT
    seen.check_keys()
    (row,) = find(archive, key="k-7").rows
    assert (row["topic"], json.loads(row["body"]), row["tag"]) == ("pay", {"number": 7}, "tag")
    assert find(archive, message_id=row["message_id"]).rows == [row]
    assert row["store_timestamp"] == datetime.fromtimestamp(START_MS / 1_000 + 7 * 3_600, UTC)
    assert len(find(archive, topic="a%b|c", most=1_000).rows) == 2 * COUNT // 3
    (source,) = tables.sources(archive)
    assert (source.position, source.keys_position, len(source.ingests)) == (
        report.to_offset,
        report.to_offset,
        2,
    )


def test_each_engine_goes_on_with_the_tables_of_the_other(spark, snapshots, tmp_path):
    """Both orders of the engines end with the same rows, and Spark reads them by statistics."""
    found = []
    for name, engines in (("a", [spark, None]), ("b", [None, spark])):
        archive = str(tmp_path / name)
        for engine, path in zip(engines, snapshots, strict=True):
            ingest(engine, path, archive)
        seen = EachOnce(archive)
        assert seen.look() == 2 * COUNT
        seen.check_keys()
        order = [(column, "ascending") for column in ("commitlog_offset", "ordinal")]
        found.append(rows_of(archive).sort_by(order))
    assert found[0].equals(found[1])
    assert ingest(spark, snapshots[1], archive).gap_before == 0
    report = verify(spark, archive)
    assert (report.sound, report.rows) == (True, 2 * COUNT)
    frame = spark.read.format("delta").load(tables.table_path(archive, tables.MESSAGES))
    assert [field.name for field in frame.schema] == list(COLUMNS)
    assert {field.name: field.dataType.simpleString() for field in frame.schema} == COLUMNS
    one = frame.where("store_timestamp = timestamp '2026-02-02T02:40:00.123Z'")
    assert [bytes(row.body) for row in one.collect()] == [b'{"number":0}']
    assert len(one.inputFiles()) == len(frame.where("dt = '2026-02-02'").inputFiles()) == 1
    assert frame.where("topic = 'a%b|c'").count() == 2 * COUNT // 3


def test_files_have_what_readers_skip_by(snapshots, archive):
    ingest(None, snapshots[0], archive)
    there, listed = files_of(archive)
    assert there == listed
    assert len(listed) == DAYS
    file = pq.ParquetFile(next(path for path in listed if "/dt=2026-02-03/" in path))
    assert [field.name for field in file.schema_arrow] == [one for one in COLUMNS if one != "dt"]
    chunk = file.metadata.row_group(0).column(file.schema_arrow.names.index("message_id"))
    assert chunk.compression == "ZSTD"
    assert chunk.has_column_index
    assert str(file.schema_arrow.field("store_timestamp").type) == "timestamp[us, tz=UTC]"
    rows = file.read()
    assert rows["topic"].to_pylist() == sorted(rows["topic"].to_pylist())
    (action,) = [one for one in actions_of(archive) if "dt=2026-02-03" in one["path"]]
    assert action["num_records"] == rows.num_rows == 24
    for name in ("topic", "commitlog_offset", "store_timestamp", "message_id", "ordinal"):
        values = rows[name].to_pylist()
        assert (action[f"min.{name}"], action[f"max.{name}"]) == (min(values), max(values)), name
    assert action["null_count.tag"] == rows["tag"].null_count == 12
    keys = pq.ParquetFile(next(iter(files_of(archive, tables.KEYS)[1]))).read()
    hashes = keys["key_hash"].to_pylist()
    assert hashes == sorted(zlib.crc32(key.encode()) for key in keys["key"].to_pylist())


def actions_of(archive):
    table = tables.require_table(archive, tables.MESSAGES)
    return pa.table(table.get_add_actions(flatten=True)).to_pylist()


def test_statistics_of_texts_that_are_cut_and_of_nothing_but_nulls_stay_true(tmp_path):
    schema = pa.schema(
        [("text", pa.string()), ("none", pa.string()), ("big", pa.string()), ("far", pa.string())]
    )
    far = ["c" * 32 + "\U0010ffff" * 2, "a"]
    long = ["b" * 40, "a" * 31 + "ü" + "z"]
    rows = pa.table([long, [None, None], ["x" * 5_000, "y"], far], schema=schema)
    files = partition_files.PartitionFiles(str(tmp_path), schema, ["day"], file_bytes=1)
    files.write(("2026-03-01",), rows)
    (file,) = files.close()
    found = json.loads(file.statistics)
    assert found["numRecords"] == 2
    assert found["minValues"] == {"text": "a" * 31 + "ü", "far": "a"}
    assert found["maxValues"] == {"text": "b" * 32 + "\U0010ffff"}
    assert found["nullCount"] == {"text": 0, "none": 2, "big": 0, "far": 0}


def test_small_runs_many_files_and_days_in_turn_are_all_the_same(snapshots, archive, monkeypatch):
    monkeypatch.setattr(partition_files, "MOST_OPEN", 1)
    monkeypatch.setattr(partition_files, "GROUP_BYTES", 200)
    monkeypatch.setattr(message_files, "RUN_BYTES", 1_000)
    monkeypatch.setattr(message_files, "BATCH_ROWS", 3)
    monkeypatch.setattr(local_engine, "RUN_BYTES", 100)
    monkeypatch.setattr(ArchiveConfig, "file_bytes", 4_000)
    ingest(None, snapshots[0], archive)
    there, listed = files_of(archive)
    assert there == listed
    assert len(listed) > 2 * DAYS
    seen = EachOnce(archive)
    assert seen.look() == COUNT
    seen.check_keys()


def test_what_somebody_else_committed_meanwhile_is_seen_and_nothing_comes_twice(
    snapshots, archive, monkeypatch
):
    """At the last moment another ingest is quicker; then one of another broker is."""
    look = Addition.reopen
    between = [
        lambda: ingest(None, snapshots[1], archive),
        lambda: ingest(None, snapshots[1], archive, name="broker-b"),
    ]

    def late(addition):
        if between:
            with monkeypatch.context() as patch:
                patch.setattr(Addition, "reopen", look)
                between.pop(0)()
        return look(addition)

    monkeypatch.setattr(Addition, "reopen", late)
    report = ingest(None, snapshots[0], archive)
    assert report.from_offset == report.to_offset  # the other one had all of it
    assert files_of(archive)[0] == files_of(archive)[1]
    ingest(None, snapshots[0], archive, name="broker-c")
    seen = EachOnce(archive)
    assert seen.look() == 2 * COUNT + 2 * COUNT + COUNT
    seen.check_keys()


def test_a_commit_between_the_look_at_the_position_and_ours_is_no_loss(
    snapshots, archive, monkeypatch
):
    ingest(None, snapshots[0], archive, name="broker-b")
    real = DeltaTable.create_write_transaction
    others = ["broker-c"]

    def late(table, *arguments, **options):
        if others:
            ingest(None, snapshots[0], archive, name=others.pop())
        real(table, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    ingest(None, snapshots[0], archive)
    assert others == []
    assert EachOnce(archive).look() == 3 * COUNT


def test_ingests_at_once_take_everything_in_once(spark, snapshots, archive):
    errors = []

    def work(engine, path, name):
        try:
            ingest(engine, path, archive, name=name)
        except BaseException as error:
            errors.append(error)

    jobs = [
        (None, snapshots[0], ""),
        (None, snapshots[1], ""),
        (spark, snapshots[1], ""),
        (None, snapshots[1], "broker-b"),
    ]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    seen = EachOnce(archive)
    assert seen.look() == 4 * COUNT
    seen.check_keys()


def test_a_position_without_messages_moves_on(snapshots, archive):
    ingest(None, snapshots[0], archive, topics="nobody")
    assert places(archive) == []
    report = ingest(None, snapshots[1], archive)
    assert report.from_offset == Snapshot(Path(snapshots[0])).manifest.end_offset
    assert len(places(archive)) == COUNT


def test_damage_and_a_full_disk_leave_nothing_behind(snapshots, archive, tmp_path, monkeypatch):
    class Full:
        def __init__(self, *arguments, **options) -> None:
            self.is_open = True

        def write_table(self, *arguments, **options):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partition_files.pq, "ParquetWriter", Full)
        with pytest.raises(DiskFull, match=r"cannot write to .*: No space left on device$"):
            ingest(None, snapshots[0], archive)
    assert files_of(archive)[0] == set()
    copy = tmp_path / "damaged"
    subprocess.run(["cp", "-R", snapshots[0], str(copy)], check=True)
    batches = [one for one in Snapshot(copy).read() if isinstance(one, Batch)]
    place = batches[-2].header.commitlog_offset
    segment = Snapshot(copy).log.find(place)
    with open(segment.path, "r+b") as file:
        file.seek(place - segment.start + 70)
        file.write(b"damage")
    with pytest.raises(CorruptRecord, match=r"^/.*is damaged: .*--on-damage skip"):
        ingest(None, str(copy), archive)
    assert files_of(archive)[0] == set()
    ingest(None, str(copy), archive, on_damage="skip")
    assert len(places(archive)) == COUNT - 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda table: table.alter.add_constraint({"small": "ordinal < 9"}), "constraints.small"),
        (None, "is divided by topic"),
    ],
)
def test_a_table_that_an_append_would_harm_is_refused(snapshots, archive, change, text):
    if change is None:
        place = tables.table_path(archive, tables.MESSAGES)
        os.makedirs(place)
        DeltaTable.create(place, message_files.SCHEMA, partition_by=["topic"])
    else:
        ingest(None, snapshots[0], archive)
        change(tables.require_table(archive, tables.MESSAGES))
    with pytest.raises(ConfigError, match=rf"{text}.*cannot add to it") as caught:
        ingest(None, snapshots[1], archive)
    assert "\n" not in str(caught.value)


def test_files_that_a_vacuum_took_are_not_committed(snapshots, archive, monkeypatch):
    real = Addition.commit

    def late(addition, files):
        os.truncate(f"{addition.place}/{files[0].path}", 3)
        real(addition, files)

    with monkeypatch.context() as patch:
        patch.setattr(Addition, "commit", late)
        with pytest.raises(StorageError, match=r"has 3 bytes, and \d+ bytes were written"):
            ingest(None, snapshots[0], archive)
    assert places(archive) == []
    ingest(None, snapshots[0], archive)
    assert EachOnce(archive).look() == COUNT


def test_all_is_durable_in_the_order_in_which_it_counts(snapshots, archive, monkeypatch):
    """Data before the commit that names it, and commits before an ingest ends."""
    done = []
    sync = os.fsync
    commit = Addition.commit

    def note(fd):
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    def check(addition, files):
        paths = [f"{addition.place}/{file.path}" for file in files]
        folders = {addition.place, *map(os.path.dirname, paths)}
        assert set(paths) | folders <= set(done)
        assert [place for place in done if place.endswith(".parquet")][-len(paths) :] == paths
        commit(addition, files)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Addition, "commit", check)
    for path in snapshots:
        done.clear()
        ingest(None, path, archive)
        for name in (tables.MESSAGES, tables.KEYS, tables.INGESTS):
            place = tables.table_path(archive, name)
            assert f"{place}/_delta_log" in done
            assert {f"{place}/_delta_log/{log}" for log in os.listdir(f"{place}/_delta_log")} <= {
                *done
            }
        assert files_of(archive, tables.INGESTS)[0] <= set(done)
        if path == snapshots[0]:
            assert {os.path.dirname(archive), archive} <= set(done)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("Generic S3 error\n\u21b3 no answer"), "cannot take .* into .*: .*no answer"),
        (DeltaError("no answer"), "Delta Lake failed: DeltaError: no answer"),
    ],
)
@pytest.mark.parametrize("where", ["_next", "_take", "sync_logs"])
def test_errors_of_a_bucket_are_ours_wherever_they_come(
    snapshots, archive, monkeypatch, error, text, where
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(ingest_module, where, fail)
    with pytest.raises(StorageError, match=text):
        ingest(None, snapshots[0], archive)


# The process kills itself at a named point.
KILLED = """
import os, signal, sys
from mqmesh.spark import local_engine, partition_files
from mqmesh.spark.addition import Addition
from mqmesh.spark.ingest import ingest
point, path, archive = sys.argv[1:]

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

real = Addition.commit

def die_behind(*arguments):
    real(*arguments)
    die()

names = {"before": die, "behind": die_behind}
if point == "in the files":
    partition_files.PartitionFiles.close = die
elif point == "before the keys":
    local_engine.LocalEngine.write_keys = die
else:
    Addition.commit = names[point]
ingest(None, path, archive)
"""


@pytest.mark.parametrize("point", ["in the files", "before", "behind", "before the keys"])
def test_what_a_killed_ingest_began_is_ended_once(snapshots, archive, point):
    command = [sys.executable, "-c", KILLED, point, snapshots[0], archive]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    seen = EachOnce(archive)
    assert seen.look() in (0, COUNT)
    ingest(None, snapshots[1], archive)
    assert seen.look() == 2 * COUNT
    seen.check_keys()
    assert tables.sources(archive)[0].gaps == []


def test_the_command_needs_no_java_and_refuses_options_of_spark(
    snapshots, archive, monkeypatch, capsys
):
    monkeypatch.delattr(session_module, "session")
    command = ["archive", "ingest", *snapshots, "--to", archive, "--engine", "local"]
    assert main.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [": nothing new" in line for line in lines] == [False, False]
    assert main.main([*command, "--master", "spark://host:7077"]) == 2
    assert capsys.readouterr().err == (
        "error: --master is for Spark, and --engine local does without it\n"
    )
    assert len(places(archive)) == 2 * COUNT


def test_progress_counts_messages_and_bytes(snapshots, archive, monkeypatch):
    monkeypatch.setattr(message_files, "PROGRESS_BYTES", 1_000)
    seen = []
    ingest(None, snapshots[0], archive, on_progress=seen.append)
    end = Snapshot(Path(snapshots[0])).manifest.end_offset
    assert len(seen) > 3
    assert {one.total for one in seen} == {end}
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert seen[-1].messages <= COUNT
