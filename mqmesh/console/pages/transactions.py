"""Transactions: half messages that wait, one of them, commit and rollback."""

from typing import Final

from mqmesh.console.actions import transactions as actions
from mqmesh.console.page import ConsoleAction, ConsolePage, Route
from mqmesh.console.queries import transactions as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/transactions",
        nav="Transactions",
        title="Transactions",
        right=Right.VIEW,
        template="transactions.html",
        arguments=queries.TransactionsArguments,
        query=queries.transactions,
        about="Half messages that wait for their decision, and those that are parked.",
    ),
    ConsolePage(
        path="/transactions/{message_id}",
        title="Half message",
        right=Right.ADMIN,
        template="transaction.html",
        arguments=queries.HalfArguments,
        query=queries.transaction,
        about="One half message with its contents.",
    ),
    ConsoleAction(
        path="/transactions/{message_id}/commit",
        title="Commit a half message",
        verb="Commit",
        right=Right.ADMIN,
        arguments=actions.DecisionForm,
        plan=actions.plan_commit,
        do=actions.commit,
        about="A half message goes to its topic.",
    ),
    ConsoleAction(
        path="/transactions/{message_id}/rollback",
        title="Roll back a half message",
        verb="Roll back",
        danger=True,
        right=Right.ADMIN,
        arguments=actions.DecisionForm,
        plan=actions.plan_rollback,
        do=actions.rollback,
        about="A half message is dropped.",
    ),
)
