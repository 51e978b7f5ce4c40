"""Locks of ordered consumers, and members that give queues back."""

from mqmesh.errors import MQMeshError, NotMaster
from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, reply_with
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import (
    LOCK_HELD_BY_OTHER,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    UnlockBatchRequest,
)
from mqmesh.roles.broker.context import BrokerContext


def lock_batch_mq(context: BrokerContext, request: Request, wanted: LockBatchRequest) -> Reply:
    """A member wants queues for itself alone.

    Raises:
        StaleGeneration: It is no member of the group here.
        NotMaster: Another replica may lead by now, and grants the same queues.
    """
    if context.leadership is not None and (loss := context.leadership.loss) is not None:
        raise NotMaster(loss)
    check_client_group(wanted.group)
    context.groups.require_member(wanted.group, wanted.client_id)
    now_ms = context.clock.monotonic_ms()
    answers = []
    for one in wanted.queues:
        token = LOCK_HELD_BY_OTHER
        if _exists(context, one):
            token = context.locks.lock(
                wanted.group,
                wanted.client_id,
                request.peer,
                (one.topic, one.queue_id),
                one.token,
                now_ms,
            )
        answers.append(LockEntry(one.topic, one.queue_id, token))
    return reply_with(LockBatchResponse(context.locks.lease_ms, answers))


def unlock_batch_mq(context: BrokerContext, request: Request, done: UnlockBatchRequest) -> Reply:
    """A member has done with queues; others may have them. Doing so twice does no harm."""
    check_client_group(done.group)
    for one in done.queues:
        context.locks.unlock(done.group, done.client_id, (one.topic, one.queue_id))
        context.groups.claims.release(done.group, one.topic, one.queue_id, done.client_id)
    return EMPTY_REPLY


def _exists(context: BrokerContext, one: LockEntry) -> bool:
    try:
        return one.queue_id < context.topics.require(one.topic).queue_count
    except MQMeshError:
        return False
