"""Snapshots of brokers."""

from typing import Final

from mqmesh.console.actions import archive as actions
from mqmesh.console.page import ConsoleAction, ConsolePage, Route, TableArguments
from mqmesh.console.queries import archive as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/archive",
        nav="Archive",
        title="Archive",
        right=Right.VIEW,
        template="archive.html",
        arguments=TableArguments,
        query=queries.archive,
        about="Snapshots of brokers, where they are on the console's machine.",
    ),
    ConsoleAction(
        path="/new/snapshot",
        title="New snapshot",
        verb="Make",
        right=Right.ADMIN,
        arguments=actions.SnapshotForm,
        initial=actions.initial_broker,
        plan=actions.plan_create,
        do=actions.create,
    ),
)
