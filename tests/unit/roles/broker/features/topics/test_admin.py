"""Administration of topics, and metrics."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import DelayedMeta
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, check_stored, decode_messages
from mqmesh.errors import (
    CorruptRecord,
    InvalidArgument,
    MQMeshError,
    NoPermission,
    OffsetIllegal,
    OffsetOutOfRange,
    TopicNotFound,
)
from mqmesh.message import Message
from mqmesh.metrics import MetricBoard, MetricKind, Readings
from mqmesh.protocol.admin import (
    CreateTopicsRequest,
    GetTopicConfigRequest,
    QueueStats,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.route import DeleteTopicRequest, Perm, TopicConfig
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.store_metrics import STORE_METRICS
from mqmesh.storage.interface import StoreStats


def update(stage, *config, **options):
    request = UpdateTopicRequest(TopicConfig(*config), **options)
    return stage.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, request, TopicConfig)


def delete(stage, name):
    return stage.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest(name))


def configs(stage, name=""):
    request = GetTopicConfigRequest(name)
    return stage.ask(RequestCode.GET_TOPIC_CONFIG, request, TopicConfigs).topics


def test_a_topic_is_created_changed_and_saved(stage):
    assert update(stage, "t", 8, 8) == TopicConfig("t", 8, 8)
    assert update(stage, "t", 8, 2, Perm.READ.value, True).order
    assert stage.saved == ["topics", "topics"]
    assert configs(stage) == configs(stage, "t") == [TopicConfig("t", 8, 2, 4, True)]


def create_all(stage, *names):
    request = CreateTopicsRequest([TopicConfig(name) for name in names])
    return stage.ask(RequestCode.CREATE_TOPICS, request, TopicConfigs).topics


def test_many_topics_are_created_together_or_not_at_all(stage):
    assert create_all(stage, "t", "u") == [TopicConfig("t"), TopicConfig("u")]
    assert stage.saved == ["topics"]
    for names, why in (
        (("v", "t"), "'t' exists already"),
        (("v", "w", "v"), "'v' is named twice"),
        (("v", "no blanks"), "no blanks"),
    ):
        with pytest.raises(MQMeshError, match=why):
            create_all(stage, *names)
    assert [one.topic for one in configs(stage)] == ["t", "u"]


def test_wanting_what_is_there_already_changes_nothing(stage):
    update(stage, "t", 8, 8)
    version = stage.features.state.topics.version
    update(stage, "t", 8, 8)
    assert stage.features.state.topics.version == version
    assert stage.saved == ["topics"]


def test_queues_can_be_added_and_taken_away_under_load(stage):
    update(stage, "t", 2, 2)
    assert [one.code for one in stage.send(stage.batch(queue_id=2))] == [13]
    update(stage, "t", 4, 4)
    assert [one.code for one in stage.send(stage.batch(queue_id=3))] == [0]
    update(stage, "t", 4, 2)
    assert [one.code for one in stage.send(stage.batch(queue_id=3))] == [13]
    assert stage.pull(queue_id=3)[1] == [b"body"], "nothing is lost while shrinking"


def test_queues_with_unread_messages_stay_unless_they_may_be_hidden(stage):
    update(stage, "t", 4, 4)
    for queue_id in range(4):
        stage.send(stage.batch(queue_id=queue_id, bodies=(b"a", b"b")))
    with pytest.raises(InvalidArgument, match="4 unread messages of topic 't' would be hidden"):
        update(stage, "t", 2, 2)
    with pytest.raises(InvalidArgument, match="8 unread messages"):
        update(stage, "t", 4, 4, Perm.WRITE.value)
    update(stage, "t", 4, 2)
    for queue_id in (2, 3):
        stage.features.state.committed.commit("billing", "t", queue_id, 2)
        stage.features.state.committed.commit("audit", "t", queue_id, 1)
    with pytest.raises(InvalidArgument, match="2 unread messages"):
        update(stage, "t", 2, 2)  # the slowest group counts
    update(stage, "t", 2, 2, may_hide=True)
    update(stage, "t", 4, 4)
    assert stage.pull(queue_id=3)[1] == [b"a", b"b"], "they are back with the queues"
    for queue_id in (2, 3):
        stage.features.state.committed.commit("audit", "t", queue_id, 2)
    assert update(stage, "t", 2, 2) == TopicConfig("t", 2, 2)


def test_permissions_hold_at_once(stage):
    update(stage, "t", 4, 4)
    stage.send(stage.batch())
    update(stage, "t", 4, 4, Perm.READ.value)
    assert stage.send(stage.batch())[0].code == ResponseCode.NO_PERMISSION
    update(stage, "t", 4, 4, Perm.WRITE.value, may_hide=True)
    with pytest.raises(NoPermission):
        stage.pull()


def test_a_message_sent_before_a_deletion_in_the_same_tick_is_deleted(stage):
    update(stage, "t", 4, 4)
    sent = stage.begin_send(stage.batch())
    delete(stage, "t")
    assert stage.outcomes(sent)[0].code == 0
    assert stage.store.queue_bounds("t", 0) == (0, 0)


def test_a_deleted_topic_leaves_nothing_behind(stage):
    stage.send(stage.batch())
    waiting = stage.begin_pull(queue_offset=1, suspend_timeout_ms=1_000)
    stage.features.state.committed.commit("g", "t", 0, 1)
    stage.saved.clear()
    delete(stage, "t")
    assert sorted(stage.saved) == ["offsets", "topics"]
    assert stage.features.state.committed.query("g", "t", 0) == -1
    with pytest.raises(TopicNotFound, match="deleted"):
        stage.pulled(waiting)
    with pytest.raises(TopicNotFound):
        stage.pull()
    (outcome,) = stage.send(stage.batch())
    assert (outcome.code, outcome.base_queue_offset) == (0, 0), "the name may be used again"


def test_what_cannot_be_done_is_refused(stage):
    update(stage, "t", 4, 4)
    with pytest.raises(InvalidArgument, match="exists already"):
        update(stage, "t", 5, 5, must_be_new=True)
    with pytest.raises(TopicNotFound):
        update(stage, "u", 5, 5, must_exist=True)
    with pytest.raises(TopicNotFound):
        delete(stage, "u")
    with pytest.raises(TopicNotFound):
        configs(stage, "u")
    with pytest.raises(NoPermission):
        update(stage, "SCHEDULE_TOPIC_XXXX", 18, 18)
    assert configs(stage) == [TopicConfig("t", 4, 4)]


def test_stats_tell_of_every_queue(stage):
    update(stage, "t", 2, 2)
    stage.send(stage.batch(bodies=(b"a", b"b")))
    stored_ms = stage.clock.wall_ms()
    stage.clock.advance(1_000)

    def stats():
        request = TopicStatsRequest("t")
        return stage.ask(RequestCode.GET_TOPIC_STATS_INFO, request, TopicStats)

    expected = TopicStats("t", [QueueStats(0, 0, 2, stored_ms, stored_ms, 2), QueueStats(1, 0, 0)])
    assert stats() == expected
    # As after a restart, when only the store knows.
    stage.features.state.topics.require("t").last_update.clear()
    assert stats() == expected


def test_stats_of_a_damaged_topic_lack_its_times_and_nothing_else(stage):
    update(stage, "t", 1, 1)
    stage.send(stage.batch(bodies=(b"a", b"b")))
    stored_ms = stage.clock.wall_ms()
    stage.features.state.topics.require("t").last_update.clear()
    good_get = stage.store.get

    def stats():
        request = TopicStatsRequest("t")
        return stage.ask(RequestCode.GET_TOPIC_STATS_INFO, request, TopicStats).queues

    def damaged(*place, **options):
        raise CorruptRecord("offset 0 of queue 0 of 't' is damaged")

    def flipped(*place, **options):
        found = good_get(*place, **options)
        data = bytearray(found.data[0])
        data[0] ^= 1
        return msgspec.structs.replace(found, data=[bytes(data)])

    for bad in (damaged, flipped):
        stage.store.get = bad
        assert stats() == [QueueStats(0, 0, 2, 0, 0, 2)]
    stage.store.get = good_get
    assert stats() == [QueueStats(0, 0, 2, stored_ms, stored_ms, 2)], "once it is repaired"


def test_a_single_batch_can_be_looked_at(stage):
    (outcome,) = stage.send(stage.batch(bodies=(b"look",)))
    reply = stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(outcome.commitlog_offset))
    header = check_stored(reply.body[0])
    assert decode_messages(reply.body[0], header)[0].body == b"look"
    with pytest.raises(OffsetOutOfRange):
        stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(10**9))
    between = outcome.commitlog_offset + 1
    with pytest.raises(OffsetIllegal, match=f"no message begins at {between} of the log"):
        stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(between))


def test_a_batch_of_a_topic_that_nobody_may_read_is_not_shown(stage):
    (plain,) = stage.send(stage.batch("t"))
    parts = batch_parts(
        encode_payload([Message("t", b"later")]),
        topic="t",
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=77_000,
        born_timestamp=1,
        attributes=Attributes.HAS_DELAY,
        meta=DelayedMeta("t", level=1),
    )
    (delayed,) = stage.send(b"".join(parts))
    assert delayed.code == 0
    (other,) = stage.send(stage.batch("u"))
    config = TopicConfig("t", 4, 4, perm=Perm.WRITE)
    wanted = UpdateTopicRequest(config, may_hide=True)
    stage.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, wanted)
    for outcome in (plain, delayed):
        with pytest.raises(NoPermission, match="'t' does not permit reading"):
            stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(outcome.commitlog_offset))
    stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(other.commitlog_offset))


def readings_of(stage) -> Readings:
    board = MetricBoard()
    for kind in FEATURES:
        board.add(kind.metrics, partial(stage.features.of, kind))
    board.add(STORE_METRICS, stage.store.stats)
    return Readings(board.read())


def test_metrics_are_told_by_name(stage):
    stage.send(stage.batch(bodies=(b"a", b"b")))
    stage.begin_pull(queue_offset=2, suspend_timeout_ms=1_000)
    stage.features.core.stats.sample(0)
    metrics = readings_of(stage)
    expected = {
        "broker_name": "broker-a",
        "topics": 1,
        "put_messages_total": 2,
        "held_pulls": 1,
        "store_backend": "memory",
    }
    assert {name: metrics[name] for name in expected} == expected


def test_numbers_are_told_as_numbers_and_identities_as_texts(stage):
    stage.send(stage.batch())
    told = {one.metric.name: one for one in readings_of(stage)}
    texts = {
        name
        for name, one in told.items()
        if any(isinstance(sample.value, str) for sample in one.samples)
    }
    assert texts == {
        "cluster_name",
        "broker_name",
        "instance_id",
        "topic_data_version",
        "schedule_service",
        "store_backend",
        "store_store_id",
    }
    assert texts == {name for name, one in told.items() if one.metric.kind is MetricKind.TEXT}
    assert told["store_writable"].samples[0].value is True
    assert isinstance(told["put_messages_per_s"].samples[0].value, float)


def test_what_a_store_tells_of_itself_is_a_metric_and_has_a_help():
    names = {one.metric.name for one in STORE_METRICS}
    assert names >= {f"store_{name}" for name in StoreStats.__struct_fields__}
    declared = [*STORE_METRICS, *(one for feature in FEATURES for one in feature.metrics)]
    assert all(one.metric.help for one in declared)
    assert all(
        one.metric.name.endswith("_total") == (one.metric.kind is MetricKind.COUNTER)
        for one in declared
        if not one.metric.name.startswith("store_")
    )


def test_every_counter_of_a_broker_is_a_metric(stage):
    total = stage.features.core.stats.total
    for number, name in enumerate(total.__struct_fields__, 1):
        setattr(total, name, number)
    metrics = readings_of(stage)
    for number, name in enumerate(total.__struct_fields__, 1):
        assert metrics[f"{name}_total"] == number, name


def test_messages_and_bytes_are_counted_by_topic_and_by_group(stage):
    stage.send(stage.batch(bodies=(b"a", b"b")))
    reply = stage.answer(stage.begin_pull())
    size = sum(map(len, reply.body))
    metrics = readings_of(stage)
    assert metrics.number("topic_put_messages_total", "t", "normal", "false") == 2
    assert metrics.number("topic_put_bytes_total", "t", "normal", "false") == size
    (sizes,) = (one.samples for one in metrics if one.metric.name == "topic_message_size_bytes")
    assert (sizes[0].value.counts[0], sizes[0].value.total) == (2, size), "both are below 1 KiB"
    assert metrics.number("group_get_messages_total", "t", "g", "false") == 2
    assert metrics.number("group_get_bytes_total", "t", "g", "false") == size
