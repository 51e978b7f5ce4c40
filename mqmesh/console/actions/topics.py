"""Actions on topics: create, change, delete."""

from typing import Annotated, Any, Final, Literal

import msgspec

from mqmesh.aio import AdminClient, Producer
from mqmesh.console.page import ActionPlan, ActionResult, Name, Text, Visit
from mqmesh.console.queries.topics import TopicArguments
from mqmesh.errors import InvalidArgument, TopicNotFound
from mqmesh.message import Message, check_topic
from mqmesh.message_checks import check_messages
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC, TopicConfig
from mqmesh.sdk.admin.views.topics import PERMS, topic_view
from mqmesh.sdk.client.options import WHOLE_CLUSTER
from mqmesh.units import MIB
from mqmesh.user_times import parse_duration

PRODUCER_GROUP: Final = "mqmesh-console"

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
        Literal["rw", "r", "w", "none"],
        msgspec.Meta(title="Permissions", description="r: consumers may read; w: producers send."),
    ] = "rw"
    order: Order = False
    retention: Annotated[
        Text,
        msgspec.Meta(
            title="Readers see messages of the last",
            description="30s, 10m, 2h or 7d; empty for all. Hidden messages free no disk.",
        ),
    ] = ""
    retention_messages: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=2**53,
            title="Messages that readers see",
            description="Of each queue, the newest; 0 for all.",
        ),
    ] = 0

    @property
    def retention_ms(self) -> int:
        """The time as ms, 0 for all."""
        return parse_duration(self.retention, "retention") if self.retention else 0


class SendForm(msgspec.Struct, frozen=True, kw_only=True):
    """A message to send."""

    topic: Name
    body: Annotated[
        str,
        msgspec.Meta(
            min_length=1, max_length=MIB, title="Body", extra_json_schema={"format": "long"}
        ),
    ]
    tag: Annotated[Text, msgspec.Meta(title="Tag")] = ""
    keys: Annotated[Text, msgspec.Meta(title="Keys", description="Separated by spaces.")] = ""
    properties: Annotated[
        str,
        msgspec.Meta(
            max_length=32_768,
            title="Properties",
            description="One a line: name=value.",
            extra_json_schema={"format": "long"},
        ),
    ] = ""
    delay: Annotated[
        Text,
        msgspec.Meta(title="Delay", description="500ms, 30s, 10m or 2h; empty for none."),
    ] = ""


async def plan_create(visit: Visit, form: NewTopicForm) -> ActionPlan:
    """Describe the new topic."""
    check_topic(form.topic)
    async with visit.client(AdminClient) as admin:
        brokers = {one.broker_name for one in (await admin.cluster()).brokers}
        if form.topic in await admin.topics():
            raise InvalidArgument(f"there is a topic {form.topic!r} already")
    return ActionPlan(
        summary=f"Topic {form.topic} is made with {form.queues} queues on each of "
        f"{len(brokers)} broker groups: {', '.join(sorted(brokers))}."
    )


async def create(visit: Visit, form: NewTopicForm) -> ActionResult:
    """Create a topic."""
    async with visit.client(AdminClient) as admin:
        made = await admin.create_topic(form.topic, queues=form.queues, order=form.order)
    return ActionResult(
        summary=f"Topic {form.topic} is there, on {', '.join(sorted(made))}.", next="/topics"
    )


async def initial_settings(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the settings that a topic has."""
    now = topic_view(fixed["topic"], await _configs(visit, fixed["topic"])).brokers[0]
    return {
        "queues": now.write_queue_nums,
        "perm": now.perm,
        "order": now.order,
        "retention": f"{now.retention_ms}ms" if now.retention_ms else "",
        "retention_messages": now.retention_messages,
    }


async def plan_settings(visit: Visit, form: TopicForm) -> ActionPlan:
    """Describe the changes, broker by broker."""
    changes = []
    fewer = False
    for now in topic_view(form.topic, await _configs(visit, form.topic)).brokers:
        name = now.broker_name
        more = form.queues - now.write_queue_nums
        if more:
            changes.append(f"{name}: {abs(more)} {'more' if more > 0 else 'fewer'} queues")
        if form.perm != now.perm:
            changes.append(f"{name}: permissions {now.perm} become {form.perm}")
        if form.order != now.order:
            changes.append(f"{name}: {'ordered' if form.order else 'no more ordered'}")
        if form.retention_ms != now.retention_ms:
            changes.append(f"{name}: readers see messages of {form.retention or 'any time'}")
        if form.retention_messages != now.retention_messages:
            number = f"{form.retention_messages:,}" if form.retention_messages else "all"
            changes.append(f"{name}: readers see {number} messages of each queue")
        fewer |= more < 0 or ("r" not in form.perm)
    if not changes:
        return ActionPlan(summary="Nothing changes.", possible=False)
    warning = "Messages in queues that are taken away wait until the queues come back."
    return ActionPlan(
        summary=f"Topic {form.topic} changes.",
        details=tuple(changes),
        warning=warning if fewer else "",
    )


async def put_settings(visit: Visit, form: TopicForm) -> ActionResult:
    """Change the settings of a topic."""
    changed = {
        name: msgspec.structs.replace(
            now,
            read_queue_nums=form.queues,
            write_queue_nums=form.queues,
            perm=PERMS[form.perm].value,
            order=form.order,
            retention_ms=form.retention_ms,
            retention_messages=form.retention_messages,
        )
        for name, now in (await _configs(visit, form.topic)).items()
    }
    async with visit.client(AdminClient) as admin:
        await admin.put_topic(changed)
    return ActionResult(summary=f"Topic {form.topic} has {form.queues} queues on each broker.")


async def plan_delete(visit: Visit, form: TopicArguments) -> ActionPlan:
    """Say how many messages are lost."""
    async with visit.client(AdminClient) as admin:
        stats = await admin.topic_stats(form.topic)
    messages = sum(
        one.max_queue_offset - one.min_queue_offset
        for of_broker in stats.values()
        for one in of_broker.queues
    )
    return ActionPlan(
        summary=f"Topic {form.topic} is deleted from {', '.join(sorted(stats)) or 'no broker'}.",
        warning=f"Its {messages:,} messages are lost.",
        typed=form.topic,
    )


async def delete(visit: Visit, form: TopicArguments) -> ActionResult:
    """Delete a topic."""
    async with visit.client(AdminClient) as admin:
        done = await admin.delete_topic(form.topic)
    silent = tuple(f"{one} does not answer; it learns it later." for one in done.silent_namesrvs)
    return ActionResult(summary=f"Topic {form.topic} is deleted.", details=silent, next="/topics")


async def plan_send(visit: Visit, form: SendForm) -> ActionPlan:
    """Describe the message that is sent."""
    message = _message(form)
    delay_ms = parse_duration(form.delay, "delay") if form.delay else 0
    facts: tuple[str, ...] = (f"{len(message.body):,} bytes",)
    facts += (f"tag {message.tag}",) if message.tag else ()
    facts += (f"keys {', '.join(message.keys)}",) if message.keys else ()
    facts += tuple(f"{name} = {value}" for name, value in (message.properties or {}).items())
    return ActionPlan(
        summary=f"One message goes to {form.topic}"
        + (f", and is delivered after {form.delay}." if delay_ms else "."),
        details=facts,
    )


async def send(visit: Visit, form: SendForm) -> ActionResult:
    """Send a message."""
    message = _message(form)
    if form.delay:
        message = message.delayed_by(parse_duration(form.delay, "delay"))
    async with Producer(
        PRODUCER_GROUP,
        namesrv_addr=visit.namesrv_addr,
        credentials=visit.user.credentials,
        namespace=WHOLE_CLUSTER,
    ) as producer:
        sent = await producer.send(message)
    return ActionResult(
        summary=f"{sent.status.name}: message {sent.message_id} is in queue "
        f"{sent.message_queue.queue_id} on {sent.message_queue.broker_name}.",
    )


def _message(form: SendForm) -> Message:
    properties = {}
    for line in form.properties.splitlines():
        name, equals, value = line.partition("=")
        if line.strip():
            if not equals or not name.strip():
                raise InvalidArgument(f"property {line[:80]!r} is not of the form name=value")
            properties[name.strip()] = value.strip()
    # A form's line breaks are those of HTTP; people mean their own.
    body = form.body.replace("\r\n", "\n").encode("utf-8", "surrogatepass")
    message = Message(
        form.topic,
        body,
        form.tag or None,
        tuple(form.keys.split()),
        properties or None,
    )
    return check_messages([message], max_message_size=MIB)[0]


async def _configs(visit: Visit, topic: str) -> dict[str, TopicConfig]:
    async with visit.client(AdminClient) as admin:
        found = {name: one for name, (one,) in (await admin.topic_configs(topic)).items()}
    if not found:
        raise TopicNotFound(f"no topic {topic!r} on a broker that runs")
    return found
