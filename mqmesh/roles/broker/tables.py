"""The tables of a broker: topics, consumer offsets, consumer groups; kept in its log."""

import logging
from typing import Final

from mqmesh.clock import Clock
from mqmesh.message import STATE_TOPIC
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.features.groups.consumer_offsets import CommittedOffsets
from mqmesh.roles.broker.features.groups.groups_table import GroupTable
from mqmesh.roles.broker.features.topics.topics import TopicTable
from mqmesh.roles.broker.state_log import StateLog
from mqmesh.roles.broker.state_records import (
    STATE_QUEUE,
    GroupRecord,
    OffsetsRecord,
    SentBackRecord,
    TopicRecord,
)
from mqmesh.storage.interface import MessageStore

CHANGES_PER_RECORD_BITS: Final = 20
"""So many changes of topics may share a batch of records, and versions are of one life still."""

_log = logging.getLogger(__name__)


class BrokerTables:
    """What a broker keeps beside its messages.

    Args:
        config: Settings.
        clock: Source of time.
        store: Keeps it, and has the messages; None to keep nothing.

    Attributes:
        topics: Topic table.
        offsets: Consumer offsets.
        groups: Settings of consumer groups.
        state: Writes their changes into the log.
    """

    def __init__(self, config: BrokerConfig, clock: Clock, store: MessageStore | None) -> None:
        retry_after_ms = config.busy_retry_after_ms
        self.topics = TopicTable(
            config.max_topics, retry_after_ms, most_auto=config.max_auto_topics
        )
        self.offsets = CommittedOffsets(config.max_consumer_offsets, retry_after_ms)
        self.groups = GroupTable(
            config.max_subscription_groups,
            auto_create=config.auto_create_subscription_group,
            busy_retry_after_ms=retry_after_ms,
        )
        self.state = StateLog(
            store,
            {
                TopicRecord: self.topics,
                GroupRecord: self.groups,
                SentBackRecord: self.offsets.sent_back,
                OffsetsRecord: self.offsets,
            },
            urgent=(self.topics, self.groups),
            clock=clock,
            config=config.storage,
        )
        self._config = config
        self._clock = clock
        self._store = store

    def load(self) -> None:
        """Takes over what is in the log.

        Raises:
            CorruptRecord: It is damaged. Offsets are never begun anew in silence.
        """
        store = self._store
        if store is None:
            return
        self.state.load()
        now_ms = self._clock.wall_ms()
        end = store.queue_bounds(STATE_TOPIC, STATE_QUEUE)[1]
        self.topics.begin_life(now_ms, end << CHANGES_PER_RECORD_BITS)
        self._adopt(store)
        # Offsets stand behind what they count; but a crash may come between the deletion of a
        # topic and the record of it.
        moved = self.offsets.bound(lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1])
        if moved:
            _log.warning("%d committed offsets stood behind the end of the log: moved back", moved)
        # The first record of a life shows whether there is room for others.
        self.state.save()

    def load_copy(self) -> None:
        """Takes over what is in the log of a leader; nothing is written, or made up.

        Raises:
            CorruptRecord: It is damaged.
        """
        # Name servers are told of a follower's topics, too: consumers read there without a master.
        self.topics.begin_life(self._clock.wall_ms(), 0)
        self.state.load()

    def _adopt(self, store: MessageStore) -> None:
        # A topic's record stands in front of its messages; only damage makes it missing.
        found = [
            (name, max(store.queues(name), default=0))
            for name in store.topics()
            if name != STATE_TOPIC
        ]
        adopted = self.topics.adopt(
            found, self._config.default_topic_queue_nums, self._clock.wall_ms()
        )
        if adopted:
            _log.warning("%d topics of the store were missing in the topic table", adopted)
