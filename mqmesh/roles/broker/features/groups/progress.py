"""Progress of consumer groups in their topics, for administrators."""

from collections.abc import Iterator, Mapping
from typing import Final

from mqmesh.message import RESERVED_TOPICS, check_topic, dlq_topic, retry_topic
from mqmesh.namespaces import is_within
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    MAX_QUEUES_PER_STATS,
    ConsumeStats,
    ConsumeStatsRequest,
    GroupNames,
    GroupsProgress,
    GroupsProgressRequest,
    GroupTopics,
    QueueProgress,
    TopicConsumersRequest,
    TopicProgress,
    WindowProgress,
    check_client_group,
)
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.groups.connections import connections_of, failures_of
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.retry_board import RetryBoard, waiting_retries
from mqmesh.roles.broker.reading.store_times import store_time
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.listings import Listings

QUEUES_PER_PAGE: Final = 64
"""A page of progress ends when so many queues were looked at, each at up to 50 µs."""
QUEUES_FOR_A_GROUP: Final = 1
"""A group without any counts like so many."""


class ProgressReader:
    """Progress of groups, from their offsets, their pulls and what waits for a retry."""

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        offsets: CommittedOffsets,
        by_group: GroupPulls,
        retries: RetryBoard,
        windows: DeliveryWindows,
    ) -> None:
        self._clock = core.clock
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._offsets = offsets
        self._pulls = by_group
        self._retries = retries
        self._windows = windows

    def queue_count(self, name: str) -> int:
        """Return the number of queues that a group has offsets in."""
        return sum(map(len, self._offsets.topics(name).values()))

    def readers(self, topic: str) -> set[str]:
        """Return the groups with offsets in a topic, and those that subscribe to it."""
        found = set(self._offsets.groups_of_topic(topic))
        return found.union(
            name for name in self._groups.names() if topic in self.subscribed_topics(name)
        )

    def rate(self, name: str) -> float:
        """Return the messages handed out to a group, a second."""
        return self._pulls.rate(name, self._clock.monotonic_ms())

    def waiting_retries(self, name: str) -> tuple[int, int]:
        """Return how many messages wait for a retry, and since when; see ``waiting_retries``."""
        return waiting_retries(self._store, self._retries, name)

    def names(self) -> set[str]:
        """Groups with settings, offsets or members."""
        names = {*self._group_table.names(), *self._offsets.groups()}
        return names.union(self._groups.names())

    def topics_of(self, name: str) -> list[str]:
        """Topics that a group has to do with, sorted; without dead letters and hidden topics.

        Delayed messages and half messages are in system topics, and count in no group's lag.
        """
        found = set(self._offsets.topics(name)) | self.subscribed_topics(name)
        found.add(retry_topic(name))
        hidden = RESERVED_TOPICS | {dlq_topic(name)}
        return sorted(one for one in found - hidden if self._topics.get(one) is not None)

    def subscribed_topics(self, name: str) -> set[str]:
        """Return the topics that members of a group subscribe to."""
        group = self._groups.find(name)
        members = () if group is None else group.members.values()
        return {one.topic for data in members for one in data.subscriptions}

    def broadcasts(self, name: str) -> bool:
        """Return whether members keep their offsets by themselves, so that its lag is unknown."""
        return self._groups.model_of(name) == MessageModel.BROADCASTING

    def lag_of(self, name: str, topic: str) -> int:
        """Messages of a topic that a group has not done; all of them for no group."""
        known = self._topics.get(topic)
        if known is None:
            return 0
        lag = 0
        for queue_id in range(known.queue_count):
            low, high = shown_bounds(self._store, self._topics, self._clock, topic, queue_id)
            window = self._windows.find((name, topic, queue_id))
            if window is not None:
                lag += window.unsettled + max(high - max(window.next_offset, low), 0)
            else:
                lag += max(high - max(self._offsets.query(name, topic, queue_id), low), 0)
        return lag

    def of_window(
        self, name: str, topic: str, queue_id: int, bounds: tuple[int, int]
    ) -> WindowProgress | None:
        """Return how far a group is that acknowledges each message; None for others.

        Args:
            name: Consumer group.
            topic: Physical topic.
            queue_id: Message queue.
            bounds: Where the queue begins for readers, and where it ends.
        """
        window = self._windows.find((name, topic, queue_id))
        if window is None:
            return None
        low, high = bounds
        now_ms = self._clock.monotonic_ms()
        return WindowProgress(
            max(high - max(window.next_offset, low), 0),
            window.leased,
            window.unsettled - window.leased,
            sum(run.count for run in window.runs if run.attempt > 1),
            now_ms - window.oldest_since(now_ms),
        )

    def of_queue(self, name: str, topic: str, queue_id: int) -> QueueProgress:
        """Return how far a group is in a queue."""
        low, high = shown_bounds(self._store, self._topics, self._clock, topic, queue_id)
        done = self._offsets.query(name, topic, queue_id)
        # Messages handed out to consumers that are gone do not count as pulled.
        running = self._groups.find(name) is not None or self._pulls.is_active(
            name, self._clock.monotonic_ms()
        )
        pulled = self._pulls.pull_offset(name, topic, queue_id) if running else -1
        oldest_ms = store_time(self._store, topic, queue_id, max(done, low)) if done < high else 0
        claim = self._groups.claims.find(name, topic, queue_id)
        members = group.members if (group := self._groups.find(name)) is not None else {}
        owner = claim.client_id if claim is not None and claim.client_id in members else ""
        return QueueProgress(
            topic,
            queue_id,
            low,
            high,
            done,
            pulled,
            oldest_ms,
            owner,
            self.of_window(name, topic, queue_id, (low, high)),
        )

    def of_topic(self, name: str, topic: str) -> TopicProgress:
        """Return how far a group is in a topic."""
        # Messages handed out to consumers that are gone do not count as pulled.
        running = self._groups.find(name) is not None or self._pulls.is_active(
            name, self._clock.monotonic_ms()
        )
        offsets = self._offsets.topics(name).get(topic, {})
        is_known = not self.broadcasts(name)
        ends = committed = lag = in_flight = 0
        oldest: list[int] = []
        ready: list[int] = []
        for queue_id in range(self._topics.require(topic).queue_count):
            low, high = shown_bounds(self._store, self._topics, self._clock, topic, queue_id)
            done = offsets.get(queue_id, -1)
            begin = max(done, low)
            behind = max(high - begin, 0)
            ends += high
            window = self._windows.find((name, topic, queue_id))
            # A message that is held long holds the offset, and not those behind it.
            committed += max(done, 0) if window is None else window.next_offset - window.unsettled
            if not behind or not is_known:
                continue
            pulled = self._pulls.pull_offset(name, topic, queue_id) if running else -1
            flying = min(max(pulled - begin, 0), behind)
            if window is not None:
                flying = window.leased
                behind = window.unsettled + max(high - max(window.next_offset, low), 0)
            lag += behind
            in_flight += flying
            oldest.append(store_time(self._store, topic, queue_id, begin))
            if flying < behind:
                at = (
                    store_time(self._store, topic, queue_id, begin + flying)
                    if flying
                    else oldest[-1]
                )
                ready.append(at)
        waiting = 0
        if is_known and topic == retry_topic(name):
            waiting, since = self.waiting_retries(name)
            oldest.append(since)
        return TopicProgress(
            topic, ends, committed, lag + waiting, in_flight, _first(oldest), _first(ready), waiting
        )


class GroupProgressFeature(Feature):
    """Progress of consumer groups, in pages that hold nobody up for long."""

    works_at_followers = True

    def __init__(
        self, core: Core, topics: TopicTable, groups: ConsumerGroups, progress: ProgressReader
    ) -> None:
        self._clock = core.clock
        self._topics = topics
        self._groups = groups
        self._progress = progress
        self._listings: Listings[list[str]] = Listings()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.GET_GROUPS_PROGRESS: self.get_groups_progress,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.query_topic_consumers,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {RequestCode.GET_CONSUME_STATS: self.get_consume_stats}

    def get_consume_stats(self, request: Request, query: ConsumeStatsRequest) -> ConsumeStats:
        """Return the progress of a group in each of its queues, in pages."""
        name = check_client_group(query.group)
        if query.topic:
            check_topic(query.topic)
            self._topics.require(query.topic)
        found: list[QueueProgress] = []
        more = False
        for topic, queue_id in self._queues_of(name, query):
            if len(found) == MAX_QUEUES_PER_STATS:
                more = True
                break
            found.append(self._progress.of_queue(name, topic, queue_id))
        rate = self._progress.rate(name)
        waiting = since = 0
        if query.topic in ("", retry_topic(name)) and not self._progress.broadcasts(name):
            waiting, since = self._progress.waiting_retries(name)
        return ConsumeStats(found, more, rate, self._clock.wall_ms(), waiting, since)

    def query_topic_consumers(self, request: Request, header: TopicConsumersRequest) -> GroupNames:
        """The groups that read a topic: those with offsets in it, and those who subscribe to it."""
        topic = check_topic(header.topic)
        namespace = request.peer.principal.namespace
        readers = self._progress.readers(topic)
        return GroupNames(sorted(one for one in readers if is_within(namespace, one)))

    def _queues_of(self, name: str, query: ConsumeStatsRequest) -> Iterator[tuple[str, int]]:
        topics = [query.topic] if query.topic else self._progress.topics_of(name)
        after = (query.after_topic, query.after_queue_id)
        for topic in topics:
            if topic < query.after_topic:
                continue
            for queue_id in range(self._topics.require(topic).queue_count):
                if not query.after_topic or (topic, queue_id) > after:
                    yield topic, queue_id

    def get_groups_progress(self, request: Request, query: GroupsProgressRequest) -> GroupsProgress:
        """A page of groups."""
        user = request.peer.principal.name
        namespace = request.peer.principal.namespace or query.namespace
        names = self._listings.take(user, query.listing)
        listing, place, after = query.listing, query.place, query.after_topic
        if names is None:
            # Made at the first page, so that no other has to.
            names, listing, place, after = list(self._progress.names()), 0, 0, ""
        if namespace:
            names = [one for one in names if is_within(namespace, one)]
        found: list[GroupTopics] = []
        left = QUEUES_PER_PAGE
        while place < len(names) and left > 0:
            part, after, left = self._part_of(names[place], after, left)
            found.append(part)
            place += not after
        if place < len(names):
            next_place, listing = place, self._listings.keep(user, listing, names)
        else:
            next_place = -1
        return GroupsProgress(listing, found, next_place, after, self._clock.wall_ms())

    def _part_of(self, name: str, after: str, left: int) -> tuple[GroupTopics, str, int]:
        """Return a group from a topic on, the topic where the page ends, and the queues left."""
        left -= QUEUES_FOR_A_GROUP
        wanted = [topic for topic in self._progress.topics_of(name) if topic > after]
        topics: list[TopicProgress] = []
        for number, topic in enumerate(wanted, 1):
            topics.append(self._progress.of_topic(name, topic))
            left -= self._topics.require(topic).queue_count
            if left <= 0 and number < len(wanted):
                return GroupTopics(name, topics), topic, left
        dead = self._topics.get(dlq_topic(name))
        members = connections_of(self._groups, name, self._clock.monotonic_ms())
        part = GroupTopics(
            name,
            topics,
            members,
            self._groups.model_of(name),
            self._progress.lag_of("", dlq_topic(name)),
            dead.put_messages if dead is not None else 0,
            failures_of(members),
        )
        return part, "", left


def _first(times: list[int]) -> int:
    return min((one for one in times if one), default=0)
