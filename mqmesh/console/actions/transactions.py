"""Decisions about half messages: commit, rollback."""

from typing import Annotated

import msgspec

from mqmesh.aio import TransactionAdmin
from mqmesh.console.page import ActionPlan, ActionResult, Visit
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk.admin.transaction_admin import HalfMessage


class DecisionForm(msgspec.Struct, frozen=True, kw_only=True):
    """Half message to decide about."""

    message_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


async def plan_commit(visit: Visit, form: DecisionForm) -> ActionPlan:
    """Say where the message goes."""
    half = await _half(visit, form)
    return ActionPlan(
        summary=f"Message {half.info.message_id} is committed: topic {half.info.topic} gets it.",
        details=_known(half),
        warning="Commit only if the local transaction is known to be done. "
        "It cannot be taken back.",
    )


async def plan_rollback(visit: Visit, form: DecisionForm) -> ActionPlan:
    """Say that no consumer gets the message."""
    half = await _half(visit, form)
    return ActionPlan(
        summary=f"Message {half.info.message_id} is rolled back: topic {half.info.topic} never "
        "gets it.",
        details=_known(half),
        warning="Roll back only if the local transaction is known not to have happened. "
        "The message is lost.",
    )


async def commit(visit: Visit, form: DecisionForm) -> ActionResult:
    """Commit a half message."""
    return await _end(visit, form, Decision.COMMIT, "committed")


async def rollback(visit: Visit, form: DecisionForm) -> ActionResult:
    """Roll a half message back."""
    return await _end(visit, form, Decision.ROLLBACK, "rolled back")


async def _half(visit: Visit, form: DecisionForm) -> HalfMessage:
    async with visit.client(TransactionAdmin) as admin:
        return await admin.half_message(form.message_id)


def _known(half: HalfMessage) -> tuple[str, ...]:
    info = half.info
    text = f"Group {info.group} was asked about it {info.check_times} times"
    if half.is_parked:
        return (f"{text}, in vain; nobody is asked any more.",)
    return (f"{text}; {info.live_members} of its members are connected.",)


async def _end(visit: Visit, form: DecisionForm, decision: Decision, done: str) -> ActionResult:
    async with visit.client(TransactionAdmin) as admin:
        where = await admin.end_half_message(form.message_id, decision)
    return ActionResult(
        summary=f"Message {form.message_id} is {done} at {where}.", next="/transactions"
    )
