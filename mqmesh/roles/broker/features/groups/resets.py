"""Moves the offsets of consumer groups, with effect on running consumers at once."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from mqmesh.errors import InvalidArgument, OffsetIllegal
from mqmesh.message import RESERVED_TOPICS, check_topic, dlq_topic, retry_topic
from mqmesh.protocol.command import Answer, encode_header
from mqmesh.protocol.commands import RequestCode
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
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.units import QueueOffset, TimestampMs

_NOWHERE: Final = -1


class PullsOfGroups(Protocol):
    """Pulls that wait for messages."""

    def is_waiting(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether a pull of a group waits at a queue."""

    def wake(self, topic: str, queue_id: int) -> None:
        """Answer those who wait at a queue: their group may have to go elsewhere."""


class ResetsFeature(Feature):
    """Offsets that administrators move, with effect on running consumers at once."""

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        offsets: CommittedOffsets,
        resets: OffsetResets,
        by_group: GroupPulls,
        pulls: PullsOfGroups,
        forget_sent_back: Callable[[str], None],
        windows: DeliveryWindows,
    ) -> None:
        self._core = core
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._offsets = offsets
        self._resets = resets
        self._by_group = by_group
        self._pulls = pulls
        self._forget_sent_back = forget_sent_back
        self._windows = windows

    def group_deleted(self, group: str) -> None:
        """Forget where a group was sent."""
        self._resets.forget(group)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset_offset,
            RequestCode.CLONE_GROUP_OFFSET: self.clone_offset,
        }

    def reset_offset(self, request: Request, wanted: ResetOffsetRequest) -> Answer | None:
        """A group goes on elsewhere in a topic; answered once that is on disk.

        Raises:
            OffsetIllegal: The queue does not reach there; nothing was changed.
            InvalidArgument: A place that is none.
        """
        check_client_group(wanted.group)
        check_topic(wanted.topic)
        queue_count = self._topics.require(wanted.topic).queue_count
        if wanted.queue_id >= queue_count:
            raise InvalidArgument(
                f"topic {wanted.topic!r} has {queue_count} queues, there is no {wanted.queue_id}"
            )
        first, behind = wanted.after_queue_id + 1, queue_count
        if wanted.queue_id >= 0:
            first, behind = wanted.queue_id, wanted.queue_id + 1
        end = min(behind, first + MAX_QUEUES_PER_RESET)
        changes = [self._change(wanted, queue_id) for queue_id in range(first, end)]
        return self._carry_out(request, wanted.group, changes, wanted.dry_run, more=end < behind)

    def clone_offset(self, request: Request, wanted: CloneOffsetRequest) -> Answer | None:
        """A group goes on where another one is; answered once that is on disk.

        Raises:
            InvalidArgument: Both are the same.
        """
        check_client_group(wanted.source)
        check_client_group(wanted.target)
        if wanted.source == wanted.target:
            raise InvalidArgument(f"group {wanted.source!r} cannot be copied to itself")
        own = {retry_topic(wanted.source), dlq_topic(wanted.source)} | RESERVED_TOPICS
        topics = [wanted.topic] if wanted.topic else self._offsets.topics(wanted.source)
        changes = []
        for topic in sorted(topics):
            if topic in own or self._topics.get(topic) is None:
                continue
            for queue_id, offset in sorted(
                self._offsets.topics(wanted.source).get(topic, {}).items()
            ):
                low, high = self._bounds(topic, queue_id)
                old = self._offsets.query(wanted.target, topic, queue_id)
                changes.append(OffsetChange(topic, queue_id, old, min(offset, high), low, high))
        if len(changes) > MAX_OFFSETS_PER_REQUEST:
            raise InvalidArgument(
                f"{len(changes)} queues are too many for one request; name a topic"
            )
        return self._carry_out(request, wanted.target, changes, wanted.dry_run)

    def _bounds(self, topic: str, queue_id: int) -> tuple[QueueOffset, QueueOffset]:
        return shown_bounds(self._store, self._topics, self._clock, topic, queue_id)

    def _change(self, wanted: ResetOffsetRequest, queue_id: int) -> OffsetChange:
        low, high = self._bounds(wanted.topic, queue_id)
        old = self._offsets.query(wanted.group, wanted.topic, queue_id)
        new: int
        if wanted.where == ResetWhere.FIRST:
            new = low
        elif wanted.where == ResetWhere.LAST:
            new = high
        elif wanted.where == ResetWhere.TIMESTAMP:
            time_ms = TimestampMs(wanted.timestamp_ms)
            new = max(self._store.offset_by_time(wanted.topic, queue_id, time_ms), low)
        elif wanted.where == ResetWhere.OFFSET and wanted.queue_id != _NOWHERE:
            new = wanted.queue_offset
            if not low <= new <= high:
                raise OffsetIllegal(
                    f"queue {queue_id} of topic {wanted.topic!r} has messages from {low} and "
                    f"before {high}; a group cannot go on at {new}"
                )
        else:
            raise InvalidArgument(
                f"where = {wanted.where!r} is none of {', '.join(ResetWhere)}, or an offset "
                "without the queue it is for"
            )
        return OffsetChange(wanted.topic, queue_id, old, new, low, high)

    def _carry_out(
        self,
        request: Request,
        group: str,
        changes: list[OffsetChange],
        dry_run: bool,
        *,
        more: bool = False,
    ) -> OffsetChanges | None:
        peers = self._groups.peers(group)
        reply = OffsetChanges(changes, len(peers), more)
        if dry_run or not changes:
            return reply
        self._commit_point.check_room()
        live = self._groups.find(group)
        broadcasting = live is not None and any(
            data.message_model == MessageModel.BROADCASTING for data in live.members.values()
        )
        if not broadcasting:
            # The members of a broadcasting group keep their offsets by themselves.
            self._group_table.note_used(group)
            self._forget_sent_back(group)
            self._move(group, changes, followed=live is not None)
        self._notify(group, peers, changes)
        self._core.reply_when_saved(request, reply)
        return None

    def _move(self, group: str, changes: list[OffsetChange], *, followed: bool) -> None:
        # A consumer that takes queues by itself is no member; its pulls show that it is there, also
        # one that has been waiting at the end of its queue for long.
        followed = followed or self._by_group.is_active(group, self._clock.monotonic_ms())
        for one in changes:
            key = (group, one.topic, one.queue_id)
            is_window = self._windows.find(key) is not None
            self._windows.drop(key)
            self._offsets.move(group, one.topic, one.queue_id, QueueOffset(one.new_offset))
            self._resets.note_moved(group, one.topic, one.queue_id)
            self._by_group.forget_queue(group, one.topic, one.queue_id)
            if is_window:
                continue  # its members have no place of their own: they get what comes
            if followed or self._pulls.is_waiting(group, one.topic, one.queue_id):
                self._resets.begin(group, one.topic, one.queue_id, one.new_offset)

    def _notify(self, group: str, peers: list[Peer], changes: list[OffsetChange]) -> None:
        # First the notice, then the answers to waiting pulls: a member that hears of it moves once.
        queues = [QueueOffsetEntry(one.topic, one.queue_id, one.new_offset) for one in changes]
        header = encode_header(ConsumerOffsetReset(group, queues))
        for peer in peers:
            peer.notify(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header)
        for one in changes:
            self._pulls.wake(one.topic, one.queue_id)
