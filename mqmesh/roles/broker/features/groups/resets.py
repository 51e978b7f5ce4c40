"""Moves the offsets of consumer groups, with effect on running consumers at once."""

from typing import Final

from mqmesh.errors import InvalidArgument, OffsetIllegal
from mqmesh.message import RESERVED_TOPICS, check_topic, dlq_topic, retry_topic
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request, encode_header, reply_with
from mqmesh.protocol.groups import (
    MAX_QUEUES_PER_RESET,
    CloneOffsetRequest,
    ConsumerOffsetReset,
    OffsetChange,
    OffsetChanges,
    ResetOffsetRequest,
    ResetWhere,
    check_client_group,
)
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.pulling import MAX_OFFSETS_PER_REQUEST, QueueOffsetEntry
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.pulls.pull import wake_pulls
from mqmesh.roles.broker.features.retries.send_back import forget_sent_back
from mqmesh.roles.broker.state_answers import reply_when_saved
from mqmesh.units import QueueOffset, TimestampMs

_NOWHERE: Final = -1


def reset_offset(
    context: BrokerContext, request: Request, wanted: ResetOffsetRequest
) -> Reply | None:
    """A group goes on elsewhere in a topic; answered once that is on disk.

    Raises:
        OffsetIllegal: The queue does not reach there; nothing was changed.
        InvalidArgument: A place that is none.
    """
    check_client_group(wanted.group)
    check_topic(wanted.topic)
    queue_count = context.topics.require(wanted.topic).queue_count
    if wanted.queue_id >= queue_count:
        raise InvalidArgument(
            f"topic {wanted.topic!r} has {queue_count} queues, there is no {wanted.queue_id}"
        )
    first, behind = wanted.after_queue_id + 1, queue_count
    if wanted.queue_id >= 0:
        first, behind = wanted.queue_id, wanted.queue_id + 1
    end = min(behind, first + MAX_QUEUES_PER_RESET)
    changes = [_change(context, wanted, queue_id) for queue_id in range(first, end)]
    return _carry_out(context, request, wanted.group, changes, wanted.dry_run, more=end < behind)


def clone_offset(
    context: BrokerContext, request: Request, wanted: CloneOffsetRequest
) -> Reply | None:
    """A group goes on where another one is; answered once that is on disk.

    Raises:
        InvalidArgument: Both are the same.
    """
    check_client_group(wanted.source)
    check_client_group(wanted.target)
    if wanted.source == wanted.target:
        raise InvalidArgument(f"group {wanted.source!r} cannot be copied to itself")
    own = {retry_topic(wanted.source), dlq_topic(wanted.source)} | RESERVED_TOPICS
    topics = [wanted.topic] if wanted.topic else context.offsets.topics(wanted.source)
    changes = []
    for topic in sorted(topics):
        if topic in own or context.topics.get(topic) is None:
            continue
        for queue_id, offset in sorted(
            context.offsets.topics(wanted.source).get(topic, {}).items()
        ):
            low, high = context.store.queue_bounds(topic, queue_id)
            old = context.offsets.query(wanted.target, topic, queue_id)
            changes.append(OffsetChange(topic, queue_id, old, min(offset, high), low, high))
    if len(changes) > MAX_OFFSETS_PER_REQUEST:
        raise InvalidArgument(f"{len(changes)} queues are too many for one request; name a topic")
    return _carry_out(context, request, wanted.target, changes, wanted.dry_run)


def _change(context: BrokerContext, wanted: ResetOffsetRequest, queue_id: int) -> OffsetChange:
    low, high = context.store.queue_bounds(wanted.topic, queue_id)
    old = context.offsets.query(wanted.group, wanted.topic, queue_id)
    new: int
    if wanted.where == ResetWhere.FIRST:
        new = low
    elif wanted.where == ResetWhere.LAST:
        new = high
    elif wanted.where == ResetWhere.TIMESTAMP:
        time_ms = TimestampMs(wanted.timestamp_ms)
        new = context.store.offset_by_time(wanted.topic, queue_id, time_ms)
    elif wanted.where == ResetWhere.OFFSET and wanted.queue_id != _NOWHERE:
        new = wanted.queue_offset
        if not low <= new <= high:
            raise OffsetIllegal(
                f"queue {queue_id} of topic {wanted.topic!r} has messages from {low} and before "
                f"{high}; a group cannot go on at {new}"
            )
    else:
        raise InvalidArgument(
            f"where = {wanted.where!r} is none of {', '.join(ResetWhere)}, or an offset without "
            "the queue it is for"
        )
    return OffsetChange(wanted.topic, queue_id, old, new, low, high)


def _carry_out(
    context: BrokerContext,
    request: Request,
    group: str,
    changes: list[OffsetChange],
    dry_run: bool,
    *,
    more: bool = False,
) -> Reply | None:
    peers = context.groups.peers(group)
    reply = reply_with(OffsetChanges(changes, len(peers), more))
    if dry_run or not changes:
        return reply
    context.commit_point.check_room()
    live = context.groups.find(group)
    broadcasting = live is not None and any(
        data.message_model == MessageModel.BROADCASTING for data in live.members.values()
    )
    if not broadcasting:
        # The members of a broadcasting group keep their offsets by themselves.
        context.group_table.note_used(group)
        forget_sent_back(context, group)
        _store(context, group, changes, followed=live is not None)
    _tell(context, group, peers, changes)
    reply_when_saved(context, request, reply)
    return None


def _store(
    context: BrokerContext, group: str, changes: list[OffsetChange], *, followed: bool
) -> None:
    # A consumer that takes queues by itself is no member; its pulls show that it is there, also
    # one that has been waiting at the end of its queue for long.
    followed = followed or context.pulls.is_active(group, context.clock.monotonic_ms())
    for one in changes:
        context.offsets.commit(group, one.topic, one.queue_id, QueueOffset(one.new_offset))
        context.resets.note_moved(group, one.topic, one.queue_id)
        context.pulls.forget_queue(group, one.topic, one.queue_id)
        if followed or context.holds.is_waiting(group, one.topic, one.queue_id):
            context.resets.begin(group, one.topic, one.queue_id, one.new_offset)


def _tell(
    context: BrokerContext, group: str, peers: list[bytes], changes: list[OffsetChange]
) -> None:
    # First the notice, then the answers to waiting pulls: a member that was told moves once.
    queues = [QueueOffsetEntry(one.topic, one.queue_id, one.new_offset) for one in changes]
    header = encode_header(ConsumerOffsetReset(group, queues))
    for peer in peers:
        context.wire.notify(peer, RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header)
    for one in changes:
        wake_pulls(context, one.topic, one.queue_id)
