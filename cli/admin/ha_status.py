"""State and settings of replicas, for people and programs."""

from collections.abc import Sequence
from typing import Final

from mqmesh.sdk.admin.ha_admin import OUTSIDE, ReplicaReport
from mqmesh.sdk.admin.views.replicas import ClusterSettingsView, replica_view

from ..render import counted, print_answer, print_table, say, timestamp

_HEADS: Final = (
    *("BROKER", "ID", "ROLE", "EPOCH", "LOG END", "ON DISK", "LAG", "LAG MS", "LEASE MS"),
    *("STATE", "ENDPOINT"),
)


def print_status(reports: Sequence[ReplicaReport]) -> None:
    """Prints how replicas are."""
    if not print_answer([replica_view(one) for one in reports]):
        return
    print_table(
        _HEADS,
        [_row(report, reports) for report in reports],
        optional=("LEASE MS", "ON DISK", "LOG END", "LAG MS", "EPOCH"),
    )
    for note in notes_of(reports):
        say(note)


def is_well(report: ReplicaReport) -> bool:
    """Returns True if a replica leads, follows, or has no part in its group."""
    status = report.status
    return status is not None and (status.connected or status.role == OUTSIDE)


def print_settings(found: ClusterSettingsView, reports: Sequence[ReplicaReport]) -> None:
    """Prints the settings of a cluster, and those in force at its replicas."""
    if not print_answer(found):
        return
    names = dict.fromkeys(
        [*found.settings, *(name for one in found.replicas for name in one.settings)]
    )
    print_table(
        ("SETTING", "CLUSTER", *(f"{one.broker_name} {one.broker_id}" for one in found.replicas)),
        [
            (
                name,
                found.settings.get(name, "-"),
                *(one.settings.get(name, "-") for one in found.replicas),
            )
            for name in names
        ],
    )
    say(f"version {found.version}")
    for note in _differing(reports):
        say(note)


def notes_of(reports: Sequence[ReplicaReport]) -> list[str]:
    """Returns the notes below the table: why each master leads, and everything unusual."""
    notes = []
    for group in dict.fromkeys(one.broker_name for one in reports):
        known = [one.status for one in reports if one.broker_name == group and one.status]
        elected = [one for one in known if one.voters]
        if elected:
            newest = max(elected, key=lambda one: (one.switched_ms, one.epoch))
            ids = ", ".join(map(str, newest.voters))
            since = f" since {timestamp(newest.switched_ms)}" if newest.switched_ms else ""
            notes.append(
                f"{group}: replicas {ids}; epoch {newest.epoch}{since} (why: {newest.reason})"
            )
            missing = sorted(set(newest.voters) - {one.broker_id for one in known})
            if missing:
                ids = ", ".join(map(str, missing))
                which = "replica" if len(missing) == 1 else "replicas"
                notes.append(f"{group}: no word from {which} {ids}")
        if any(one.paused for one in elected):
            notes.append(f"{group}: failover is paused, see `mqmesh ha resume {group}`")
        notes += [
            f"{group}: replica {one.broker_id} leads without the coordinator; nobody is elected"
            for one in known
            if one.failsafe
        ]
        notes += [
            f"{group}: replica {one.broker_id}: {one.problem}" for one in known if one.problem
        ]
    return [*notes, *_differing(reports)]


def _differing(reports: Sequence[ReplicaReport]) -> list[str]:
    """Returns settings of replicas that are not in force, and those that differ within a group."""
    notes, seen = [], dict[tuple[str, str], dict[str, list[int]]]()
    for report in reports:
        status = report.status
        if status is None:
            continue
        notes += [
            f"{report.broker_name}: replica {status.broker_id}: ha.{one.name} = {one.own} is not "
            f"in force, {one.in_force} is"
            for one in status.differing
        ]
        for each in status.settings:
            values = seen.setdefault((report.broker_name, each.name), {})
            values.setdefault(each.value, []).append(status.broker_id)
    for (group, name), values in seen.items():
        if len(values) > 1:
            places = ", ".join(f"{value} at {ids}" for value, ids in values.items())
            notes.append(
                f"{group}: ha.{name} differs: {places}; see `mqmesh ha settings --set {name}=…`"
            )
    return notes


def _row(report: ReplicaReport, reports: Sequence[ReplicaReport]) -> tuple[str, ...]:
    status, which = report.status, (report.broker_name, str(report.broker_id))
    if status is None:
        return (*which, "?", *["-"] * 6, report.problem, report.endpoint)
    masters = [
        one.status.log_end
        for one in reports
        if one.broker_name == report.broker_name and one.status and one.status.role == "MASTER"
    ]
    end = max(masters, default=status.leader_end)
    is_master = status.role in ("MASTER", "STARTING_MASTER", "HANDING_OVER", "ISOLATED")
    state = counted(len(status.replicas), "follower") if is_master else "streaming"
    if status.in_sync:
        state += f", in sync: {' '.join(map(str, status.in_sync))}"
    if not status.connected:
        state = f"no word from {status.leader}" if status.leader else "follows nobody"
    return (
        *which,
        status.role,
        str(status.epoch),
        str(status.log_end),
        str(status.durable_end),
        "-" if is_master else str(max(end - status.log_end, 0)),
        "-" if is_master or not status.connected else str(status.lag_ms),
        "-" if status.lease_age_ms < 0 else str(status.lease_age_ms),
        state,
        report.endpoint,
    )
