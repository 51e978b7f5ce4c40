"""Cancelling of delayed messages."""

import msgspec

from mqmesh.aio import DelayClient, TrackClient
from mqmesh.console.page import ActionPlan, ActionResult, Visit
from mqmesh.console.queries.messages import MessageId


class CancelForm(msgspec.Struct, frozen=True, kw_only=True):
    """Delayed message to cancel."""

    message_id: MessageId


async def plan_cancel(visit: Visit, form: CancelForm) -> ActionPlan:
    """Describe the message that is never delivered."""
    async with visit.client(TrackClient) as client:
        track = await client.track(form.message_id)
    if not track.due_ms and all(not one.due_ms for one in track.tracks):
        return ActionPlan(
            summary=f"Message {form.message_id} does not wait: it was delivered, or never was "
            "delayed.",
            possible=False,
        )
    topic = track.copies[0].topic
    return ActionPlan(
        summary=f"Message {form.message_id} to topic {topic} is cancelled.",
        warning="It is never delivered.",
    )


async def cancel(visit: Visit, form: CancelForm) -> ActionResult:
    """Cancel a delayed message."""
    async with visit.client(DelayClient) as client:
        where = await client.cancel(form.message_id)
    return ActionResult(
        summary=f"Message {form.message_id} is cancelled at {', '.join(where)}.",
        next="/delayed",
    )
