"""Clients of all brokers."""

from typing import Final

from mqmesh.console.page import ConsolePage, Route, TableArguments
from mqmesh.console.queries import clients as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/clients",
        nav="Clients",
        title="Clients",
        right=Right.VIEW,
        template="clients.html",
        arguments=queries.ClientsArguments,
        query=queries.clients,
        about="Producers and consumers: machine, language, version, silence, groups.",
    ),
    ConsolePage(
        path="/gateway",
        menu="/clients",
        title="Clients of RocketMQ",
        right=Right.VIEW,
        template="gateway.html",
        arguments=TableArguments,
        query=queries.gateway_clients,
        needs_view=True,
        about="Clients of RocketMQ at the gateways of this machine: user, address, language, "
        "version, groups, topics, silence.",
    ),
)
