"""How far all groups are, for the exporter: in pages that hold nobody up for long."""

from typing import Final

from mqmesh.message import dlq_topic, retry_topic
from mqmesh.protocol.command import Reply, Request, reply_with
from mqmesh.protocol.groups import (
    GroupsProgress,
    GroupsProgressRequest,
    GroupTopics,
    TopicProgress,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.groups.groups import (
    all_names,
    broadcasts,
    connections_of,
    failures_of,
    lag_of,
    topics_of,
)
from mqmesh.roles.broker.features.retries.waiting_retries import waiting_retries
from mqmesh.roles.broker.features.topics.store_times import store_time

QUEUES_PER_PAGE: Final = 64
"""A page ends when so many queues were looked at, each at up to 50 µs."""
QUEUES_FOR_A_GROUP: Final = 1
"""A group without any counts like so many."""


def get_groups_progress(
    context: BrokerContext, request: Request, query: GroupsProgressRequest
) -> Reply:
    """A page of groups."""
    names = context.group_listings.take(query.listing)
    listing, place, after = query.listing, query.place, query.after_topic
    if names is None:
        # Made at the first page, so that no other has to.
        names, listing, place, after = list(all_names(context)), 0, 0, ""
    found: list[GroupTopics] = []
    left = QUEUES_PER_PAGE
    while place < len(names) and left > 0:
        part, after, left = _part_of(context, names[place], after, left)
        found.append(part)
        place += not after
    if place < len(names):
        next_place, listing = place, context.group_listings.keep(listing, names)
    else:
        next_place = -1
    return reply_with(GroupsProgress(listing, found, next_place, after, context.clock.wall_ms()))


def _part_of(
    context: BrokerContext, name: str, after: str, left: int
) -> tuple[GroupTopics, str, int]:
    """A group from a topic on, the topic that it ends with unless it is done, and what is left."""
    left -= QUEUES_FOR_A_GROUP
    wanted = [topic for topic in topics_of(context, name) if topic > after]
    topics: list[TopicProgress] = []
    for number, topic in enumerate(wanted, 1):
        topics.append(_progress(context, name, topic))
        left -= context.topics.require(topic).queue_count
        if left <= 0 and number < len(wanted):
            return GroupTopics(name, topics), topic, left
    dead = context.topics.get(dlq_topic(name))
    members = connections_of(context, name)
    part = GroupTopics(
        name,
        topics,
        members,
        context.groups.model_of(name),
        lag_of(context, "", dlq_topic(name)),
        dead.put_messages if dead is not None else 0,
        failures_of(members),
    )
    return part, "", left


def _progress(context: BrokerContext, name: str, topic: str) -> TopicProgress:
    # What was handed out to consumers that are gone is with nobody.
    running = context.groups.find(name) is not None or context.pulls.is_active(
        name, context.clock.monotonic_ms()
    )
    offsets = context.offsets.topics(name).get(topic, {})
    is_known = not broadcasts(context, name)
    ends = committed = lag = in_flight = 0
    oldest: list[int] = []
    ready: list[int] = []
    for queue_id in range(context.topics.require(topic).queue_count):
        low, high = context.store.queue_bounds(topic, queue_id)
        done = offsets.get(queue_id, -1)
        begin = max(done, low)
        behind = max(high - begin, 0)
        ends += high
        committed += max(done, 0)
        if not behind or not is_known:
            continue
        pulled = context.pulls.pull_offset(name, topic, queue_id) if running else -1
        flying = min(max(pulled - begin, 0), behind)
        lag += behind
        in_flight += flying
        oldest.append(store_time(context.store, topic, queue_id, begin))
        if flying < behind:
            at = (
                store_time(context.store, topic, queue_id, begin + flying) if flying else oldest[-1]
            )
            ready.append(at)
    waiting = 0
    if is_known and topic == retry_topic(name):
        waiting, since = waiting_retries(context, name)
        oldest.append(since)
    return TopicProgress(
        topic, ends, committed, lag + waiting, in_flight, _first(oldest), _first(ready), waiting
    )


def _first(times: list[int]) -> int:
    return min((one for one in times if one), default=0)
