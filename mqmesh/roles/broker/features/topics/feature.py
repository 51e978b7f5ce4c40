"""Topics of this broker: their table, and the commands of administrators."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import STATE_TOPIC
from mqmesh.metrics import gauge, text
from mqmesh.namespaces import is_within
from mqmesh.protocol.admin import (
    CreateTopicsRequest,
    GetTopicConfigRequest,
    QueueStats,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.command import EMPTY_REPLY, Answer, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import DeleteTopicRequest, Perm, TopicConfig
from mqmesh.protocol.topic_schema import PutTopicSchemaRequest, TopicSchema, TopicSchemaRequest
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.reading.store_times import store_time
from mqmesh.roles.broker.state_records import STATE_QUEUE
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable, create_all
from mqmesh.roles.dispatch import Handler
from mqmesh.units import TimestampMs

CHANGES_PER_RECORD_BITS: Final = 20
"""Bits for the topic changes that share a batch of records, so that a version is of one life."""

_log = logging.getLogger(__name__)


class TopicsFeature(Feature):
    """The topics of a broker.

    Args:
        core: The core of the broker.
        topics: Topics by name; kept in the state log.
        committed: Offsets that groups have committed.
    """

    works_at_followers = True

    def __init__(self, core: Core, topics: TopicTable, committed: CommittedOffsets) -> None:
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._topics = topics
        self._committed = committed

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.UPDATE_AND_CREATE_TOPIC: self.update_and_create_topic,
            RequestCode.CREATE_TOPICS: self.create_topics,
            RequestCode.DELETE_TOPIC_IN_BROKER: self.delete_topic,
            RequestCode.PUT_TOPIC_SCHEMA: self.put_schema,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {
            RequestCode.GET_TOPIC_CONFIG: self.get_topic_config,
            RequestCode.GET_TOPIC_STATS_INFO: self.get_topic_stats,
            RequestCode.GET_TOPIC_SCHEMA: self.get_schema,
        }

    def loaded(self) -> None:
        """Begin a version that no earlier life of the broker had; adopt topics of the store."""
        now_ms, topics, store = self._clock.wall_ms(), self._topics, self._store
        if self._core.is_follower:
            # Name servers get a follower's topics, too: consumers read there without a master.
            topics.begin_life(now_ms, topics.version.counter)
            return
        end = store.queue_bounds(STATE_TOPIC, STATE_QUEUE)[1]
        topics.begin_life(now_ms, end << CHANGES_PER_RECORD_BITS)
        # A topic's record stands in front of its messages; only damage makes it missing.
        found = [
            (name, max(store.queues(name), default=0))
            for name in store.topics()
            if name != STATE_TOPIC
        ]
        adopted = topics.adopt(found, self._settings.now.default_topic_queue_nums, now_ms)
        if adopted:
            _log.warning("%d topics of the store were missing in the topic table", adopted)

    def configured(self) -> None:
        """Announce the topics anew: name servers get the settings of new topics with them."""
        if self._core.is_follower:
            return
        self._topics.begin_life(self._clock.wall_ms(), self._topics.version.counter + 1)

    def _version(self) -> str:
        version = self._topics.version
        return f"{version.timestamp_ms}.{version.counter}"

    def update_and_create_topic(
        self, request: Request, wanted: UpdateTopicRequest
    ) -> Answer | None:
        """Creates or changes a topic; answered once that is on disk."""
        self._commit_point.check_room()
        if not wanted.may_hide and not wanted.must_be_new:
            self._check_hidden(wanted.config)
        before = self._topics.version
        topic = self._topics.update(
            wanted.config,
            self._clock.wall_ms(),
            must_exist=wanted.must_exist,
            must_be_new=wanted.must_be_new,
        )
        reply = topic.config
        if self._topics.version == before:
            return reply
        self._core.reply_when_saved(request, reply)
        return None

    def create_topics(self, request: Request, wanted: CreateTopicsRequest) -> None:
        """Creates topics, all of them or none; answered once they are on disk."""
        self._commit_point.check_room()
        create_all(self._topics, wanted.configs, self._clock.wall_ms())
        self._core.reply_when_saved(request, TopicConfigs(wanted.configs))

    def get_topic_config(self, request: Request, query: GetTopicConfigRequest) -> TopicConfigs:
        """One topic, or all."""
        if query.topic:
            return TopicConfigs([self._topics.require(query.topic).config])
        namespace = request.peer.principal.namespace
        configs = [one for one in self._topics.configs() if is_within(namespace, one.topic)]
        with_schema = [one.topic for one in configs if self._topics.require(one.topic).schema]
        return TopicConfigs(configs, with_schema)

    def put_schema(self, request: Request, wanted: PutTopicSchemaRequest) -> Reply | None:
        """Keeps the schema of a topic; answered once that is on disk."""
        self._commit_point.check_room()
        if not self._topics.put_schema(wanted.topic, wanted.schema):
            return EMPTY_REPLY
        self._core.reply_when_saved(request, EMPTY_REPLY)
        return None

    def get_schema(self, request: Request, query: TopicSchemaRequest) -> TopicSchema:
        """Return the schema of a topic."""
        return TopicSchema(self._topics.require(query.topic).schema)

    def delete_topic(self, request: Request, header: DeleteTopicRequest) -> Reply | None:
        """Forgets a topic, its messages and all offsets in it; answered once that is on disk."""
        name = header.topic
        self._topics.check_deletable(name)
        self._commit_point.check_room()
        self._topics.delete(name, self._clock.wall_ms())
        self._core.reply_when_saved(request, EMPTY_REPLY)
        return None

    def get_topic_stats(self, request: Request, header: TopicStatsRequest) -> TopicStats:
        """Return where each queue of a topic begins and ends, and the times of its messages."""
        name = header.topic
        topic = self._topics.require(name)
        groups = self._committed.groups_of_topic(name)
        queues = []
        for queue_id in range(topic.queue_count):
            low, high = shown_bounds(self._store, self._topics, self._clock, name, queue_id)
            first = updated = 0
            if high > low:
                first = self._first_stored(topic, queue_id, low)
                updated = self._last_update(topic, queue_id, high)
            unread = self._unread(groups, name, queue_id)
            queues.append(QueueStats(queue_id, low, high, updated, first, unread))
        return TopicStats(name, queues)

    def _check_hidden(self, wanted: TopicConfig) -> None:
        """Check that a change takes no queue with unread messages away from consumers.

        Raises:
            InvalidArgument: It does; the sentence says how many messages it would hide.
        """
        old = self._topics.get(wanted.topic)
        if old is None:
            return
        first = wanted.read_queue_nums if wanted.perm & Perm.READ else 0
        groups = self._committed.groups_of_topic(wanted.topic)
        unread = {
            queue_id: count
            for queue_id in range(first, old.readable_queues)
            if (count := self._unread(groups, wanted.topic, queue_id))
        }
        if unread:
            change = (
                f"read_queue_nums {wanted.read_queue_nums}, now {old.config.read_queue_nums}"
                if wanted.perm & Perm.READ
                else "a perm without reading"
            )
            raise InvalidArgument(
                f"{change}: {sum(unread.values())} unread messages of topic {wanted.topic!r} would "
                f"be hidden, in {len(unread)} queues from queue {min(unread)} on; lower "
                "write_queue_nums alone until consumers have read them, or say that they may be "
                "hidden (--yes, may_hide)"
            )

    def _unread(self, groups: Sequence[str], topic: str, queue_id: int) -> int:
        """Return messages of a queue that one of the groups lacks; all of them for no groups."""
        low, high = shown_bounds(self._store, self._topics, self._clock, topic, queue_id)
        done = min((self._committed.query(one, topic, queue_id) for one in groups), default=low)
        return max(high - max(done, low), 0)

    def _first_stored(self, topic: Topic, queue_id: int, low: int) -> TimestampMs:
        offset, stored_ms = topic.first.get(queue_id, (-1, TimestampMs(0)))
        if offset != low:
            stored_ms = store_time(self._store, topic.config.topic, queue_id, low)
            if stored_ms:
                topic.first[queue_id] = low, stored_ms
        return stored_ms

    def _last_update(self, topic: Topic, queue_id: int, end: int) -> TimestampMs:
        known = topic.last_update.get(queue_id)
        if known is None:
            # Nothing came since the broker was started: the last batch knows.
            known = store_time(self._store, topic.config.topic, queue_id, end - 1)
            if known:
                topic.last_update[queue_id] = known
        return known

    metrics = (
        gauge(
            "topics",
            "topics",
            lambda feature: len(feature._topics),
            rocketmq_name="rocketmq_topic_number",
        ),
        text(
            "topic_data_version",
            "version of the topic table; name servers compare theirs",
            lambda feature: feature._version(),
        ),
    )
