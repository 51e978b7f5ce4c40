"""Actions on topics: create, change, delete."""

from typing import Annotated, Any, Literal

import msgspec

from mqmesh.aio import AdminClient
from mqmesh.console.page import ActionPlan, ActionResult, Name, Visit
from mqmesh.console.queries.topics import TopicArguments, perm_text
from mqmesh.errors import InvalidArgument, TopicNotFound
from mqmesh.message import check_topic
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC, Perm, TopicConfig

_PERMS = {"rw": Perm.READ_WRITE, "r": Perm.READ, "w": Perm.WRITE, "-": Perm.NONE}

Queues = Annotated[
    int,
    msgspec.Meta(
        ge=1,
        le=MAX_QUEUES_PER_TOPIC,
        title="Queues",
        description="On each broker, 1 to 65,536. As many consumers of a group can work at once.",
    ),
]
Order = Annotated[
    bool,
    msgspec.Meta(title="Ordered: the route keeps the queues of a broker that is down"),
]


class NewTopicForm(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a new topic."""

    topic: Annotated[str, msgspec.Meta(min_length=1, max_length=127, title="Name")]
    queues: Queues = 4
    order: Order = False


class TopicForm(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a topic on all brokers that carry it."""

    topic: Name
    queues: Queues
    perm: Annotated[
        Literal["rw", "r", "w", "-"],
        msgspec.Meta(title="Permissions", description="r: consumers may read; w: producers send."),
    ] = "rw"
    order: Order = False


async def plan_create(visit: Visit, asked: NewTopicForm) -> ActionPlan:
    """Say what the new topic is."""
    check_topic(asked.topic)
    async with visit.client(AdminClient) as admin:
        brokers = {one.broker_name for one in (await admin.cluster()).brokers}
        if asked.topic in await admin.topics():
            raise InvalidArgument(f"there is a topic {asked.topic!r} already")
    return ActionPlan(
        summary=f"Topic {asked.topic} is made with {asked.queues} queues on each of "
        f"{len(brokers)} broker groups: {', '.join(sorted(brokers))}."
    )


async def create(visit: Visit, asked: NewTopicForm) -> ActionResult:
    """Create a topic."""
    async with visit.client(AdminClient) as admin:
        made = await admin.create_topic(asked.topic, queues=asked.queues, order=asked.order)
    return ActionResult(
        summary=f"Topic {asked.topic} is there, on {', '.join(sorted(made))}.", next="/topics"
    )


async def initial_settings(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the settings that a topic has."""
    now = next(iter((await _configs(visit, fixed["topic"])).values()))
    return {"queues": now.write_queue_nums, "perm": perm_text(now.perm), "order": now.order}


async def plan_settings(visit: Visit, asked: TopicForm) -> ActionPlan:
    """Say what changes, broker by broker."""
    changes = []
    fewer = False
    for name, now in sorted((await _configs(visit, asked.topic)).items()):
        more = asked.queues - now.write_queue_nums
        if more:
            changes.append(f"{name}: {abs(more)} {'more' if more > 0 else 'fewer'} queues")
        if asked.perm != perm_text(now.perm):
            changes.append(f"{name}: permissions {perm_text(now.perm)} become {asked.perm}")
        if asked.order != now.order:
            changes.append(f"{name}: {'ordered' if asked.order else 'no more ordered'}")
        fewer |= more < 0 or ("r" not in asked.perm)
    if not changes:
        return ActionPlan(summary="Nothing changes.", possible=False)
    warning = "Messages in queues that are taken away wait until the queues come back."
    return ActionPlan(
        summary=f"Topic {asked.topic} changes.",
        details=tuple(changes),
        warning=warning if fewer else "",
    )


async def put_settings(visit: Visit, asked: TopicForm) -> ActionResult:
    """Change the settings of a topic."""
    config = TopicConfig(
        asked.topic, asked.queues, asked.queues, _PERMS[asked.perm].value, asked.order
    )
    brokers = await _configs(visit, asked.topic)
    async with visit.client(AdminClient) as admin:
        await admin.put_topic(dict.fromkeys(brokers, config))
    return ActionResult(summary=f"Topic {asked.topic} has {asked.queues} queues on each broker.")


async def plan_delete(visit: Visit, asked: TopicArguments) -> ActionPlan:
    """Say how many messages are lost."""
    async with visit.client(AdminClient) as admin:
        stats = await admin.topic_stats(asked.topic)
    messages = sum(
        one.max_queue_offset - one.min_queue_offset
        for of_broker in stats.values()
        for one in of_broker.queues
    )
    return ActionPlan(
        summary=f"Topic {asked.topic} is deleted from {', '.join(sorted(stats)) or 'no broker'}.",
        warning=f"Its {messages:,} messages are lost.",
        typed=asked.topic,
    )


async def delete(visit: Visit, asked: TopicArguments) -> ActionResult:
    """Delete a topic."""
    async with visit.client(AdminClient) as admin:
        done = await admin.delete_topic(asked.topic)
    silent = tuple(f"{one} does not answer; it learns it later." for one in done.silent_namesrvs)
    return ActionResult(summary=f"Topic {asked.topic} is deleted.", details=silent, next="/topics")


async def _configs(visit: Visit, topic: str) -> dict[str, TopicConfig]:
    async with visit.client(AdminClient) as admin:
        found = {name: one for name, (one,) in (await admin.topic_configs(topic)).items()}
    if not found:
        raise TopicNotFound(f"no topic {topic!r} on a broker that runs")
    return found
