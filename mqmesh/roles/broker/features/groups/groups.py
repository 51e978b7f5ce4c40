"""Consumer groups for administrators: settings, members, how far they have come."""

import heapq
from collections.abc import Iterable, Iterator

from mqmesh.errors import InvalidArgument
from mqmesh.message import RESERVED_TOPICS, check_topic, dlq_topic, retry_topic
from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, reply_with
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
    GroupSummaries,
    GroupSummary,
    ProducerConnection,
    ProducerConnections,
    ProducerConnectionsRequest,
    QueueProgress,
    TopicConsumersRequest,
    UpdateGroupRequest,
    check_client_group,
)
from mqmesh.protocol.membership import MessageModel
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.groups.consumer_groups import GroupClient
from mqmesh.roles.broker.features.retries.send_back import forget_sent_back
from mqmesh.roles.broker.features.retries.waiting_retries import waiting_retries
from mqmesh.roles.broker.features.topics.store_times import store_time
from mqmesh.roles.broker.state_answers import reply_when_saved

QUEUES_PER_LIST = 4_096
"""A list of groups ends its page when so many queues were looked at."""


def update_and_create_group(
    context: BrokerContext, request: Request, wanted: UpdateGroupRequest
) -> Reply | None:
    """Makes or changes the settings of a group; answered once that is on disk."""
    context.commit_point.check_room()
    changed = context.group_table.update(
        wanted.config,
        must_exist=wanted.must_exist,
        must_be_new=wanted.must_be_new,
    )
    reply = reply_with(wanted.config)
    if not changed:
        return reply
    reply_when_saved(context, request, reply)
    return None


def get_groups(context: BrokerContext, request: Request, query: GetGroupsRequest) -> Reply:
    """One group, or all, in pages."""
    if query.group:
        check_client_group(query.group)
        known = query.group in all_names(context)
        return reply_with(GroupSummaries([_summary(context, query.group)] if known else []))
    names = (name for name in all_names(context) if name > query.after)
    page = heapq.nsmallest(MAX_GROUPS_PER_ANSWER + 1, names)
    found: list[GroupSummary] = []
    queues = 0
    for name in page[:MAX_GROUPS_PER_ANSWER]:
        found.append(_summary(context, name))
        queues += sum(map(len, context.offsets.topics(name).values()))
        if queues >= QUEUES_PER_LIST:
            break
    return reply_with(GroupSummaries(found, len(found) < len(page)))


def delete_group(
    context: BrokerContext, request: Request, wanted: DeleteGroupRequest
) -> Reply | None:
    """Forgets a group; answered once that is on disk.

    Raises:
        InvalidArgument: It has members, with whose next word it would be there again.
    """
    name = check_client_group(wanted.group)
    group = context.groups.find(name)
    if group is not None:
        raise InvalidArgument(
            f"consumer group {name!r} has {len(group.members)} members, for example "
            f"{min(group.members)}; stop them first"
        )
    context.commit_point.check_room()
    forget_sent_back(context, name)
    context.group_table.delete(name)
    context.groups.claims.forget_group(name)
    context.offsets.remove_group(name)
    context.pulls.forget(name)
    context.resets.forget(name)
    topics = [retry_topic(name), dlq_topic(name)] if wanted.remove_topics else []
    for topic in topics:
        if context.topics.get(topic) is not None:
            context.topics.delete(topic, context.clock.wall_ms())
    reply_when_saved(context, request, EMPTY_REPLY)
    return None


def get_consumer_connections(
    context: BrokerContext, request: Request, query: ConsumerConnectionsRequest
) -> Reply:
    """The members of a group, and how each differs from it."""
    name = check_client_group(query.group)
    generation = context.groups.group(name).generation
    return reply_with(ConsumerConnections(connections_of(context, name), generation))


def connections_of(context: BrokerContext, name: str) -> list[ConsumerConnection]:
    """The members of a group, by client id; none if it has none."""
    group = context.groups.find(name)
    if group is None:
        return []
    now_ms = context.clock.monotonic_ms()
    members = []
    for client_id in sorted(group.members):
        client = context.groups.client(client_id)
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
    context: BrokerContext, request: Request, query: ProducerConnectionsRequest
) -> Reply:
    """The members of a producer group."""
    check_client_group(query.group)
    now_ms = context.clock.monotonic_ms()
    clients = context.groups.clients(query.group)
    return reply_with(
        ProducerConnections([ProducerConnection(*_connection(one, now_ms)) for one in clients])
    )


def get_all_clients(context: BrokerContext, request: Request, query: AllClientsRequest) -> Reply:
    """Everybody who is registered, in pages."""
    now_ms = context.clock.monotonic_ms()
    after = query.after_client_id
    clients = [one for one in context.groups.clients() if one.heartbeat.client_id > after]
    found = [
        ClientInfo(
            *_connection(one, now_ms),
            sorted(one.heartbeat.producer_groups),
            sorted(data.group for data in one.heartbeat.consumers),
        )
        for one in clients[:MAX_CLIENTS_PER_ANSWER]
    ]
    return reply_with(AllClients(found, len(found) < len(clients)))


def get_consume_stats(
    context: BrokerContext, request: Request, query: ConsumeStatsRequest
) -> Reply:
    """How far a group has come in each of its queues, in pages."""
    name = check_client_group(query.group)
    if query.topic:
        check_topic(query.topic)
        context.topics.require(query.topic)
    found: list[QueueProgress] = []
    more = False
    for topic, queue_id in _queues_of(context, name, query):
        if len(found) == MAX_QUEUES_PER_STATS:
            more = True
            break
        found.append(_progress(context, name, topic, queue_id))
    rate = context.pulls.rate(name, context.clock.monotonic_ms())
    waiting = since = 0
    if query.topic in ("", retry_topic(name)) and not broadcasts(context, name):
        waiting, since = waiting_retries(context, name)
    return reply_with(ConsumeStats(found, more, rate, context.clock.wall_ms(), waiting, since))


def query_topic_consumers(
    context: BrokerContext, request: Request, asked: TopicConsumersRequest
) -> Reply:
    """The groups that read a topic: those with offsets in it, and those who subscribe to it."""
    topic = check_topic(asked.topic)
    found = set(context.offsets.groups_of_topic(topic))
    for name in context.groups.names():
        if topic in _subscribed_topics(context, name):
            found.add(name)
    return reply_with(GroupNames(sorted(found)))


def topics_of(context: BrokerContext, name: str) -> list[str]:
    """Topics that a group has to do with, sorted; without dead letters and hidden topics.

    What waits in a delay or as half a transaction is in a topic of the system's, and is no
    lag of anybody.
    """
    found = set(context.offsets.topics(name)) | _subscribed_topics(context, name)
    found.add(retry_topic(name))
    hidden = RESERVED_TOPICS | {dlq_topic(name)}
    return sorted(one for one in found - hidden if context.topics.get(one) is not None)


def all_names(context: BrokerContext) -> set[str]:
    """Groups with settings, offsets or members."""
    names = {*context.group_table.names(), *context.offsets.groups()}
    return names.union(context.groups.names())


def _subscribed_topics(context: BrokerContext, name: str) -> set[str]:
    group = context.groups.find(name)
    members = () if group is None else group.members.values()
    return {one.topic for data in members for one in data.subscriptions}


def _queues_of(
    context: BrokerContext, name: str, query: ConsumeStatsRequest
) -> Iterator[tuple[str, int]]:
    topics = [query.topic] if query.topic else topics_of(context, name)
    after = (query.after_topic, query.after_queue_id)
    for topic in topics:
        if topic < query.after_topic:
            continue
        for queue_id in range(context.topics.require(topic).queue_count):
            if not query.after_topic or (topic, queue_id) > after:
                yield topic, queue_id


def _progress(context: BrokerContext, name: str, topic: str, queue_id: int) -> QueueProgress:
    low, high = context.store.queue_bounds(topic, queue_id)
    done = context.offsets.query(name, topic, queue_id)
    # What was handed out to consumers that are gone is with nobody.
    running = context.groups.find(name) is not None or context.pulls.is_active(
        name, context.clock.monotonic_ms()
    )
    pulled = context.pulls.pull_offset(name, topic, queue_id) if running else -1
    oldest_ms = store_time(context.store, topic, queue_id, max(done, low)) if done < high else 0
    claim = context.groups.claims.find(name, topic, queue_id)
    members = group.members if (group := context.groups.find(name)) is not None else {}
    owner = claim.client_id if claim is not None and claim.client_id in members else ""
    return QueueProgress(topic, queue_id, low, high, done, pulled, oldest_ms, owner)


def _summary(context: BrokerContext, name: str) -> GroupSummary:
    group = context.groups.find(name)
    config = context.group_table.get(name)
    own = retry_topic(name)
    topics = [one for one in topics_of(context, name) if one != own]
    is_known = not broadcasts(context, name)
    retrying = lag_of(context, name, own) + (waiting_retries(context, name)[0] if is_known else 0)
    lag = sum(lag_of(context, name, one) for one in topics) + retrying
    return GroupSummary(
        config=config or GroupConfig(name),
        is_configured=config is not None,
        members=0 if group is None else len(group.members),
        message_model=context.groups.model_of(name),
        topics=topics,
        lag=lag if is_known else 0,
        consume_tps=context.pulls.rate(name, context.clock.monotonic_ms()),
        retrying=retrying,
        dead=lag_of(context, "", dlq_topic(name)),
        differing=0 if group is None else group.check.differing,
        failures=failures_of(connections_of(context, name)),
    )


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


def broadcasts(context: BrokerContext, name: str) -> bool:
    """The members of a group keep their offsets by themselves: what is not done is not known."""
    return context.groups.model_of(name) == MessageModel.BROADCASTING


def lag_of(context: BrokerContext, name: str, topic: str) -> int:
    """Messages of a topic that a group has not done; all of them for no group."""
    known = context.topics.get(topic)
    if known is None:
        return 0
    lag = 0
    for queue_id in range(known.queue_count):
        low, high = context.store.queue_bounds(topic, queue_id)
        lag += max(high - max(context.offsets.query(name, topic, queue_id), low), 0)
    return lag


def _connection(client: GroupClient, now_ms: int) -> tuple[str, str, str, bool, int]:
    beat = client.heartbeat
    silent_ms = max(now_ms - client.last_seen_ms, 0)
    return beat.client_id, beat.language, beat.version, client.lost_at_ms is None, silent_ms
