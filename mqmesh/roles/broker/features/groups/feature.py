"""Consumer groups: members, queues, locks, offsets; and producer groups."""

from typing import Final

from mqmesh.figures import counter, gauge
from mqmesh.log_identity import first_number
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, BrokerTurn, Feature
from mqmesh.roles.broker.features.groups import (
    groups,
    held_commits,
    locks,
    membership,
    offsets,
    progress_pages,
    resets,
)
from mqmesh.roles.broker.features.groups.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.features.groups.queue_locks import QueueLocks

GROUPS_SETTLE_MS: Final = 1_500
"""After an election no group is divided anew for so long: its members come one after the other."""


def make_groups(begins: Beginning) -> ConsumerGroups:
    """Clients and groups of a role that begins: none."""
    config = begins.config
    return ConsumerGroups(
        grace_ms=config.client_lost_grace_ms,
        expiry_ms=config.client_channel_expired_timeout_ms,
        most_clients=config.max_clients,
        first_generation=first_number(begins.epoch),
        busy_retry_after_ms=config.busy_retry_after_ms,
        settled_ms=begins.now_ms + GROUPS_SETTLE_MS if begins.was_elected else 0,
    )


def make_locks(begins: Beginning) -> QueueLocks:
    """Locks of queues of a role that begins: none, and for a while only who had some gets them."""
    config = begins.config
    settled_ms = free_ms = begins.now_ms
    if begins.has_past:
        settled_ms += config.rebalance_lock_lost_grace_ms
        # So long a master that is cut off may not know that it is one no more.
        free_ms = settled_ms + (begins.lease_ttl_ms if begins.was_elected else 0)
    return QueueLocks(
        lease_ms=config.rebalance_lock_max_live_time_ms,
        lost_grace_ms=config.rebalance_lock_lost_grace_ms,
        most=config.max_consumer_offsets,
        first_token=first_number(begins.epoch) + 1,
        settled_ms=settled_ms,
        free_ms=free_ms,
        busy_retry_after_ms=config.busy_retry_after_ms,
    )


def _send_notices(context: BrokerContext, turn: BrokerTurn) -> None:
    membership.send_notices(context)


def _configure(context: BrokerContext) -> None:
    context.group_table.auto_create = context.config.auto_create_subscription_group


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
        RequestCode.GET_ALL_CLIENTS: groups.get_all_clients,
        RequestCode.GET_CONSUME_STATS: groups.get_consume_stats,
        RequestCode.GET_GROUPS_PROGRESS: progress_pages.get_groups_progress,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: groups.query_topic_consumers,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: resets.reset_offset,
        RequestCode.CLONE_GROUP_OFFSET: resets.clone_offset,
        RequestCode.HAND_OVER_COMMITS: held_commits.hand_over_commits,
    },
    turn_ended=_send_notices,
    tick=_tick,
    configured=_configure,
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
            "producer_connections",
            "clients of producer groups",
            lambda broker: broker.groups.producer_counts,
            labels=("language", "version"),
            metric="rocketmq_producer_connections",
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
