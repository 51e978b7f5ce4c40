"""Consumer groups: members, queues, locks, offsets; and producer groups."""

from typing import Final

from mqmesh.figures import counter, gauge
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.groups import groups, locks, membership, offsets, resets


def _send_notices(context: BrokerContext, turn: BrokerTurn) -> None:
    membership.send_notices(context)


def _tick(context: BrokerContext, now_ms: int) -> None:
    context.groups.tick(now_ms)
    context.locks.tick(now_ms)


def _forget_client(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    context.groups.on_disconnect(peer, now_ms)
    context.locks.on_disconnect(peer, now_ms)


def _forget_topic(context: BrokerContext, topic: str) -> None:
    context.locks.remove_topic(topic)
    context.groups.claims.remove_topic(topic)
    context.offsets.remove_topic(topic)
    context.resets.forget_topic(topic)


GROUPS: Final = Feature(
    commands={
        RequestCode.QUERY_CONSUMER_OFFSET: offsets.query_consumer_offset,
        RequestCode.UPDATE_CONSUMER_OFFSET: offsets.update_consumer_offset,
        RequestCode.QUERY_QUEUE_BOUNDS: offsets.query_queue_bounds,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search_offset_by_timestamp,
        RequestCode.HEART_BEAT: membership.heart_beat,
        RequestCode.UNREGISTER_CLIENT: membership.unregister_client,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: membership.get_consumer_list,
        RequestCode.LOCK_BATCH_MQ: locks.lock_batch_mq,
        RequestCode.UNLOCK_BATCH_MQ: locks.unlock_batch_mq,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: groups.update_and_create_group,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: groups.get_groups,
        RequestCode.DELETE_SUBSCRIPTIONGROUP: groups.delete_group,
        RequestCode.GET_CONSUMER_CONNECTION_LIST: groups.get_consumer_connections,
        RequestCode.GET_PRODUCER_CONNECTION_LIST: groups.get_producer_connections,
        RequestCode.GET_CONSUME_STATS: groups.get_consume_stats,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: groups.query_topic_consumers,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: resets.reset_offset,
        RequestCode.CLONE_GROUP_OFFSET: resets.clone_offset,
    },
    turn_ended=_send_notices,
    tick=_tick,
    sample=offsets.tell_forced_losses,
    client_gone=_forget_client,
    topic_deleted=_forget_topic,
    figures=(
        gauge("clients", "clients that are registered", lambda broker: broker.groups.client_count),
        gauge(
            "consumer_groups",
            "consumer groups with members",
            lambda broker: broker.groups.group_count,
        ),
        gauge(
            "subscription_groups",
            "consumer groups with settings",
            lambda broker: len(broker.group_table),
            metric="rocketmq_consumer_group_number",
        ),
        gauge(
            "offset_resets_pending",
            "queues whose offset was moved and whose consumer has not followed yet",
            lambda broker: len(broker.resets),
            unit="queues",
        ),
        gauge("consumer_offsets", "offsets that are kept", lambda broker: len(broker.offsets)),
        counter(
            "offset_commits_total",
            "offsets that were committed",
            lambda broker: broker.stats.total.offset_commits,
        ),
        counter(
            "forced_lost_messages_total",
            "messages removed before their time that a group had not consumed",
            lambda broker: broker.stats.total.forced_lost_messages,
            unit="messages",
        ),
    ),
)
