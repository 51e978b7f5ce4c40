"""Track of a message: which groups consumed it, and which did not, and why."""

import enum
from collections.abc import Iterable

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, due_times, read_delayed_meta
from mqmesh.batch.record_batch import Attributes, check_stored
from mqmesh.errors import CorruptBatch, InvalidArgument, MQMeshError, TopicNotFound
from mqmesh.filtering.predicate import fits_sql
from mqmesh.filtering.tags import parse_tags
from mqmesh.message import (
    DLQ_PREFIX,
    PROPERTY_LAST_FAILURE,
    RESERVED_TOPICS,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    StoredMessage,
    dlq_topic,
    retry_topic,
)
from mqmesh.namespaces import shown_name
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ConsumerConnection, ConsumeStats, ConsumeStatsRequest
from mqmesh.protocol.membership import MessageModel, Subscription
from mqmesh.protocol.pulling import ExpressionType, ViewMessageRequest
from mqmesh.protocol.queries import MAX_QUERY_MESSAGES
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.transport.endpoints import endpoint_of


class TrackState(enum.StrEnum):
    """State of a message in a group."""

    CONSUMED = "CONSUMED"
    """The group's offset has passed it."""
    FILTERED = "FILTERED"
    """The group's offset has passed it, and its members' expressions leave it out."""
    IN_FLIGHT = "IN_FLIGHT"
    """Handed out to a member, which is not done with it."""
    WAITING = "WAITING"
    """The group has not come so far."""
    RETRYING = "RETRYING"
    """The message failed, and will come again."""
    DEAD = "DEAD"
    """The message failed too often, and is in the dead letters."""
    UNKNOWN = "UNKNOWN"
    """Members of a broadcasting group keep their offsets by themselves."""


class Track(msgspec.Struct, frozen=True):
    """Track of a message in one group.

    Attributes:
        group: Consumer group.
        state: State of the message.
        members: Connected members of the group.
        reconsume_times: Number of times it was sent back.
        last_failure: Why, as the consumer said.
        due_ms: When it comes again, wall clock; 0 for at once or never.
        messages_before: Messages of its queue that the group has to do first.
        client_id: Member that has the queue; empty for none.
    """

    group: str
    state: TrackState
    members: int = 0
    reconsume_times: int = 0
    last_failure: str = ""
    due_ms: int = 0
    messages_before: int = 0
    client_id: str = ""


class MessageTrack(msgspec.Struct, frozen=True):
    """Copies of a message, and its track in each group.

    Attributes:
        copies: Everything stored under its id, newest first: itself, retries, dead letters.
        due_ms: When a delayed message will be delivered, wall clock; 0 if it was, or is not
            delayed.
        tracks: By group; none where no group reads the topic.
        notes: By broker group, why the answer may lack something.
    """

    copies: list[StoredMessage]
    due_ms: int
    tracks: list[Track]
    notes: dict[str, str] = {}


class TrackClient(QueryClient, GroupAdmin):
    """Client that tracks messages, in the caller's thread."""

    def track(self, message_id: str) -> MessageTrack:
        """Return the track of a message.

        It reads the index, and the offsets of all groups that read its topic. A group whose
        offset was moved past a message without reading it counts as having consumed it.

        Args:
            message_id: 32 hex digits, from ``SendResult`` or ``StoredMessage``.

        Returns:
            The track; without copies if no broker has the message any more.

        Raises:
            InvalidArgument: That is no message id.
            TransportError, BrokerError: A broker could not answer.
        """
        found = self.by_id(message_id, max_count=MAX_QUERY_MESSAGES, with_system=True)
        copies = found.messages
        if not copies:
            return MessageTrack([], 0, [], found.notes)
        goals = {id(one): self._goal(one) for one in copies if one.info.topic == SCHEDULE_TOPIC}
        groups = {_group_of(one) for one in copies} | {
            _group_in(goal) for goal, _ in goals.values()
        }
        groups |= set(self.topic_consumers(copies[0].topic))
        tracks = []
        for group in sorted(groups - {""}):
            own = {copies[0].topic, retry_topic(group), dlq_topic(group)}
            for copy in copies:
                goal, due_ms = goals.get(id(copy), (copy.info.topic, 0))
                if goal in own:
                    tracks.append(self._track(group, copy, goal, due_ms))
                    break  # the newest copy shows where the group is
        real = {copies[0].topic}
        waiting = [due_ms for goal, due_ms in goals.values() if goal in real]
        delivered = any(copy.info.topic in real for copy in copies)
        return MessageTrack(
            copies, 0 if delivered else max(waiting, default=0), tracks, found.notes
        )

    def _goal(self, copy: StoredMessage) -> tuple[str, int]:
        """Return the topic to which a message in the schedule topic goes, and when."""
        header = encode_header(ViewMessageRequest(copy.info.commitlog_offset))
        endpoint = endpoint_of(copy.store_host)
        try:
            answer = self._request(endpoint, RequestCode.VIEW_MESSAGE, header)
            batch = check_stored(answer.body)
            if not batch.attributes & Attributes.HAS_DELAY:
                return "", 0
            meta: DelayedMeta = read_delayed_meta(answer.body, batch)
        except (MQMeshError, CorruptBatch):
            return "", 0  # the log is gone there, so it is not waiting any more
        times = due_times(meta, batch)
        topic = shown_name(self.namespace, meta.real_topic)
        return topic, times[copy.ordinal] if len(times) > 1 else times[0]

    def _track(self, group: str, copy: StoredMessage, goal: str, due_ms: int) -> Track:
        members = self.connections(group)
        failed = goal != copy.topic
        track = Track(
            group,
            TrackState.WAITING,
            members=len(members),
            reconsume_times=copy.reconsume_times if failed else 0,
            last_failure=copy.property(PROPERTY_LAST_FAILURE) or "" if failed else "",
            due_ms=due_ms,
        )
        if goal.startswith(DLQ_PREFIX):
            return msgspec.structs.replace(track, state=TrackState.DEAD)
        if copy.info.topic not in RESERVED_TOPICS:
            return self._stand(group, copy, members, track)
        if goal.startswith(RETRY_PREFIX):
            return msgspec.structs.replace(track, state=TrackState.RETRYING)
        return track

    def _stand(
        self, group: str, copy: StoredMessage, members: list[ConsumerConnection], track: Track
    ) -> Track:
        if any(one.data.message_model == MessageModel.BROADCASTING for one in members):
            return msgspec.structs.replace(track, state=TrackState.UNKNOWN)
        topic, queue_id = copy.info.topic, copy.queue_id
        request = ConsumeStatsRequest(group, topic)
        if queue_id:
            request = ConsumeStatsRequest(group, topic, topic, queue_id - 1)
        endpoint = endpoint_of(copy.store_host)
        try:
            queues = self._ask(
                endpoint, RequestCode.GET_CONSUME_STATS, request, ConsumeStats
            ).queues
        except TopicNotFound:
            queues = []
        queue = next((one for one in queues if one.queue_id == queue_id), None)
        if queue is None:
            return track
        if queue.consumer_offset > copy.queue_offset:
            wanted = _is_wanted(copy, (s for m in members for s in m.data.subscriptions))
            state = TrackState.CONSUMED if wanted else TrackState.FILTERED
            return msgspec.structs.replace(track, state=state)
        state = TrackState.WAITING
        if topic.startswith(RETRY_PREFIX):
            state = TrackState.RETRYING
        if queue.pull_offset > copy.queue_offset:
            state = TrackState.IN_FLIGHT
        begin = max(queue.consumer_offset, queue.min_queue_offset)
        return msgspec.structs.replace(
            track,
            state=state,
            messages_before=max(copy.queue_offset - begin, 0),
            client_id=queue.client_id,
        )


def _group_of(copy: StoredMessage) -> str:
    return _group_in(copy.info.topic)


def _group_in(topic: str) -> str:
    """Return the group of a retry or dead letter topic, "" for another one."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if topic.startswith(prefix):
            return topic.removeprefix(prefix)
    return ""


def _is_wanted(copy: StoredMessage, subscriptions: Iterable[Subscription]) -> bool:
    """Return False when the members' expressions leave the message out; Python filters may not."""
    mine = [one for one in subscriptions if one.topic == copy.info.topic]
    return not mine or any(_fits(copy, one) for one in mine)


def _fits(copy: StoredMessage, subscription: Subscription) -> bool:
    try:
        if subscription.expression_type == ExpressionType.TAG:
            tags = parse_tags(subscription.expression)
            return tags is None or copy.tag in tags
        if subscription.expression_type == ExpressionType.SQL92:
            return fits_sql(subscription.expression, copy)
    except InvalidArgument:
        return True  # of a later version, perhaps
    return True
