"""Actions on the access list: users, their rules, keys and quotas, each with a diff first."""

import datetime
import difflib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from mqmesh.aio import AccessClient
from mqmesh.console.forms import Choices
from mqmesh.console.page import ActionPlan, ActionResult, ActionTable, Name, Text, Visit
from mqmesh.console.queries.access import UserArguments, fingerprint, read_list, today_of
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import TRACE_TOPIC
from mqmesh.security.access_list import (
    MAX_RATE,
    AccessList,
    Action,
    Quota,
    Rule,
    User,
    UserRole,
    read_access_list,
    write_access_list,
)

NAMES_HELP = "Names, separated by commas; orders* for all that begin so, * for all."

Names = Annotated[str, msgspec.Meta(max_length=100_000)]
PublicKey = Annotated[
    Text,
    msgspec.Meta(
        title="Public key",
        description="As `mqmesh key generate --user NAME -o FILE` prints it. The secret half stays "
        "in that file.",
    ),
]
Rate = Annotated[int, msgspec.Meta(ge=0, le=MAX_RATE)]


class NewUserForm(msgspec.Struct, frozen=True, kw_only=True):
    """A new user."""

    name: Annotated[Name, msgspec.Meta(title="Name")]
    key: PublicKey
    role: Annotated[UserRole, msgspec.Meta(title="Role")] = UserRole.NONE
    publishes: Annotated[Names, msgspec.Meta(title="May send to", description=NAMES_HELP)] = ""
    subscribes: Annotated[Names, msgspec.Meta(title="May read", description=NAMES_HELP)] = ""
    groups: Annotated[Names, msgspec.Meta(title="As consumer groups", description=NAMES_HELP)] = ""


class UserForm(msgspec.Struct, frozen=True, kw_only=True):
    """Role, term and quota of a user."""

    name: Name
    role: Annotated[UserRole, msgspec.Meta(title="Role")]
    enabled: Annotated[bool, msgspec.Meta(title="Enabled")] = True
    expires: Annotated[
        Text,
        msgspec.Meta(
            title="Expires", description="First day, by UTC, on which nobody is it: 2027-12-31."
        ),
    ] = ""
    send_messages_per_s: Annotated[
        Rate, msgspec.Meta(title="Sent messages a second", description="To a broker; 0: no limit.")
    ] = 0
    send_bytes_per_s: Annotated[Rate, msgspec.Meta(title="Sent bytes a second")] = 0
    read_messages_per_s: Annotated[Rate, msgspec.Meta(title="Read messages a second")] = 0
    read_bytes_per_s: Annotated[Rate, msgspec.Meta(title="Read bytes a second")] = 0
    connections: Annotated[
        int, msgspec.Meta(ge=0, le=1_000_000, title="Connections", description="To each server.")
    ] = 0


class RuleForm(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of a user."""

    name: Name
    effect: Annotated[Literal["allow", "deny"], msgspec.Meta(title="Effect")] = "allow"
    number: Annotated[
        int,
        msgspec.Meta(ge=0, le=1_000, title="Number", description="Rule to replace; 0: a new one."),
    ] = 0
    actions: Annotated[
        Text,
        msgspec.Meta(
            title="Actions",
            description="PUB: send; SUB: read, as groups; CREATE: topics by sending; FILTER.",
        ),
    ] = "PUB"
    topics: Annotated[Names, msgspec.Meta(title="Topics", description=NAMES_HELP)] = ""
    groups: Annotated[Names, msgspec.Meta(title="Groups", description=NAMES_HELP)] = ""


class DeleteRuleForm(msgspec.Struct, frozen=True, kw_only=True):
    """Deletion of a rule."""

    name: Name
    effect: Annotated[Literal["allow", "deny"], msgspec.Meta(title="Effect")] = "allow"
    number: Annotated[int, msgspec.Meta(ge=1, le=1_000, title="Number")] = 1


class AddKeyForm(msgspec.Struct, frozen=True, kw_only=True):
    """A further key of a user."""

    name: Name
    key: PublicKey


class RemoveKeyForm(msgspec.Struct, frozen=True, kw_only=True):
    """Removal of a key of a user."""

    name: Name
    key: Annotated[Text, msgspec.Meta(title="Key", description="Its fingerprint.")]


async def _plan(
    visit: Visit,
    name: str,
    change: Callable[[AccessList], AccessList],
    summary: str,
    *,
    warning: str = "",
    typed: str = "",
) -> ActionPlan:
    """Describe the effect of a change of the list on one user, line by line."""
    now = await read_list(visit)
    new = change(now)
    _text_of(new, visit)
    before, after = _lines(now, name), _lines(new, name)
    if before == after:
        return ActionPlan(summary="Nothing changes.", possible=False)
    diff = list(difflib.unified_diff(before, after, n=3, lineterm=""))[2:]
    rows: list[tuple[Any, ...]] = [
        ("", "…") if line.startswith("@@") else (line[0].strip(), line[1:]) for line in diff
    ]
    return ActionPlan(
        summary=summary,
        details=(f"The access list becomes version {new.version}, at all roles.",),
        table=ActionTable(columns=("", f"User {name}"), rows=rows),
        warning=warning,
        typed=typed,
    )


async def _put(
    visit: Visit, change: Callable[[AccessList], AccessList], summary: str, next_path: str = ""
) -> ActionResult:
    new = change(await read_list(visit))
    async with visit.client(AccessClient) as client:
        failed = await client.put_access_list(_text_of(new, visit), new.version - 1)
    return ActionResult(
        summary=f"{summary} The access list is version {new.version}.",
        details=tuple(f"{one.where} has the former list still: {one.problem}" for one in failed),
        ok=not failed,
        next=next_path,
    )


def _text_of(new: AccessList, visit: Visit) -> str:
    """Return the text of a list, checked as servers will."""
    text = write_access_list(new)
    read_access_list(text, "the access list", today_of(visit))
    return text


def _lines(access_list: AccessList, name: str) -> list[str]:
    """Return a user as the list has it, with fingerprints in place of keys."""
    user = next((one for one in access_list.user if one.name == name), None)
    if user is None:
        return []
    text = write_access_list(AccessList(1, [user]))
    for key in user.keys:
        text = text.replace(key, fingerprint(key))
    lines = text.splitlines()
    return [line for line in lines if line and line not in ("version = 1", "[[user]]")]


def _names(text: str) -> list[str]:
    return [one for part in text.split(",") if (one := part.strip())]


# ---- Users -------------------------------------------------------------------------------


def _with_new_user(form: NewUserForm) -> Callable[[AccessList], AccessList]:
    rules = [
        Rule([action], _names(topics), _names(groups))
        for action, topics, groups in (
            (Action.PUB, form.publishes, ""),
            (Action.SUB, form.subscribes, form.groups),
        )
        if _names(topics) or _names(groups)
    ]
    if rules:
        rules.append(Rule([Action.PUB, Action.CREATE], [TRACE_TOPIC]))

    def change(now: AccessList) -> AccessList:
        if any(one.name == form.name for one in now.user):
            raise InvalidArgument(f"there is a user {form.name!r} already")
        return now.with_user(User(form.name, [form.key.strip()], form.role, allow=rules))

    return change


async def plan_add(visit: Visit, form: NewUserForm) -> ActionPlan:
    """Describe the rights of the new user."""
    return await _plan(visit, form.name, _with_new_user(form), f"User {form.name} is new.")


async def add(visit: Visit, form: NewUserForm) -> ActionResult:
    """Add a user."""
    summary = f"User {form.name} is added."
    return await _put(visit, _with_new_user(form), summary, "/access")


async def initial_user(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the rights and limits of a user."""
    user = (await read_list(visit)).find(fixed["name"])
    quota = msgspec.structs.asdict(user.quota or Quota())
    return {
        "role": user.role.value,
        "enabled": user.enabled,
        "expires": "" if user.expires is None else user.expires.isoformat(),
    } | {name: value or 0 for name, value in quota.items()}


def _with_user(form: UserForm) -> Callable[[AccessList], AccessList]:
    limits = {name: getattr(form, name) or None for name in Quota.__struct_fields__}
    quota = Quota(**limits) if any(limits.values()) else None
    try:
        expires = datetime.date.fromisoformat(form.expires) if form.expires else None
    except ValueError:
        raise InvalidArgument(f"expires: {form.expires!r} is no day; write 2027-12-31") from None
    return lambda now: now.with_user(
        msgspec.structs.replace(
            now.find(form.name),
            role=form.role,
            enabled=form.enabled,
            expires=expires,
            quota=quota,
        )
    )


async def plan_change(visit: Visit, form: UserForm) -> ActionPlan:
    """Describe the changes."""
    warning = "" if form.enabled else "Its connections end."
    summary = f"User {form.name} changes."
    return await _plan(visit, form.name, _with_user(form), summary, warning=warning)


async def change(visit: Visit, form: UserForm) -> ActionResult:
    """Change role, term and quota of a user."""
    return await _put(visit, _with_user(form), f"User {form.name} is changed.")


async def plan_delete(visit: Visit, form: UserArguments) -> ActionPlan:
    """Describe the loss."""
    return await _plan(
        visit,
        form.name,
        lambda now: now.without_user(form.name),
        f"User {form.name} is deleted with its keys.",
        warning="Its connections end.",
        typed=form.name,
    )


async def delete(visit: Visit, form: UserArguments) -> ActionResult:
    """Delete a user."""
    summary = f"User {form.name} is deleted."
    return await _put(visit, lambda now: now.without_user(form.name), summary, "/access")


# ---- Rules -------------------------------------------------------------------------------


def _with_rule(form: RuleForm) -> Callable[[AccessList], AccessList]:
    try:
        actions = [Action(one.upper()) for one in _names(form.actions)]
    except ValueError as error:
        raise InvalidArgument(f"actions: {error}; there are {', '.join(Action)}") from None
    if not actions:
        raise InvalidArgument(f"actions: write at least one of {', '.join(Action)}")
    rule = Rule(actions, _names(form.topics), _names(form.groups))

    def change(now: AccessList) -> AccessList:
        user = now.find(form.name)
        rules = [*getattr(user, form.effect)]
        if form.number:
            _check_number(user, form.effect, form.number)
            rules[form.number - 1] = rule
        else:
            rules.append(rule)
        return now.with_user(msgspec.structs.replace(user, **{form.effect: rules}))

    return change


def _without_rule(form: DeleteRuleForm) -> Callable[[AccessList], AccessList]:
    def change(now: AccessList) -> AccessList:
        user = now.find(form.name)
        _check_number(user, form.effect, form.number)
        rules = [*getattr(user, form.effect)]
        del rules[form.number - 1]
        return now.with_user(msgspec.structs.replace(user, **{form.effect: rules}))

    return change


def _check_number(user: User, effect: str, number: int) -> None:
    if number > len(getattr(user, effect)):
        raise InvalidArgument(f"user {user.name!r} has no rule {number} of {effect}")


async def plan_rule(visit: Visit, form: RuleForm) -> ActionPlan:
    """Describe the changes in the rules of a user."""
    verb = "changes" if form.number else "is new"
    summary = f"A rule of {form.name} {verb}."
    return await _plan(visit, form.name, _with_rule(form), summary)


async def put_rule(visit: Visit, form: RuleForm) -> ActionResult:
    """Add or replace a rule."""
    return await _put(visit, _with_rule(form), "The rule is in force.")


async def plan_delete_rule(visit: Visit, form: DeleteRuleForm) -> ActionPlan:
    """Say which rule goes."""
    summary = f"A rule of {form.name} goes."
    return await _plan(visit, form.name, _without_rule(form), summary)


async def delete_rule(visit: Visit, form: DeleteRuleForm) -> ActionResult:
    """Delete a rule."""
    return await _put(visit, _without_rule(form), "The rule is gone.")


# ---- Keys --------------------------------------------------------------------------------


def _with_key(form: AddKeyForm) -> Callable[[AccessList], AccessList]:
    def change(now: AccessList) -> AccessList:
        user = now.find(form.name)
        return now.with_user(msgspec.structs.replace(user, keys=[*user.keys, form.key.strip()]))

    return change


def _without_key(form: RemoveKeyForm) -> Callable[[AccessList], AccessList]:
    def change(now: AccessList) -> AccessList:
        user = now.find(form.name)
        left = [one for one in user.keys if fingerprint(one) != form.key]
        if len(left) == len(user.keys):
            raise InvalidArgument(f"user {form.name!r} has no key {form.key}")
        if not left:
            raise ConfigError(f"user {form.name!r} has no other key: disable or delete it instead")
        return now.with_user(msgspec.structs.replace(user, keys=left))

    return change


async def plan_add_key(visit: Visit, form: AddKeyForm) -> ActionPlan:
    """Say which key is new."""
    summary = (
        f"User {form.name} has a further key. The former ones are good until they are removed."
    )
    return await _plan(visit, form.name, _with_key(form), summary)


async def add_key(visit: Visit, form: AddKeyForm) -> ActionResult:
    """Give a user a further key."""
    return await _put(visit, _with_key(form), "The key is good from now on.")


async def initial_key(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the keys that could be removed."""
    user = (await read_list(visit)).find(fixed["name"])
    keys = tuple(fingerprint(one) for one in user.keys)
    return {"key": Choices(keys[0], keys)}


async def plan_remove_key(visit: Visit, form: RemoveKeyForm) -> ActionPlan:
    """Say which key goes."""
    return await _plan(
        visit,
        form.name,
        _without_key(form),
        f"User {form.name} loses a key.",
        warning="All connections with it end.",
    )


async def remove_key(visit: Visit, form: RemoveKeyForm) -> ActionResult:
    """Take a key from a user."""
    return await _put(visit, _without_key(form), "The key is good no more.")
