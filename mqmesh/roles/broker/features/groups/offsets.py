"""Queue offsets: where queues begin and end, and how far groups have come."""

import logging
from typing import Final

from mqmesh.errors import MessageIllegal, MQMeshError, OffsetIllegal
from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, reply_with
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueBoundsRequest,
    QueueBoundsResponse,
    QueueOffsetEntry,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.groups.forced_losses import losses, sentences
from mqmesh.roles.broker.features.groups.membership import note_used
from mqmesh.roles.broker.features.groups.queue_claims import NO_GENERATION
from mqmesh.units import MAX_OFFSET, QueueOffset, TimestampMs

MOST_LOSSES_NAMED: Final = 20
"""Pairs of group and topic in the log of one forced cleaning."""

_log = logging.getLogger(__name__)


def query_consumer_offset(
    context: BrokerContext, request: Request, query: QueryConsumerOffsetRequest
) -> Reply:
    """Where a group stands in some queues; -1 where it never committed.

    A member that was given the queues claims them so: all of them, or it is refused.

    Raises:
        StaleGeneration: It is no member, or another one has a queue in this generation.
    """
    check_client_group(query.group)
    offsets, epoch = context.offsets, context.store.epoch()
    generation = NO_GENERATION
    if query.client_id:
        generation = context.groups.require_member(query.group, query.client_id).generation
        for one in query.queues:
            _check_queue(context, one.topic, one.queue_id)
            context.groups.claims.claim(
                query.group, one.topic, one.queue_id, query.client_id, generation
            )
    return reply_with(
        ConsumerOffsets(
            [
                QueueOffsetEntry(
                    one.topic,
                    one.queue_id,
                    offsets.query(query.group, one.topic, one.queue_id),
                    epoch,
                )
                for one in query.queues
            ],
            generation,
        )
    )


def update_consumer_offset(
    context: BrokerContext, request: Request, update: UpdateConsumerOffsetRequest
) -> Reply:
    """Commits offsets of a group. What is legal is committed, also beside what is not.

    Raises:
        StaleGeneration: The member was removed, or replaced.
        DiskFull: It is committed in memory, but offsets cannot be saved now.
        MQMeshError: The first refusal, if any.
    """
    check_client_group(update.group)
    note_used(context, request, update.group)
    is_member = update.generation != NO_GENERATION
    if is_member:
        context.groups.require_member(update.group, update.client_id, update.generation)
    refusal: MQMeshError | None = None
    for one in update.queues:
        try:
            _check_commit(context, update.group, one)
            if is_member:
                before = context.offsets.query(update.group, one.topic, one.queue_id)
                context.groups.claims.commit(
                    update.group,
                    one.topic,
                    one.queue_id,
                    update.client_id,
                    update.generation,
                    goes_back=one.queue_offset < before,
                )
            context.offsets.commit(
                update.group, one.topic, one.queue_id, QueueOffset(one.queue_offset)
            )
        except MQMeshError as error:
            refusal = refusal or error
        else:
            context.stats.total.offset_commits += 1
    # Said now, and not when a crash has put the group back.
    refusal = refusal or context.state.failure
    if refusal is not None:
        raise refusal
    return EMPTY_REPLY


def tell_forced_losses(context: BrokerContext) -> None:
    """Logs and counts what groups lost by forced cleaning since the call before; now and then."""
    moves = context.store.take_forced_moves()
    if not moves:
        return
    found = losses(moves, context.offsets.groups_of_topic, context.offsets.query)
    for sentence in sentences(moves, found, MOST_LOSSES_NAMED):
        _log.error("%s", sentence)
    context.stats.total.forced_lost_messages += sum(one.messages for one in found)


def query_queue_bounds(
    context: BrokerContext, request: Request, query: QueueBoundsRequest
) -> Reply:
    """Where a queue begins and ends."""
    _check_queue(context, query.topic, query.queue_id)
    return reply_with(QueueBoundsResponse(*context.store.queue_bounds(query.topic, query.queue_id)))


def search_offset_by_timestamp(
    context: BrokerContext, request: Request, query: SearchOffsetRequest
) -> Reply:
    """The first message of a queue that was stored at or after a time."""
    _check_queue(context, query.topic, query.queue_id)
    found = context.store.offset_by_time(
        query.topic, query.queue_id, TimestampMs(query.timestamp_ms)
    )
    return reply_with(OffsetResponse(found))


def _check_queue(context: BrokerContext, name: str, queue_id: int) -> None:
    # Without regard to permissions: committing and looking must go on while a topic drains.
    queue_count = context.topics.require(name).queue_count
    if queue_id >= queue_count:
        raise MessageIllegal(f"topic {name!r} has {queue_count} queues, there is no {queue_id}")


def _check_commit(context: BrokerContext, group: str, one: QueueOffsetEntry) -> None:
    _check_queue(context, one.topic, one.queue_id)
    end = context.store.queue_bounds(one.topic, one.queue_id)[1]
    if context.is_follower:
        end = QueueOffset(MAX_OFFSET)  # the group may have read at the master what is not here yet
    if not 0 <= one.queue_offset <= end:
        raise OffsetIllegal(
            f"offset {one.queue_offset} of queue {one.queue_id} of topic {one.topic!r} is not "
            f"within 0 and the queue's end, {end}"
        )
    if 0 < one.epoch < context.store.epoch():
        cut = context.store.cut_offset(one.topic, one.queue_id, one.epoch)
        if cut is not None and one.queue_offset > cut:
            raise OffsetIllegal(
                f"the broker lost what queue {one.queue_id} of topic {one.topic!r} had from offset "
                f"{cut} on; this commit of offset {one.queue_offset} is from before"
            )
    if context.resets.holds_commit(group, one.topic, one.queue_id):
        raise OffsetIllegal(
            f"the offset of group {group!r} in queue {one.queue_id} of topic {one.topic!r} was "
            "moved by an administrator; this commit is from before"
        )
