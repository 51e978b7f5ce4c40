"""Topics, and single messages, for administrators."""

import logging
from collections.abc import Sequence

import msgspec

from mqmesh.batch.delayed_batch import read_delayed_meta
from mqmesh.batch.half_batch import is_half, read_half_meta
from mqmesh.batch.record_batch import Attributes, read_header, read_meta
from mqmesh.errors import (
    CorruptRecord,
    InvalidArgument,
    MessageIllegal,
    OffsetIllegal,
    UnsupportedCommand,
)
from mqmesh.protocol.admin import (
    CleanRequest,
    CreateTopicsRequest,
    GetTopicConfigRequest,
    QueueEntries,
    QueueEntriesRequest,
    QueueEntry,
    QueueStats,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, reply_with
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.route import DeleteTopicRequest, Perm, TopicConfig
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.admin.cleaning import Answer
from mqmesh.roles.broker.features.topics.store_times import store_time
from mqmesh.roles.broker.features.topics.topics import Topic, create_all
from mqmesh.roles.broker.state_answers import reply_when_saved
from mqmesh.storage.interface import InspectableStore, RetainingStore
from mqmesh.units import CommitLogOffset, TimestampMs

_log = logging.getLogger(__name__)


def update_and_create_topic(
    context: BrokerContext, request: Request, wanted: UpdateTopicRequest
) -> Reply | None:
    """Creates or changes a topic; answered once that is on disk."""
    context.commit_point.check_room()
    if not wanted.may_hide and not wanted.must_be_new:
        _check_hidden(context, wanted.config)
    before = context.topics.version
    topic = context.topics.update(
        wanted.config,
        context.clock.wall_ms(),
        must_exist=wanted.must_exist,
        must_be_new=wanted.must_be_new,
    )
    reply = reply_with(topic.config)
    if context.topics.version == before:
        return reply
    reply_when_saved(context, request, reply)
    return None


def create_topics(context: BrokerContext, request: Request, wanted: CreateTopicsRequest) -> None:
    """Creates topics, all of them or none; answered once they are on disk."""
    context.commit_point.check_room()
    create_all(context.topics, wanted.configs, context.clock.wall_ms())
    reply_when_saved(context, request, reply_with(TopicConfigs(wanted.configs)))


def get_topic_config(
    context: BrokerContext, request: Request, query: GetTopicConfigRequest
) -> Reply:
    """One topic, or all."""
    if query.topic:
        return reply_with(TopicConfigs([context.topics.require(query.topic).config]))
    return reply_with(TopicConfigs(context.topics.configs()))


def delete_topic(
    context: BrokerContext, request: Request, asked: DeleteTopicRequest
) -> Reply | None:
    """Forgets a topic, its messages and all offsets in it; answered once that is on disk."""
    name = asked.topic
    context.topics.check_deletable(name)
    context.commit_point.check_room()
    context.topics.delete(name, context.clock.wall_ms())
    reply_when_saved(context, request, EMPTY_REPLY)
    return None


def get_topic_stats(context: BrokerContext, request: Request, asked: TopicStatsRequest) -> Reply:
    """Where each queue of a topic begins and ends, and when it got its first and last message."""
    name = asked.topic
    topic = context.topics.require(name)
    groups = context.offsets.groups_of_topic(name)
    queues = []
    for queue_id in range(topic.queue_count):
        low, high = context.store.queue_bounds(name, queue_id)
        first = updated = 0
        if high > low:
            first = _first_stored(context, topic, queue_id, low)
            updated = _last_update(context, topic, queue_id, high)
        unread = _unread(context, groups, name, queue_id)
        queues.append(QueueStats(queue_id, low, high, updated, first, unread))
    return reply_with(TopicStats(name, queues))


def _check_hidden(context: BrokerContext, wanted: TopicConfig) -> None:
    """Check that a change takes no queue with unread messages away from consumers.

    Raises:
        InvalidArgument: It does; the sentence says how many messages it would hide.
    """
    old = context.topics.get(wanted.topic)
    if old is None:
        return
    first = wanted.read_queue_nums if wanted.perm & Perm.READ else 0
    groups = context.offsets.groups_of_topic(wanted.topic)
    unread = {
        queue_id: count
        for queue_id in range(first, old.readable_queues)
        if (count := _unread(context, groups, wanted.topic, queue_id))
    }
    if unread:
        change = (
            f"read_queue_nums {wanted.read_queue_nums}, now {old.config.read_queue_nums}"
            if wanted.perm & Perm.READ
            else "a perm without reading"
        )
        raise InvalidArgument(
            f"{change}: {sum(unread.values())} unread messages of topic {wanted.topic!r} would be "
            f"hidden, in {len(unread)} queues from queue {min(unread)} on; lower write_queue_nums "
            "alone until consumers have read them, or say that they may be hidden (--yes, "
            "may_hide)"
        )


def _unread(context: BrokerContext, groups: Sequence[str], topic: str, queue_id: int) -> int:
    """Return the messages of a queue that one of the groups lacks; all of them for no groups."""
    low, high = context.store.queue_bounds(topic, queue_id)
    done = min((context.offsets.query(one, topic, queue_id) for one in groups), default=low)
    return max(high - max(done, low), 0)


def query_consume_queue(
    context: BrokerContext, request: Request, query: QueueEntriesRequest
) -> Reply:
    """Entries of a queue, as they are.

    Raises:
        UnsupportedCommand: The store has no consume queues.
        TopicNotFound: There is no such topic.
        MessageIllegal: It has no such queue, nor had one that still holds messages.
    """
    store = context.store
    if not isinstance(store, InspectableStore):
        raise UnsupportedCommand(_only_commitlog(context, "consume queues"))
    topic = context.topics.require(query.topic)
    low, high = store.queue_bounds(query.topic, query.queue_id)
    if query.queue_id >= topic.queue_count and not high:
        # A topic that was made smaller keeps what its queues hold.
        raise MessageIllegal(
            f"queue {query.queue_id} of topic {query.topic!r} does not exist: "
            f"read_queue_nums = {topic.config.read_queue_nums}"
        )
    entries = store.inspector.entries(query.topic, query.queue_id, query.queue_offset, query.count)
    found = [QueueEntry(*msgspec.structs.astuple(one)) for one in entries]
    return reply_with(QueueEntries(low, high, found))


def delete_expired_commitlog(
    context: BrokerContext, request: Request, asked: CleanRequest
) -> Reply | None:
    """Begins a pass of retention; answered once it is over.

    Raises:
        UnsupportedCommand: The store removes nothing by itself.
        SystemBusy: A pass is under way.
    """
    store = context.store
    if not isinstance(store, RetainingStore):
        raise UnsupportedCommand(_only_commitlog(context, "retention"))
    context.cleaning.begin(request.without_frame(), store.retention, dry_run=asked.dry_run)
    answer_cleaned(context, 0)
    return None


def answer_cleaned(context: BrokerContext, now_ms: int) -> None:
    """Answers who has waited for a pass of retention that is over."""
    _answer(context, context.cleaning.take_answer())


def give_up_cleaning(context: BrokerContext) -> None:
    """The broker stops."""
    _answer(context, context.cleaning.give_up())


def _answer(context: BrokerContext, answer: Answer | None) -> None:
    if answer is None:
        return
    request, result = answer
    if isinstance(result, Exception):
        context.wire.fail(request, result)
    else:
        context.wire.reply(request, reply_with(result))


def _only_commitlog(context: BrokerContext, what: str) -> str:
    backend = context.config.storage.backend
    return f"{what} are of the backend commitlog, and this broker has {backend} (storage.backend)"


def view_message(context: BrokerContext, request: Request, query: ViewMessageRequest) -> Reply:
    """The stored batch at a log offset.

    Raises:
        NoPermission: Its topic, or the one that its messages wait for, does not permit reading.
        OffsetIllegal: No batch begins there; what lies between two beginnings looks like damage.
    """
    offset = CommitLogOffset(query.commitlog_offset)
    try:
        batch = context.store.read_at(offset)
    except CorruptRecord as error:
        _log.info("a client asked for a batch that is none: %s", error)
        raise OffsetIllegal(
            f"no message begins at {offset} of the log, unless it is damaged there (`mqmesh store "
            "verify` tells); offset ids come from messages, nobody can make them up"
        ) from error
    topics = _topics_of(batch)
    for topic in topics:
        context.wire.permit(request, topic)
    context.topics.check_readable(*topics)
    return Reply(body=(batch,))


def _topics_of(batch: bytes) -> list[str]:
    header = read_header(batch)
    topics = [read_meta(batch, header).topic]
    if header.attributes & Attributes.HAS_DELAY:
        topics.append(read_delayed_meta(batch, header).real_topic)
    if is_half(header):
        topics.append(read_half_meta(batch, header).real_topic)
    return topics


def _first_stored(context: BrokerContext, topic: Topic, queue_id: int, low: int) -> TimestampMs:
    offset, stored_ms = topic.first.get(queue_id, (-1, TimestampMs(0)))
    if offset != low:
        stored_ms = store_time(context.store, topic.config.topic, queue_id, low)
        if stored_ms:
            topic.first[queue_id] = low, stored_ms
    return stored_ms


def _last_update(context: BrokerContext, topic: Topic, queue_id: int, end: int) -> TimestampMs:
    known = topic.last_update.get(queue_id)
    if known is None:
        # Nothing came since the broker was started: the last batch knows.
        known = store_time(context.store, topic.config.topic, queue_id, end - 1)
        if known:
            topic.last_update[queue_id] = known
    return known
