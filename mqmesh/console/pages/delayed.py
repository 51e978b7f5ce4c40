"""Delayed messages: list, and cancelling."""

from typing import Final

from mqmesh.console.actions import delayed as actions
from mqmesh.console.page import ConsoleAction, ConsolePage, Route
from mqmesh.console.queries import delayed as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/delayed",
        nav="Delayed",
        title="Delayed messages",
        right=Right.ADMIN,
        template="delayed.html",
        arguments=queries.DelayedArguments,
        query=queries.delayed,
        about="Delayed messages that wait, those due next first.",
    ),
    ConsoleAction(
        path="/delayed/{message_id}/cancel",
        title="Cancel a delayed message",
        verb="Cancel it",
        right=Right.PUB,
        danger=True,
        arguments=actions.CancelForm,
        plan=actions.plan_cancel,
        do=actions.cancel,
        about="A delayed message is never delivered.",
    ),
)
