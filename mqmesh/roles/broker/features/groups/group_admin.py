"""Consumer groups for administrators: settings, members, how far they have come."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import RESERVED_TOPICS, check_topic, dlq_topic, retry_topic
from mqmesh.metrics import gauge
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import EMPTY_REPLY, Answer, Reply
from mqmesh.protocol.groups import (
    MAX_CLIENTS_PER_ANSWER,
    MAX_GROUPS_PER_ANSWER,
    MAX_QUEUES_PER_STATS,
    AllClients,
    AllClientsRequest,
    ClientInfo,
    ConsumerConnection,
    ConsumerConnections,
    ConsumerConnectionsRequest,
    ConsumeStats,
    ConsumeStatsRequest,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupFailures,
    GroupNames,
    GroupsProgress,
    GroupsProgressRequest,
    GroupSummaries,
    GroupSummary,
    GroupTopics,
    ProducerConnection,
    ProducerConnections,
    ProducerConnectionsRequest,
    QueueProgress,
    TopicConsumersRequest,
    TopicProgress,
    UpdateGroupRequest,
    check_client_group,
)
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.delays.retry_board import RetryBoard
from mqmesh.roles.broker.features.pulling.group_pulls import GroupPulls
from mqmesh.roles.broker.features.retries.send_back import SendBackFeature
from mqmesh.roles.broker.features.retries.waiting_retries import waiting_retries
from mqmesh.roles.broker.features.topics.state import TopicTable
from mqmesh.roles.broker.features.topics.store_times import store_time
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups, GroupClient
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.listings import Listings

QUEUES_PER_PAGE: Final = 64
"""A page of progress ends when so many queues were looked at, each at up to 50 µs."""
QUEUES_FOR_A_GROUP: Final = 1
"""A group without any counts like so many."""
QUEUES_PER_LIST: Final = 4_096
"""A list of groups ends its page when so many queues were looked at."""


class GroupAdminFeature(Feature):
    """Consumer groups for administrators: settings, members, progress."""

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        offsets: CommittedOffsets,
        resets: OffsetResets,
        by_group: GroupPulls,
        send_back: SendBackFeature,
        retries: RetryBoard,
    ) -> None:
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._offsets = offsets
        self._resets = resets
        self._pulls = by_group
        self._send_back = send_back
        self._retries = retries
        self._listings: Listings[list[str]] = Listings()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update_and_create_group,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.get_consumer_connections,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.get_producer_connections,
            RequestCode.GET_ALL_CLIENTS: self.get_all_clients,
            RequestCode.GET_GROUPS_PROGRESS: self.get_groups_progress,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.query_topic_consumers,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.get_groups,
            RequestCode.GET_CONSUME_STATS: self.get_consume_stats,
        }

    def configured(self) -> None:
        """Take over whether groups get settings by themselves."""
        self._group_table.auto_create = self._settings.now.auto_create_subscription_group

    def update_and_create_group(
        self, request: Request, wanted: UpdateGroupRequest
    ) -> Answer | None:
        """Makes or changes the settings of a group; answered once that is on disk."""
        self._commit_point.check_room()
        changed = self._group_table.update(
            wanted.config,
            must_exist=wanted.must_exist,
            must_be_new=wanted.must_be_new,
        )
        reply = wanted.config
        if not changed:
            return reply
        self._core.reply_when_saved(request, reply)
        return None

    def get_groups(self, request: Request, query: GetGroupsRequest) -> GroupSummaries:
        """One group, or all, in pages."""
        if query.group:
            check_client_group(query.group)
            known = query.group in self.all_names()
            return GroupSummaries([self._summary(query.group)] if known else [])
        names = (name for name in self.all_names() if name > query.after)
        page = heapq.nsmallest(MAX_GROUPS_PER_ANSWER + 1, names)
        found: list[GroupSummary] = []
        queues = 0
        for name in page[:MAX_GROUPS_PER_ANSWER]:
            found.append(self._summary(name))
            queues += sum(map(len, self._offsets.topics(name).values()))
            if queues >= QUEUES_PER_LIST:
                break
        return GroupSummaries(found, len(found) < len(page))

    def delete_group(self, request: Request, wanted: DeleteGroupRequest) -> Reply | None:
        """Forgets a group; answered once that is on disk.

        Raises:
            InvalidArgument: It has members, with whose next word it would be there again.
        """
        name = check_client_group(wanted.group)
        group = self._groups.find(name)
        if group is not None:
            raise InvalidArgument(
                f"consumer group {name!r} has {len(group.members)} members, for example "
                f"{min(group.members)}; stop them first"
            )
        self._commit_point.check_room()
        self._send_back.forget_sent_back(name)
        self._group_table.delete(name)
        self._groups.claims.forget_group(name)
        self._offsets.remove_group(name)
        self._pulls.forget(name)
        self._resets.forget(name)
        topics = [retry_topic(name), dlq_topic(name)] if wanted.remove_topics else []
        for topic in topics:
            if self._topics.get(topic) is not None:
                self._topics.delete(topic, self._clock.wall_ms())
        self._core.reply_when_saved(request, EMPTY_REPLY)
        return None

    def get_consumer_connections(
        self, request: Request, query: ConsumerConnectionsRequest
    ) -> ConsumerConnections:
        """The members of a group, and how each differs from it."""
        name = check_client_group(query.group)
        generation = self._groups.group(name).generation
        return ConsumerConnections(self.connections_of(name), generation)

    def connections_of(self, name: str) -> list[ConsumerConnection]:
        """The members of a group, by client id; none if it has none."""
        group = self._groups.find(name)
        if group is None:
            return []
        now_ms = self._clock.monotonic_ms()
        members = []
        for client_id in sorted(group.members):
            client = self._groups.client(client_id)
            assert client is not None
            members.append(
                ConsumerConnection(
                    *_connection(client, now_ms),
                    group.members[client_id],
                    group.check.difference(client_id),
                    [one for one in client.stats if one.group == name],
                )
            )
        return members

    def get_producer_connections(
        self, request: Request, query: ProducerConnectionsRequest
    ) -> ProducerConnections:
        """The members of a producer group."""
        check_client_group(query.group)
        now_ms = self._clock.monotonic_ms()
        clients = self._groups.clients(query.group)
        return ProducerConnections(
            [ProducerConnection(*_connection(one, now_ms)) for one in clients]
        )

    def get_all_clients(self, request: Request, query: AllClientsRequest) -> AllClients:
        """Everybody who is registered, in pages."""
        now_ms = self._clock.monotonic_ms()
        after = query.after_client_id
        clients = [one for one in self._groups.clients() if one.heartbeat.client_id > after]
        found = [
            ClientInfo(
                *_connection(one, now_ms),
                sorted(one.heartbeat.producer_groups),
                sorted(data.group for data in one.heartbeat.consumers),
            )
            for one in clients[:MAX_CLIENTS_PER_ANSWER]
        ]
        return AllClients(found, len(found) < len(clients))

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
            found.append(self._progress(name, topic, queue_id))
        rate = self._pulls.rate(name, self._clock.monotonic_ms())
        waiting = since = 0
        if query.topic in ("", retry_topic(name)) and not self.broadcasts(name):
            waiting, since = waiting_retries(self._store, self._retries, name)
        return ConsumeStats(found, more, rate, self._clock.wall_ms(), waiting, since)

    def query_topic_consumers(self, request: Request, asked: TopicConsumersRequest) -> GroupNames:
        """The groups that read a topic: those with offsets in it, and those who subscribe to it."""
        topic = check_topic(asked.topic)
        found = set(self._offsets.groups_of_topic(topic))
        for name in self._groups.names():
            if topic in self._subscribed_topics(name):
                found.add(name)
        return GroupNames(sorted(found))

    def topics_of(self, name: str) -> list[str]:
        """Topics that a group has to do with, sorted; without dead letters and hidden topics.

        What waits in a delay or as half a transaction is in a topic of the system's, and is no
        lag of anybody.
        """
        found = set(self._offsets.topics(name)) | self._subscribed_topics(name)
        found.add(retry_topic(name))
        hidden = RESERVED_TOPICS | {dlq_topic(name)}
        return sorted(one for one in found - hidden if self._topics.get(one) is not None)

    def all_names(self) -> set[str]:
        """Groups with settings, offsets or members."""
        names = {*self._group_table.names(), *self._offsets.groups()}
        return names.union(self._groups.names())

    def _subscribed_topics(self, name: str) -> set[str]:
        group = self._groups.find(name)
        members = () if group is None else group.members.values()
        return {one.topic for data in members for one in data.subscriptions}

    def _queues_of(self, name: str, query: ConsumeStatsRequest) -> Iterator[tuple[str, int]]:
        topics = [query.topic] if query.topic else self.topics_of(name)
        after = (query.after_topic, query.after_queue_id)
        for topic in topics:
            if topic < query.after_topic:
                continue
            for queue_id in range(self._topics.require(topic).queue_count):
                if not query.after_topic or (topic, queue_id) > after:
                    yield topic, queue_id

    def _progress(self, name: str, topic: str, queue_id: int) -> QueueProgress:
        low, high = self._store.queue_bounds(topic, queue_id)
        done = self._offsets.query(name, topic, queue_id)
        # What was handed out to consumers that are gone is with nobody.
        running = self._groups.find(name) is not None or self._pulls.is_active(
            name, self._clock.monotonic_ms()
        )
        pulled = self._pulls.pull_offset(name, topic, queue_id) if running else -1
        oldest_ms = store_time(self._store, topic, queue_id, max(done, low)) if done < high else 0
        claim = self._groups.claims.find(name, topic, queue_id)
        members = group.members if (group := self._groups.find(name)) is not None else {}
        owner = claim.client_id if claim is not None and claim.client_id in members else ""
        return QueueProgress(topic, queue_id, low, high, done, pulled, oldest_ms, owner)

    def _summary(self, name: str) -> GroupSummary:
        group = self._groups.find(name)
        config = self._group_table.get(name)
        own = retry_topic(name)
        topics = [one for one in self.topics_of(name) if one != own]
        is_known = not self.broadcasts(name)
        retrying = self.lag_of(name, own)
        if is_known:
            retrying += waiting_retries(self._store, self._retries, name)[0]
        lag = sum(self.lag_of(name, one) for one in topics) + retrying
        return GroupSummary(
            config=config or GroupConfig(name),
            is_configured=config is not None,
            members=0 if group is None else len(group.members),
            message_model=self._groups.model_of(name),
            topics=topics,
            lag=lag if is_known else 0,
            consume_tps=self._pulls.rate(name, self._clock.monotonic_ms()),
            retrying=retrying,
            dead=self.lag_of("", dlq_topic(name)),
            differing=0 if group is None else group.check.differing,
            failures=failures_of(self.connections_of(name)),
        )

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
            low, high = self._store.queue_bounds(topic, queue_id)
            lag += max(high - max(self._offsets.query(name, topic, queue_id), low), 0)
        return lag

    # ---- Progress of all groups, in pages that hold nobody up for long -------------------

    def get_groups_progress(self, request: Request, query: GroupsProgressRequest) -> GroupsProgress:
        """A page of groups."""
        names = self._listings.take(query.listing)
        listing, place, after = query.listing, query.place, query.after_topic
        if names is None:
            # Made at the first page, so that no other has to.
            names, listing, place, after = list(self.all_names()), 0, 0, ""
        found: list[GroupTopics] = []
        left = QUEUES_PER_PAGE
        while place < len(names) and left > 0:
            part, after, left = self._part_of(names[place], after, left)
            found.append(part)
            place += not after
        if place < len(names):
            next_place, listing = place, self._listings.keep(listing, names)
        else:
            next_place = -1
        return GroupsProgress(listing, found, next_place, after, self._clock.wall_ms())

    def _part_of(self, name: str, after: str, left: int) -> tuple[GroupTopics, str, int]:
        """Return a group from a topic on, the topic where the page ends, and the queues left."""
        left -= QUEUES_FOR_A_GROUP
        wanted = [topic for topic in self.topics_of(name) if topic > after]
        topics: list[TopicProgress] = []
        for number, topic in enumerate(wanted, 1):
            topics.append(self._progress_of(name, topic))
            left -= self._topics.require(topic).queue_count
            if left <= 0 and number < len(wanted):
                return GroupTopics(name, topics), topic, left
        dead = self._topics.get(dlq_topic(name))
        members = self.connections_of(name)
        part = GroupTopics(
            name,
            topics,
            members,
            self._groups.model_of(name),
            self.lag_of("", dlq_topic(name)),
            dead.put_messages if dead is not None else 0,
            failures_of(members),
        )
        return part, "", left

    def _progress_of(self, name: str, topic: str) -> TopicProgress:
        # What was handed out to consumers that are gone is with nobody.
        running = self._groups.find(name) is not None or self._pulls.is_active(
            name, self._clock.monotonic_ms()
        )
        offsets = self._offsets.topics(name).get(topic, {})
        is_known = not self.broadcasts(name)
        ends = committed = lag = in_flight = 0
        oldest: list[int] = []
        ready: list[int] = []
        for queue_id in range(self._topics.require(topic).queue_count):
            low, high = self._store.queue_bounds(topic, queue_id)
            done = offsets.get(queue_id, -1)
            begin = max(done, low)
            behind = max(high - begin, 0)
            ends += high
            committed += max(done, 0)
            if not behind or not is_known:
                continue
            pulled = self._pulls.pull_offset(name, topic, queue_id) if running else -1
            flying = min(max(pulled - begin, 0), behind)
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
            waiting, since = waiting_retries(self._store, self._retries, name)
            oldest.append(since)
        return TopicProgress(
            topic, ends, committed, lag + waiting, in_flight, _first(oldest), _first(ready), waiting
        )

    metrics = (
        gauge(
            "subscription_groups",
            "consumer groups with settings",
            lambda feature: len(feature._group_table),
            rocketmq_name="rocketmq_consumer_group_number",
        ),
    )


def _connection(client: GroupClient, now_ms: int) -> tuple[str, str, str, bool, int]:
    beat = client.heartbeat
    silent_ms = max(now_ms - client.last_seen_ms, 0)
    return beat.client_id, beat.language, beat.version, client.lost_at_ms is None, silent_ms


def _first(times: list[int]) -> int:
    return min((one for one in times if one), default=0)


def failures_of(members: Iterable[ConsumerConnection]) -> GroupFailures:
    """Return what the members of a group did in the last ten minutes, as of their heartbeats."""
    ok = failed = 0
    per_s = 0.0
    for member in members:
        for one in member.stats:
            ok += one.recent_ok
            failed += one.recent_failed
            per_s += one.recent_failed * 1_000 / max(one.recent_ms, 1)
    return GroupFailures(ok + failed, failed, per_s)
