"""Actions on messages: download of a body, and handing one to a member of a group."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from mqmesh.aio import MemberClient, QueryClient
from mqmesh.console.forms import Choices
from mqmesh.console.page import ActionPlan, ActionResult, Visit
from mqmesh.console.queries.messages import (
    MessageArguments,
    MessageId,
    check_bodies_shown,
    stored_message,
)
from mqmesh.errors import InvalidArgument
from mqmesh.protocol.client_rpc import HandedResult
from mqmesh.protocol.membership import MessageModel

PART_BYTES = 65_536


class HandToForm(msgspec.Struct, frozen=True, kw_only=True):
    """Member that gets a message."""

    message_id: MessageId
    member: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            max_length=1_024,
            title="Member",
            description="Group and client of a member that runs, with a space between.",
        ),
    ]


async def body(visit: Visit, form: MessageArguments) -> AsyncIterator[bytes]:
    """Yield the body of a message.

    Raises:
        NoPermission: The console shows no bodies.
    """
    check_bodies_shown(visit)
    async with visit.client(QueryClient) as client:
        whole = bytes((await stored_message(client, form.message_id)).body)
    for begin in range(0, len(whole), PART_BYTES):
        yield whole[begin : begin + PART_BYTES]


async def initial_member(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the members of groups that read the message's topic, to choose one."""
    async with visit.client(MemberClient) as client:
        topic = (await stored_message(client, fixed["message_id"])).topic
        found = [
            f"{group} {one.client_id}"
            for group in await client.topic_consumers(topic)
            for one in await client.connections(group)
            if one.data.message_model != MessageModel.BROADCASTING
        ]
    return {"member": Choices(found[0], tuple(found))} if found else {}


async def plan_hand_to(visit: Visit, form: HandToForm) -> ActionPlan:
    """Say who gets the message."""
    group, client_id = _member(form)
    async with visit.client(QueryClient) as client:
        found = await stored_message(client, form.message_id)
    return ActionPlan(
        summary=f"Message {found.message_id} of topic {found.topic} is handed to one member of "
        f"group {group}: {client_id}.",
        details=(
            "Its listener is called at once. No offset moves, and nothing is retried.",
            "The answer comes within 10 s.",
        ),
        warning="A message that the group has consumed already is consumed once more.",
    )


async def hand_to(visit: Visit, form: HandToForm) -> ActionResult:
    """Have a member consume the message."""
    group, client_id = _member(form)
    async with visit.client(MemberClient) as client:
        done = await client.hand_to(form.message_id, group, client_id)
    return ActionResult(
        summary=f"{done.result} after {done.took_ms:,} ms",
        details=(done.text,) if done.text else (),
        ok=done.result == HandedResult.SUCCESS,
    )


def _member(form: HandToForm) -> tuple[str, str]:
    group, _, client_id = form.member.partition(" ")
    if not client_id:
        raise InvalidArgument(f"member {form.member!r} is not a group and a client")
    return group, client_id
