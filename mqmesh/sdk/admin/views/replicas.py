"""Views of replicas: state, settings, epochs and comparisons of logs."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from mqmesh.protocol.replication import (
    HaSettings,
    HaStatus,
    LogEpochs,
    ReplicaStatus,
    SettingDiffers,
)
from mqmesh.sdk.admin.ha_admin import ReplicaReport
from mqmesh.sdk.admin.log_comparison import LogComparison, LogDifference, parting
from mqmesh.sdk.admin.views.clusters import MetricView, metric_views
from mqmesh.sdk.admin.views.fields import view_of, views_of


class FollowerView(ReplicaStatus, array_like=False, frozen=True):
    """A follower, as its leader sees it."""


class SettingDiffersView(SettingDiffers, array_like=False, frozen=True):
    """A setting of a replica that is not in force."""


class ReplicaStatusView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica; as ``HaStatus``, with settings by name."""

    broker_name: str
    broker_id: int
    role: str
    epoch: int
    log_start: int
    log_end: int
    durable_end: int
    leader: str
    connected: bool
    leader_end: int
    in_sync: list[int]
    confirmed: int
    lag_ms: int
    problem: str
    voters: list[int]
    paused: bool
    reason: str
    switched_ms: int
    lease_age_ms: int
    failsafe: bool
    settings: dict[str, str]
    differing: list[SettingDiffersView]


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a broker group.

    Attributes:
        broker_name: Broker group.
        broker_id: Its id, as name servers know it.
        endpoint: ``host:port``.
        problem: Why it does not answer, "" if it does.
        status: Its state; absent, as all that follows, if it does not answer.
        followers: Its followers, if it leads.
        metrics: Its metrics, by name.
    """

    broker_name: str
    broker_id: int
    endpoint: str
    problem: str
    status: ReplicaStatusView | UnsetType = UNSET
    followers: list[FollowerView] | UnsetType = UNSET
    metrics: dict[str, MetricView] | UnsetType = UNSET


class ReplicaSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of replication that are in force at a replica, and its own that are not."""

    broker_name: str
    broker_id: int
    settings: dict[str, str]
    differing: list[SettingDiffersView]


class ClusterSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of replication that a cluster has for all replicas, and those of replicas."""

    version: int
    settings: dict[str, str]
    replicas: list[ReplicaSettingsView]


class EpochView(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch, and the commit-log offset of its first record."""

    epoch: int
    start: int


class LogView(msgspec.Struct, frozen=True, kw_only=True):
    """The log of a replica; as ``LogEpochs``.

    Attributes:
        common_end: End of the history that it has in common with the first replica; None if they
            have nothing in common.
    """

    broker_id: int
    log_start: int
    log_end: int
    confirmed: int
    epochs: list[EpochView]
    common_end: int | None


class LogDifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A place where logs differ that must not; as ``LogDifference``."""

    start: int
    end: int
    broker_ids: list[int]
    problems: dict[str, str]


class LogComparisonView(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of the logs of a broker group.

    Attributes:
        broker_name: Broker group.
        start: Commit-log offset of the oldest record that all have, 0 if there is none.
        compared: End of the compared part.
        broker_ids: Replicas of the logs.
        differences: Places that differ.
    """

    broker_name: str
    start: int = 0
    compared: int = 0
    broker_ids: list[int] = []
    differences: list[LogDifferenceView] = []


class GroupChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a broker group whose replicas elect their master, or are promoted.

    Attributes:
        broker_name: Broker group.
        broker_id: Replica that leads, or stands; absent if the group is meant.
        epoch: Epoch from which it is so; absent if that is not known.
        offset: Commit-log offset at which it begins; absent if that is not known.
        voters: Replicas that belong to the group; absent if that did not change.
        paused: No master is elected; absent if that did not change.
    """

    broker_name: str
    broker_id: int | UnsetType = UNSET
    epoch: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    voters: list[int] | UnsetType = UNSET
    paused: bool | UnsetType = UNSET


def replica_view(report: ReplicaReport) -> ReplicaView:
    """Makes the view of a replica."""
    status = report.status
    if status is None:
        return view_of(ReplicaView, report, status=UNSET, followers=UNSET, metrics=UNSET)
    return view_of(
        ReplicaView,
        report,
        status=view_of(
            ReplicaStatusView,
            status,
            settings=_settings(status),
            differing=views_of(SettingDiffersView, status.differing),
        ),
        followers=views_of(FollowerView, status.replicas),
        metrics=metric_views(report.metrics),
    )


def cluster_settings_view(
    settings: HaSettings, reports: Iterable[ReplicaReport]
) -> ClusterSettingsView:
    """Makes the view of a cluster's settings of replication, and of those that are in force.

    Args:
        settings: Settings that the coordinator keeps.
        reports: State of the replicas; those that do not answer are left out.
    """
    replicas = [
        ReplicaSettingsView(
            broker_name=one.broker_name,
            broker_id=one.status.broker_id,
            settings=_settings(one.status),
            differing=views_of(SettingDiffersView, one.status.differing),
        )
        for one in reports
        if one.status is not None
    ]
    return ClusterSettingsView(
        version=settings.version, settings=_settings(settings), replicas=replicas
    )


def _settings(found: HaSettings | HaStatus) -> dict[str, str]:
    return {one.name: one.value for one in found.settings}


def log_views(logs: Mapping[int, LogEpochs]) -> list[LogView]:
    """Makes views of the logs of a broker group, and how far each goes with the first one."""
    return [_log_view(next(iter(logs.values())), one) for one in logs.values()]


def _log_view(first: LogEpochs, log: LogEpochs) -> LogView:
    end = parting(first, log)
    return view_of(
        LogView,
        log,
        epochs=[EpochView(epoch=one.epoch, start=one.start_offset) for one in log.epochs],
        common_end=None if end is None else end.end_offset,
    )


def parted_logs(logs: Sequence[LogView]) -> list[LogView]:
    """Returns those of the logs that have another history than the first one."""
    return [
        one
        for one in logs
        if one.common_end is None or one.common_end < min(logs[0].log_end, one.log_end)
    ]


def log_comparison_view(
    broker_name: str, last: LogComparison | None, differences: Iterable[LogDifference]
) -> LogComparisonView:
    """Makes the view of a comparison of logs.

    Args:
        broker_name: Broker group.
        last: Its last step, None if there was nothing to compare.
        differences: Places that were found.
    """
    if last is None:
        return LogComparisonView(broker_name=broker_name)
    places = [
        view_of(
            LogDifferenceView,
            one,
            problems={str(number): text for number, text in one.problems.items()},
        )
        for one in differences
    ]
    return view_of(LogComparisonView, last, broker_name=broker_name, differences=places)
