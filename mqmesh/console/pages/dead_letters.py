"""Dead letters: groups, those of one group, resend, export, purge."""

from typing import Final

from mqmesh.console.actions import dead_letters as actions
from mqmesh.console.page import (
    ConsoleAction,
    ConsoleDownload,
    ConsolePage,
    Route,
    TableArguments,
)
from mqmesh.console.queries import dead_letters as queries
from mqmesh.console.queries.groups import GroupArguments
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/dead-letters",
        nav="Dead letters",
        title="Dead letters",
        right=Right.VIEW,
        template="dead_letters.html",
        arguments=TableArguments,
        query=queries.groups,
        about="Groups with dead letters: how many, how old, and the last reason.",
    ),
    ConsolePage(
        path="/dead-letters/{group}",
        title="Dead letters of {group}",
        right=Right.ADMIN_OWN,
        template="letters.html",
        arguments=queries.LettersArguments,
        query=queries.letters,
        about="Dead letters of a group by topic, tag, key, reason and time.",
    ),
    ConsoleAction(
        path="/dead-letters/{group}/resend",
        title="Resend dead letters of {group}",
        verb="Resend",
        right=Right.ADMIN_OWN,
        arguments=actions.ResendForm,
        plan=actions.plan_resend,
        do=actions.resend,
        about="Dead letters get another chance, each once unless it is forced.",
    ),
    ConsoleDownload(
        path="/dead-letters/{group}/export.jsonl",
        title="Export as JSON lines",
        right=Right.ADMIN_OWN,
        arguments=queries.LetterChoice,
        filename="dead-letters.jsonl",
        content=actions.json_lines,
        about="Dead letters as `mqmesh dlq export` writes them.",
    ),
    ConsoleDownload(
        path="/dead-letters/{group}/export.csv",
        title="Export as CSV",
        right=Right.ADMIN_OWN,
        arguments=queries.LetterChoice,
        filename="dead-letters.csv",
        content=actions.csv_rows,
        about="Dead letters as CSV.",
    ),
    ConsoleAction(
        path="/dead-letters/{group}/purge",
        title="Purge dead letters of {group}",
        verb="Purge",
        danger=True,
        right=Right.ADMIN,
        arguments=GroupArguments,
        plan=actions.plan_purge,
        do=actions.purge,
        about="All dead letters of a group are deleted.",
    ),
)
