"""`mqmesh cluster list`, `mqmesh broker show`: clusters as their name servers know them."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import click

from mqmesh.errors import MQMeshError
from mqmesh.figures import Distribution, FigureReading, FigureValue
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import namesrv_addresses

from ..notes import tell_error
from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, state_text

PING_TIMEOUT_MS: Final = 1_000
PINGS_AT_ONCE: Final = 16


@click.group()
def cluster() -> None:
    """Clusters as their name servers know them, whoever started them.

    \b
    Examples:
      mqmesh cluster list
      mqmesh cluster list --namesrv 10.0.0.1:9876,10.0.0.2:9876 --json
    """


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
        infos = list(pool.map(partial(_ping, namesrv), (row["endpoint"] for row in rows)))
    for row, info in zip(rows, infos, strict=True):
        row.update(_state(info))
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


def show_broker(name: str, namesrv: str, as_json: bool) -> int:
    """Shows a broker: where it is, how it is, and its figures.

    Args:
        name: Broker group.
        namesrv: Name servers.
        as_json: Answer in JSON.

    Returns:
        Exit code.
    """
    with AdminClient(namesrv) as admin:
        groups = {one.broker_name: one for one in admin.cluster().brokers}
        if name not in groups:
            known = ", ".join(sorted(groups)) or "there are none"
            tell_error(f"the name servers know no broker {name!r} ({known})")
            return ExitCode.FAILED
        figures = admin.runtime_info(name)[name]
    group = groups[name]
    infos = {
        broker_id: _ping(namesrv, address.tcp)
        for broker_id, address in sorted(group.addresses.items())
    }
    members: list[dict[str, Any]] = [
        {
            "role": "broker",
            "cluster": group.cluster_name,
            "name": name,
            "broker_id": broker_id,
            "endpoint": group.addresses[broker_id].tcp,
        }
        | _state(info)
        for broker_id, info in infos.items()
    ]
    if as_json:
        print_json({"broker_name": name, "members": members, "figures": figures_as_json(figures)})
        return ExitCode.OK
    for one in members:
        click.echo(
            f"broker {name} of {group.cluster_name}, id {one['broker_id']}, at {one['endpoint']}: "
            f"{one['state']} for {duration(one['uptime_ms'])}, version {one['version'] or '-'}"
        )
    print_table(("FIGURE", "OF", "VALUE", "UNIT"), figure_rows(figures))
    return ExitCode.OK


def figures_as_json(readings: Iterable[FigureReading]) -> dict[str, Any]:
    """Figures by name: what each is, and its ``value``, or ``values`` with their labels."""
    shown: dict[str, Any] = {}
    for figure, samples in ((one.figure, one.samples) for one in readings):
        told: dict[str, Any] = {"kind": figure.kind, "unit": figure.unit, "help": figure.help}
        if figure.metric:
            told["metric"] = figure.metric
        values = [_plain(one.value) for one in samples]
        if figure.labels:
            labels = [dict(zip(figure.labels, one.labels, strict=True)) for one in samples]
            pairs = zip(labels, values, strict=True)
            told["values"] = [{"labels": label, "value": value} for label, value in pairs]
        else:
            (told["value"],) = values
        shown[figure.name] = told
    return shown


def figure_rows(readings: Iterable[FigureReading]) -> list[tuple[str, str, str, str]]:
    """Figures for a table: name, labels, value and unit; sorted by name."""
    return [
        (reading.figure.name, " ".join(one.labels), _shown(one.value), reading.figure.unit)
        for reading in sorted(readings, key=lambda one: one.figure.name)
        for one in reading.samples
    ]


def _plain(value: FigureValue) -> Any:
    if not isinstance(value, Distribution):
        return value
    return {"bounds": value.bounds, "counts": value.counts, "total": value.total}


def _shown(value: FigureValue) -> str:
    if isinstance(value, Distribution):
        middle, high = value.quantile(0.5), value.quantile(0.99)
        return f"{value.count}, half within {middle:g}, 99 % within {high:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ping(namesrv: str, endpoint: str) -> RoleInfo | None:
    try:
        with AdminClient(namesrv, timeout_ms=PING_TIMEOUT_MS) as admin:
            return admin.ping(endpoint)
    except MQMeshError:
        return None


def _state(info: RoleInfo | None) -> dict[str, Any]:
    return {
        "state": info.state if info else "down",
        "version": info.version if info else "",
        "pid": info.pid if info else 0,
        "uptime_ms": info.uptime_ms if info else 0,
    }
