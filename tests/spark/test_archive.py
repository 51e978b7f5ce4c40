"""All flights through snapshots into an archive: each message once, in every version."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections import Counter
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable
from harness.console import ConsoleWorld, open_console
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles
from pyspark.sql.types import StructType

from mqmesh.batch.record_batch import decode_messages
from mqmesh.errors import ConfigError
from mqmesh.message import Message
from mqmesh.protocol.route import ClusterInfo
from mqmesh.spark import export, tables
from mqmesh.spark import find as find_module
from mqmesh.spark.compaction import compact
from mqmesh.spark.data_source import MqmeshDataSource
from mqmesh.spark.find import FoundRows, find
from mqmesh.spark.forgetting import expire
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import (
    check_reads_only,
    content_of,
    query,
    vacuum,
    verify,
)
from mqmesh.storage.interface import StoreConfig
from mqmesh.storage.tools.snapshot_making import restore_snapshot
from mqmesh.storage.tools.snapshot_reading import Batch, Snapshot
from mqmesh.units import MIB, TimestampMs

pytestmark = [
    pytest.mark.timeout(900),
    # Sockets and processes of Java end when it likes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FIRST_DAY = datetime(2026, 3, 1, tzinfo=UTC)
BATCH = 500
MOST = 40_000
"""Flights; scripts/quickstart archives all of them."""
PER_DAY = 10_000
SIXTEENTHS = (1, 8, 12, 16, 17)
"""Of the flights, when a snapshot is taken; the first is a small one for many questions."""
CONFIG = StoreConfig(mapped_file_size_commit_log=4 * MIB)


class Scene:
    """A store that gets all flights, four snapshots of it, and what the file says of them."""

    def __init__(self, root, flights) -> None:
        self.root = root
        self.files = StoreFiles(root / "store", CONFIG)
        store = self.files.open()
        self.carriers: Counter[str] = Counter()
        self.hours: Counter[tuple[str, int]] = Counter()
        self.bodies = 0
        self.snapshots = []
        messages = []
        stored = 0
        rows = list(flights.rows())[:MOST]
        for number, row in enumerate(rows):
            messages.append(flights.to_message(row))
            self.carriers[row["carrier"]] += 1
            self.hours[row["carrier"], int(row["hour"])] += 1
            if len(messages) == BATCH or number == len(rows) - 1:
                self.put(store, messages, stored)
                stored += len(messages)
                messages = []
            if (number + 1) * 16 >= len(rows) * SIXTEENTHS[len(self.snapshots)]:
                self.snapshots.append(self.snapshot(store))
        self.count = len(rows)
        self.store = store

    def put(self, store, messages, sequence):
        day = FIRST_DAY.timestamp() + sequence // PER_DAY * 86_400
        batch = make_messages_batch(
            messages,
            topic=messages[0].topic,
            first_sequence=sequence,
            producer_id=7,
            compress_over_bytes=4096,
        )
        store.put([batch], TimestampMs(int(day * 1_000) + sequence % PER_DAY))

    def snapshot(self, store, name=None):
        name = name or f"broker-a.{len(self.snapshots)}.0"
        return take_snapshot(store, self.files.directory, self.root / "snapshots", name=name)[0]


@pytest.fixture(scope="session")
def scene(tmp_path_factory, project_root):
    sys.path.insert(0, str(project_root / "examples"))
    try:
        import flights
    finally:
        sys.path.pop(0)
    scene = Scene(tmp_path_factory.mktemp("archive"), flights)
    yield scene
    scene.files.close()


@pytest.fixture(scope="session")
def archive(spark, scene):
    """The archive of all snapshots, ingested in any order and at once, by both engines."""
    archive = str(scene.root / "archive")
    for number, engine in ((1, spark), (0, None)):
        ingest(engine, str(scene.snapshots[number]), archive)
    errors = []

    def work(number, engine):
        try:
            ingest(engine, str(scene.snapshots[number]), archive)
        except BaseException as error:
            errors.append(error)

    jobs = ((2, spark), (3, None), (3, spark))
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert ingest(spark, str(scene.snapshots[3]), archive).from_offset == (
        Snapshot(scene.snapshots[3]).manifest.end_offset
    )
    return archive


def test_a_snapshot_read_by_spark_is_what_a_full_scan_finds(spark, scene):
    path = scene.snapshots[0]
    frame = spark.read.format("mqmesh").load(str(path))
    found = frame.selectExpr(
        "count(*)", "bit_xor(xxhash64(commitlog_offset, ordinal, body))"
    ).collect()[0]
    rows = [
        (batch.header.commitlog_offset, number, message.body)
        for batch in Snapshot(path).read()
        if isinstance(batch, Batch)
        for number, message in enumerate(decode_messages(batch.data, batch.header))
    ]
    assert found[0] == len(rows) >= scene.count // 16
    names = ["commitlog_offset", "ordinal", "body"]
    types = pa.schema([(names[0], pa.int64()), (names[1], pa.int32()), (names[2], pa.binary())])
    scanned = pa.table([list(column) for column in zip(*rows, strict=True)], schema=types)
    hashed = spark.createDataFrame(scanned).selectExpr(
        "bit_xor(xxhash64(commitlog_offset, ordinal, body))"
    )
    assert hashed.collect()[0][0] == found[1]


def test_columns_have_what_a_consumer_sees(spark, scene):
    path = scene.snapshots[0]
    frame = spark.read.format("mqmesh").load(str(path)).where("queue_offset = 1234")
    (row,) = frame.collect()
    place = next(
        batch
        for batch in Snapshot(path).read()
        if isinstance(batch, Batch) and batch.header.next_queue_offset > 1234
    )
    messages = decode_messages(place.data, place.header)
    message = next(one for one in messages if one.queue_offset == 1234)
    assert (row.topic, row.physical_topic, row.broker) == ("flights", "flights", "broker-a")
    assert (row.message_id, row.ordinal) == (message.message_id, message.ordinal)
    assert (row.commitlog_offset, row.store_id) == (message.commitlog_offset, place.header.store_id)
    assert (row.tag, tuple(row["keys"]), row.properties) == (
        message.tag,
        tuple(message.keys),
        message.properties,
    )
    assert (bytes(row.body), row.flag, row.sharding_key) == (
        message.body,
        message.flag,
        message.sharding_key,
    )
    assert not row.transaction
    assert row.dt == FIRST_DAY.date()


def test_one_frame_answers_many_questions_and_options_narrow_what_is_read(spark, scene):
    path = str(scene.snapshots[0])
    source = spark.read.format("mqmesh")
    frame = source.load(path)
    total = frame.count()
    some_id = frame.where("queue_offset = 1500").collect()[0].message_id
    # With filters passed to the source, Spark 4.1 reads the next question with those of the last.
    none, all_of_them = frame.where("topic = 'nobody'"), frame.where("topic = 'flights'")
    assert (none.count(), all_of_them.count(), frame.count()) == (0, total, total)
    assert none.union(all_of_them).count() == total
    one = spark.read.schema("topic string").format("mqmesh").option("messageId", some_id)
    assert one.load(path).collect() == [("flights",)]
    assert one.load(path).rdd.getNumPartitions() == 1
    options = {"topics": "flights", "key": "N14228", "columns": "tag,keys"}
    by_key = spark.read.format("mqmesh").options(**options).load(path)
    assert by_key.columns == ["tag", "keys"]
    assert by_key.count() == frame.where("array_contains(keys, 'N14228')").count() > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "flights"}, "a snapshot has no option 'topic'; it has"),
        ({"pushdown": "true"}, "no option 'pushdown'"),
        ({"summary": "true", "maxRow": "5"}, "no option 'maxRow'"),
        ({"subscribe": "flights"}, "no option 'subscribe'"),
        ({"TOPICS": "flights", "path": ""}, "option namesrv"),
    ],
)
def test_wrong_options_of_a_snapshot_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        MqmeshDataSource({"path": "/tmp/snapshot", **options}).reader(StructType())


def test_every_version_of_the_table_has_each_message_once(archive, scene):
    newest = DeltaTable(f"{archive}/messages").version()
    assert newest >= 1
    seen = 0
    for version in range(newest + 1):
        table = DeltaTable(f"{archive}/messages", version=version)
        rows = table.to_pyarrow_table(columns=["commitlog_offset", "ordinal"])
        assert (
            rows.num_rows == rows.group_by(["commitlog_offset", "ordinal"]).aggregate([]).num_rows
        )
        assert rows.num_rows >= seen
        seen = rows.num_rows
    assert seen == scene.count


def test_sql_gives_the_totals_of_the_file(spark, archive, scene):
    rows = query(
        spark, archive, "select tag, count(*) from messages where topic = 'flights' group by tag"
    ).collect()
    assert dict(map(tuple, rows)) == dict(scene.carriers)
    report = verify(spark, archive)
    assert report.sound
    assert (report.rows, report.duplicates, report.gaps) == (scene.count, 0, [])


def by_duckdb(archive):
    import duckdb

    files = DeltaTable(f"{archive}/messages").file_uris()
    return duckdb.sql(
        f"select tag, count(*) from read_parquet({files}, hive_partitioning=true) group by tag"
    ).fetchall()


def by_polars(archive):
    import polars

    return polars.scan_delta(f"{archive}/messages").group_by("tag").len().collect().rows()


@pytest.mark.parametrize("ask", [by_duckdb, by_polars])
def test_another_engine_reads_the_same_counts(ask, archive, scene):
    assert dict(ask(archive)) == dict(scene.carriers)


LIVE = '.options(namesrv="127.0.0.1:9876", subscribe="flights").load()'


def test_the_notebook_counts_and_draws_all_flights_of_each_hour(
    archive, scene, project_root, tmp_path, monkeypatch
):
    text = (project_root / "examples" / "archive_flights.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    (tmp_path / "archive").symlink_to(archive)
    program = tmp_path / "examples" / "program.py"
    program.parent.mkdir()
    text = "\n".join("".join(cell["source"]) for cell in cells)
    # Live messages have the columns of a snapshot's; here is no cluster.
    assert LIVE in text
    program.write_text(text.replace(LIVE, f".load({str(scene.snapshots[3])!r})"))
    monkeypatch.chdir(program.parent)
    monkeypatch.setenv("MPLBACKEND", "agg")
    found = runpy.run_path(str(program))
    assert found["counts"] == {"archive": scene.hours, "live": scene.hours}
    for axes in found["both"]:
        assert sum(bar.get_height() for bar in axes.patches) == scene.count
    drawn = [one.get_text() for one in found["both"][1].get_legend().get_texts()]
    assert drawn == [carrier for carrier, _ in scene.carriers.most_common()]
    found["plt"].close("all")


def test_messages_are_found_without_java(archive, scene, monkeypatch):
    every = find(archive, topic="flights", key="N14228", most=1_000)
    found = every.rows
    assert found
    assert not every.more
    assert all("N14228" in row["keys"] for row in found)
    assert {json.loads(row["body"])["tailnum"] for row in found} == {"N14228"}
    (row,) = find(archive, message_id=found[3]["message_id"]).rows
    assert row == found[3]
    # Those that are too early do not count among the most that are wanted.
    last_ms = int(found[-1]["store_timestamp"].timestamp() * 1_000)
    late = [row for row in found if row["store_timestamp"] >= found[-1]["store_timestamp"]]
    assert 0 < len(late) < len(found)
    assert find(archive, key="N14228", from_ms=last_ms, most=len(late)) == FoundRows(
        late, more=False
    )
    monkeypatch.setattr(find_module, "PLACES_AT_ONCE", 2)
    assert find(archive, topic="flights", key="N14228", most=1_000) == every
    assert find(archive, key="N14228", most=len(found)) == every
    assert find(archive, key="N14228", most=len(found) - 1).more
    assert find(archive, key="nobody's") == FoundRows([], more=False)
    some = find(archive, topic="flights", most=7)
    assert (len(some.rows), some.more) == (7, True)
    with pytest.raises(ConfigError, match="no archive"):
        find(str(scene.root), key="x")


def test_an_export_has_the_messages_in_the_order_of_the_log(archive, scene, tmp_path):
    rows = list(export.rows(archive, "flights", "2026-03-02", "2026-03-02"))
    places = [(row["commitlog_offset"], row["ordinal"]) for row in rows]
    assert len(rows) == PER_DAY
    assert places == sorted(set(places))
    last = ("flights", "2026-03-04", "2026-03-31")
    count = export.write_parquet(archive, *last, str(tmp_path))
    table = pa.parquet.read_table(tmp_path / "flights.parquet")
    assert count == table.num_rows == scene.count - 3 * PER_DAY
    assert list(export.rows(archive, "nobody", "", "")) == []


def test_status_is_told_without_java(archive, scene):
    (source,) = tables.sources(archive)
    end = Snapshot(scene.snapshots[-1]).manifest.end_offset
    assert (source.broker, source.position, source.keys_position) == ("broker-a", end, end)
    assert source.gaps == []
    assert source.ingests[0].from_offset == 0
    assert sum(one.rows for one in tables.days(archive)) == scene.count


def test_the_console_shows_the_archive_and_looks_messages_up(archive, scene):
    world = ConsoleWorld({"cluster": ClusterInfo([])})
    client = open_console(world, archive=archive)
    (source,) = client.get("/api/v1/archive").json()["sources"]
    end = Snapshot(scene.snapshots[-1]).manifest.end_offset
    assert (source["broker"], source["position"], source["missing_bytes"]) == ("broker-a", end, 0)
    wanted = find(archive, topic="flights", key="N14228", most=50).rows
    found = client.get("/api/v1/archive/find", params={"key": "N14228"}).json()["rows"]
    assert [one["message_id"] for one in found] == [one["message_id"] for one in wanted]
    assert "N14228" in client.get("/archive/find", params={"key": "N14228"}).text
    late = client.get("/api/v1/archive/find", params={"key": "N14228", "until": "2026-02-01"})
    assert late.json()["rows"] == []


@pytest.mark.parametrize(
    "text",
    [
        "insert into messages select * from messages",
        "drop table messages",
        "create table x as select 1",
        "delete from messages",
        "from messages insert into a select * insert into b select *",
        "with a as (select 1) insert into messages select * from a",
        "set spark.x=1",
        "optimize messages",
        "select from where",
    ],
)
def test_sql_that_would_write_is_refused(spark, archive, text):
    with pytest.raises(ConfigError, match=r"only SELECT|Spark cannot"):
        query(spark, archive, text)
    check_reads_only(spark, "with a as (select 1 as x) select x from a order by x limit 3")


def test_compaction_changes_no_message_and_vacuum_removes_old_files(spark, archive, scene):
    before = content_of(spark, archive)
    done = compact(archive, date(2026, 4, 1))
    assert done["files_after"] < done["files_before"]
    assert content_of(spark, archive) == before
    assert before.rows == scene.count
    assert vacuum(archive, hours=1, dry_run=True) == []
    assert ingest(spark, str(scene.snapshots[0]), archive).gap_before == 0
    assert content_of(spark, archive) == before


def small_store(root, name, count, *, config=CONFIG):
    files = StoreFiles(root / name, config)
    store = files.open()
    grow(store, 0, count)
    return files, store


def grow(store, start, stop):
    for number in range(start, stop):
        batch = make_messages_batch(
            [Message("small", str(number).encode(), keys=[f"s-{number}"])], first_sequence=number
        )
        store.put([batch], TimestampMs(1_770_000_000_000 + number * 3_600_000))


def test_a_gap_another_store_and_another_course_are_refused(spark, scene, tmp_path):
    archive = str(tmp_path / "archive")
    root = tmp_path / "snapshots"
    files, store = small_store(tmp_path, "one", 20)
    early = take_snapshot(store, files.directory, root, name="broker-a.1.0")[0]
    grow(store, 20, 30)
    later = take_snapshot(store, files.directory, root, name="broker-a.2.0")[0]
    ingest(None, str(later), archive)
    # Another store of that name.
    others, other = small_store(tmp_path, "two", 3)
    foreign = take_snapshot(other, others.directory, root, name="broker-a.3.0")[0]
    with pytest.raises(ConfigError, match="already there from another store"):
        ingest(None, str(foreign), archive)
    ingest(None, str(foreign), archive, name="broker-a-2")
    # The store as it was restored from a backup, gone on otherwise.
    restore_snapshot(early, tmp_path / "restored")
    again = StoreFiles(tmp_path / "restored", CONFIG)
    restored = again.open()
    grow(restored, 100, 140)
    otherwise = take_snapshot(restored, again.directory, root, name="broker-a.4.0")[0]
    with pytest.raises(ConfigError, match="not the one that was archived up to"):
        ingest(None, str(otherwise), archive)
    rows = tables.require_table(archive, tables.MESSAGES).to_pyarrow_table(
        columns=["broker", "body"]
    )
    found = Counter(rows["broker"].to_pylist())
    assert found == {"broker-a": 30, "broker-a-2": 3}
    before = datetime.fromtimestamp(1_770_000_000 + 30 * 3_600, UTC).date().isoformat()
    gone = expire(archive, before=before)
    assert 0 < gone < 33
    assert verify(spark, archive).rows == 33 - gone
    assert verify(spark, archive).sound
    for one in (files, others, again):
        one.close()
