"""Topics, for administrators."""

from collections.abc import Mapping
from typing import Any, Final

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import StorageError
from mqmesh.figures import LabelValues, Measured, gauge, text
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin import admin
from mqmesh.roles.broker.features.admin.periods import DAY_MS, Totals
from mqmesh.units import CommitLogOffset


def _version(context: BrokerContext) -> str:
    version = context.topics.version
    return f"{version.timestamp_ms}.{version.counter}"


def _announce_anew(context: BrokerContext) -> None:
    # Name servers are told, too, what topics that make themselves are like.
    if context.is_follower:
        return
    version = context.topics.version
    context.topics.begin_life(context.clock.wall_ms(), version.counter + 1)


def _oldest_age_ms(context: BrokerContext) -> int:
    try:
        oldest = context.store.read_at(CommitLogOffset(context.store.stats().min_commitlog_offset))
    except StorageError:
        return 0  # there is none, or it is damaged
    return max(context.clock.wall_ms() - read_header(oldest).store_timestamp, 0)


_PUT, _GOT = "put_messages", "get_messages"
"""Totals of the whole broker; those of a topic, and of a topic and group, are tuples."""


def _main_totals(context: BrokerContext) -> Totals:
    total = context.stats.total
    return {_PUT: total.put_messages, _GOT: total.get_messages}


def _put_totals(context: BrokerContext) -> dict[LabelValues, int]:
    return {(one.config.topic,): one.put_messages for one in context.topics if one.put_messages}


def _got_totals(context: BrokerContext) -> dict[LabelValues, int]:
    handed_out = context.pulls.handed_out()
    return {(topic, group): one.messages for topic, group, one in handed_out}


def _sample_totals(context: BrokerContext) -> None:
    def look() -> Totals:
        parts: list[Mapping[Any, int]] = [
            _main_totals(context),
            _put_totals(context),
            _got_totals(context),
        ]
        return {key: total for part in parts for key, total in part.items()}

    context.periods.sample(
        context.clock.monotonic_ms(),
        context.clock.wall_ms() // DAY_MS,
        look,
        lambda: _main_totals(context),
    )


def _rates(context: BrokerContext, totals: dict[LabelValues, int]) -> dict[LabelValues, float]:
    now_ms = context.clock.monotonic_ms()
    return {key: context.periods.per_s(key, one, now_ms) for key, one in totals.items()}


def _today(context: BrokerContext, totals: dict[LabelValues, int]) -> dict[LabelValues, int]:
    return {key: context.periods.today(key, total) for key, total in totals.items()}


def _total_today(context: BrokerContext, name: str) -> int:
    return context.periods.today(name, getattr(context.stats.total, name))


def _rate_of_day(context: BrokerContext, name: str) -> float:
    total = getattr(context.stats.total, name)
    return context.periods.per_s_of_day(name, total, context.clock.monotonic_ms())


_PERIOD_FIGURES: Final[tuple[Measured[BrokerContext], ...]] = (
    gauge(
        "put_messages_today",
        "messages stored since midnight (UTC)",
        lambda broker: _total_today(broker, _PUT),
        unit="messages",
    ),
    gauge(
        "put_messages_yesterday",
        "messages stored the day before",
        lambda broker: broker.periods.yesterday(_PUT),
        unit="messages",
    ),
    gauge(
        "get_messages_today",
        "messages handed out since midnight (UTC)",
        lambda broker: _total_today(broker, _GOT),
        unit="messages",
    ),
    gauge(
        "get_messages_yesterday",
        "messages handed out the day before",
        lambda broker: broker.periods.yesterday(_GOT),
        unit="messages",
    ),
    gauge(
        "put_messages_day_per_s",
        "messages stored a second, in the last 24 hours",
        lambda broker: _rate_of_day(broker, _PUT),
        unit="messages",
    ),
    gauge(
        "get_messages_day_per_s",
        "messages handed out a second, in the last 24 hours",
        lambda broker: _rate_of_day(broker, _GOT),
        unit="messages",
    ),
    gauge(
        "topic_put_messages_per_s",
        "messages stored a second, in the last minute or two",
        lambda broker: _rates(broker, _put_totals(broker)),
        unit="messages",
        labels=("topic",),
    ),
    gauge(
        "topic_put_messages_today",
        "messages stored since midnight (UTC)",
        lambda broker: _today(broker, _put_totals(broker)),
        unit="messages",
        labels=("topic",),
    ),
    gauge(
        "group_get_messages_per_s",
        "messages handed out a second, in the last minute or two",
        lambda broker: _rates(broker, _got_totals(broker)),
        unit="messages",
        labels=("topic", "consumer_group"),
    ),
    gauge(
        "group_get_messages_today",
        "messages handed out since midnight (UTC)",
        lambda broker: _today(broker, _got_totals(broker)),
        unit="messages",
        labels=("topic", "consumer_group"),
    ),
)

ADMIN: Final = Feature(
    commands={
        RequestCode.UPDATE_AND_CREATE_TOPIC: admin.update_and_create_topic,
        RequestCode.GET_TOPIC_CONFIG: admin.get_topic_config,
        RequestCode.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
        RequestCode.GET_TOPIC_STATS_INFO: admin.get_topic_stats,
        RequestCode.VIEW_MESSAGE: admin.view_message,
        RequestCode.QUERY_CONSUME_QUEUE: admin.query_consume_queue,
        RequestCode.DELETE_EXPIRED_COMMITLOG: admin.delete_expired_commitlog,
    },
    tick=admin.answer_cleaned,
    sample=_sample_totals,
    stopping=admin.give_up_cleaning,
    configured=_announce_anew,
    figures=(
        text("cluster_name", "cluster of the broker", lambda broker: broker.config.cluster_name),
        text("broker_name", "broker group", lambda broker: broker.config.broker_name),
        gauge("broker_id", "0 for the master", lambda broker: broker.config.broker_id),
        text("instance_id", "another one with every start", lambda broker: str(broker.instance_id)),
        gauge(
            "topics", "topics", lambda broker: len(broker.topics), metric="rocketmq_topic_number"
        ),
        gauge(
            "oldest_message_age_ms",
            "age of the oldest batch in the log",
            _oldest_age_ms,
            unit="ms",
            metric="rocketmq_storage_message_reserve_time_milliseconds",
        ),
        text(
            "topic_data_version", "tells name servers whether they have the topic table", _version
        ),
        *_PERIOD_FIGURES,
    ),
)
