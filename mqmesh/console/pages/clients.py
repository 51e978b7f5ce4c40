"""Clients of all brokers."""

from typing import Final

from mqmesh.console.page import ConsolePage, Route
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
)
