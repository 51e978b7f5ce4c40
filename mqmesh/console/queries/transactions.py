"""Half messages of transactions that wait for their decision, and one of them."""

from typing import Annotated, Literal

import msgspec

from mqmesh.aio import TransactionAdmin
from mqmesh.console.body_view import BodyKind, BodyView
from mqmesh.console.page import TableArguments, TablePage, Text, Visit, table_page
from mqmesh.console.queries.messages import shown_body
from mqmesh.protocol.transactions import MAX_LISTED
from mqmesh.sdk.admin.views.messages import (
    HalfMessageView,
    HalfView,
    half_message_view,
    half_messages_view,
)


class TransactionsArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of the list of half messages.

    Attributes:
        state: ``all`` that wait, or only those that are ``parked``.
        group: Only of this producer group; "" for all.
        topic: Only for this topic; "" for all.
    """

    state: Literal["all", "parked"] = "all"
    group: Text = ""
    topic: Text = ""


class HalfArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of pages of one half message.

    Attributes:
        message_id: Its id, 32 hex digits.
        kind: View of the body, if it can be read so; "" for the best one.
    """

    message_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    kind: BodyKind | Literal[""] = ""


class WaitingHalves(msgspec.Struct, frozen=True, kw_only=True):
    """Half messages that wait.

    Attributes:
        pending: All that wait and are not parked.
        parked: All that were checked in vain.
        table: The requested ones, oldest first.
    """

    pending: int
    parked: int
    table: TablePage[HalfView]


class HalfDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One half message.

    Attributes:
        half: Its fields; the body is in ``body``.
        body: View of the body; None where bodies are not shown.
    """

    half: HalfMessageView
    body: BodyView | None


async def transactions(visit: Visit, arguments: TransactionsArguments) -> WaitingHalves:
    """Return one page of the half messages that wait."""
    most = min(visit.config.max_query_messages, MAX_LISTED)
    async with visit.client(TransactionAdmin) as admin:
        found = half_messages_view(
            await admin.half_messages(
                group=arguments.group,
                topic=arguments.topic,
                parked=arguments.state == "parked",
                max_count=most,
            )
        )
    is_cut = len(found.messages) == most
    cut = f"These are the {most:,} oldest: name a group or topic." if is_cut else ""
    return WaitingHalves(
        pending=found.pending,
        parked=found.parked,
        table=table_page(found.messages, arguments, cut=cut),
    )


async def transaction(visit: Visit, arguments: HalfArguments) -> HalfDetails:
    """Return one half message with its contents."""
    async with visit.client(TransactionAdmin) as admin:
        found = await admin.half_message(arguments.message_id)
    assert found.message is not None
    shown = msgspec.structs.replace(half_message_view(found), body=None, body_base64=None)
    return HalfDetails(
        half=shown, body=shown_body(visit, bytes(found.message.body), arguments.kind)
    )
