"""Which handler serves which command. Read this first.

A handler is a function ``(context, request, header) -> Reply | None`` in a folder of ``features/``;
None means that it answers later, through ``context.wire``. The header is decoded, and the right
looked up, by the table in ``protocol/commands.py``. PING is served by ``server.py``, also while
there is no context yet.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.delays import schedule
from mqmesh.roles.broker.features.groups import groups, locks, membership, offsets, resets
from mqmesh.roles.broker.features.pulls import filter_server, pull
from mqmesh.roles.broker.features.queries import query
from mqmesh.roles.broker.features.replies import reply
from mqmesh.roles.broker.features.retries import dead_letters, send_back
from mqmesh.roles.broker.features.sends import send
from mqmesh.roles.broker.features.snapshots import snapshots
from mqmesh.roles.broker.features.topics import admin
from mqmesh.roles.broker.features.transactions import transactions
from mqmesh.roles.dispatch import Handler

HANDLERS: Final[dict[RequestCode, Callable[[BrokerContext, Request, Any], Reply | None]]] = {
    RequestCode.SEND_MESSAGE: send.send_message,
    RequestCode.PULL_MESSAGE: pull.pull_message,
    RequestCode.CONSUMER_SEND_MSG_BACK: send_back.send_back,
    RequestCode.RESEND_DEAD_LETTERS: dead_letters.resend,
    RequestCode.QUERY_CONSUMER_OFFSET: offsets.query_consumer_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: offsets.update_consumer_offset,
    RequestCode.QUERY_QUEUE_BOUNDS: offsets.query_queue_bounds,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: offsets.search_offset_by_timestamp,
    RequestCode.HEART_BEAT: membership.heart_beat,
    RequestCode.UNREGISTER_CLIENT: membership.unregister_client,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: membership.get_consumer_list,
    RequestCode.LOCK_BATCH_MQ: locks.lock_batch_mq,
    RequestCode.UNLOCK_BATCH_MQ: locks.unlock_batch_mq,
    RequestCode.SEND_REPLY_MESSAGE: reply.send_reply_message,
    RequestCode.ACKNOWLEDGE_REPLY: reply.acknowledge_reply,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: groups.update_and_create_group,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: groups.get_groups,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: groups.delete_group,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: groups.get_consumer_connections,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: groups.get_producer_connections,
    RequestCode.GET_CONSUME_STATS: groups.get_consume_stats,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: groups.query_topic_consumers,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: resets.reset_offset,
    RequestCode.CLONE_GROUP_OFFSET: resets.clone_offset,
    RequestCode.END_TRANSACTION: transactions.end_transaction,
    RequestCode.LIST_HALF_MESSAGES: transactions.list_half_messages,
    RequestCode.VIEW_HALF_MESSAGE: transactions.view_half_message,
    RequestCode.END_HALF_MESSAGE: transactions.end_half_message,
    RequestCode.UPDATE_AND_CREATE_TOPIC: admin.update_and_create_topic,
    RequestCode.GET_TOPIC_CONFIG: admin.get_topic_config,
    RequestCode.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
    RequestCode.GET_TOPIC_STATS_INFO: admin.get_topic_stats,
    RequestCode.GET_BROKER_RUNTIME_INFO: admin.get_broker_runtime_info,
    RequestCode.VIEW_MESSAGE: admin.view_message,
    RequestCode.CREATE_SNAPSHOT: snapshots.create_snapshot,
    RequestCode.REGISTER_FILTER_SERVER: filter_server.register_filter_server,
    RequestCode.GET_FILTER_SERVER: filter_server.get_filter_server,
    RequestCode.OPEN_SCHEDULE: schedule.open_schedule,
    RequestCode.PULL_SCHEDULE: schedule.pull_schedule,
    RequestCode.DELIVER_DUE: schedule.deliver_due,
    RequestCode.CANCEL_DELAYED: schedule.cancel_delayed,
    RequestCode.REFUSE_CANCEL: schedule.refuse_cancel,
    RequestCode.QUERY_MESSAGE: query.query_message,
    RequestCode.QUERY_MESSAGE_BY_ID: query.query_message_by_id,
}


def bind_handlers(context: BrokerContext) -> dict[RequestCode, Handler]:
    """The handlers of a running broker, for ``Dispatch.open``."""
    return {code: partial(handler, context) for code, handler in HANDLERS.items()}
