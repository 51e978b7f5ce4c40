"""Snapshots of brokers: make one."""

from typing import Any

import msgspec

from mqmesh.aio import AdminClient
from mqmesh.console.forms import Choices
from mqmesh.console.page import ActionPlan, ActionResult, Name, Visit
from mqmesh.sdk.admin.admin import masters_of


class SnapshotForm(msgspec.Struct, frozen=True, kw_only=True):
    """A broker group whose master makes a snapshot."""

    broker_name: Name


async def initial_broker(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the broker groups, to choose one."""
    async with visit.client(AdminClient) as admin:
        names = tuple(sorted(masters_of((await admin.cluster()).brokers)))
    return {"broker_name": Choices(names[0] if names else "", names)}


async def plan_create(visit: Visit, form: SnapshotForm) -> ActionPlan:
    """Describe a snapshot."""
    return ActionPlan(
        summary=f"{form.broker_name} makes a snapshot while it goes on.",
        details=(
            "It lies on the broker's machine, in snapshot.root_dir.",
            "On the file system of the store it is made of links: little time, little room.",
        ),
    )


async def create(visit: Visit, form: SnapshotForm) -> ActionResult:
    """Have a broker make a snapshot."""
    async with visit.client(AdminClient) as admin:
        made = await admin.create_snapshot(form.broker_name)
    return ActionResult(
        summary=f"{made.messages:,} messages are in {made.path}.",
        details=(f"It took {made.took_ms / 1_000:.1f} s.",),
    )
