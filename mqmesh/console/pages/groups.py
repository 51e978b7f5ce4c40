"""Consumer groups: list, one of them, its members, and their actions."""

from typing import Final

from mqmesh.console.actions import groups as actions
from mqmesh.console.page import ConsoleAction, ConsolePage, Route, TableArguments
from mqmesh.console.queries import groups as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/groups",
        nav="Groups",
        title="Groups",
        right=Right.VIEW,
        template="groups.html",
        arguments=TableArguments,
        query=queries.groups,
        about="Consumer groups: lag, rate, retries, dead letters, members.",
    ),
    ConsolePage(
        path="/groups/{group}",
        title="Group {group}",
        right=Right.VIEW_OWN,
        template="group.html",
        arguments=queries.GroupArguments,
        query=queries.group,
        about="One group: progress by queue, members, settings.",
    ),
    ConsolePage(
        path="/groups/{group}/member",
        title="Member of {group}",
        right=Right.ADMIN,
        template="member.html",
        arguments=queries.MemberArguments,
        query=queries.member,
        about="What a member says of itself: queues, work, settings, stacks.",
    ),
    ConsoleAction(
        path="/new/group",
        title="New group",
        verb="Create",
        right=Right.ADMIN,
        arguments=actions.NewGroupForm,
        plan=actions.plan_create,
        do=actions.create,
    ),
    ConsoleAction(
        path="/groups/{group}/settings",
        title="Settings of group {group}",
        verb="Apply",
        right=Right.ADMIN,
        arguments=actions.GroupForm,
        initial=actions.initial_settings,
        plan=actions.plan_settings,
        do=actions.put_settings,
    ),
    ConsoleAction(
        path="/groups/{group}/reset",
        title="Reset group {group}",
        verb="Reset",
        right=Right.ADMIN_OWN,
        arguments=actions.ResetForm,
        initial=actions.initial_topic,
        plan=actions.plan_reset,
        do=actions.reset,
    ),
    ConsoleAction(
        path="/groups/{group}/skip",
        title="Skip the backlog of group {group}",
        verb="Skip",
        danger=True,
        right=Right.ADMIN_OWN,
        arguments=actions.SkipForm,
        plan=actions.plan_skip,
        do=actions.skip,
    ),
    ConsoleAction(
        path="/groups/{group}/clone",
        title="Clone group {group}",
        verb="Clone",
        right=Right.ADMIN,
        arguments=actions.CloneForm,
        plan=actions.plan_clone,
        do=actions.clone,
    ),
    ConsoleAction(
        path="/groups/{group}/delete",
        title="Delete group {group}",
        verb="Delete",
        danger=True,
        right=Right.ADMIN,
        arguments=actions.DeleteGroupForm,
        plan=actions.plan_delete,
        do=actions.delete,
    ),
)
