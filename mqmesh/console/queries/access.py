"""Access: users, their rules and quotas, versions at all roles, refusals, the audit log."""

import datetime
import hashlib
from collections import deque
from pathlib import Path
from typing import Final, Literal

import msgspec

from mqmesh.aio import AccessClient
from mqmesh.console.cluster_view import QUOTA_BYTES, QUOTA_MESSAGES
from mqmesh.console.page import Name, TableArguments, TablePage, Text, Visit, table_page
from mqmesh.console.queries.cluster import data_dir_of
from mqmesh.errors import InvalidArgument, MQMeshError, NoPermission, UnsupportedCommand
from mqmesh.protocol.commands import Right
from mqmesh.roles.audit_log import AUDIT_FILE, AuditLine
from mqmesh.sdk.admin.access import AccessListState
from mqmesh.security.access_list import AccessList, Action, Quota, Rule, User, read_access_list
from mqmesh.security.permissions import Permissions

AUDIT_BYTES: Final = 262_144
"""Newest part of the audit log that is read."""
LATEST: Final = 10
"""Lines of the audit log on the page of all users."""
_LIMITS: Final = (
    ("send", "in", "messages", QUOTA_MESSAGES),
    ("send", "in", "bytes", QUOTA_BYTES),
    ("read", "out", "messages", QUOTA_MESSAGES),
    ("read", "out", "bytes", QUOTA_BYTES),
)


class LimitRow(msgspec.Struct, frozen=True):
    """One limit of a user's quota.

    Attributes:
        name: ``send messages``, ``read bytes``, … a second, to or from one broker.
        unit: ``messages`` or ``bytes``.
        limit: Most of them a second.
        used: As many were of late, at the broker where it was most; None for unknown.
    """

    name: str
    unit: str
    limit: int
    used: float | None


class UserRow(msgspec.Struct, frozen=True, kw_only=True):
    """One user.

    Attributes:
        name: Its name.
        role: Rights beside its rules.
        state: ``enabled``, ``disabled`` or ``expired``.
        expires: First day, by UTC, on which no client can connect as this user; None for never.
        keys: Fingerprints of its public keys.
        rules: Number of rules.
        fullest: Share of a limit of its quota that is used, of the fullest one; None without.
        held_up: Requests that had to wait since brokers' start.
    """

    name: str
    role: str
    state: str
    expires: datetime.date | None
    keys: list[str]
    rules: int
    fullest: float | None
    held_up: int


class RefusalRow(msgspec.Struct, frozen=True):
    """Refused requests of one process.

    Attributes:
        node: Its name.
        response_code: Why: ``no_permission``, ``system_busy``, …
        count: Since its start.
    """

    node: str
    response_code: str
    count: int


class AccessView(msgspec.Struct, frozen=True, kw_only=True):
    """Users and their rights.

    Attributes:
        is_on: Security is on.
        version: Of the access list in force.
        users: One page of them.
        states: Version at each role.
        is_same: All have the same list.
        refusals: Refused requests, most first.
        audit: Newest lines of the audit log, where it is on this machine and for the user.
    """

    is_on: bool = True
    version: int = 0
    users: TablePage[UserRow] = TablePage(rows=[], total=0)
    states: list[AccessListState] = []
    is_same: bool = True
    refusals: list[RefusalRow] = []
    audit: list[AuditLine] = []


class UserArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of pages of one user.

    Attributes:
        name: Its name.
    """

    name: Name


class RuleRow(msgspec.Struct, frozen=True):
    """One rule.

    Attributes:
        effect: ``allow`` or ``deny``.
        number: Its number, from 1.
        actions: Actions that it allows or denies.
        topics: Topics that it applies to.
        groups: Consumer groups that it applies to.
    """

    effect: str
    number: int
    actions: list[str]
    topics: list[str]
    groups: list[str]


class UserDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One user.

    Attributes:
        user: As in the list of users.
        brokers: Broker groups that it may register as.
        rules: Those that deny first, as they count.
        limits: Its quota, with its usage.
        connections: To one server at most; None for as many as it likes.
    """

    user: UserRow
    brokers: list[str]
    rules: list[RuleRow]
    limits: list[LimitRow]
    connections: int | None


class CheckArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Question whether a user may do something.

    Attributes:
        user: Name of the user; "" for no question yet.
        action: Action to check.
        topic: Topic of the action.
        group: Consumer group of the action.
    """

    user: Text = ""
    action: Action = Action.PUB
    topic: Text = ""
    group: Text = ""


class CheckRow(msgspec.Struct, frozen=True):
    """Answer for a topic or a group.

    Attributes:
        what: ``topic orders`` or ``group billing``.
        allowed: It may.
        reason: Rule or role that decides.
    """

    what: str
    allowed: bool
    reason: str


class CheckView(msgspec.Struct, frozen=True):
    """Answer to a question, and the users that one can choose.

    Attributes:
        users: Names.
        answers: One for the topic, one for the group.
    """

    users: list[str]
    answers: list[CheckRow]


class AuditArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of the page of the audit log.

    Attributes:
        kind: Only changes, or refusals; ``all`` for all.
    """

    kind: Literal["all", "done", "refused"] = "all"


def fingerprint(key: str) -> str:
    """Return 16 hex digits that stand for a public key: of its BLAKE2b."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return ":".join(digest[at : at + 4] for at in range(0, 16, 4))


def today_of(visit: Visit) -> datetime.date:
    """Return the day by UTC."""
    return datetime.datetime.fromtimestamp(visit.clock.wall_ms() / 1_000, datetime.UTC).date()


async def read_list(visit: Visit) -> AccessList:
    """Return the access list in force, as the user may see it.

    Raises:
        NoPermission: It is not for this user.
        UnsupportedCommand: Security is off.
    """
    async with visit.client(AccessClient) as client:
        text = (await client.access_list()).text
    return read_access_list(text, "the access list", today_of(visit))


async def access(visit: Visit, arguments: TableArguments) -> AccessView:
    """Return users, versions, refusals and the end of the audit log."""
    try:
        found = await read_list(visit)
    except UnsupportedCommand:
        return AccessView(is_on=False)
    async with visit.client(AccessClient) as client:
        states = await client.access_states()
    today = today_of(visit)
    rows = [_user_row(visit, one, today) for one in found.user]
    refusals = visit.readings.refusals if visit.readings else {}
    shown = [
        RefusalRow(node, code, int(count)) for (node, code), count in refusals.items() if count
    ]
    return AccessView(
        version=found.version,
        users=table_page(rows, arguments, ("name", "role", "state", "keys"), sort="name"),
        states=states,
        is_same=len({(one.version, one.digest) for one in states}) == 1,
        refusals=sorted(shown, key=lambda one: -one.count)[:LATEST],
        audit=audit_lines(visit)[:LATEST] if may_audit(visit) else [],
    )


def _user_row(visit: Visit, user: User, today: datetime.date) -> UserRow:
    state = "enabled" if user.enabled else "disabled"
    if user.enabled and not user.is_valid(today):
        state = "expired"
    shares = [one.used / one.limit for one in _limits(visit, user) if one.used is not None]
    held_up = visit.readings.held_up if visit.readings else {}
    return UserRow(
        name=user.name,
        role=user.role.value,
        state=state,
        expires=user.expires,
        keys=[fingerprint(key) for key in user.keys],
        rules=len(user.allow) + len(user.deny),
        fullest=max(shares, default=None),
        held_up=int(held_up.get(user.name, 0)),
    )


def _limits(visit: Visit, user: User) -> list[LimitRow]:
    quota = user.quota or Quota()
    used = visit.readings.used if visit.readings else None
    return [
        LimitRow(
            f"{word} {unit}",
            unit,
            limit,
            None if used is None else used.get((name, user.name, direction), 0.0),
        )
        for word, direction, unit, name in _LIMITS
        if (limit := getattr(quota, f"{word}_{unit}_per_s")) is not None
    ]


async def user(visit: Visit, arguments: UserArguments) -> UserDetails:
    """Return one user."""
    found = (await read_list(visit)).find(arguments.name)
    return UserDetails(
        user=_user_row(visit, found, today_of(visit)),
        brokers=found.brokers,
        rules=[*_rule_rows("deny", found.deny), *_rule_rows("allow", found.allow)],
        limits=_limits(visit, found),
        connections=None if found.quota is None else found.quota.connections,
    )


def _rule_rows(effect: str, rules: list[Rule]) -> list[RuleRow]:
    return [
        RuleRow(effect, number, [one.value for one in rule.actions], rule.topics, rule.groups)
        for number, rule in enumerate(rules, start=1)
    ]


async def check(visit: Visit, arguments: CheckArguments) -> CheckView:
    """Return whether a user may do something, and by which rule."""
    found = await read_list(visit)
    names = sorted(one.name for one in found.user)
    if not arguments.user:
        return CheckView(names, [])
    if not arguments.topic and not arguments.group:
        raise InvalidArgument("say a topic, or a group, or both")
    found.find(arguments.user)
    permissions = Permissions(found, today_of(visit))
    answers = []
    if arguments.topic:
        one = permissions.topic(arguments.user, arguments.action, arguments.topic)
        answers.append(CheckRow(f"topic {arguments.topic}", one.allowed, one.reason))
    if arguments.group:
        one = permissions.group(arguments.user, arguments.action, arguments.group)
        answers.append(CheckRow(f"group {arguments.group}", one.allowed, one.reason))
    return CheckView(names, answers)


def may_audit(visit: Visit) -> bool:
    """Return True if the user may see the audit log, which the console itself reads."""
    return visit.sees_all and visit.rights.may(Right.ADMIN)


async def audit(visit: Visit, arguments: AuditArguments) -> TablePage[AuditLine]:
    """Return one page of the audit log."""
    if not may_audit(visit):
        raise NoPermission("the audit log is for administrators")
    path = _audit_path(visit)
    if path is None or not path.exists():
        raise InvalidArgument(
            "the audit log is not on this machine: it is audit.jsonl beside the access list of "
            "each role; data_dir in the console's settings names the folder of a cluster here"
        )
    lines = [
        one
        for one in audit_lines(visit)
        if arguments.kind == "all" or (one.result == "SUCCESS") is (arguments.kind == "done")
    ]
    is_cut = path.stat().st_size > AUDIT_BYTES
    return table_page(
        lines,
        arguments,
        ("user", "server", "command", "topics", "groups", "result", "remark", "what"),
        sort="-time",
        cut="older lines are in the file audit.jsonl only" if is_cut else "",
    )


def audit_lines(visit: Visit) -> list[AuditLine]:
    """Return the newest lines of the audit log, newest first; none where it is elsewhere.

    Raises:
        MQMeshError: It cannot be read.
    """
    path = _audit_path(visit)
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - AUDIT_BYTES, 0))
            text = file.read(AUDIT_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MQMeshError(f"audit log {path}: {error.strerror}") from error
    found: deque[AuditLine] = deque()
    # The first line may be cut, and the last one be under way.
    for line in text.splitlines():
        try:
            found.appendleft(msgspec.json.decode(line, type=AuditLine))
        except msgspec.MsgspecError:
            continue
    return list(found)


def _audit_path(visit: Visit) -> Path | None:
    folder = data_dir_of(visit)
    return Path(folder, "security", AUDIT_FILE) if folder else None
