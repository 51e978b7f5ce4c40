"""`mqmesh cluster …`: clusters as their name servers know them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import click
from msgspec import UNSET

from mqmesh.errors import MQMeshError
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient, masters_of
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.views.clusters import (
    BrokerReportView,
    broker_member_view,
    broker_report_view,
    namesrv_view,
)
from mqmesh.sdk.client.options import namesrv_addresses
from mqmesh.units import MIB

from ..lazy_group import LazyGroup
from ..options import cluster_options
from ..render import (
    Column,
    Table,
    duration,
    print_answer,
    rate,
    state_text,
    text_or_dash,
    timestamp,
)

_LAZY: Final = {
    "export": ("admin.cluster_files", "export_cluster"),
    "import": ("admin.cluster_files", "import_cluster"),
    "probe": ("admin.probe", "probe_cluster"),
}
_check = click.option("--check", is_flag=True, help="Exit code 1 when one does not answer.")

PING_TIMEOUT_MS: Final = 1_000
PINGS_AT_ONCE: Final = 16


def _known(shown: Any) -> Any:
    return lambda value: "-" if value is UNSET else shown(value)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


_MEMBERS: Final = (
    Column("cluster", "CLUSTER", rank=1),
    Column("role", "ROLE"),
    Column("name", "NAME"),
    Column("broker_id", "ID", text_or_dash),
    Column("state", "STATE", state_text),
    Column("endpoint", "ENDPOINT"),
    Column("version", "VERSION", rank=3),
    Column("uptime_ms", "UPTIME", lambda ms: duration(ms) if ms else "-", rank=2),
)
_LOADS: Final = (
    Column("name", "BROKER"),
    Column("broker_id", "ID", str),
    Column("endpoint", "ENDPOINT", rank=1),
    Column("version", "VERSION", rank=5),
    Column("state", "STATE", state_text),
    Column("in_per_s", "IN/S", _known(rate)),
    Column("out_per_s", "OUT/S", _known(rate)),
    Column("in_today", "IN TODAY", _known(_whole), rank=2),
    Column("in_yesterday", "IN YESTERDAY", _known(_whole), rank=6),
    Column("out_today", "OUT TODAY", _known(_whole), rank=3),
    Column("out_yesterday", "OUT YESTERDAY", _known(_whole), rank=7),
    Column("disk_used_percent", "DISK", _known(lambda percent: f"{percent:.0f} %")),
    Column("oldest_timestamp", "OLDEST", _known(timestamp), rank=4),
)
_REPORT: Final = (
    Column("broker_name", "BROKER"),
    Column("version", "VERSION", lambda version: "down" if version is UNSET else version, rank=4),
    Column("put_messages_day_per_s", "IN/S 24 H", _known(rate)),
    Column("get_messages_day_per_s", "OUT/S 24 H", _known(rate)),
    Column("store_disk_bytes", "LOG", _known(lambda size: f"{size / MIB:,.0f} MiB"), rank=1),
    Column("topics", "TOPICS", _known(str), rank=2),
    Column("subscription_groups", "GROUPS", _known(str), rank=3),
    Column(
        "clients",
        "CLIENTS",
        lambda clients: " ".join(f"{one}: {count}" for one, count in clients.items()) or "-",
    ),
)


@click.group(cls=LazyGroup, places=_LAZY)
def cluster() -> None:
    """Clusters as their name servers know them, however they were started.

    \b
    Examples:
      mqmesh cluster list
      mqmesh cluster list --namesrv 10.0.0.1:9876,10.0.0.2:9876 --json
      mqmesh cluster export cluster.json
      mqmesh cluster import cluster.json --dry-run
    """


@cluster.command("list")
@click.option("--more", is_flag=True, help="Also rates, totals, disk and oldest message.")
@_check
@cluster_options
def list_cluster(more: bool, check: bool, namesrv: str) -> int:
    """List name servers and brokers, asking each how it is; one that does not answer is down.

    \b
    Examples:
      mqmesh cluster list --more
      mqmesh cluster list --check > /dev/null || echo "something is down"
    """
    with AdminClient(namesrv) as admin:
        groups = admin.cluster().brokers
    namesrvs = namesrv_addresses(namesrv)
    brokers = [
        (group, broker_id)
        for group in sorted(groups, key=lambda one: (one.cluster_name, one.broker_name))
        for broker_id in sorted(group.addresses)
    ]
    endpoints = [group.addresses[broker_id].tcp for group, broker_id in brokers]
    with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
        infos = list(pool.map(partial(ping_role, namesrv), [*namesrvs, *endpoints]))
        loads = pool.map(partial(_load, namesrv), endpoints) if more else [None] * len(brokers)
        views = [namesrv_view(*one) for one in zip(namesrvs, infos[: len(namesrvs)], strict=True)]
        views += [
            broker_member_view(group, broker_id, info, load)
            for (group, broker_id), info, load in zip(
                brokers, infos[len(namesrvs) :], loads, strict=True
            )
        ]
    if print_answer(views):
        if more:
            Table(_LOADS, [one for one in views if one.role == "broker"]).print()
        else:
            Table(_MEMBERS, views).print()
    return ExitCode.FAILED if check and not all(infos) else ExitCode.OK


def _load(namesrv: str, endpoint: str) -> Readings | None:
    """Reads the metrics of a broker; None if it does not answer."""
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            return admin.role_info(endpoint)
    except MQMeshError:
        return None


@cluster.command("report")
@_check
@cluster_options
def report(check: bool, namesrv: str) -> int:
    """Show each broker's traffic in 24 hours, size of its log, topics, groups and clients.

    With --json for reports that are kept.

    \b
    Examples:
      mqmesh cluster report --json > report.json
    """
    with BrokerAdmin(namesrv) as admin:
        names = sorted(masters_of(admin.cluster().brokers))
    with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
        views = list(pool.map(partial(_report_on, namesrv), names))
    print_answer({"brokers": views}, Table(_REPORT, views))
    is_whole = all(one.version is not UNSET for one in views)
    return ExitCode.FAILED if check and not is_whole else ExitCode.OK


def _report_on(namesrv: str, name: str) -> BrokerReportView:
    try:
        with BrokerAdmin(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            endpoint = masters_of(admin.cluster().brokers)[name].tcp
            readings, clients = admin.role_info(endpoint), admin.clients(name)
            return broker_report_view(name, readings, clients, admin.ping(endpoint).version)
    except (MQMeshError, KeyError):
        return BrokerReportView(broker_name=name)


def ping_role(namesrv: str, endpoint: str) -> RoleInfo | None:
    """Pings a process and returns its answer; None if none comes within a second."""
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            return admin.ping(endpoint)
    except MQMeshError:
        return None
