"""`mqmesh cluster …`: clusters as their name servers know them."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import click

from mqmesh.errors import MQMeshError
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient, masters_of
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.client.options import namesrv_addresses
from mqmesh.units import MIB

from ..lazy_group import LazyGroup
from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, rate, state_text, timestamp

_LAZY: Final = {
    "export": ("admin.cluster_files", "export_cluster"),
    "import": ("admin.cluster_files", "import_cluster"),
    "probe": ("admin.probe", "probe_cluster"),
}
_check = click.option("--check", is_flag=True, help="Exit code 1 when one does not answer.")

PING_TIMEOUT_MS: Final = 1_000
PINGS_AT_ONCE: Final = 16


@click.group(cls=LazyGroup, places=_LAZY)
def cluster() -> None:
    """Clusters as their name servers know them, whoever started them.

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
@namesrv_option
@json_option
def list_cluster(more: bool, check: bool, namesrv: str, as_json: bool) -> int:
    """List name servers and brokers, asking each how it is; one that does not answer is down.

    \b
    Examples:
      mqmesh cluster list --more
      mqmesh cluster list --check > /dev/null || echo "something is down"
    """
    with AdminClient(namesrv) as admin:
        groups = admin.cluster().brokers
    rows: list[dict[str, Any]] = [
        {"role": "namesrv", "cluster": "", "name": "", "broker_id": None, "endpoint": address}
        for address in namesrv_addresses(namesrv)
    ]
    rows += [
        {
            "role": "broker",
            "cluster": group.cluster_name,
            "name": group.broker_name,
            "broker_id": broker_id,
            "endpoint": address.tcp,
        }
        for group in sorted(groups, key=lambda one: (one.cluster_name, one.broker_name))
        for broker_id, address in sorted(group.addresses.items())
    ]
    with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
        infos = list(pool.map(partial(ping_role, namesrv), (row["endpoint"] for row in rows)))
        if more:
            places = [row["endpoint"] if row["role"] == "broker" else "" for row in rows]
            for row, loads in zip(rows, pool.map(partial(_load, namesrv), places), strict=True):
                row.update(loads)
    for row, info in zip(rows, infos, strict=True):
        row.update(role_state(info))
        row["name"] = row["name"] or (info.name if info else "")
    if as_json:
        print_json(rows)
    elif more:
        _print_more(row for row in rows if row["role"] == "broker")
    else:
        print_table(
            ("CLUSTER", "ROLE", "NAME", "ID", "STATE", "ENDPOINT", "VERSION", "UPTIME"),
            [
                (
                    row["cluster"] or "-",
                    row["role"],
                    row["name"] or "-",
                    "-" if row["broker_id"] is None else str(row["broker_id"]),
                    state_text(row["state"]),
                    row["endpoint"],
                    row["version"] or "-",
                    duration(row["uptime_ms"]) if row["uptime_ms"] else "-",
                )
                for row in rows
            ],
            optional=("VERSION", "UPTIME", "CLUSTER"),
        )
    return ExitCode.FAILED if check and not all(infos) else ExitCode.OK


_LOADS: Final = {
    "in_per_s": "put_messages_per_s",
    "out_per_s": "get_messages_per_s",
    "in_today": "put_messages_today",
    "in_yesterday": "put_messages_yesterday",
    "out_today": "get_messages_today",
    "out_yesterday": "get_messages_yesterday",
    "disk_used_percent": "store_disk_used_percent",
    "oldest_timestamp": "store_oldest_timestamp",
}
"""Columns of `--more`, and the metric that each one shows."""


def _load(namesrv: str, endpoint: str) -> dict[str, Any]:
    """Reads the load metrics of a broker; empty if it does not answer or has no endpoint."""
    if not endpoint:
        return {}
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            readings = admin.role_info(endpoint)
    except MQMeshError:
        return {}
    return {key: readings.number(metric, default=0) for key, metric in _LOADS.items()}


def _print_more(rows: Iterable[dict[str, Any]]) -> None:
    print_table(
        ("BROKER", "ID", "ENDPOINT", "VERSION", "STATE", "IN/S", "OUT/S", "IN TODAY",
         "IN YESTERDAY", "OUT TODAY", "OUT YESTERDAY", "DISK", "OLDEST"),
        [
            (
                row["name"],
                str(row["broker_id"]),
                row["endpoint"],
                row["version"] or "-",
                state_text(row["state"]),
                *(
                    ("-",) * 8
                    if "in_per_s" not in row
                    else (
                        rate(row["in_per_s"]),
                        rate(row["out_per_s"]),
                        f"{row['in_today']:,.0f}",
                        f"{row['in_yesterday']:,.0f}",
                        f"{row['out_today']:,.0f}",
                        f"{row['out_yesterday']:,.0f}",
                        f"{row['disk_used_percent']:.0f} %",
                        timestamp(row["oldest_timestamp"]),
                    )
                ),
            )
            for row in rows
        ],
        optional=("OUT YESTERDAY", "IN YESTERDAY", "VERSION", "OLDEST", "OUT TODAY", "IN TODAY",
                  "ENDPOINT"),
    )  # fmt: skip


@cluster.command("report")
@_check
@namesrv_option
@json_option
def report(check: bool, namesrv: str, as_json: bool) -> int:
    """Tell per broker what it did in 24 hours, what it holds, and who its clients are.

    With --json, for reports that are kept.

    \b
    Examples:
      mqmesh cluster report --json > report.json
    """
    with BrokerAdmin(namesrv) as admin:
        names = sorted(masters_of(admin.cluster().brokers))
    with ThreadPoolExecutor(PINGS_AT_ONCE) as pool:
        rows = list(pool.map(partial(_report_on, namesrv), names))
    if as_json:
        print_json({"brokers": rows})
    else:
        print_table(
            ("BROKER", "VERSION", "IN/S 24 H", "OUT/S 24 H", "LOG", "TOPICS", "GROUPS", "CLIENTS"),
            [
                (
                    row["broker_name"],
                    row.get("version", "down"),
                    rate(row["put_messages_day_per_s"]) if "version" in row else "-",
                    rate(row["get_messages_day_per_s"]) if "version" in row else "-",
                    f"{row['store_disk_bytes'] / MIB:,.0f} MiB" if "version" in row else "-",
                    str(row.get("topics", "-")),
                    str(row.get("subscription_groups", "-")),
                    " ".join(f"{one}: {count}" for one, count in row["clients"].items()) or "-",
                )
                for row in rows
            ],
            optional=("VERSION", "GROUPS", "TOPICS", "LOG"),
        )
    is_whole = all("version" in row for row in rows)
    return ExitCode.FAILED if check and not is_whole else ExitCode.OK


_REPORTED: Final = (
    "put_messages_day_per_s", "get_messages_day_per_s", "put_messages_today",
    "put_messages_yesterday", "get_messages_today", "get_messages_yesterday", "put_bytes_total",
    "get_bytes_total", "store_disk_bytes", "store_disk_used_percent", "store_segments",
    "store_oldest_timestamp", "topics", "subscription_groups", "consumer_offsets", "uptime_ms",
)  # fmt: skip
"""Metrics of a report."""


def _report_on(namesrv: str, name: str) -> dict[str, Any]:
    """Reports on a broker; without ``version`` if it does not answer. Counts clients by version."""
    row: dict[str, Any] = {"broker_name": name, "clients": {}}
    try:
        with BrokerAdmin(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            endpoint = masters_of(admin.cluster().brokers)[name].tcp
            readings, clients = admin.role_info(endpoint), admin.clients(name)
            version = admin.ping(endpoint).version
    except (MQMeshError, KeyError):
        return row
    versions = Counter(f"{one.language} {one.version}".strip() for one in clients)
    metrics = {one: readings.number(one, default=0) for one in _REPORTED}
    return row | {"version": version, "clients": dict(sorted(versions.items())), **metrics}


def ping_role(namesrv: str, endpoint: str) -> RoleInfo | None:
    """Pings a process and returns its answer; None if none comes within a second."""
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            return admin.ping(endpoint)
    except MQMeshError:
        return None


def role_state(info: RoleInfo | None) -> dict[str, Any]:
    """Returns state, version, process and age; ``down`` for a process that did not answer."""
    return {
        "state": info.state if info else "down",
        "version": info.version if info else "",
        "pid": info.pid if info else 0,
        "uptime_ms": info.uptime_ms if info else 0,
    }
