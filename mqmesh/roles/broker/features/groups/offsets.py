"""Queue offsets: where queues begin and end, and how far groups have come."""

import logging
from collections.abc import Mapping
from typing import Final

from mqmesh.errors import (
    InvalidArgument,
    MessageIllegal,
    MQMeshError,
    OffsetIllegal,
    StaleGeneration,
)
from mqmesh.metrics import counter, gauge
from mqmesh.protocol.command import EMPTY_REPLY, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_client_group, check_lasting_group
from mqmesh.protocol.processing import CommitProcessedRequest
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
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.groups.forced_losses import losses, sentences
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.group_state.queue_ownership import NO_GENERATION
from mqmesh.roles.broker.group_state.used_groups import UsedGroups
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.units import MAX_OFFSET, QueueOffset, TimestampMs

MOST_LOSSES_NAMED: Final = 20
"""Pairs of group and topic in the log of one forced cleaning."""

_log = logging.getLogger(__name__)


class OffsetsFeature(Feature):
    """Offsets of queues, and the offsets that groups have committed."""

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        offsets: CommittedOffsets,
        resets: OffsetResets,
        locks: QueueLocks,
        used: UsedGroups,
    ) -> None:
        self._locks = locks
        self._store = core.store
        self._state = core.state
        self._stats = core.stats
        self._is_follower = core.is_follower
        self._clock = core.clock
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._resets = resets
        self._used = used

    def group_deleted(self, group: str) -> None:
        """Forget the offsets of a group."""
        self._offsets.remove_group(group)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.UPDATE_CONSUMER_OFFSET: self.update_consumer_offset,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {
            RequestCode.QUERY_CONSUMER_OFFSET: self.query_consumer_offset,
            RequestCode.QUERY_QUEUE_BOUNDS: self.query_queue_bounds,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.search_offset_by_timestamp,
        }

    def loaded(self) -> None:
        """Move offsets back that stand behind the end of their queue."""
        if self._is_follower:
            return
        # Offsets stand behind what they count; but a crash may come between the deletion of a
        # topic and the record of it.
        store = self._store
        moved = self._offsets.bound(lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1])
        if moved:
            _log.warning("%d committed offsets stood behind the end of the log: moved back", moved)

    def topic_deleted(self, topic: str) -> None:
        """Forget the offsets of all groups in a topic."""
        self._offsets.remove_topic(topic)
        self._resets.forget_topic(topic)

    def query_consumer_offset(
        self, request: Request, query: QueryConsumerOffsetRequest
    ) -> ConsumerOffsets:
        """Return where a group stands in some queues; -1 where it never committed.

        A member that was given the queues claims them so: all of them, or it is refused.

        Raises:
            StaleGeneration: It is no member, or another one has a queue in this generation.
        """
        check_client_group(query.group)
        offsets, epoch = self._offsets, self._store.epoch()
        generation = NO_GENERATION
        if query.client_id:
            generation = self._groups.require_member(query.group, query.client_id).generation
            for one in query.queues:
                self._check_queue(one.topic, one.queue_id)
                self._groups.claims.claim(
                    query.group, one.topic, one.queue_id, query.client_id, generation
                )
        return ConsumerOffsets(
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

    def update_consumer_offset(
        self, request: Request, update: UpdateConsumerOffsetRequest
    ) -> Reply:
        """Commit offsets of a group. Legal offsets are committed, also beside illegal ones.

        Raises:
            StaleGeneration: The member was removed, or replaced.
            DiskFull: It is committed in memory, but offsets cannot be saved now.
            MQMeshError: The first refusal, if any.
        """
        check_lasting_group(update.group)
        self._used.note(request, update.group)
        is_member = update.generation != NO_GENERATION
        if is_member:
            self._groups.require_member(update.group, update.client_id, update.generation)
        refusal: MQMeshError | None = None
        for one in update.queues:
            try:
                self._check_commit(update.group, one)
                key = (update.group, one.topic, one.queue_id)
                goes_back = one.queue_offset < self._offsets.query(*key)
                if is_member:
                    self._groups.claims.commit(
                        *key, update.client_id, update.generation, goes_back=goes_back
                    )
                if goes_back and self._offsets.is_processed(*key):
                    # Of before, from a connection that broke perhaps.
                    raise OffsetIllegal(
                        f"outputs of messages of queue {one.queue_id} of topic {one.topic!r} are "
                        f"stored: group {update.group!r} does not go back before them, to "
                        f"{one.queue_offset}, unless an administrator moves it"
                    )
                self._offsets.commit(*key, QueueOffset(one.queue_offset))
            except MQMeshError as error:
                refusal = refusal or error
            else:
                self._stats.total.offset_commits += 1
        # Said now, and not when a crash has put the group back.
        refusal = refusal or self._state.failure
        if refusal is not None:
            raise refusal
        return EMPTY_REPLY

    def plan_processed(self, request: Request, wanted: CommitProcessedRequest) -> PlannedChange:
        """Return the change that commits the offsets of messages of which a member made others.

        Raises:
            StaleGeneration: It is no member, or has not got a queue's lock; or the group is not
                where the member knew it to be.
            InvalidArgument: A queue is named twice, or makes no progress.
            MQMeshError: As for UPDATE_CONSUMER_OFFSET.
        """
        group, topic, member = wanted.group, wanted.topic, wanted.member
        self._used.note(request, group)
        generation = self._groups.require_member(group, member).generation
        if len({one.queue_id for one in wanted.offsets}) < len(wanted.offsets):
            raise InvalidArgument("a commit has each queue once")
        offsets: dict[int, QueueOffset] = {}
        added = 0
        for one in wanted.offsets:
            key = (group, topic, one.queue_id)
            entry = QueueOffsetEntry(topic, one.queue_id, one.queue_offset, one.epoch)
            self._check_commit(group, entry)
            self._check_lock(key, member, one.token)
            self._groups.claims.check_commit(*key, member)
            before = self._offsets.query(*key)
            if before >= one.queue_offset > one.known_offset and not wanted.batch_count:
                continue  # a repeat, for all that is known
            if before != one.known_offset:
                raise StaleGeneration(
                    f"the committed offset of group {group!r} in queue {one.queue_id} of topic "
                    f"{topic!r} is {before}, not {one.known_offset} (-1 is none): what {member} "
                    f"made of messages before {one.queue_offset} is not stored"
                )
            if one.queue_offset <= before:
                raise InvalidArgument(
                    f"a commit of queue {one.queue_id} from {before} to {one.queue_offset} makes "
                    "no progress"
                )
            added += before < 0
            offsets[one.queue_id] = QueueOffset(one.queue_offset)
        if added:
            self._offsets.check_room(added)
        change = self._offsets.plan_processed(group, topic, offsets)

        def apply() -> None:
            change.apply()
            for queue_id in offsets:
                self._groups.claims.commit(
                    group, topic, queue_id, member, generation, goes_back=False
                )
            self._stats.total.offset_commits += len(offsets)

        return PlannedChange(change.records, apply)

    def sample(self) -> None:
        """Log and count messages that groups lost by forced cleaning."""
        moves = self._store.take_forced_moves()
        if not moves:
            return
        found = losses(moves, self._offsets.groups_of_topic, self._offsets.query)
        for sentence in sentences(moves, found, MOST_LOSSES_NAMED):
            _log.error("%s", sentence)
        self._stats.total.forced_lost_messages += sum(one.messages for one in found)

    def query_queue_bounds(
        self, request: Request, query: QueueBoundsRequest
    ) -> QueueBoundsResponse:
        """Return where a queue begins and ends."""
        self._check_queue(query.topic, query.queue_id)
        return QueueBoundsResponse(*self._bounds(query.topic, query.queue_id))

    def search_offset_by_timestamp(
        self, request: Request, query: SearchOffsetRequest
    ) -> OffsetResponse:
        """The first message of a queue that was stored at or after a time."""
        self._check_queue(query.topic, query.queue_id)
        found = self._store.offset_by_time(
            query.topic, query.queue_id, TimestampMs(query.timestamp_ms)
        )
        return OffsetResponse(max(found, self._bounds(query.topic, query.queue_id)[0]))

    def _bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        return shown_bounds(self._store, self._topics, self._clock, topic, queue_id)

    def _check_queue(self, name: str, queue_id: int) -> None:
        # Without regard to permissions: committing and looking must go on while a topic drains.
        queue_count = self._topics.require(name).queue_count
        if queue_id >= queue_count:
            raise MessageIllegal(f"topic {name!r} has {queue_count} queues, there is no {queue_id}")

    def _check_lock(self, key: tuple[str, str, int], member: str, token: int) -> None:
        group, topic, queue_id = key
        lock = self._locks.find(group, (topic, queue_id))
        if lock is None or lock.client_id != member or lock.token != token:
            raise StaleGeneration(
                f"{member} has not the lock of queue {queue_id} of topic {topic!r} under which it "
                "processed messages (consume_orderly): of what it made of them nothing is stored"
            )

    def _check_commit(self, group: str, one: QueueOffsetEntry) -> None:
        self._check_queue(one.topic, one.queue_id)
        end = self._store.queue_bounds(one.topic, one.queue_id)[1]
        if self._is_follower:
            end = QueueOffset(
                MAX_OFFSET
            )  # the group may have read at the master what is not here yet
        if not 0 <= one.queue_offset <= end:
            raise OffsetIllegal(
                f"offset {one.queue_offset} of queue {one.queue_id} of topic {one.topic!r} is not "
                f"within 0 and the queue's end, {end}"
            )
        if 0 < one.epoch < self._store.epoch():
            cut = self._store.cut_offset(one.topic, one.queue_id, one.epoch)
            if cut is not None and one.queue_offset > cut:
                raise OffsetIllegal(
                    f"the broker lost what queue {one.queue_id} of topic {one.topic!r} had from "
                    f"offset {cut} on; this commit of offset {one.queue_offset} is from before"
                )
        if self._resets.holds_commit(group, one.topic, one.queue_id):
            raise OffsetIllegal(
                f"the offset of group {group!r} in queue {one.queue_id} of topic {one.topic!r} was "
                "moved by an administrator; this commit is from before"
            )

    metrics = (
        gauge(
            "offset_resets_pending",
            "queues whose offset was moved and whose consumer has not followed yet",
            lambda feature: len(feature._resets),
            unit="queues",
        ),
        gauge("consumer_offsets", "offsets that are kept", lambda feature: len(feature._offsets)),
        counter(
            "offset_commits_total",
            "offsets that were committed",
            lambda feature: feature._stats.total.offset_commits,
        ),
        counter(
            "forced_lost_messages_total",
            "messages removed before their time that a group had not consumed",
            lambda feature: feature._stats.total.forced_lost_messages,
            unit="messages",
        ),
    )
