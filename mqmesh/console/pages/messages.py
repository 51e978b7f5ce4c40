"""Messages: search, one of them, its body, and handing it to a member."""

from typing import Final

from mqmesh.console.actions import messages as actions
from mqmesh.console.page import ConsoleAction, ConsoleDownload, ConsolePage, Route
from mqmesh.console.queries import messages as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/messages",
        nav="Messages",
        title="Messages",
        right=Right.SUB,
        template="messages.html",
        arguments=queries.MessagesArguments,
        query=queries.messages,
        about="Messages by id, key, queue, or topic and time, with filters.",
    ),
    ConsolePage(
        path="/messages/{message_id}",
        title="Message",
        right=Right.SUB,
        template="message.html",
        arguments=queries.MessageArguments,
        query=queries.message,
        about="One message: all fields, a view of its body, its track by group, its trace.",
    ),
    ConsoleDownload(
        path="/messages/{message_id}/body",
        title="Body",
        right=Right.SUB,
        arguments=queries.MessageArguments,
        filename="body.bin",
        content=actions.body,
        about="The whole body of a message.",
    ),
    ConsoleAction(
        path="/messages/{message_id}/hand-to",
        title="Hand the message to one client",
        verb="Hand over",
        right=Right.ADMIN,
        arguments=actions.HandToForm,
        initial=actions.initial_member,
        plan=actions.plan_hand_to,
        do=actions.hand_to,
        about="One member of a group consumes the message at once.",
    ),
)
