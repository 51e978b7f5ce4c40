"""Messages that producers send: checked, written once a turn, answered when they are safe."""

from collections.abc import Callable
from typing import Final

from mqmesh.errors import NotMaster
from mqmesh.figures import Histogram, Labelled, LabelValues, counter, gauge, histogram
from mqmesh.message import SCHEDULE_TOPIC, TRANS_HALF_TOPIC, is_system_topic
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, BrokerTurn, Feature
from mqmesh.roles.broker.features.sends import send
from mqmesh.roles.broker.features.sends.send_admission import SendAdmission
from mqmesh.roles.broker.features.storing import storing
from mqmesh.roles.broker.features.topics.topics import Topic


def make_admission(begins: Beginning) -> SendAdmission:
    """Decides which sends of a role that begins have waited for too long."""
    return SendAdmission(
        wait_limit_ms=begins.config.wait_time_mills_in_send_queue,
        busy_timeout_ms=begins.config.os_page_cache_busy_timeout_mills,
    )


def _configure(context: BrokerContext) -> None:
    config, admission = context.config, context.admission
    admission.wait_limit_ms = config.wait_time_mills_in_send_queue
    admission.busy_timeout_ms = config.os_page_cache_busy_timeout_mills


def _finish(context: BrokerContext, turn: BrokerTurn) -> None:
    if context.stage.sends:
        context.admission.frames_taken(turn.readable_ms)
    storing.finish_sends(context)


def _note_turn(context: BrokerContext, turn: BrokerTurn) -> None:
    now_ms = context.clock.monotonic_ms()
    context.admission.tick_ended(now_ms, turn.readable_ms, turn.drained_ms)


def _forget_producer(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    context.producer_keys.on_disconnect(peer)


def _forget_messages(context: BrokerContext, topic: str) -> None:
    # What was sent before goes first, or it would be stored into a topic that is not there.
    storing.finish_sends(context)
    context.store.delete_topic(topic)


def _answer_all(context: BrokerContext) -> None:
    if context.leadership is not None:
        # They may be stored, or not: who repeats them at the next master does not store them twice.
        storing.refuse_all(context, NotMaster("this replica is stopped"))
    wait_ms = context.commit_point.timeout_ms  # none waits for longer
    storing.answer_expired(context, context.clock.monotonic_ms() + wait_ms)


def _by_topic(context: BrokerContext, value: Callable[[Topic], int | Histogram]) -> Labelled[Topic]:
    used = (topic for topic in context.topics if topic.put_messages)
    return Labelled(used, lambda topic: _topic_labels(topic.config.topic), value)


def _topic_labels(topic: str) -> LabelValues:
    kind = _MESSAGE_TYPES.get(topic, "normal")
    return (topic, kind, str(is_system_topic(topic)).lower())


_MESSAGE_TYPES: Final = {SCHEDULE_TOPIC: "delay", TRANS_HALF_TOPIC: "transaction"}
"""Others hold what has become an ordinary message."""
_TOPIC_LABELS: Final = ("topic", "message_type", "is_system")

SENDS: Final = Feature(
    commands={
        RequestCode.SEND_MESSAGE: send.send_message,
    },
    turn_ended=_finish,
    turn_over=_note_turn,
    durable=storing.answer_confirmed,
    tick=storing.answer_expired,
    client_gone=_forget_producer,
    topic_deleting=_forget_messages,
    configured=_configure,
    stopping=storing.finish_sends,
    stopped=_answer_all,
    figures=(
        counter(
            "send_requests_total",
            "requests to store messages",
            lambda broker: broker.stats.total.send_requests,
        ),
        counter(
            "put_batches_total",
            "batches that were stored",
            lambda broker: broker.stats.total.put_batches,
            unit="batches",
        ),
        counter(
            "put_messages_total",
            "messages in them",
            lambda broker: broker.stats.total.put_messages,
            unit="messages",
        ),
        counter(
            "put_bytes_total",
            "their size in the log",
            lambda broker: broker.stats.total.put_bytes,
            unit="bytes",
        ),
        counter(
            "put_duplicates_total",
            "batches that had been stored before",
            lambda broker: broker.stats.total.put_duplicates,
            unit="batches",
        ),
        counter(
            "put_refused_total",
            "batches that were refused",
            lambda broker: broker.stats.total.put_refused,
            unit="batches",
        ),
        counter(
            "busy_refusals_total",
            "requests and batches refused for flow control",
            lambda broker: broker.stats.total.busy_refusals,
        ),
        counter(
            "unsafe_answers_total",
            "answers to sends that were stored, but not by all who should have them",
            lambda broker: {
                (status.name.lower(),): count
                for status, count in broker.stats.unsafe_answers.items()
            },
            labels=("send_status",),
        ),
        gauge(
            "sync_flush_waits",
            "sends that wait for the disk or a follower now",
            lambda broker: broker.commit_point.waiting_count,
        ),
        gauge(
            "send_requests_per_s",
            "requests to store messages, of late",
            lambda broker: broker.stats.rate("send_requests"),
        ),
        gauge(
            "put_messages_per_s",
            "messages stored, of late",
            lambda broker: broker.stats.rate("put_messages"),
            unit="messages",
        ),
        gauge(
            "put_bytes_per_s",
            "bytes stored, of late",
            lambda broker: broker.stats.rate("put_bytes"),
            unit="bytes",
        ),
        counter(
            "topic_put_messages_total",
            "messages stored",
            lambda broker: _by_topic(broker, lambda topic: topic.put_messages),
            unit="messages",
            labels=_TOPIC_LABELS,
            metric="rocketmq_messages_in_total",
        ),
        counter(
            "topic_put_bytes_total",
            "their size in the log",
            lambda broker: _by_topic(broker, lambda topic: topic.put_bytes),
            unit="bytes",
            labels=_TOPIC_LABELS,
            metric="rocketmq_throughput_in_total",
        ),
        histogram(
            "topic_message_size_bytes",
            "sizes of the messages stored",
            lambda broker: _by_topic(broker, lambda topic: topic.sizes),
            unit="bytes",
            labels=_TOPIC_LABELS,
            metric="rocketmq_message_size",
        ),
    ),
)
