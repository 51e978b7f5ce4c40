"""Spark on a running cluster: what is read, what is written, each message once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from harness.secured import CLIENT, secured_folder
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from mqmesh.errors import ConfigError, InvalidArgument, MQMeshError, OffsetIllegal, TopicNotFound
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.connector.numbered_sender import NumberedSender
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.spark.data_source import MqmeshDataSource
from mqmesh.spark.failures import NOT_STARTED
from mqmesh.spark.live.sink import _Sink
from mqmesh.spark.live.source import LiveReader, LiveStreamReader
from mqmesh.spark.message_columns import COLUMNS
from mqmesh.spark.streams import drain, offsets_behind
from mqmesh.testing.processes import ProcessCluster

pytestmark = [
    pytest.mark.timeout(600),
    # Sockets and processes of Java end when it likes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BROKERS = ("broker-a", "broker-b")
TYPES = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "array<string>": ArrayType(StringType()),
    "map<string,string>": MapType(StringType(), StringType()),
}


def struct(text):
    """A schema, without asking Java."""
    columns = [one.split() for one in text.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in columns])


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    with ProcessCluster(folder, brokers=BROKERS) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def topic(cluster, request):
    name = f"t-{abs(hash(request.node.name)) % 10**9}"
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(name, queues=2)
    return name


def messages_in(cluster, topic):
    """What a consumer finds in a topic."""
    found = []
    with PullConsumer("look", namesrv_addr=cluster.namesrv_addr, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to_begin()
        left = sum(consumer.lag().values())
        while left:
            some = consumer.poll(10_000, 1_000)
            assert some, f"{left} messages of {topic} do not come"
            left -= len(some)
            found += some
    return found


def fill(cluster, topic, count, start=0):
    with Producer("fill", namesrv_addr=cluster.namesrv_addr) as producer:
        futures = [
            producer.send_async(
                Message(
                    topic,
                    str(number).encode(),
                    f"tag{number % 3}",
                    [f"k{number}"],
                    sharding_key=f"s{number % 50}",  # into all queues
                )
            )
            for number in range(start, start + count)
        ]
        for future in futures:
            future.result()


def reader(kind, cluster, **options):
    schema = StructType([StructField(name, BinaryType()) for name in COLUMNS])
    return kind(schema, {"namesrv": cluster.namesrv_addr, **options})


def rows_of(reader, parts):
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_what_is_written_is_read_as_it_was(spark, cluster, topic):
    rows = [
        Row(
            body=bytes([number % 256, 0, 255]) + b"x" * (number % 40),
            tag=f"tag{number % 5}" if number % 4 else None,
            keys=[f"k{number}", "all"] if number % 3 else [],
            properties={"number": str(number), "empty": "", "ü": "€"} if number % 2 else {},
            sharding_key=f"s{number % 7}" if number % 6 == 0 else None,
            flag=number,
        )
        for number in range(3_000)
    ]
    schema = (
        "body binary, tag string, keys array<string>, properties map<string,string>, "
        "sharding_key string, flag int"
    )
    frame = spark.createDataFrame(rows, schema).repartition(2, "flag")
    options = {"namesrv": cluster.namesrv_addr, "topic": topic}
    frame.write.format("mqmesh").options(**options).mode("append").save()
    source = spark.read.format("mqmesh").options(namesrv=cluster.namesrv_addr, subscribe=topic)
    found = source.option("minPartitions", "6").load()
    assert found.rdd.getNumPartitions() >= 6
    assert found.columns == list(COLUMNS)

    def plain(row):
        return (
            bytes(row.body),
            row.tag,
            tuple(row["keys"] or ()),
            row.properties or {},
            row.sharding_key,
        )

    assert {row.flag: plain(row) for row in found.collect()} == {
        row.flag: plain(row) for row in rows
    }
    assert found.count() == found.select("message_id").distinct().count() == 3_000
    stored = messages_in(cluster, topic)
    assert {one.flag: (one.body, one.message_id) for one in stored} == {
        row.flag: (bytes(row.body), row.message_id) for row in found.collect()
    }
    one_queue = {(one.sharding_key, one.message_queue) for one in stored if one.sharding_key}
    assert len(one_queue) == 7
    # What was read can be written as it is.
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(f"{topic}-again", queues=1, exist_ok=True)
    again = {"namesrv": cluster.namesrv_addr, "topic": f"{topic}-again"}
    found.where("tag = 'tag1'").write.format("mqmesh").options(**again).mode("append").save()
    copied = source.option("subscribe", f"{topic}-ag*").load().collect()
    assert {row.flag: plain(row) for row in copied} == {
        row.flag: plain(row) for row in rows if row.tag == "tag1"
    }


def test_offsets_times_and_filters_choose_what_is_read(cluster, topic):
    fill(cluster, topic, 900)
    stored = messages_in(cluster, topic)
    everything = reader(LiveReader, cluster, subscribe=topic)
    assert len(rows_of(everything, everything.partitions())) == 900
    by_queue = Counter(one.message_queue for one in stored)
    queues = sorted(by_queue)
    start = {topic: {f"{one.broker_name}:{one.queue_id}": -1 for one in queues}}
    first = queues[0]
    start[topic][f"{first.broker_name}:{first.queue_id}"] = 3
    some = reader(LiveReader, cluster, subscribe=topic, startingOffsets=json.dumps(start))
    found = rows_of(some, some.partitions())
    assert [row["queue_offset"] for row in found] == list(range(3, by_queue[first]))
    assert {row["queue_id"] for row in found} == {first.queue_id}
    assert {row["broker"] for row in found} == {first.broker_name}
    name = f"{first.broker_name}:{first.queue_id}"
    assigned = reader(
        LiveReader,
        cluster,
        assign=json.dumps({topic: [name]}),
        startingOffsets=json.dumps({topic: {name: -2}}),
        endingOffsets=json.dumps({topic: {name: 5}}),
        maxRowsPerBatch="2",
    )
    assert [row["queue_offset"] for row in rows_of(assigned, assigned.partitions())] == [
        0,
        1,
        2,
        3,
        4,
    ]
    tagged = reader(LiveReader, cluster, subscribe=topic, filter="tag1 || tag2", minPartitions="9")
    found = rows_of(tagged, tagged.partitions())
    assert Counter(row["tag"] for row in found) == {"tag1": 300, "tag2": 300}
    middle = sorted(one.store_timestamp for one in stored)[450]
    late = reader(LiveReader, cluster, subscribePattern=topic, startingTimestamp=str(middle))
    expected = {one.message_id for one in stored if one.store_timestamp >= middle}
    assert {row["message_id"] for row in rows_of(late, late.partitions())} == expected


def test_a_stream_goes_on_where_its_checkpoint_says(cluster, topic):
    fill(cluster, topic, 500)
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "130"}
    stream = reader(LiveStreamReader, cluster, **options)
    place, found = stream.initialOffset(), []
    for _ in range(2):
        end = stream.latestOffset()
        rows = rows_of(stream, stream.partitions(place, end))
        assert len(rows) == 130
        found += rows
        stream.commit(end)
        place = end
    stream.stop()
    # A new driver, which Spark tells where it is.
    stream = reader(LiveStreamReader, cluster, **options)
    assert list(stream.partitions(place, place)) == []
    fill(cluster, topic, 100, start=500)
    while True:
        end = json.loads(json.dumps(stream.latestOffset()))
        rows = rows_of(stream, stream.partitions(place, end))
        assert len(rows) <= 130
        if end == place:
            break
        found += rows
        place = end
    stream.stop()
    assert sorted(int(row["body"]) for row in found) == list(range(600))
    # Who begins at the end gets what comes later.
    stream = reader(LiveStreamReader, cluster, subscribe=topic)
    begin = stream.latestOffset()
    assert begin == stream.initialOffset()
    fill(cluster, topic, 7, start=600)
    rows = rows_of(stream, stream.partitions(begin, stream.latestOffset()))
    assert sorted(int(row["body"]) for row in rows) == list(range(600, 607))
    stream.stop()


def test_a_stream_with_a_limit_is_drained_batch_by_batch(spark, cluster, topic, tmp_path):
    fill(cluster, topic, 500)
    path = str(tmp_path / "table")
    options = {"namesrv": cluster.namesrv_addr, "subscribe": topic, "startingOffsets": "earliest"}

    def stream(**more):
        frame = spark.readStream.format("mqmesh").options(**options, **more).load()
        writer = frame.select("body").writeStream.format("parquet")
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint"))

    text = NOT_STARTED
    while NOT_STARTED in text:  # on a busy machine
        with pytest.raises(StreamingQueryException) as refused:
            limited = stream(maxOffsetsPerTrigger="200").trigger(availableNow=True).start(path)
            limited.awaitTermination(300)
        text = str(refused.value)
    assert "mqmesh.spark.streams.drain" in text
    query = drain(stream(maxOffsetsPerTrigger="200", endingOffsets="latest"), path)
    batches = [one for one in query.recentProgress if one.numInputRows]
    assert [one.numInputRows for one in batches] == [200, 200, 100]
    behind = [offsets_behind(one)["avgOffsetsBehindLatest"] for one in batches]
    assert behind == [75, 25, 0]  # of four queues
    fill(cluster, topic, 10, start=500)
    drain(stream(), path)
    found = spark.read.schema("body binary").parquet(path).collect()
    assert sorted(int(bytes(row.body)) for row in found) == list(range(510))
    options["namesrv"] = "nowhere"
    with pytest.raises(MQMeshError, match=r"^name server 'nowhere'.*host:port") as caught:
        drain(stream(), path)
    assert "\n" not in str(caught.value)


def test_messages_that_are_gone_fail_the_query_or_are_passed_over(cluster, topic):
    fill(cluster, topic, 40)
    stream = reader(LiveStreamReader, cluster, subscribe=topic, startingOffsets="earliest")
    place = stream.latestOffset()
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.delete_topic(topic)
        admin.create_topic(topic, queues=2)
    fill(cluster, topic, 4)
    end = stream.latestOffset()
    with pytest.raises(OffsetIllegal, match="failOnDataLoss 'false' goes on"):
        stream.partitions(
            {
                t: {q: {"offset": p["offset"] + 1_000, "epoch": 0} for q, p in of.items()}
                for t, of in place.items()
            },
            {
                t: {q: {"offset": p["offset"] + 2_000, "epoch": 0} for q, p in of.items()}
                for t, of in end.items()
            },
        )
    stream.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one of subscribe"),
        ({"subscribe": "a", "assign": "{}"}, "given: subscribe, assign"),
        ({"subscribe": "a", "kafka.bootstrap.servers": "b:1"}, "no option 'kafka.bootstrap"),
        ({"subscribe": "a", "startingOffsets": "first"}, "earliest, latest or JSON"),
        ({"subscribe": "a", "startingOffsets": '{"a": 5}'}, "'a' has 5"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"b": 5}}'}, "write broker-a:0"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"b:0": -3}}'}, "-2 for earliest"),
        ({"subscribe": "a", "startingTimestamp": "soon"}, "is no time"),
        ({"subscribe": "a", "startingOffsets": "latest", "startingTimestamp": "5"}, "exclude"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "'latest' or JSON"),
        ({"subscribe": "a", "minPartitions": "0"}, "it may be 1 to 10000"),
        ({"subscribe": "a", "failOnDataLoss": "no"}, "'true' or 'false'"),
        ({"subscribe": "a", "filterSql": "a >"}, "option filterSql"),
        ({"subscribe": "a b"}, "topic"),
        ({"subscribePattern": "("}, "option subscribePattern is '\\('"),
        ({"subscribe": "a", "group": "a b"}, "option group"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, "no option 'maxOffsetsPerTrigger'"),
        ({"subscribe": "a", "startingOffsetsByTimestamp": '{"a": 5}'}, "'a' has 5; write"),
        ({"subscribe": "a", "startingOffsetsByTimestamp": '{"a": {"b:0": "soon"}}'}, "no time"),
        ({"subscribe": "a", "namesrv": "nowhere"}, "host:port"),
    ],
)
def test_wrong_options_of_a_source_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        LiveReader(struct("body binary"), {"namesrv": "127.0.0.1:1", **options})


@pytest.mark.parametrize(
    ("schema", "options", "text"),
    [
        ("body binary", {}, "say where to"),
        ("body binary, value binary", {"topic": "a"}, "body and value, and not both"),
        ("tag string", {"topic": "a"}, "one of the columns body and value"),
        ("body int", {"topic": "a"}, "must be binary or string"),
        ("body binary, colour string", {"topic": "a"}, "no column 'colour'"),
        ("body binary, keys string", {"topic": "a"}, "must be array<string>"),
        ("body binary, delay_level int, deliver_at bigint", {"topic": "a"}, "exclude each other"),
        ("body binary", {"topic": "a", "subscribe": "b"}, "no option 'subscribe'"),
        ("body binary", {"topic": "a", "path": "/tmp/a"}, "no option 'path'"),
        ("body binary", {"topic": "%DLQ%a"}, "topic of mqmesh's own"),
        ("body binary", {"topic": "a", "maxMessageSize": "0"}, "may be 1 to"),
    ],
)
def test_wrong_options_of_a_sink_are_refused(schema, options, text):
    source = MqmeshDataSource({"namesrv": "127.0.0.1:1", **options})
    for make in (source.writer, source.streamWriter):
        with pytest.raises(ConfigError, match=text):
            make(struct(schema), False)
    with pytest.raises(ConfigError, match="mode 'append'"):
        MqmeshDataSource({"namesrv": "127.0.0.1:1", "topic": "a"}).writer(
            struct("body binary"), True
        )


def test_processes_that_only_look_for_data_sources_load_little():
    code = (
        "import sys, pyspark_mqmesh; source = pyspark_mqmesh.DefaultSource({}); source.schema(); "
        "print(*sorted({'pyarrow', 'zmq', 'zstandard', 'mqmesh.sdk'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_a_query_says_of_wrong_names_reaches_its_user(spark, cluster):
    source = spark.read.format("mqmesh").option("namesrv", cluster.namesrv_addr)
    with pytest.raises(PySparkException, match=r"nowhere.*create it"):
        source.option("subscribe", "nowhere").load().collect()
    with pytest.raises(PySparkException, match="exclude each other"):
        source.option("subscribe", "a").load("/tmp/snapshot").collect()
    absent = reader(LiveReader, cluster, subscribe="nowhere")
    with pytest.raises(TopicNotFound, match="take it out of the options"):
        absent.partitions()


def batches(count, size=700):
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        yield pa.record_batch(
            {
                "body": pa.array([str(number).encode() for number in numbers]),
                "sharding_key": pa.array([f"s{n % 5}" if n % 2 else None for n in numbers]),
            }
        )


class Killed(Exception):
    """Ends a task in the middle."""


def test_a_task_that_is_done_again_adds_nothing(cluster, topic, monkeypatch):
    options = {"namesrv": cluster.namesrv_addr, "topic": topic}
    sink = _Sink(struct("body binary, sharding_key string"), options, False)
    real, flights, stop = NumberedSender._send_to, 0, 0

    def dying(self, broker_name, waiting):
        nonlocal flights
        real(self, broker_name, waiting)
        flights += 1
        if flights == stop:
            raise Killed

    monkeypatch.setattr(NumberedSender, "_send_to", dying)
    for until in (1, 4, 9, 10_000):  # after some brokers have their parts of a flight
        flights, stop = 0, until
        try:
            sent = sink.send(batches(20_000), "a-write", 0, 0)
        except Killed:
            continue
    assert sent.rows == 20_000
    assert 4_000 <= sent.known < 20_000
    assert sink.send(batches(20_000), "a-write", 0, 0).known == 20_000
    assert sorted(int(one.body) for one in messages_in(cluster, topic)) == list(range(20_000))
    # Another part of the write, and the next batch of a stream, are other messages.
    assert sink.send(batches(10), "a-write", 1, 0).known == 0
    assert sink.send(batches(10), "a-write", 0, 1 << 32).known == 0
    assert len(messages_in(cluster, topic)) == 20_020


def test_a_secured_cluster_is_written_and_read_with_credentials():
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    keys = secured_folder(folder)
    credentials = str(keys / f"{CLIENT}.toml")
    with ProcessCluster(folder, keys=keys) as cluster:
        with AdminClient(cluster.namesrv_addr, credentials=credentials) as admin:
            admin.create_topic("secrets", queues=2)
        options = {"namesrv": cluster.namesrv_addr, "topic": "secrets", "credentials": credentials}
        sink = _Sink(struct("body binary, sharding_key string"), options, False)
        assert sink.send(batches(100), "a-write", 0, 0).rows == 100
        source = reader(LiveReader, cluster, subscribe="secrets", credentials=credentials)
        assert len(rows_of(source, source.partitions())) == 100
        stream = reader(LiveStreamReader, cluster, subscribe="secrets", credentials=credentials)
        assert stream.latestOffset() == stream.initialOffset()
        stream.stop()
        stranger = reader(LiveReader, cluster, subscribe="secrets", fetchTimeoutMs="1000")
        with pytest.raises(MQMeshError):
            stranger.partitions()
        absent = reader(LiveReader, cluster, subscribe="secrets", credentials="/nowhere.toml")
        with pytest.raises(ConfigError, match=r"/nowhere\.toml: No such file"):
            absent.partitions()
    shutil.rmtree(folder, ignore_errors=True)


def test_rows_that_can_be_no_message_are_refused(cluster, topic):
    options = {"namesrv": cluster.namesrv_addr, "topic": topic}
    sink = _Sink(struct("body binary"), options, False)
    with pytest.raises(InvalidArgument, match="empty body"):
        sink.send(iter([pa.record_batch({"body": pa.array([b"x", b""])})]), "w", 0, 0)
    with pytest.raises(InvalidArgument, match="over the limit"):
        big = pa.record_batch({"body": pa.array([b"x" * 5_000_000])})
        sink.send(iter([big]), "w", 0, 0)
    assert messages_in(cluster, topic) == []
