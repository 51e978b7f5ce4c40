"""Views of consumer groups: settings, members, progress, moves of offsets."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mqmesh.message import retry_topic
from mqmesh.protocol.client_rpc import InFlightMessage, RunningInfo, RunningQueue
from mqmesh.protocol.delivery import LeaseInfo
from mqmesh.protocol.groups import (
    ConsumerConnection,
    GroupConfig,
    GroupFailures,
    GroupSummary,
    ProducerConnection,
)
from mqmesh.protocol.membership import MessageModel, Subscription, TopicConsumption
from mqmesh.sdk.admin.group_admin import GroupProgress, OffsetMove, OffsetMoves, QueueLag
from mqmesh.sdk.admin.views.fields import view_of, views_of


class GroupBrokerView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a group on one broker; as ``GroupConfig``.

    Attributes:
        is_configured: The broker has settings of it, and these are no defaults.
    """

    broker_name: str
    is_configured: bool
    consume_enable: bool
    consume_broadcast_enable: bool
    retry_max_times: int
    notify_consumer_ids_changed_enable: bool
    retry_delays: str
    dead_letter: str
    paused_until: int
    paused_topics: dict[str, int]
    max_messages_per_s: int
    delivery: str
    invisible_ms: int
    max_unsettled: int
    lost_grace_ms: int
    priority_fairness: int


class GroupSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a group, by broker."""

    group: str
    brokers: list[GroupBrokerView]


class ConsumerGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group on all brokers; as ``GroupSummary``, with numbers summed up.

    Attributes:
        lag: None for a group that broadcasts: its members keep their offsets by themselves.
        recent_deliveries: Messages that came to listeners in the last ten minutes, each time.
        recent_failures: Of them, those whose listener failed.
        failed_per_s: The same, a second.
        consume_enable: Members may consume, from every broker.
        topics: Names, sorted.
        brokers: Its settings, by broker.
    """

    group: str
    message_model: str
    members: int
    lag: int | None
    consume_tps: float
    retrying: int
    recent_deliveries: int
    recent_failures: int
    failed_per_s: float
    dead: int
    differing: int
    consume_enable: bool
    topics: list[str]
    brokers: list[GroupBrokerView]


class DeletedGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was deleted.

    Attributes:
        group: Name.
        deleted_from: Brokers that had it.
        with_topics: Its retry and dead letter topics went, too.
    """

    group: str
    deleted_from: list[str]
    with_topics: bool


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a group that a member holds, or that wait; as ``LeaseInfo``."""

    topic: str
    broker_name: str
    queue_id: int
    first: int
    count: int
    attempt: int
    state: str
    member: str
    held_ms: int
    left_ms: int


class ReleasedLeasesView(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that were taken from a member.

    Attributes:
        group: Consumer group.
        member: Client id.
        messages: How many, on all brokers.
    """

    group: str
    member: str
    messages: int


class QueueProgressView(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a group in one queue; as ``QueueLag`` and its ``QueueProgress``.

    Attributes:
        is_retry: The queue is of the group's own retry topic.
        lag: Messages that are not done; None for a group that broadcasts, as the next two.
        lag_ms: Waiting time of the oldest of them.
        in_flight: Those of them that are with members.
        oldest_timestamp: Store time of the next message to be done, ms; 0 for none.
        ready: Messages that were never handed out; None unless the group acknowledges each, as the
            next three.
        waiting: Messages that were handed out and come again.
        redelivered: Messages at hand, or that wait, that were handed out more than once.
        oldest_held_ms: So long ago the oldest message at hand was handed out.
    """

    topic: str
    is_retry: bool
    broker_name: str
    queue_id: int
    consumer_offset: int
    min_queue_offset: int
    max_queue_offset: int
    lag: int | None
    lag_ms: int | None
    oldest_timestamp: int
    in_flight: int | None
    client_id: str
    ready: int | None
    waiting: int | None
    redelivered: int | None
    oldest_held_ms: int | None


class ProgressView(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a group; as ``GroupProgress`` and ``ConsumerGroupView``.

    Attributes:
        lag: Messages that are not done; None for a group that broadcasts, as the next two.
        lag_ms: Waiting time of the oldest of them.
        in_flight: Those of them that are with members.
        queues: By topic, broker and queue.
    """

    group: str
    message_model: str
    members: int
    differing: int
    lag: int | None
    lag_ms: int | None
    in_flight: int | None
    consume_tps: float
    retrying: int
    waiting_retries: int
    recent_deliveries: int
    recent_failures: int
    failed_per_s: float
    dead: int
    queues: list[QueueProgressView]


class SubscriptionView(Subscription, array_like=False, frozen=True):
    """A subscription, as its member has it."""


class TopicConsumptionView(TopicConsumption, array_like=False, frozen=True):
    """Metrics of a consumer in a topic, as it reports them."""


class ConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a consumer group; as ``ConsumerConnection``."""

    client_id: str
    connected: bool
    silent_ms: int
    language: str
    version: str
    message_model: str
    consume_from_where: str
    subscriptions: list[SubscriptionView]
    difference: str
    stats: list[TopicConsumptionView]


class ConsumersView(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a consumer group."""

    group: str
    members: list[ConsumerView]


class ProducerView(ProducerConnection, array_like=False, frozen=True):
    """A member of a producer group, as brokers know it."""


class ProducersView(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a producer group."""

    group: str
    members: list[ProducerView]


class OffsetMoveView(msgspec.Struct, frozen=True, kw_only=True):
    """Move of a group's offset in a queue; as ``OffsetChange``.

    Attributes:
        reread: Messages that come again.
        skipped: Messages that will not come.
    """

    topic: str
    broker_name: str
    queue_id: int
    old_offset: int
    new_offset: int
    min_queue_offset: int
    max_queue_offset: int
    reread: int
    skipped: int


class OffsetMovesView(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of a group's offsets; as ``OffsetMoves``."""

    group: str
    dry_run: bool
    reread: int
    skipped: int
    members_notified: int
    queues: list[OffsetMoveView]


class RunningQueueView(RunningQueue, array_like=False, frozen=True):
    """A queue of a running consumer, as it reports it."""


class InFlightView(InFlightMessage, array_like=False, frozen=True):
    """A message that is with a listener."""


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a running consumer; as ``RunningInfo``."""

    client_id: str
    group: str
    kind: str
    started_ms: int
    properties: dict[str, str]
    subscriptions: list[SubscriptionView]
    queues: list[RunningQueueView]
    topics: list[TopicConsumptionView]
    in_flight: list[InFlightView]
    stacks: str


class RunningGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Running members of a group.

    Attributes:
        group: Name.
        members: Those that answered.
        silent: Others by client id, and why there is no answer.
    """

    group: str
    members: list[RunningView]
    silent: dict[str, str]


def group_settings_view(group: str, configs: Mapping[str, GroupConfig]) -> GroupSettingsView:
    """Makes the view of settings that were made, by broker."""
    brokers = [_on_broker(name, one, is_configured=True) for name, one in configs.items()]
    return GroupSettingsView(group=group, brokers=brokers)


def group_views(by_broker: Mapping[str, Iterable[GroupSummary]]) -> list[ConsumerGroupView]:
    """Makes views of groups, by name, from the answers of brokers."""
    found: dict[str, dict[str, GroupSummary]] = {}
    for broker_name, summaries in by_broker.items():
        for one in summaries:
            found.setdefault(one.config.group, {})[broker_name] = one
    return [_group_view(group, found[group]) for group in sorted(found)]


def _group_view(group: str, by_broker: Mapping[str, GroupSummary]) -> ConsumerGroupView:
    parts = list(by_broker.values())
    model = next((one.message_model for one in parts if one.message_model), "")
    # Each member reports its failures to all of its brokers alike; the newest report has most.
    failures = max([one.failures for one in reversed(parts)], key=lambda one: one.deliveries)
    return ConsumerGroupView(
        group=group,
        message_model=model,
        # Every member is connected to every broker.
        members=max(one.members for one in parts),
        lag=None if model == MessageModel.BROADCASTING else sum(one.lag for one in parts),
        consume_tps=sum(one.consume_tps for one in parts),
        retrying=sum(one.retrying for one in parts),
        **_failures(failures),
        dead=sum(one.dead for one in parts),
        differing=max(one.differing for one in parts),
        consume_enable=all(one.config.consume_enable for one in parts),
        topics=sorted({topic for one in parts for topic in one.topics}),
        brokers=[
            _on_broker(name, one.config, is_configured=one.is_configured)
            for name, one in by_broker.items()
        ],
    )


def progress_view(found: GroupProgress) -> ProgressView:
    """Makes the view of a group's progress."""
    return view_of(
        ProgressView,
        found,
        **_failures(found.failures),
        **_lag(found, is_known=not found.broadcasts),
        queues=[_queue_progress(one, found.group) for one in found.queues],
    )


def _queue_progress(one: QueueLag, group: str) -> QueueProgressView:
    window = one.progress.window
    return view_of(
        QueueProgressView,
        one.progress,
        is_retry=one.progress.topic == retry_topic(group),
        broker_name=one.broker_name,
        ready=None if window is None else window.ready,
        waiting=None if window is None else window.waiting,
        redelivered=None if window is None else window.redelivered,
        oldest_held_ms=None if window is None else window.oldest_held_ms,
        **_lag(one, is_known=one.is_known),
    )


def _lag(one: GroupProgress | QueueLag, *, is_known: bool) -> dict[str, int | None]:
    lag: dict[str, int | None] = {"lag": one.lag, "lag_ms": one.lag_ms, "in_flight": one.in_flight}
    return lag if is_known else dict.fromkeys(lag, None)


def _failures(one: GroupFailures) -> dict[str, Any]:
    return {
        "recent_deliveries": one.deliveries,
        "recent_failures": one.failed,
        "failed_per_s": one.failed_per_s,
    }


def lease_views(found: Mapping[str, Iterable[LeaseInfo]]) -> list[LeaseView]:
    """Makes the views of a group's leases, by topic, broker and queue."""
    views = [
        view_of(LeaseView, one, broker_name=name) for name, some in found.items() for one in some
    ]
    return sorted(views, key=lambda one: (one.topic, one.broker_name, one.queue_id, one.first))


def consumers_view(group: str, members: Iterable[ConsumerConnection]) -> ConsumersView:
    """Makes the view of a consumer group's members."""
    return ConsumersView(group=group, members=[_consumer(one) for one in members])


def _consumer(one: ConsumerConnection) -> ConsumerView:
    return view_of(
        ConsumerView,
        one,
        message_model=one.data.message_model,
        consume_from_where=one.data.consume_from_where,
        subscriptions=views_of(SubscriptionView, one.data.subscriptions),
        stats=views_of(TopicConsumptionView, one.stats),
    )


def producers_view(group: str, members: list[ProducerConnection]) -> ProducersView:
    """Makes the view of a producer group's members."""
    return ProducersView(group=group, members=views_of(ProducerView, members))


def offset_moves_view(group: str, moves: OffsetMoves) -> OffsetMovesView:
    """Makes the view of the changes by a reset, clone or skip, done or only planned."""
    queues = [_offset_move(one) for one in moves.queues]
    return view_of(OffsetMovesView, moves, group=group, queues=queues)


def _offset_move(one: OffsetMove) -> OffsetMoveView:
    return view_of(
        OffsetMoveView,
        one.change,
        broker_name=one.broker_name,
        reread=one.reread,
        skipped=one.skipped,
    )


def running_view(info: RunningInfo) -> RunningView:
    """Makes the view of a running member's account of itself."""
    return view_of(
        RunningView,
        info,
        subscriptions=views_of(SubscriptionView, info.subscriptions),
        queues=views_of(RunningQueueView, info.queues),
        topics=views_of(TopicConsumptionView, info.topics),
        in_flight=views_of(InFlightView, info.in_flight),
    )


def _on_broker(broker_name: str, config: GroupConfig, *, is_configured: bool) -> GroupBrokerView:
    return view_of(GroupBrokerView, config, broker_name=broker_name, is_configured=is_configured)
