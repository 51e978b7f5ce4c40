"""Topics, for administrators."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from mqmesh.figures import Labelled, Measured, gauge, text
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin import admin
from mqmesh.roles.broker.features.topics.topics import Topic
from mqmesh.roles.broker.stats import DAY_MS, Before, Totals


def _version(context: BrokerContext) -> str:
    version = context.topics.version
    return f"{version.timestamp_ms}.{version.counter}"


def _announce_anew(context: BrokerContext) -> None:
    # Name servers are told, too, what topics that make themselves are like.
    if context.is_follower:
        return
    version = context.topics.version
    context.topics.begin_life(context.clock.wall_ms(), version.counter + 1)


_PUT, _GOT = "put_messages", "get_messages"


def _used_topics(context: BrokerContext) -> Iterator[Topic]:
    return (topic for topic in context.topics if topic.put_messages)


def _totals(context: BrokerContext) -> Totals:
    total = context.stats.total
    return {_PUT: total.put_messages, _GOT: total.get_messages}


def _other_totals(context: BrokerContext) -> Iterator[tuple[Before, int]]:
    yield from ((topic.before, topic.put_messages) for topic in _used_topics(context))
    yield from ((one.before, one.messages) for _, _, one in context.pulls.handed_out())


def _sample_totals(context: BrokerContext) -> None:
    context.periods.sample(
        context.clock.monotonic_ms(),
        context.clock.wall_ms() // DAY_MS,
        lambda: _totals(context),
        lambda: _other_totals(context),
    )


def _per_s(context: BrokerContext, before: Before, total: int) -> float:
    return context.periods.per_s(before, total, context.clock.monotonic_ms())


def _by_topic(
    context: BrokerContext, value: Callable[[Before, int], int | float]
) -> Labelled[Topic]:
    return Labelled(
        _used_topics(context),
        lambda topic: (topic.config.topic,),
        lambda topic: value(topic.before, topic.put_messages),
    )


def _by_group(context: BrokerContext, value: Callable[[Before, int], int | float]) -> Labelled[Any]:
    return Labelled(
        context.pulls.handed_out(),
        lambda one: one[:2],
        lambda one: value(one[2].before, one[2].messages),
    )


def _grown_today(before: Before, total: int) -> int:
    return total - before.midnight


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
        lambda broker: _by_topic(broker, partial(_per_s, broker)),
        unit="messages",
        labels=("topic",),
    ),
    gauge(
        "topic_put_messages_today",
        "messages stored since midnight (UTC)",
        lambda broker: _by_topic(broker, _grown_today),
        unit="messages",
        labels=("topic",),
    ),
    gauge(
        "group_get_messages_per_s",
        "messages handed out a second, in the last minute or two",
        lambda broker: _by_group(broker, partial(_per_s, broker)),
        unit="messages",
        labels=("topic", "consumer_group"),
    ),
    gauge(
        "group_get_messages_today",
        "messages handed out since midnight (UTC)",
        lambda broker: _by_group(broker, _grown_today),
        unit="messages",
        labels=("topic", "consumer_group"),
    ),
)

ADMIN: Final = Feature(
    commands={
        RequestCode.UPDATE_AND_CREATE_TOPIC: admin.update_and_create_topic,
        RequestCode.CREATE_TOPICS: admin.create_topics,
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
        text(
            "topic_data_version", "tells name servers whether they have the topic table", _version
        ),
        *_PERIOD_FIGURES,
    ),
)
