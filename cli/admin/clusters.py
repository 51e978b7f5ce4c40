"""`mqmesh cluster …`: clusters as their name servers know them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import click

from mqmesh.errors import MQMeshError
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import namesrv_addresses

from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, state_text
from .cluster_files import export_cluster, import_cluster
from .probe import probe_cluster

PING_TIMEOUT_MS: Final = 1_000
PINGS_AT_ONCE: Final = 16


@click.group()
def cluster() -> None:
    """Clusters as their name servers know them, whoever started them.

    \b
    Examples:
      mqmesh cluster list
      mqmesh cluster list --namesrv 10.0.0.1:9876,10.0.0.2:9876 --json
      mqmesh cluster export cluster.json
      mqmesh cluster import cluster.json --dry-run
    """


cluster.add_command(probe_cluster)
cluster.add_command(export_cluster)
cluster.add_command(import_cluster)


@cluster.command("list")
@namesrv_option
@json_option
def list_cluster(namesrv: str, as_json: bool) -> int:
    """List name servers and brokers, asking each how it is.

    Exit code 1 when one does not answer.
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
    for row, info in zip(rows, infos, strict=True):
        row.update(role_state(info))
        row["name"] = row["name"] or (info.name if info else "")
    if as_json:
        print_json(rows)
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
        )
    return ExitCode.OK if all(infos) else ExitCode.FAILED


def ping_role(namesrv: str, endpoint: str) -> RoleInfo | None:
    """What a process says of itself; None if it does not answer within a second."""
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            return admin.ping(endpoint)
    except MQMeshError:
        return None


def role_state(info: RoleInfo | None) -> dict[str, Any]:
    """State, version, process and age of a process; ``down`` for one that did not answer."""
    return {
        "state": info.state if info else "down",
        "version": info.version if info else "",
        "pid": info.pid if info else 0,
        "uptime_ms": info.uptime_ms if info else 0,
    }
