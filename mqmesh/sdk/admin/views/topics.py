"""Views of topics: settings, routes, queues."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from mqmesh.message import PROPERTY_CONTENT_TYPE, MessageQueue, StoredMessage
from mqmesh.protocol.admin import TopicStats
from mqmesh.protocol.groups import GroupSummary
from mqmesh.protocol.route import Perm, TopicConfig, TopicRoute
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.sdk.admin.json_schema import JsonSchema
from mqmesh.sdk.admin.searches import SearchResult
from mqmesh.sdk.admin.views.fields import view_of

PERMS: Final = {"rw": Perm.READ_WRITE, "r": Perm.READ, "w": Perm.WRITE, "none": Perm.NONE}
"""Permissions of a topic by name."""
_NAME_OF_PERM: Final = {int(perm): name for name, perm in PERMS.items()}


class TopicBrokerView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a topic on one broker; as ``TopicConfig``.

    Attributes:
        perm: Name of ``PERMS``.
    """

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: str
    order: bool
    retention_ms: int
    retention_messages: int
    priorities: int
    message_ttl: bool
    on_expired: str
    history: int


class TopicView(msgspec.Struct, frozen=True, kw_only=True):
    """A topic.

    Attributes:
        topic: Name.
        brokers: Its settings, by broker.
        groups: Groups that read it; absent unless they were requested.
    """

    topic: str
    brokers: list[TopicBrokerView]
    groups: list[str] | UnsetType = UNSET


class TopicSchemaView(msgspec.Struct, frozen=True, kw_only=True):
    """Schema of a topic's bodies.

    Attributes:
        topic: Name.
        schema: A JSON Schema, as text; "" for none.
    """

    topic: str
    schema: str


class MisfitView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that does not fit the schema of its topic.

    Attributes:
        reason: Description of the misfit, with its place in the body.
    """

    message_id: str
    broker_name: str
    queue_id: int
    queue_offset: int
    reason: str


class CheckedTopicView(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a topic, tried against a schema.

    Attributes:
        topic: Name.
        looked: Messages that were tried.
        unreadable: Batches that cannot be decoded.
        misfits: Messages that do not fit, newest first.
    """

    topic: str
    looked: int
    unreadable: int
    misfits: list[MisfitView]


class DeletedTopicView(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that was deleted.

    Attributes:
        topic: Name.
        deleted_from: Brokers that had it.
        silent_namesrvs: Name servers that did not answer.
    """

    topic: str
    deleted_from: list[str]
    silent_namesrvs: list[str]


class RouteQueuesView(msgspec.Struct, frozen=True, kw_only=True):
    """Queues of a topic on one broker, as clients get them.

    Attributes:
        cluster_name: Cluster of the broker, "" if it is not known.
        broker_name: Broker group.
        address: Endpoint of its master, "" while there is none.
        ipc: Its local socket, "" for none.
        read_queue_nums: Queues for consumers.
        write_queue_nums: Queues for producers.
        perm: Name of ``PERMS``.
    """

    cluster_name: str
    broker_name: str
    address: str
    ipc: str
    read_queue_nums: int
    write_queue_nums: int
    perm: str


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """The route of a topic."""

    topic: str
    order: bool
    queues: list[RouteQueuesView]


class MessageQueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue of a topic."""

    broker_name: str
    queue_id: int


class AllocationView(msgspec.Struct, frozen=True, kw_only=True):
    """Queues that a member of a group would get."""

    client_id: str
    queues: list[MessageQueueView]


class QueueStatsView(msgspec.Struct, frozen=True, kw_only=True):
    """Begin and end of a queue; as ``QueueStats``.

    Attributes:
        messages: Messages between begin and end.
    """

    broker_name: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    messages: int
    first_timestamp: int
    last_update_timestamp: int


class TopicStatsView(msgspec.Struct, frozen=True, kw_only=True):
    """Begin and end of all queues of a topic.

    Attributes:
        topic: Name.
        messages: Messages in all of them.
        queues: By broker and queue id.
    """

    topic: str
    messages: int
    queues: list[QueueStatsView]


def checked_topic_view(topic: str, found: SearchResult, schema: JsonSchema) -> CheckedTopicView:
    """Makes the view of messages that were tried against a schema."""
    misfits = []
    for message in found.messages:
        reason = _misfit(message, schema)
        if reason:
            misfits.append(view_of(MisfitView, message, reason=reason))
    return CheckedTopicView(
        topic=topic, looked=len(found.messages), unreadable=found.unreadable, misfits=misfits
    )


def _misfit(message: StoredMessage, schema: JsonSchema) -> str:
    named = message.property(PROPERTY_CONTENT_TYPE, "application/json")
    try:
        if named == "application/msgpack":
            value = msgspec.msgpack.decode(message.body)
        elif named == "application/json":
            value = msgspec.json.decode(message.body)
        else:
            return f"the body is {named}, neither JSON nor msgpack"
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"the body is no {named}: {error}"
    return schema.trouble(value)


def topic_view(topic: str, configs: Mapping[str, TopicConfig]) -> TopicView:
    """Makes the view of a topic from its settings by broker."""
    rows = [_on_broker(name, config) for name, config in configs.items()]
    return TopicView(topic=topic, brokers=rows)


def topic_views(
    by_broker: Mapping[str, Iterable[TopicConfig]],
    groups: Mapping[str, Iterable[GroupSummary]] | None = None,
) -> list[TopicView]:
    """Makes views of topics, by name.

    Args:
        by_broker: Topics by broker.
        groups: Groups by broker, to show which ones read a topic; None to leave that out.
    """
    found: dict[str, list[TopicBrokerView]] = {}
    for broker_name, configs in by_broker.items():
        for config in configs:
            found.setdefault(config.topic, []).append(_on_broker(broker_name, config))
    readers: dict[str, set[str]] = {}
    for one in (summary for summaries in (groups or {}).values() for summary in summaries):
        for topic in one.topics:
            readers.setdefault(topic, set()).add(one.config.group)
    return [
        TopicView(
            topic=topic,
            brokers=found[topic],
            groups=UNSET if groups is None else sorted(readers.get(topic, ())),
        )
        for topic in sorted(found)
    ]


def route_view(topic: str, route: TopicRoute) -> RouteView:
    """Makes the view of a topic's route."""
    addresses = masters_of(route.brokers)
    clusters = {one.broker_name: one.cluster_name for one in route.brokers}
    queues = []
    for one in route.queues:
        address = addresses.get(one.broker_name)
        queues.append(
            view_of(
                RouteQueuesView,
                one,
                cluster_name=clusters.get(one.broker_name, ""),
                address=address.tcp if address else "",
                ipc=address.ipc if address else "",
                perm=_perm(one.perm),
            )
        )
    return RouteView(topic=topic, order=route.order, queues=queues)


def allocation_views(shares: Mapping[str, Iterable[MessageQueue]]) -> list[AllocationView]:
    """Makes the view of each member's queues, by client id."""
    return [
        AllocationView(
            client_id=member,
            queues=[
                MessageQueueView(broker_name=one.broker_name, queue_id=one.queue_id)
                for one in queues
            ],
        )
        for member, queues in sorted(shares.items())
    ]


def topic_stats_view(topic: str, by_broker: Mapping[str, TopicStats]) -> TopicStatsView:
    """Makes the view of a topic's queues from their begins and ends, by broker."""
    queues = [
        view_of(
            QueueStatsView,
            one,
            broker_name=broker_name,
            messages=one.max_queue_offset - one.min_queue_offset,
        )
        for broker_name, found in by_broker.items()
        for one in found.queues
    ]
    return TopicStatsView(topic=topic, messages=sum(one.messages for one in queues), queues=queues)


def _on_broker(broker_name: str, config: TopicConfig) -> TopicBrokerView:
    return view_of(TopicBrokerView, config, broker_name=broker_name, perm=_perm(config.perm))


def _perm(perm: int) -> str:
    return _NAME_OF_PERM.get(perm & Perm.READ_WRITE, str(perm))
