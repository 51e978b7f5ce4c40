"""Topics, for administrators."""

from typing import Final

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import StorageError
from mqmesh.figures import gauge, text
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin import admin
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
    ),
)
