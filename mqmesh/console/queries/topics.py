"""Topics: all of them, and one with its queues and readers."""

from typing import Annotated, Literal

import msgspec

from mqmesh.aio import AdminClient, GroupAdmin
from mqmesh.console.page import Name, TableArguments, TablePage, Visit, table_page
from mqmesh.console.tails import TailView
from mqmesh.message import DLQ_PREFIX, RETRY_PREFIX, is_system_topic
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.sdk.admin.views.topics import TopicBrokerView, topic_view

TopicKind = Literal["normal", "retry", "dead letters", "system"]


class TopicsArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of the list of topics.

    Attributes:
        kind: Only topics of this kind; ``all`` for all.
    """

    kind: Literal["normal", "retry", "dead letters", "system", "all"] = "normal"


class TopicRow(msgspec.Struct, frozen=True):
    """One topic.

    Attributes:
        topic: Name.
        kind: ``normal``, ``retry`` and ``dead letters`` of a group, or ``system``.
        queues: Write queues, of all brokers.
        brokers: Broker groups that carry it.
        perm: Name of ``views.topics.PERMS``; if brokers differ, the permissions that all give.
        order: An ordered topic.
        priorities: Its priorities, 0 for none.
        expires: Its messages may expire.
        in_per_s: Messages stored a second; None where the console may not see it.
        out_per_s: Messages handed out a second, the same.
    """

    topic: str
    kind: TopicKind
    queues: int
    brokers: int
    perm: str
    order: bool
    priorities: int
    expires: bool
    in_per_s: float | None
    out_per_s: float | None


class TopicArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of pages of one topic.

    Attributes:
        topic: Its name.
    """

    topic: Name


class TopicQueue(msgspec.Struct, frozen=True):
    """One queue.

    Attributes:
        broker_name: Broker group.
        queue_id: From 0.
        begin: Offset of the first message.
        end: Offset behind the last.
        messages: Number of messages.
        first_ms: Store time of the first, ms since 1970; 0 for none.
        last_ms: Store time of the last.
        unread: Messages that the group which lacks most has not done.
    """

    broker_name: str
    queue_id: int
    begin: int
    end: int
    messages: int
    first_ms: int
    last_ms: int
    unread: int


class TopicDetails(msgspec.Struct, frozen=True):
    """One topic.

    Attributes:
        topic: Name.
        kind: As of ``TopicRow``.
        in_per_s, out_per_s: As of ``TopicRow``.
        messages: In all queues.
        first_ms: Store time of the first message, ms since 1970; 0 for none.
        last_ms: Store time of the last one.
        settings: By broker group.
        queues: By broker group and number.
        groups: Consumer groups that read it.
        schema: JSON Schema of its bodies; "" for none.
    """

    topic: str
    kind: TopicKind
    in_per_s: float | None
    out_per_s: float | None
    messages: int
    first_ms: int
    last_ms: int
    settings: list[TopicBrokerView]
    queues: list[TopicQueue]
    groups: list[str]
    schema: str


def kind_of(topic: str) -> TopicKind:
    """Return the kind of a topic by its name."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DLQ_PREFIX):
        return "dead letters"
    return "system" if is_system_topic(topic) else "normal"


class TailArguments(TopicArguments, frozen=True, kw_only=True):
    """Arguments of a live tail.

    Attributes:
        tail: Name of the tail, chosen by the page that begins it; another one begins anew.
        stop: End it.
    """

    tail: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9]{1,32}$")] = "1"
    stop: bool = False


async def tail(visit: Visit, arguments: TailArguments) -> TailView:
    """Return the messages of a topic that came since the tail began."""
    assert visit.tails is not None
    if arguments.stop:
        await visit.tails.stop(visit.user.credentials, arguments.topic, arguments.tail)
    return visit.tails.follow(visit.user.credentials, arguments.topic, arguments.tail)


async def topics(visit: Visit, arguments: TopicsArguments) -> TablePage[TopicRow]:
    """Return one page of the topics."""
    async with visit.client(AdminClient) as admin:
        by_broker = await admin.topic_configs()
    configs: dict[str, list[TopicConfig]] = {}
    for found in by_broker.values():
        for one in found:
            configs.setdefault(one.topic, []).append(one)
    rows = (_row(visit, topic, found) for topic, found in configs.items())
    kept = (row for row in rows if arguments.kind in ("all", row.kind))
    return table_page(kept, arguments, ("topic",), sort="topic")


def _row(visit: Visit, topic: str, configs: list[TopicConfig]) -> TopicRow:
    perm = Perm.READ_WRITE.value
    for one in configs:
        perm &= one.perm
    least = msgspec.structs.replace(configs[0], perm=perm)
    return TopicRow(
        topic,
        kind_of(topic),
        sum(one.write_queue_nums for one in configs),
        len(configs),
        topic_view(topic, {"": least}).brokers[0].perm,
        any(one.order for one in configs),
        max(one.priorities for one in configs),
        any(one.message_ttl for one in configs),
        *_rates(visit, topic),
    )


def _rates(visit: Visit, topic: str) -> tuple[float | None, float | None]:
    readings = visit.readings
    if readings is None:
        return None, None
    return readings.in_per_s.get(topic, 0.0), readings.out_per_s.get(topic, 0.0)


async def topic(visit: Visit, arguments: TopicArguments) -> TopicDetails:
    """Return one topic."""
    async with visit.client(GroupAdmin) as admin:
        configs = await admin.topic_configs(arguments.topic)
        stats = await admin.topic_stats(arguments.topic)
        groups = await admin.topic_consumers(arguments.topic)
        schema = await admin.topic_schema(arguments.topic)
    queues = [
        TopicQueue(
            name,
            one.queue_id,
            one.min_queue_offset,
            one.max_queue_offset,
            one.max_queue_offset - one.min_queue_offset,
            one.first_timestamp,
            one.last_update_timestamp,
            one.unread_messages,
        )
        for name, of_broker in sorted(stats.items())
        for one in of_broker.queues
    ]
    return TopicDetails(
        arguments.topic,
        kind_of(arguments.topic),
        *_rates(visit, arguments.topic),
        sum(one.messages for one in queues),
        min((one.first_ms for one in queues if one.first_ms), default=0),
        max((one.last_ms for one in queues), default=0),
        topic_view(arguments.topic, {name: one for name, (one,) in configs.items()}).brokers,
        queues,
        groups,
        schema,
    )
