"""Consumer groups: all of them, and one with its queues and members."""

from typing import Annotated

import msgspec

from mqmesh.aio import GroupAdmin, MemberClient
from mqmesh.console.page import Name, TableArguments, TablePage, Visit, table_page
from mqmesh.sdk.admin.views.groups import (
    ConsumersView,
    GroupSettingsView,
    ProgressView,
    RunningView,
    consumers_view,
    group_settings_view,
    group_views,
    progress_view,
    running_view,
)


class GroupRow(msgspec.Struct, frozen=True):
    """One consumer group; numbers are those of ``ConsumerGroupView``.

    Attributes:
        group: Name.
        message_model: ``CLUSTERING`` or ``BROADCASTING``; "" without members.
        members: Connected consumers.
        lag: Messages that are not done; None for a group that broadcasts.
        lag_ms: Waiting time of the oldest of them; None where the console may not see it.
        consume_tps: Messages handed out a second of late.
        retrying: Messages that failed and are not done.
        dead: Messages in its dead letter topic.
        failing: Share of deliveries in the last ten minutes whose listener failed, 0 to 1.
        differing: Members that subscribe differently from the group.
        consume_enable: Members may consume.
    """

    group: str
    message_model: str
    members: int
    lag: int | None
    lag_ms: int | None
    consume_tps: float
    retrying: int
    dead: int
    failing: float
    differing: int
    consume_enable: bool


class GroupArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of pages of one group.

    Attributes:
        group: Its name.
    """

    group: Name


class GroupDetails(msgspec.Struct, frozen=True):
    """One consumer group.

    Attributes:
        progress: Its progress, queue by queue.
        members: Connected consumers.
        settings: By broker.
    """

    progress: ProgressView
    members: ConsumersView
    settings: GroupSettingsView


class MemberArguments(GroupArguments, frozen=True, kw_only=True):
    """Arguments of the page of a member.

    Attributes:
        client_id: The member.
        stacks: Also where its threads and tasks stand.
    """

    client_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    stacks: bool = False


async def groups(visit: Visit, arguments: TableArguments) -> TablePage[GroupRow]:
    """Return one page of the groups."""
    async with visit.client(GroupAdmin) as admin:
        found = group_views(await admin.groups())
    waits = {one.group: one.lag_ms for one in visit.readings.groups} if visit.readings else {}
    rows = (
        GroupRow(
            one.group,
            one.message_model,
            one.members,
            one.lag,
            None if one.lag is None else waits.get(one.group),
            one.consume_tps,
            one.retrying,
            one.dead,
            one.recent_failures / max(one.recent_deliveries, 1),
            one.differing,
            one.consume_enable,
        )
        for one in found
    )
    return table_page(rows, arguments, ("group",), sort="group")


async def group(visit: Visit, arguments: GroupArguments) -> GroupDetails:
    """Return one group."""
    async with visit.client(GroupAdmin) as admin:
        progress = await admin.progress(arguments.group)
        members = await admin.connections(arguments.group)
        found = await admin.groups(arguments.group)
    configs = {name: one.config for name, (one,) in found.items()}
    return GroupDetails(
        progress_view(progress),
        consumers_view(arguments.group, members),
        group_settings_view(arguments.group, configs),
    )


async def member(visit: Visit, arguments: MemberArguments) -> RunningView:
    """Return a member's information about itself."""
    async with visit.client(MemberClient) as client:
        info = await client.running_info(
            arguments.group, arguments.client_id, with_stacks=arguments.stacks
        )
    return running_view(info)
