"""Clients: producers and consumers that are registered at brokers."""

from typing import Literal

import msgspec

from mqmesh.aio import AdminClient, BrokerAdmin
from mqmesh.console.page import TableArguments, TablePage, Visit, table_page
from mqmesh.console.queries.cluster import data_dir_of
from mqmesh.errors import MQMeshError, NoPermission
from mqmesh.protocol.groups import ClientInfo
from mqmesh.roles.exporter.run_files import gateways_beside
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.sdk.admin.views.clusters import GatewayClientView, gateway_client_views


class ClientsArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of the list of clients.

    Attributes:
        kind: Only clients that send, or consume; ``all`` for all.
    """

    kind: Literal["all", "producers", "consumers"] = "all"


class ClientRow(msgspec.Struct, frozen=True, kw_only=True):
    """One client.

    Attributes:
        client_id: Client id: its machine, process and instance.
        machine: Name of its machine.
        pid: Its process, 0 for unknown.
        language: As it says.
        version: mqmesh version of it.
        connected: A broker has a connection of it.
        silent_ms: Since its last sign of life at a broker.
        producer_groups: Groups that it sends for.
        consumer_groups: Groups that it consumes for.
        brokers: Broker groups that know it.
    """

    client_id: str
    machine: str
    pid: int
    language: str
    version: str
    connected: bool
    silent_ms: int
    producer_groups: list[str]
    consumer_groups: list[str]
    brokers: list[str]


async def clients(visit: Visit, arguments: ClientsArguments) -> TablePage[ClientRow]:
    """Return one page of the clients."""
    found: dict[str, list[tuple[str, ClientInfo]]] = {}
    silent: list[str] = []
    async with visit.client(BrokerAdmin) as admin:
        masters = sorted(masters_of((await admin.cluster()).brokers))
        for broker_name in masters:
            try:
                known = await admin.clients(broker_name)
            except NoPermission:
                raise
            except MQMeshError:
                if len(masters) == 1:
                    raise
                silent.append(broker_name)
                continue
            for one in known:
                found.setdefault(one.client_id, []).append((broker_name, one))
    rows = (client_row(client_id, of) for client_id, of in found.items())
    kept = (
        one
        for one in rows
        if arguments.kind == "all"
        or (one.producer_groups if arguments.kind == "producers" else one.consumer_groups)
    )
    searched = ("client_id", "language", "version", "producer_groups", "consumer_groups")
    cut = f"no answer of {', '.join(silent)}: their clients are missing" if silent else ""
    return table_page(kept, arguments, searched, sort="client_id", cut=cut)


async def gateway_clients(visit: Visit, arguments: TableArguments) -> TablePage[GatewayClientView]:
    """Return one page of RocketMQ's clients, at the gateways of this machine."""
    rows: list[GatewayClientView] = []
    silent: list[str] = []
    async with visit.client(AdminClient) as admin:
        for name, endpoint in gateways_beside(data_dir_of(visit)):
            try:
                rows += gateway_client_views(name, await admin.gateway_clients(endpoint))
            except NoPermission:
                raise
            except MQMeshError:
                silent.append(name)
    searched = ("client_id", "user", "address", "producer_groups", "consumer_groups", "topics")
    cut = f"no answer of {', '.join(silent)}: their clients are missing" if silent else ""
    return table_page(rows, arguments, searched, sort="client_id", cut=cut)


def client_row(client_id: str, known: list[tuple[str, ClientInfo]]) -> ClientRow:
    """Make the row of a client.

    Args:
        client_id: Its id: ``machine:pid@instance#number``, where it is mqmesh's.
        known: Broker groups that know it, with their information about it.
    """
    machine, _, rest = client_id.partition("@")[0].rpartition(":")
    infos = [one for _, one in known]
    return ClientRow(
        client_id=client_id,
        machine=machine,
        pid=int(rest) if machine and rest.isascii() and rest.isdecimal() else 0,
        language=infos[0].language,
        version=infos[0].version,
        connected=any(one.connected for one in infos),
        silent_ms=min(one.silent_ms for one in infos),
        producer_groups=sorted({group for one in infos for group in one.producer_groups}),
        consumer_groups=sorted({group for one in infos for group in one.consumer_groups}),
        brokers=[broker_name for broker_name, _ in known],
    )
