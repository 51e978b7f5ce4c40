"""`mqmesh archive …` on a cluster: run, export, and what a snapshot's damage becomes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles

from mqmesh.cli import main
from mqmesh.cli.stores import archive as commands
from mqmesh.cli.stores import archive_export
from mqmesh.errors import CorruptRecord, InvalidArgument, StorageError
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.spark import ingest as ingest_module
from mqmesh.spark import maintenance, tables
from mqmesh.spark import session as session_module
from mqmesh.spark.columns import json as json_of
from mqmesh.spark.columns import text
from mqmesh.spark.forgetting import expire, expire_by_settings
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import query
from mqmesh.spark.session import read_archive
from mqmesh.storage.tools.snapshot_reading import Batch, Snapshot
from mqmesh.testing.processes import ProcessCluster
from mqmesh.units import TimestampMs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

COUNT = 250
DAY_MS = 86_400_000
START_MS = 1_770_000_000_000


class Kept:
    """The session of all tests, which commands do not end."""

    def __init__(self, spark) -> None:
        self._spark = spark

    def __getattr__(self, name):
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Not now."""


@pytest.fixture
def call(spark, monkeypatch, capsys):
    """Runs a command with the session of all tests; what it printed."""
    monkeypatch.setattr(session_module, "session", lambda **_: Kept(spark))

    def run(*arguments, code=0):
        found = main.main([str(one) for one in arguments])
        said = capsys.readouterr()
        assert found == code, said.err
        return said.err if code else said.out

    return run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    settings = {"snapshot.keep": "1"}
    with ProcessCluster(tmp_path_factory.mktemp("c"), broker_settings=settings) as cluster:
        send(cluster, 0, COUNT)
        yield cluster


@pytest.fixture(scope="module")
def archive(cluster, tmp_path_factory):
    return str(tmp_path_factory.mktemp("commands") / "archive")


def make_message(number):
    return Message(
        "orders",
        json.dumps({"number": number, "ü": "ö"}).encode() if number else b"\xff\x00",
        tag=f"tag-{number % 3}",
        keys=[f"k-{number}", "all"],
        properties={"number": str(number)},
        sharding_key=f"s-{number % 7}",
    )


def send(cluster, start, stop):
    with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
        for one in [producer.send_async(make_message(number)) for number in range(start, stop)]:
            one.result(30)


def fail(*arguments, **options):
    raise StorageError("no room")


class Rounds:
    """Stands for Ctrl-C: lets a command do some rounds, with something between them."""

    def __init__(self, *between) -> None:
        self._between = list(between)
        self.pauses = []

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def wait(self, seconds) -> bool:
        self.pauses.append(seconds)
        if self._between:
            self._between.pop(0)()
            return False
        return True


def test_run_takes_in_what_came_again_and_again_and_a_broker_that_is_away_is_told(
    call, cluster, archive, monkeypatch
):
    stop = cluster.brokers["broker-a"].stop

    def start_again():
        cluster.start_broker()
        cluster.wait_known()
        send(cluster, COUNT, 2 * COUNT)

    rounds = Rounds(stop, start_again, lambda: None)
    monkeypatch.setattr(commands, "Interrupt", lambda: rounds)
    address = ("--namesrv", cluster.namesrv_addr)
    out = call(*address, "archive", "run", "--every", "1h", "--to", archive, "--broker", "broker-a")
    assert rounds.pauses == [3_600] * 4
    lines = out.splitlines()
    assert [("nothing new" in line) for line in lines] == [False, False, True]
    rows = tables.require_table(archive, tables.MESSAGES).to_pyarrow_table(columns=["properties"])
    found = Counter(dict(row)["number"] for row in rows["properties"].to_pylist())
    assert found == {str(number): 1 for number in range(2 * COUNT)}
    snapshots = cluster.folder / "snapshots"
    assert list(snapshots.iterdir()) == []
    status = json.loads(call("archive", "status", archive, "--json"))
    assert [one["broker"] for one in status["sources"]] == ["broker-a"]
    # Without --every an error ends it; the broker keeps what was not taken in.
    with monkeypatch.context() as patch:
        patch.setattr(ingest_module, "ingest", fail)
        assert "no room" in call(*address, "archive", "run", "--to", archive, code=1)
    with AdminClient(cluster.namesrv_addr) as admin:
        others = [admin.create_snapshot("broker-a").path for _ in range(2)]
    (waiting,) = {str(path) for path in snapshots.iterdir()} - {others[1]}
    listed = call("snapshot", "list", snapshots, "--json").splitlines()
    assert [json.loads(one)["archive"] for one in listed] == [archive, ""]
    out = call(*address, "archive", "run", "--to", archive)
    (line,) = out.splitlines()  # the newest has all of the one that waits, which goes as it is
    assert Path(waiting).name < line
    assert [str(path) for path in snapshots.iterdir()] == [others[1]]
    wrong = ("archive", "run", "--to", archive, "--broker", "nobody")
    assert "nobody" in call(*address, *wrong, code=1)


def test_the_benchmark_reads_what_commands_print(
    call, archive, tmp_path, monkeypatch, load_archive_benchmark
):
    """Of ``scripts/bench --archive``, which takes minutes, the part that reads JSON of commands."""
    run, figures = load_archive_benchmark("run"), load_archive_benchmark("figures")

    def mqmesh(folder, *arguments):
        done = arguments[1] == "ingest"
        return figures.Used(0.1, 0.1), "" if done else call(*arguments)

    monkeypatch.setattr(run, "mqmesh", mqmesh)
    report = maintenance.ArchiveReport(
        sound=True, rows=2 * COUNT, duplicates=0, keys_missing=0, keys_left=0, gaps=[]
    )
    monkeypatch.setattr(maintenance, "verify", lambda spark, archive: report)
    monkeypatch.setattr(run, "key_of", lambda number: f"k-{number % COUNT}")
    size = figures.sizes(figures.QUICK)
    found = run.look_ups(tmp_path, Path(archive), size)
    found.append(run.taken_once(tmp_path, tmp_path, tmp_path, Path(archive), 2 * COUNT))
    assert [(one.goal, one.met) for one in found] == [*[("F5", True)] * 3, ("F4", True)]


def test_bodies_are_text_and_json_in_sql_and_in_data_frames(call, spark, archive):
    select = (
        "select text(body) as body, json(body, '$.ü') as u from messages "
        "where array_contains(keys, 'k-0') or array_contains(keys, 'k-1') order by u nulls first"
    )
    rows = [
        json.loads(line)
        for line in call("archive", "sql", archive, select, "--json").split("\n")[:-1]
    ]
    assert rows[0] == {"body": None, "u": None}
    assert (json.loads(rows[1]["body"])["number"], rows[1]["u"]) == (1, "ö")
    frame = read_archive(spark, archive).select(text().alias("t"), json_of("$.number").alias("n"))
    found = {row.n for row in frame.collect() if row.t is not None}
    assert found == {str(number) for number in range(1, 2 * COUNT)}
    select = "select value from messages where array_contains(keys, 'k-0') or keys[0] = 'k-1'"
    for topic, wanted in (("ord*", {"number": 1, "ü": "ö"}), ("pay", None)):
        said = call(
            "archive",
            "sql",
            archive,
            f"{select} order by topic, ordinal",
            "--values",
            topic,
            "--json",
        )
        assert sorted(map(json.loads, said.splitlines()), key=str)[-1] == {"value": wanted}
    frame = read_archive(spark, archive, values=["orders"])
    number = frame.selectExpr("try_variant_get(value, '$.number', 'int') as n")
    assert number.where("n is not null").count() == 2 * COUNT - 1


@pytest.mark.parametrize(
    ("select", "code", "cause"),
    [
        ("select nix from messages", 2, "[UNRESOLVED_COLUMN.WITH_SUGGESTION]"),
        ("selct 1", 2, "[PARSE_SYNTAX_ERROR]"),
        ("select 1 / (ordinal - ordinal) from messages", 1, "[DIVIDE_BY_ZERO]"),
    ],
)
def test_an_error_of_sql_is_one_line(call, archive, select, code, cause):
    error = call("archive", "sql", archive, select, code=code)
    assert error.startswith("error: Spark ")
    assert cause in error
    assert error.count("\n") == 1
    assert len(error) < 600


def test_a_session_that_does_not_start_says_the_last_cause_of_java(archive):
    arguments = ("archive", "sql", archive, "select 1", "--memory", "1x")
    done = subprocess.run(
        [sys.executable, "-m", "mqmesh.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "error: Spark does not start: Invalid maximum heap size: -Xmx1x"
    )
    assert len(done.stderr.splitlines()) <= 2  # the jars may be fetched for the first time


def test_lines_and_parquet_hold_every_message_in_order(call, archive, tmp_path):
    path = tmp_path / "orders.ndjson"
    call("archive", "export", archive, "--topic", "orders", "-o", path)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert call("archive", "export", archive, "--topic", "orders").encode() == path.read_bytes()
    assert len(lines) == 2 * COUNT
    places = [(line["commitlog_offset"], line["ordinal"]) for line in lines]
    assert places == sorted(places)
    by_number = {int(line["properties"]["number"]): line for line in lines}
    assert json.loads(by_number[17]["body"]) == {"number": 17, "ü": "ö"}
    assert by_number[0]["body_base64"] == "/wA="
    assert by_number[17]["keys"] == ["k-17", "all"]
    # A file that is there is not written over.
    assert "exists" in call("archive", "export", archive, "--topic", "orders", "-o", path, code=1)
    parquet = ("archive", "export", archive, "--topic", "orders", "--format", "parquet")
    call(*parquet, "-o", tmp_path / "parquet")
    table = pa.parquet.read_table(tmp_path / "parquet" / "orders.parquet")
    assert table["commitlog_offset"].to_pylist() == [one for one, _ in places]


def test_what_is_sent_again_is_the_same_and_a_command_that_was_stopped_goes_on(
    call, cluster, archive, tmp_path, monkeypatch
):
    state = tmp_path / "state"
    resend = ("--namesrv", cluster.namesrv_addr, "archive", "export", archive, "--topic", "orders")
    resend = (*resend, "--format", "resend", "--into", "again", "-o", state)
    assert call(*resend, "--dry-run") == f"{2 * COUNT:,} messages\n"
    assert not state.exists()

    class Stopped(Exception):
        pass

    sent = archive_export.send_again

    def send_and_stop(*arguments):
        sent(*arguments)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(archive_export, "send_again", send_and_stop)
        patch.setattr(archive_export, "RESEND_BATCH", 100)
        call(*resend, code=1)
    left = 2 * COUNT - 100
    assert call(*resend, "--dry-run") == f"{left:,} messages\n"
    assert call(*resend, "--rate", "100000") == f"{left:,} messages\n"
    assert call(*resend) == "0 messages\n"
    found = []
    with PullConsumer(
        "g", namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.subscribe("again")
        while len(found) < 2 * COUNT:
            messages = consumer.poll(10_000)
            assert messages, f"only {len(found)} came"
            found += messages
    assert Counter(int(one.properties["number"]) for one in found) == Counter(range(2 * COUNT))
    for one in found:
        wanted = make_message(int(one.properties["number"]))
        origin = one.properties.pop("ARCHIVE_ORIGIN")
        assert re.fullmatch(r"broker-a#[0-9A-F]+#[0-9A-F]+", origin)
        assert (one.body, one.tag, list(one.keys), one.properties, one.sharding_key) == (
            wanted.body,
            wanted.tag,
            list(wanted.keys),
            wanted.properties,
            wanted.sharding_key,
        )


@pytest.fixture
def days(tmp_path):
    """A snapshot of three topics, a message a day of each."""
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    for number in range(12):
        topic = ("keep", "debug-1", "pay")[number % 3]
        batch = make_messages_batch([Message(topic, b"x")], topic=topic, first_sequence=number)
        store.put([batch], TimestampMs(START_MS + number // 3 * DAY_MS))
    path, _ = take_snapshot(store, files.directory, tmp_path / "snapshots")
    files.close()
    return path


def test_settings_say_what_is_left_out_and_how_long_it_is_kept(spark, days, tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    archive.joinpath("archive.toml").write_text('leave_out = ["debug*"]\n[expire_days]\npay = 2\n')
    ingest(spark, str(days), str(archive))
    counts = query(spark, str(archive), "select topic, count(*) from messages group by topic")
    assert dict(map(tuple, counts.collect())) == {"keep": 4, "pay": 4}
    last = date.fromtimestamp((START_MS + 3 * DAY_MS) / 1_000)
    assert expire_by_settings(str(archive), last) == 1
    assert expire_by_settings(str(archive), last) == 0
    with pytest.raises(InvalidArgument):
        expire(str(archive), before="2100-01-01", topic="keep' OR '1'='1")
    assert sum(one.rows for one in tables.days(str(archive))) == 7


def test_damage_ends_an_ingest_with_one_sentence_and_a_summary_counts_it(spark, days, tmp_path):
    archive = str(tmp_path / "archive")
    batches = [one for one in Snapshot(days).read() if isinstance(one, Batch)]
    place = batches[5].header.commitlog_offset
    segment = Snapshot(days).log.find(place)
    with open(segment.path, "r+b") as file:
        file.seek(place - segment.start + 70)
        file.write(b"damage")
    with pytest.raises(CorruptRecord, match=r"^/.*is damaged: .*--on-damage skip") as caught:
        ingest(spark, str(days), archive)
    assert "\n" not in str(caught.value)
    frame = spark.read.format("mqmesh").option("summary", "true").load(str(days))
    assert frame.selectExpr("sum(messages)", "sum(_damage)").collect()[0][:] == (11, 1)
    ingest(spark, str(days), archive, on_damage="skip")
    assert sum(one.rows for one in tables.days(archive)) == 11
