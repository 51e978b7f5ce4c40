"""Where a stream begins and where its batches end, call by call as Spark makes them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mqmesh.errors import ConfigError, EndpointUnreachable, OffsetIllegal
from mqmesh.message import MessageQueue
from mqmesh.sdk.connector.queue_reader import QueueEdges
from mqmesh.spark.live.options import Place, from_json, read_options, to_json
from mqmesh.spark.live.position import StreamPosition
from mqmesh.spark.streams import offsets_behind

A, B = (MessageQueue("orders", broker, 0) for broker in ("a", "b"))


class Cluster:
    """Stands in for ``QueueReader``; tests move the ends of its queues."""

    def __init__(self, **ends) -> None:
        self.ends = ends
        self.away = set()
        self.patience_ms = 60_000

    def readable_queues(self, topic):
        return [MessageQueue(topic, broker, 0) for broker in self.ends]

    def edges(self, queue):
        if queue.broker_name in self.away:
            raise EndpointUnreachable(f"{queue} is away")
        return QueueEdges(0, self.ends[queue.broker_name], 1)

    def offset_of_time(self, queue, timestamp_ms):
        return min(timestamp_ms // 1_000, self.ends[queue.broker_name])


class Spark:
    """Stands in for Spark: calls as it does, and keeps a checkpoint."""

    def __init__(self, cluster, **options) -> None:
        self.cluster = cluster
        self.options = {"namesrv": "127.0.0.1:1", "subscribe": "orders", **options}
        self.checkpoint = None
        self.sizes = []
        self.start()

    def start(self):
        self.position = StreamPosition(read_options(self.options, stream=True))
        if self.checkpoint is not None:
            self.position.plan(self.checkpoint, self.checkpoint)

    def look(self, now_ms=0):
        return json.loads(json.dumps(self.position.advance(self.cluster, now_ms)))

    def batch(self, now_ms=0):
        """A turn of a query; how many messages it read, None if it found nothing new."""
        end = self.look(now_ms)
        if self.checkpoint is None:
            places = self.position.initial(self.cluster)
        else:
            places = from_json(self.checkpoint, "test")
        if self.checkpoint == end:
            return None
        begins, ends = self.position.plan(self.checkpoint or to_json(places), end)
        self.checkpoint = end
        return sum(ends[q].offset - begins.get(q, Place(0)).offset for q in ends)

    def available_now(self):
        """A query with ``Trigger.AvailableNow``, which a wrapper of Spark's carries out."""
        self.position = StreamPosition(read_options(self.options, stream=True))
        end = self.look()
        if self.checkpoint is None:
            start = to_json(self.position.initial(self.cluster))
        else:
            start = self.checkpoint
            self.position.plan(start, start)
        self.look()
        begins, ends = self.position.plan(start, end)
        self.checkpoint = end
        self.look()
        return sum(ends[q].offset - begins.get(q, Place(0)).offset for q in ends)


def progress_of(*ends):
    sources = [{"endOffset": end} for end in ends]
    return SimpleNamespace(json=json.dumps({"sources": sources}))


def test_a_limit_cuts_batches_and_the_ends_of_queues_are_noted():
    spark = Spark(Cluster(a=60, b=40), startingOffsets="earliest", maxOffsetsPerTrigger="30")
    assert spark.batch() == 30
    assert spark.checkpoint == {
        "orders": {
            "a:0": {"offset": 18, "epoch": 1, "latest": 60},
            "b:0": {"offset": 12, "epoch": 1, "latest": 40},
        }
    }
    assert offsets_behind(progress_of(spark.checkpoint, None)) == {
        "minOffsetsBehindLatest": 28,
        "maxOffsetsBehindLatest": 42,
        "avgOffsetsBehindLatest": 35,
    }
    spark.start()  # another driver
    assert [spark.batch() for _ in range(4)] == [30, 30, 10, None]
    assert "latest" not in json.dumps(spark.checkpoint)
    assert offsets_behind(progress_of({"sourceVersion": 1}, {"topic": {"0": 5}}, 17)) == {}


def test_a_stream_with_an_end_reads_what_was_there_when_it_began():
    cluster = Cluster(a=60, b=40)
    options = {"startingOffsets": "earliest", "endingOffsets": "latest"}
    spark = Spark(cluster, maxOffsetsPerTrigger="70", **options)
    assert spark.batch() == 70
    cluster.ends = {"a": 1_000, "b": 1_000, "new": 5}
    assert [spark.batch(), spark.batch()] == [30, None]
    place = spark.checkpoint
    spark.start()
    assert spark.batch() == 70
    # An end that is behind the stream does not take it back.
    spark.options["endingOffsets"] = '{"orders": {"a:0": 5, "b:0": 5, "new:0": 5}}'
    spark.start()
    assert spark.batch() in (None, 5)
    assert from_json(spark.checkpoint, "test")[A].offset >= from_json(place, "test")[A].offset


def test_a_batch_waits_for_enough_messages_but_not_for_ever():
    cluster = Cluster(a=1)
    spark = Spark(
        cluster,
        startingOffsets="earliest",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="2m",
    )
    assert spark.batch(0) == 1  # at once, as with Kafka
    cluster.ends["a"] = 10
    assert spark.batch(119_999) is None
    cluster.ends["a"] = 11
    assert spark.batch(119_999) == 10
    cluster.ends["a"] = 12
    assert [spark.batch(239_998), spark.batch(239_999), spark.batch(400_000)] == [None, 1, None]


def test_a_stream_begins_at_a_time_of_its_own_in_each_queue():
    times = '{"orders": {"a:0": 20000, "b:0": "1970-01-01T00:00:07Z"}}'
    spark = Spark(Cluster(a=60, b=40), startingOffsetsByTimestamp=times)
    assert spark.batch() == 40 + 33
    spark = Spark(Cluster(a=60, b=40, c=1), startingOffsetsByTimestamp=times)
    with pytest.raises(ConfigError, match=r"says nothing of queue c:0.*a time in ISO"):
        spark.batch()


def test_available_now_reads_all_in_one_batch_and_a_limit_with_it_is_refused():
    cluster = Cluster(a=60, b=40)
    spark = Spark(cluster, startingOffsets="earliest")
    assert spark.available_now() == 100
    cluster.ends = {"a": 61, "b": 42, "c": 3}
    assert spark.available_now() == 6
    assert spark.available_now() == 0
    # A queue that is away cannot be passed over: its place would be forgotten.
    del cluster.ends["c"]
    with pytest.raises(OffsetIllegal, match=r"queue c:0.*start it again"):
        spark.available_now()
    for begin in ("earliest", "latest"):
        for checkpoint in (None, {"orders": {"a:0": 5, "b:0": 5}}):
            spark = Spark(cluster, startingOffsets=begin, maxOffsetsPerTrigger="30")
            spark.checkpoint = checkpoint
            if (begin, checkpoint) == ("latest", None):
                assert spark.available_now() == 0
                continue
            with pytest.raises(ConfigError, match=r"streams\.drain"):
                spark.available_now()


def test_an_empty_topic_and_batches_that_found_nothing_are_no_available_now():
    cluster = Cluster(a=0)
    spark = Spark(cluster, startingOffsets="earliest", maxOffsetsPerTrigger="30")
    assert [spark.batch(), spark.batch(), spark.batch()] == [0, None, None]
    cluster.ends["a"] = 40
    assert [spark.batch(), spark.batch(), spark.batch()] == [30, 10, None]


def test_a_broker_that_is_away_keeps_its_place():
    cluster = Cluster(a=60, b=40)
    spark = Spark(cluster, startingOffsets="earliest")
    assert spark.batch() == 100
    cluster.away.add("b")
    cluster.ends = {"a": 70, "b": 50}
    assert spark.batch() == 10
    spark.options["endingOffsets"] = "latest"
    spark.start()
    cluster.ends["a"] = 71
    assert spark.batch() == 1
    cluster.away.clear()
    assert spark.batch() is None  # what was known of it when the query began was its end
