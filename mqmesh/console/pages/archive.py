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
    ConsolePage(
        path="/archive/find",
        title="Look up in the archive",
        right=Right.SUB,
        template="archive_find.html",
        arguments=queries.FindArguments,
        query=queries.find,
        needs_view=True,
        about="Messages of the archive by topic, key, id and time.",
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
