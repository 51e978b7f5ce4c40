"""Views of clusters and their processes: state, metrics, settings, clients, replicas."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from mqmesh.metrics import Distribution, MetricReading, MetricValue, Readings
from mqmesh.protocol.admin import (
    CleanedSegment,
    CleanedTopic,
    CleanResult,
    ConfigChange,
    ConfigEntry,
    QueueEntries,
    QueueEntry,
    RoleInfo,
)
from mqmesh.protocol.gateway import GatewayClient
from mqmesh.protocol.groups import ClientInfo
from mqmesh.protocol.route import BrokerData
from mqmesh.sdk.admin.namesrv_admin import Draining, NamesrvConfigChange
from mqmesh.sdk.admin.views.fields import view_of, views_of

LOAD_METRICS: Final = {
    "in_per_s": "put_messages_per_s",
    "out_per_s": "get_messages_per_s",
    "in_today": "put_messages_today",
    "in_yesterday": "put_messages_yesterday",
    "out_today": "get_messages_today",
    "out_yesterday": "get_messages_yesterday",
    "disk_used_percent": "store_disk_used_percent",
    "oldest_timestamp": "store_oldest_timestamp",
}
"""Fields of ``MemberView`` that are a broker's load, and the metric that each one shows."""


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A name server or a broker of a cluster.

    Attributes:
        role: ``namesrv`` or ``broker``.
        cluster: Name of its cluster, "" for a name server.
        name: Broker group, or the name of the name server; "" while it does not answer.
        broker_id: Id of a replica, None for a name server.
        endpoint: ``host:port``.
        state: As ``RoleInfo`` has it; ``down`` if it does not answer.
        version: mqmesh's; "" if it does not answer.
        pid: Process number; 0 if it does not answer.
        uptime_ms: Since its start.
        in_per_s: Messages stored a second; this field and the following ones are absent unless they
            were requested.
        out_per_s: Messages handed out a second.
        in_today: Messages stored since midnight (UTC).
        in_yesterday: Messages stored on the day before.
        out_today: Messages handed out since midnight (UTC).
        out_yesterday: Messages handed out on the day before.
        disk_used_percent: Of the disk with the store.
        oldest_timestamp: Store time of the oldest message, ms.
    """

    role: str
    cluster: str
    name: str
    broker_id: int | None
    endpoint: str
    state: str = "down"
    version: str = ""
    pid: int = 0
    uptime_ms: int = 0
    in_per_s: float | UnsetType = UNSET
    out_per_s: float | UnsetType = UNSET
    in_today: float | UnsetType = UNSET
    in_yesterday: float | UnsetType = UNSET
    out_today: float | UnsetType = UNSET
    out_yesterday: float | UnsetType = UNSET
    disk_used_percent: float | UnsetType = UNSET
    oldest_timestamp: float | UnsetType = UNSET


class MetricValueView(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a metric with labels, by their names."""

    labels: dict[str, str]
    value: Any


class MetricView(msgspec.Struct, frozen=True, kw_only=True):
    """A metric; as ``Metric``, with its reading.

    Attributes:
        rocketmq_name: Its name in RocketMQ; absent if it has none there.
        value: Number or text, or ``bounds``, ``counts`` and ``total`` of a distribution; absent
            for a metric with labels.
        values: Values by labels; absent for a metric without.
    """

    kind: str
    unit: str
    help: str
    rocketmq_name: str | UnsetType = UNSET
    value: Any = UNSET
    values: list[MetricValueView] | UnsetType = UNSET


class BrokerView(msgspec.Struct, frozen=True, kw_only=True):
    """A broker group.

    Attributes:
        broker_name: Name.
        members: Its replicas, by id.
        metrics: Metrics of its master, by name.
    """

    broker_name: str
    members: list[MemberView]
    metrics: dict[str, MetricView]


class BrokerReportView(msgspec.Struct, frozen=True, kw_only=True):
    """Report on a broker group; all but the first two are absent if it does not answer.

    Attributes:
        broker_name: Name.
        clients: How many clients there are of each language and version.
        version: mqmesh's. All that follows is the metric of that name.
    """

    broker_name: str
    clients: dict[str, int] = {}
    version: str | UnsetType = UNSET
    put_messages_day_per_s: float | UnsetType = UNSET
    get_messages_day_per_s: float | UnsetType = UNSET
    put_messages_today: float | UnsetType = UNSET
    put_messages_yesterday: float | UnsetType = UNSET
    get_messages_today: float | UnsetType = UNSET
    get_messages_yesterday: float | UnsetType = UNSET
    put_bytes_total: float | UnsetType = UNSET
    get_bytes_total: float | UnsetType = UNSET
    store_disk_bytes: float | UnsetType = UNSET
    store_disk_used_percent: float | UnsetType = UNSET
    store_segments: float | UnsetType = UNSET
    store_oldest_timestamp: float | UnsetType = UNSET
    topics: float | UnsetType = UNSET
    subscription_groups: float | UnsetType = UNSET
    consumer_offsets: float | UnsetType = UNSET
    uptime_ms: float | UnsetType = UNSET


class ClientView(ClientInfo, array_like=False, frozen=True):
    """A client that is registered at a broker."""


class GatewayClientView(GatewayClient, array_like=False, frozen=True, kw_only=True):
    """A client of RocketMQ, and the gateway that it is connected to."""

    gateway: str


class DrainingView(msgspec.Struct, frozen=True, kw_only=True):
    """A broker that was drained or undrained; as ``Draining``."""

    broker_name: str
    namesrvs: list[str]
    silent_namesrvs: list[str]
    topic_count: int


class QueueEntryView(QueueEntry, array_like=False, frozen=True):
    """An entry of a queue, as it is stored."""


class QueueEntriesView(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of a queue, as they are stored; as ``QueueEntries``."""

    broker_name: str
    topic: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    entries: list[QueueEntryView]


class CleanedSegmentView(CleanedSegment, array_like=False, frozen=True):
    """A segment of the log that went, or would go."""


class CleanedTopicView(CleanedTopic, array_like=False, frozen=True):
    """Loss of a topic's consumers when segments go."""


class CleanView(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a pass of retention; as ``CleanResult``."""

    broker_name: str
    dry_run: bool
    segments: list[CleanedSegmentView]
    reason: str
    forced: bool
    topics: list[CleanedTopicView]
    more_topics: int


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a process; as ``ConfigEntry``, with values in place of their JSON."""

    key: str
    value: Any
    default: Any
    at_start: Any
    is_overridden: bool
    is_changeable: bool


class DifferingSettingView(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that a replica has otherwise than the first one of its group."""

    broker_id: int
    key: str
    value: Any


class BrokerSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a broker group: those of the first replica, and how others differ."""

    broker_name: str
    settings: list[SettingView]
    differing: list[DifferingSettingView]


class NamesrvSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a name server."""

    endpoint: str
    settings: list[SettingView]


class SettingChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that has another value now."""

    key: str
    before: Any
    after: Any


class ReplicaChangesView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a replica that changed."""

    broker_id: int
    changes: list[SettingChangeView]


class BrokerChangesView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a broker group that changed."""

    broker_name: str
    replicas: list[ReplicaChangesView]


class NamesrvChangesView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of name servers that changed; as ``NamesrvConfigChange``."""

    namesrvs: list[str]
    silent_namesrvs: list[str]
    changes: dict[str, list[SettingChangeView]]


class SupervisedProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a supervisor looks after.

    Attributes:
        role: Its role.
        name: Its name in the cluster.
        pid: Process number, 0 for none.
        state: As it says itself; ``down``, or as the supervisor has it, if it does not answer.
        endpoint: Endpoint that it serves at, "" for none.
        uptime_ms: Since its start.
        restarts: How often the supervisor started it again.
        exits: How often it ended, by cause.
    """

    role: str
    name: str
    pid: int
    state: str
    endpoint: str
    uptime_ms: int
    restarts: int
    exits: dict[str, int]


class LocalClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that a supervisor runs on this machine.

    Attributes:
        data_dir: Its data folder.
        running: There is a supervisor.
        pid: Process number of the supervisor, 0 for none.
        namesrv: Name servers, "" if nothing runs.
        uptime_ms: Since the supervisor's start.
        roles: Its processes.
        metrics: Metrics of the supervisor, by name.
    """

    data_dir: str
    running: bool
    pid: int
    namesrv: str = ""
    uptime_ms: int = 0
    roles: list[SupervisedProcessView] = []
    metrics: dict[str, MetricView] = {}


def namesrv_view(endpoint: str, info: RoleInfo | None) -> MemberView:
    """Makes the view of a name server; ``info`` is None if it does not answer."""
    name = info.name if info else ""
    return MemberView(
        role="namesrv", cluster="", name=name, broker_id=None, endpoint=endpoint, **_state(info)
    )


def broker_member_view(
    group: BrokerData, broker_id: int, info: RoleInfo | None, metrics: Readings | None = None
) -> MemberView:
    """Makes the view of a replica of a broker group.

    Args:
        group: Its group, as name servers know it.
        broker_id: Its id.
        info: Its answer, None if there is none.
        metrics: Its metrics, to show its load; None for no load.
    """
    load: dict[str, Any] = {}
    if metrics is not None:
        load = {key: metrics.number(name, default=0) for key, name in LOAD_METRICS.items()}
    return MemberView(
        role="broker",
        cluster=group.cluster_name,
        name=group.broker_name,
        broker_id=broker_id,
        endpoint=group.addresses[broker_id].tcp,
        **_state(info),
        **load,
    )


def _state(info: RoleInfo | None) -> dict[str, Any]:
    names = ("state", "version", "pid", "uptime_ms")
    return {} if info is None else {name: getattr(info, name) for name in names}


def metric_views(readings: Iterable[MetricReading]) -> dict[str, MetricView]:
    """Makes views of metrics, by name."""
    return {one.metric.name: _metric_view(one) for one in readings}


def _metric_view(reading: MetricReading) -> MetricView:
    metric = reading.metric
    values = [_plain(one.value) for one in reading.samples]
    measured: dict[str, Any] = {}
    if metric.labels:
        labels = [dict(zip(metric.labels, one.labels, strict=True)) for one in reading.samples]
        pairs = zip(labels, values, strict=True)
        measured["values"] = [MetricValueView(labels=one, value=value) for one, value in pairs]
    else:
        (measured["value"],) = values
    return MetricView(
        kind=metric.kind,
        unit=metric.unit,
        help=metric.help,
        rocketmq_name=metric.rocketmq_name or UNSET,
        **measured,
    )


def _plain(value: MetricValue) -> Any:
    if not isinstance(value, Distribution):
        return value
    return {"bounds": value.bounds, "counts": value.counts, "total": value.total}


def broker_report_view(
    broker_name: str, metrics: Readings, clients: Iterable[ClientInfo], version: str
) -> BrokerReportView:
    """Makes the report on a broker that answers; clients are counted by version."""
    versions = Counter(f"{one.language} {one.version}".strip() for one in clients)
    names = BrokerReportView.__struct_fields__[3:]
    return BrokerReportView(
        broker_name=broker_name,
        clients=dict(sorted(versions.items())),
        version=version,
        **{name: metrics.number(name, default=0) for name in names},
    )


def client_views(clients: list[ClientInfo]) -> list[ClientView]:
    """Makes views of a broker's clients."""
    return views_of(ClientView, clients)


def gateway_client_views(gateway: str, clients: list[GatewayClient]) -> list[GatewayClientView]:
    """Makes views of a gateway's clients."""
    return [view_of(GatewayClientView, one, gateway=gateway) for one in clients]


def draining_view(broker_name: str, done: Draining) -> DrainingView:
    """Makes the view of the changes by a drain or its end."""
    return view_of(DrainingView, done, broker_name=broker_name)


def queue_entries_view(
    broker_name: str, topic: str, queue_id: int, found: QueueEntries
) -> QueueEntriesView:
    """Makes the view of a queue's entries."""
    return view_of(
        QueueEntriesView,
        found,
        broker_name=broker_name,
        topic=topic,
        queue_id=queue_id,
        entries=views_of(QueueEntryView, found.entries),
    )


def clean_view(broker_name: str, done: CleanResult, *, dry_run: bool) -> CleanView:
    """Makes the view of a pass of retention, or of its dry run."""
    return view_of(
        CleanView,
        done,
        broker_name=broker_name,
        dry_run=dry_run,
        segments=views_of(CleanedSegmentView, done.segments),
        topics=views_of(CleanedTopicView, done.topics),
    )


def setting_views(
    entries: Iterable[ConfigEntry], *, only_changed: bool = False
) -> list[SettingView]:
    """Makes views of settings.

    Args:
        entries: Settings of a process.
        only_changed: Leave out those that are the default and were not set.
    """
    return [
        view_of(
            SettingView,
            one,
            value=_decoded(one.value),
            default=_decoded(one.default),
            at_start=_decoded(one.at_start),
        )
        for one in entries
        if not only_changed or one.is_overridden or one.value != one.default
    ]


def broker_settings_view(
    broker_name: str,
    replicas: Mapping[int, Sequence[ConfigEntry]],
    *,
    only_changed: bool = False,
) -> BrokerSettingsView:
    """Makes the view of the settings of a broker group.

    Args:
        broker_name: Broker group.
        replicas: Settings by broker id, at least of one replica; the first one's are shown.
        only_changed: As for ``setting_views``.
    """
    first, *others = replicas
    values = {one.key: one.value for one in replicas[first]}
    differing = [
        DifferingSettingView(broker_id=other, key=one.key, value=_decoded(one.value))
        for other in others
        for one in replicas[other]
        # Settings that each replica has for itself are no difference.
        if one.is_changeable and one.value != values.get(one.key)
    ]
    return BrokerSettingsView(
        broker_name=broker_name,
        settings=setting_views(replicas[first], only_changed=only_changed),
        differing=differing,
    )


def broker_changes_view(
    broker_name: str, replicas: Mapping[int, Iterable[ConfigChange]]
) -> BrokerChangesView:
    """Makes the view of changed settings of a broker group, by broker id."""
    changes = [
        ReplicaChangesView(broker_id=broker_id, changes=_changes(found))
        for broker_id, found in replicas.items()
    ]
    return BrokerChangesView(broker_name=broker_name, replicas=changes)


def namesrv_changes_view(done: NamesrvConfigChange) -> NamesrvChangesView:
    """Makes the view of changed settings of name servers."""
    changes = {address: _changes(found) for address, found in done.changes.items()}
    return view_of(NamesrvChangesView, done, changes=changes)


def _changes(changes: Iterable[ConfigChange]) -> list[SettingChangeView]:
    return [
        SettingChangeView(key=one.key, before=_decoded(one.before), after=_decoded(one.after))
        for one in changes
    ]


def _decoded(text: str) -> Any:
    return msgspec.json.decode(text)
