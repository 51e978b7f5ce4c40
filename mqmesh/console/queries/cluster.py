"""The cluster: broker groups with replicas, name servers, processes, settings, key/value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from mqmesh.aio import BrokerAdmin, HaAdmin, NamesrvAdmin
from mqmesh.console.page import (
    Name,
    NoArguments,
    TableArguments,
    TablePage,
    Text,
    Visit,
    table_page,
)
from mqmesh.errors import InvalidArgument, MQMeshError, NoRoute, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.protocol.admin import ConfigEntry, RoleInfo
from mqmesh.protocol.replication import HaStatus
from mqmesh.protocol.route import Perm
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.ha_admin import OUTSIDE, ReplicaReport
from mqmesh.sdk.admin.views.clusters import (
    DifferingSettingView,
    MemberView,
    SupervisedProcessView,
    broker_settings_view,
    namesrv_view,
    setting_views,
)

LEADING = frozenset({"MASTER", "STARTING_MASTER", "HANDING_OVER", "ISOLATED"})


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a broker group.

    Attributes:
        broker_id: Its id.
        endpoint: ``host:port``; "" where name servers do not know it.
        role: As ``HaStatus`` has it; "" if it does not answer.
        epoch: The newest of its log.
        lag_bytes: Bytes of log that it has less than the master; None for a master.
        lag_ms: So long ago it had all that its master had then; None for a master.
        is_in_sync: A failover to it loses nothing.
        is_well: It leads, follows, or has no part in its group.
        problem: Why it does not answer or follow; "" if it does.
    """

    broker_id: int
    endpoint: str = ""
    role: str = ""
    epoch: int = 0
    lag_bytes: int | None = None
    lag_ms: int | None = None
    is_in_sync: bool = False
    is_well: bool = False
    problem: str = ""


class BrokerGroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One broker group.

    Attributes:
        broker_name: Its name.
        master: Id of the leading replica; None for none.
        epoch: The newest epoch.
        in_sync: Ids of the replicas that a failover to loses nothing.
        voters: Ids of all replicas of a group that elects its master; none of others.
        since_ms: Time when the master began to lead, ms since 1970; 0 if that is not known.
        reason: Reason of the last change of the master.
        is_paused: No replica stands for election when the master is missed.
        is_drained: Producers have left it.
        replicas: By id.
    """

    broker_name: str
    master: int | None
    epoch: int
    in_sync: list[int]
    voters: list[int]
    since_ms: int
    reason: str
    is_paused: bool
    is_drained: bool
    replicas: list[ReplicaRow]


class ClusterDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster.

    Attributes:
        groups: Broker groups, by name.
        namesrvs: Name servers.
        processes: Those of the run file, where it is on this machine; those that run come last.
    """

    groups: list[BrokerGroupRow]
    namesrvs: list[MemberView]
    processes: list[SupervisedProcessView]


class BrokerArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of actions on one broker group.

    Attributes:
        broker_name: Its name.
    """

    broker_name: Name


class SettingsArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of a page of settings.

    Attributes:
        kind: ``changed``: those that are not the default; ``changeable``: those that may change
            while the process runs; ``all``.
    """

    kind: Literal["changed", "changeable", "all"] = "changed"


class BrokerSettingsArguments(SettingsArguments, frozen=True, kw_only=True):
    """Arguments of the page of a broker group's settings.

    Attributes:
        broker_name: Its name.
    """

    broker_name: Name


class NamesrvSettingsArguments(SettingsArguments, frozen=True, kw_only=True):
    """Arguments of the page of name servers' settings.

    Attributes:
        address: ``host:port`` of one of them; "" for the first.
    """

    address: Text = ""


class SettingRow(msgspec.Struct, frozen=True):
    """One setting; values are JSON.

    Attributes:
        key: With the names of its tables: ``storage.delete_when``.
        value: In force.
        default: When nothing is said.
        at_start: At the start of the process.
        is_overridden: An administrator has changed it since.
        is_changeable: It may change while the process runs.
    """

    key: str
    value: str
    default: str
    at_start: str
    is_overridden: bool
    is_changeable: bool


class SettingsView(msgspec.Struct, frozen=True):
    """Settings of a broker group, or of a name server.

    Attributes:
        name: Broker group, or address.
        table: One page of them.
        others: Other name servers.
        differing: Settings in which replicas differ from the first one.
    """

    name: str
    table: TablePage[SettingRow]
    others: list[str] = []
    differing: list[DifferingSettingView] = []


class KvRow(msgspec.Struct, frozen=True):
    """One text of the key/value configuration.

    Attributes:
        namespace: Its namespace.
        key: Its key.
        value: The text.
    """

    namespace: str
    key: str
    value: str


async def cluster(visit: Visit, arguments: NoArguments) -> ClusterDetails:
    """Return the broker groups, name servers and processes."""
    async with visit.client(HaAdmin) as admin:
        try:
            reports = await admin.ha_status()
            drained = await _drained(admin)
        except NoRoute:
            reports, drained = [], {}
        # A process that is known to be down is not waited for.
        down = {one.name for one in visit.view.processes if not one.is_up}
        namesrvs = [
            namesrv_view(address, None if address in down else await _ping(admin, address))
            for address in visit.namesrv_addr
        ]
    names = dict.fromkeys(one.broker_name for one in reports)
    return ClusterDetails(
        groups=[
            group_row(
                name,
                [one for one in reports if one.broker_name == name],
                is_drained=drained.get(name, False),
            )
            for name in names
        ],
        namesrvs=namesrvs,
        processes=_processes(visit),
    )


async def _drained(admin: HaAdmin) -> dict[str, bool]:
    """Return whether broker groups are drained: routes have it at once, brokers later."""
    try:
        queues = (await admin.route(AUTO_CREATE_TOPIC)).queues
    except TopicNotFound:
        found = await admin.runtime_info()
        return {
            name: bool(one.number("wiped_write_perm", default=0)) for name, one in found.items()
        }
    return {one.broker_name: not one.perm & Perm.WRITE for one in queues}


async def _ping(admin: HaAdmin, address: str) -> RoleInfo | None:
    try:
        return await admin.ping(address if "://" in address else f"tcp://{address}")
    except MQMeshError:
        return None


def _processes(visit: Visit) -> list[SupervisedProcessView]:
    folder = data_dir_of(visit)
    record = read_record(Path(folder)) if folder else None
    now_ms = visit.clock.wall_ms()
    found = [
        SupervisedProcessView(
            role=one.role,
            name=one.name,
            pid=one.pid,
            state=one.state,
            endpoint=one.endpoint.removeprefix("tcp://"),
            uptime_ms=max(now_ms - one.started_ms, 0) if one.pid else 0,
            restarts=one.restarts,
            exits=one.exits,
        )
        for one in (() if record is None else record.roles)
    ]
    return sorted(found, key=lambda one: one.state == "running")


def data_dir_of(visit: Visit) -> str:
    """Return the data folder of the cluster on this machine; "" for none."""
    return next(one.data_dir for one in visit.config.sources() if one.name == visit.cluster)


def group_row(
    broker_name: str, reports: Sequence[ReplicaReport], *, is_drained: bool
) -> BrokerGroupRow:
    """Make the row of a broker group.

    Args:
        broker_name: Its name.
        reports: State of its replicas, those that name servers know.
        is_drained: Producers have left it.
    """
    known = [one.status for one in reports if one.status is not None]
    leaders = [one for one in known if one.role in LEADING]
    leader = max(leaders, key=lambda one: one.epoch, default=None)
    newest = max(known, key=lambda one: (one.switched_ms, one.epoch), default=None)
    in_sync = [] if leader is None else leader.in_sync
    voters = [] if newest is None else newest.voters
    rows = [_replica_row(one, leader, in_sync) for one in reports]
    missing = set(voters) - {one.broker_id for one in rows}
    rows += [ReplicaRow(broker_id=one, problem="name servers do not know it") for one in missing]
    return BrokerGroupRow(
        broker_name=broker_name,
        master=None if leader is None else leader.broker_id,
        epoch=max((one.epoch for one in known), default=0),
        in_sync=in_sync,
        voters=voters,
        since_ms=0 if newest is None else newest.switched_ms,
        reason="" if newest is None else newest.reason,
        is_paused=any(one.paused for one in known),
        is_drained=is_drained,
        replicas=sorted(rows, key=lambda one: one.broker_id),
    )


def _replica_row(
    report: ReplicaReport, leader: HaStatus | None, in_sync: Sequence[int]
) -> ReplicaRow:
    status = report.status
    if status is None:
        return ReplicaRow(
            broker_id=report.broker_id, endpoint=report.endpoint, problem=report.problem
        )
    is_leader = status.role in LEADING
    end = status.leader_end if leader is None else leader.log_end
    problem = status.problem
    if not status.connected and not problem:
        problem = f"no word from {status.leader}" if status.leader else "follows nobody"
    if status.failsafe:
        problem = problem or "leads without the coordinator: nobody is elected"
    return ReplicaRow(
        broker_id=status.broker_id,
        endpoint=report.endpoint,
        role=status.role,
        epoch=status.epoch,
        lag_bytes=None if is_leader else max(end - status.log_end, 0),
        lag_ms=None if is_leader or not status.connected else status.lag_ms,
        is_in_sync=status.broker_id in in_sync,
        is_well=(status.connected or status.role == OUTSIDE) and not status.failsafe,
        problem=problem,
    )


async def broker_settings(visit: Visit, arguments: BrokerSettingsArguments) -> SettingsView:
    """Return the settings of a broker group."""
    replicas = await broker_config(visit, arguments.broker_name)
    differing = broker_settings_view(arguments.broker_name, replicas).differing
    table = _settings_table(next(iter(replicas.values())), arguments)
    return SettingsView(arguments.broker_name, table, differing=differing)


async def broker_config(visit: Visit, broker_name: str) -> Mapping[int, list[ConfigEntry]]:
    """Return the settings of the replicas of a broker group, the master's first."""
    async with visit.client(BrokerAdmin) as admin:
        return await admin.config(broker_name)


async def namesrv_settings(visit: Visit, arguments: NamesrvSettingsArguments) -> SettingsView:
    """Return the settings of a name server."""
    address = arguments.address or visit.namesrv_addr[0]
    entries = await namesrv_config(visit, address)
    others = [one for one in visit.namesrv_addr if one != address]
    return SettingsView(address, _settings_table(entries, arguments), others)


async def namesrv_config(visit: Visit, address: str) -> list[ConfigEntry]:
    """Return the settings of a name server.

    Raises:
        InvalidArgument: It is none of this cluster.
    """
    if address not in visit.namesrv_addr:
        raise InvalidArgument(f"{address} is no name server of this cluster")
    async with visit.client(NamesrvAdmin) as admin:
        return await admin.config(address)


def _settings_table(
    entries: Sequence[ConfigEntry], arguments: SettingsArguments
) -> TablePage[SettingRow]:
    changed = {one.key for one in setting_views(entries, only_changed=True)}
    rows = [
        SettingRow(*(getattr(one, field) for field in SettingRow.__struct_fields__))
        for one in entries
        if arguments.kind == "all"
        or (one.is_changeable if arguments.kind == "changeable" else one.key in changed)
    ]
    return table_page(rows, arguments, ("key", "value"), sort="key")


async def kv(visit: Visit, arguments: TableArguments) -> TablePage[KvRow]:
    """Return one page of the key/value configuration."""
    async with visit.client(NamesrvAdmin) as admin:
        found = {space: await admin.list_kv(space) for space in await admin.kv_namespaces()}
    rows = [
        KvRow(space, key, value)
        for space, pairs in found.items()
        for key, value in sorted(pairs.items())
    ]
    return table_page(rows, arguments, ("namespace", "key", "value"), sort="namespace")
