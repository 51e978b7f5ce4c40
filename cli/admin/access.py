"""`mqmesh user`, `mqmesh acl` and `mqmesh key`: users, their rights and their keys."""

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from mqmesh.config import MAX_FILE_BYTES
from mqmesh.errors import ConfigError
from mqmesh.message import TRACE_TOPIC
from mqmesh.namespaces import add_namespace
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.access import AccessClient, AccessListState
from mqmesh.sdk.client.options import find_credentials
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
from mqmesh.security.keys import MAX_SERVER_KEYS, Credentials, save_credentials
from mqmesh.security.permissions import Permissions

from ..notes import print_note
from ..options import cluster_options, confirm, json_option, yes_option
from ..processes.secure import new_credentials
from ..render import (
    Column,
    print_answer,
    print_records,
    print_text,
    say,
    text_or_dash,
)

NAME: Final = click.argument("name")
DAY: Final = click.DateTime(["%Y-%m-%d"])
RATE: Final = click.IntRange(1, MAX_RATE)
OUTPUT: Final = click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="New file for the keys; it must not be there yet.",
)


_USERS: Final = (
    Column("name", "USER"),
    Column("role", "ROLE"),
    Column("enabled", "ENABLED"),
    Column("expires", "EXPIRES", text_or_dash),
    Column("keys", "KEYS", len, rank=1),
    Column("", "RULES", value=lambda one: len(one.allow) + len(one.deny), rank=2),
)
_STATES: Final = (
    Column("where", "ADDRESS"),
    Column("version", "VERSION", lambda version: version or "-"),
    Column("digest", "DIGEST", str, rank=1),
    Column("problem", "PROBLEM", str),
)


@click.group()
def user() -> None:
    """Users of a cluster with security on; see docs/security.md.

    \b
    Examples:
      mqmesh user add shop --pub 'orders*' --sub payments --group billing -o shop.toml
      mqmesh user list
      mqmesh user disable shop
      mqmesh user rotate-key shop -o shop-2.toml
    """


@click.group()
def acl() -> None:
    """The access list of a cluster with security on; see docs/security.md.

    \b
    Examples:
      mqmesh acl show > acl.toml
      mqmesh acl apply acl.toml --dry-run
      mqmesh acl check shop PUB orders
      mqmesh acl status
    """


@click.group()
def key() -> None:
    """Key files, for processes of a cluster that `mqmesh up` does not start.

    \b
    Examples:
      mqmesh key generate --user namesrv -o namesrv.toml
    """


@user.command()
@NAME
@OUTPUT
@click.option("--pub", multiple=True, metavar="TOPIC", help="May send to it; orders* for more.")
@click.option("--create", multiple=True, metavar="TOPIC", help="May have it made by sending.")
@click.option("--sub", multiple=True, metavar="TOPIC", help="May read it, as its groups.")
@click.option("--group", multiple=True, metavar="GROUP", help="May consume as this group.")
@click.option(
    "--role",
    type=click.Choice([one.value for one in UserRole]),
    default="none",
    show_default=True,
    help="Rights beside those by name; docs/security.md says what each role may do.",
)
@click.option("--broker", multiple=True, metavar="NAME", help="Broker group, for role broker.")
@click.option("--expires", type=DAY, help="First day, by UTC, on which it is disabled.")
@click.option("--within", "namespace", metavar="NAMESPACE", default="", help="Confines it to one.")
@cluster_options
def add(
    name: str,
    output: Path,
    pub: tuple[str, ...],
    create: tuple[str, ...],
    sub: tuple[str, ...],
    group: tuple[str, ...],
    role: str,
    broker: tuple[str, ...],
    expires: datetime.datetime | None,
    namespace: str,
    namesrv: str,
) -> int:
    """Add a user, and write a key file for it.

    A user who may send or consume messages may also write their trace; see docs/tracing.md.

    \b
    Examples:
      mqmesh user add shop --pub 'orders*' --sub payments --group billing -o shop.toml
      mqmesh user add watcher --role view -o watcher.toml
      mqmesh user add guest --pub orders --expires 2027-12-31 -o guest.toml
      mqmesh user add shop-api --within shop --pub 'shop%*' -o shop-api.toml
    """
    rules = [
        Rule([action], list(topics), list(groups))
        for action, topics, groups in (
            (Action.PUB, pub, ()),
            (Action.CREATE, create, ()),
            (Action.SUB, sub, group),
        )
        if topics or groups
    ]
    if rules:
        trace = add_namespace(namespace, TRACE_TOPIC)
        rules.append(Rule([Action.PUB, Action.CREATE], [trace]))

    made = _new_keys(name, namesrv)

    def change(now: AccessList) -> AccessList:
        if any(one.name == name for one in now.user):
            raise ConfigError(f"there is a user {name!r} already")
        new = User(
            name,
            [made.public_key],
            UserRole(role),
            expires=None if expires is None else expires.date(),
            brokers=list(broker),
            namespace=namespace,
            allow=rules,
        )
        return now.with_user(new)

    summary = f"user {name} is added; its keys are in {output}"
    return _change(namesrv, change, summary, lambda: save_credentials(output, made))


@user.command("list")
@cluster_options
def list_users(namesrv: str) -> None:
    """List all users.

    \b
    Examples:
      mqmesh user list
    """
    found = _read(namesrv).user
    print_records(_USERS, found)


@user.command()
@NAME
@cluster_options
def show(name: str, namesrv: str) -> None:
    """Show a user as the access list has it.

    \b
    Examples:
      mqmesh user show billing
    """
    now = _read(namesrv)
    _print_list(AccessList(now.version, [now.find(name)]))


@user.command()
@NAME
@cluster_options
def disable(name: str, namesrv: str) -> int:
    """Disable a user: no client can connect as it, and its connections end.

    \b
    Examples:
      mqmesh user disable billing
    """
    return _set(namesrv, name, f"user {name} is disabled", enabled=False)


@user.command()
@NAME
@cluster_options
def enable(name: str, namesrv: str) -> int:
    """Enable a user again: clients with its key can connect.

    \b
    Examples:
      mqmesh user enable billing
    """
    return _set(namesrv, name, f"user {name} is enabled", enabled=True)


@user.command()
@NAME
@click.argument("day", type=DAY, required=False)
@click.option("--never", is_flag=True, help="It does not expire any more.")
@cluster_options
def expire(name: str, day: datetime.datetime | None, never: bool, namesrv: str) -> int:
    """Disable a user from DAY on, by UTC; its connections end then.

    \b
    Examples:
      mqmesh user expire shop 2027-12-31
      mqmesh user expire shop --never
    """
    if never == (day is not None):
        raise ConfigError("say a day, as 2027-12-31, or --never")
    summary = "does not expire" if day is None else f"expires on {day.date()}"
    expires = None if day is None else day.date()
    return _set(namesrv, name, f"user {name} {summary}", expires=expires)


@user.command()
@NAME
@yes_option
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> int:
    """Take a user from the access list; its connections end.

    \b
    Examples:
      mqmesh user delete shop
      mqmesh user delete shop --yes
    """
    confirm(
        "this takes the user and its keys from the access list, and ends its connections",
        f"Delete user {name} with its keys, and end its connections?",
        yes=yes,
    )
    return _change(namesrv, lambda now: now.without_user(name), f"user {name} is deleted")


@user.command()
@NAME
@click.option("--send-messages", type=RATE, help="Messages a second, to each broker.")
@click.option("--send-bytes", type=RATE, help="Bytes a second, to each broker.")
@click.option("--read-messages", type=RATE, help="Messages a second, from each broker.")
@click.option("--read-bytes", type=RATE, help="Bytes a second, from each broker.")
@click.option("--connections", type=click.IntRange(1, 1_000_000), help="To each server.")
@click.option("--none", "is_none", is_flag=True, help="Take the quota away.")
@cluster_options
def quota(
    name: str,
    send_messages: int | None,
    send_bytes: int | None,
    read_messages: int | None,
    read_bytes: int | None,
    connections: int | None,
    is_none: bool,
    namesrv: str,
) -> int:
    """Set the quota of a user; limits that are left out are removed.

    \b
    Examples:
      mqmesh user quota shop --send-messages 5000 --connections 20
      mqmesh user quota shop --none
    """
    wanted = Quota(send_messages, send_bytes, read_messages, read_bytes, connections)
    if is_none == (wanted != Quota()):
        raise ConfigError("say what to limit, or --none")
    summary = "no quota" if is_none else "this quota"
    return _set(namesrv, name, f"user {name} has {summary}", quota=None if is_none else wanted)


@user.command("rotate-key")
@NAME
@OUTPUT
@cluster_options
def rotate_key(name: str, output: Path, namesrv: str) -> int:
    """Give a user another key. The former is good until `mqmesh user remove-key`.

    \b
    Examples:
      mqmesh user rotate-key shop -o shop-2.toml
      mqmesh user remove-key shop 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'
    """
    made = _new_keys(name, namesrv)

    def change(now: AccessList) -> AccessList:
        one = now.find(name)
        return now.with_user(msgspec.structs.replace(one, keys=[*one.keys, made.public_key]))

    summary = f"user {name} has another key, in {output}"
    return _change(namesrv, change, summary, lambda: save_credentials(output, made))


@user.command("remove-key")
@NAME
@click.argument("public_key")
@yes_option
@cluster_options
def remove_key(name: str, public_key: str, yes: bool, namesrv: str) -> int:
    """Take a key from a user; connections with it end.

    \b
    Examples:
      mqmesh user remove-key shop 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' --yes
    """
    confirm(
        "this ends all connections with the key, for good",
        f"Take the key from user {name}, and end all connections with it?",
        yes=yes,
    )

    def change(now: AccessList) -> AccessList:
        one = now.find(name)
        if public_key not in one.keys:
            raise ConfigError(f"user {name!r} has no key {public_key}")
        left = [known for known in one.keys if known != public_key]
        return now.with_user(msgspec.structs.replace(one, keys=left))

    return _change(namesrv, change, f"user {name} has the key no more")


@acl.command("show")
@cluster_options
def show_list(namesrv: str) -> None:
    """Show the access list, to be edited and applied.

    \b
    Examples:
      mqmesh acl show > access.toml
    """
    _print_list(_read(namesrv))


@acl.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Only check it.")
@cluster_options
def apply(file: Path, dry_run: bool, namesrv: str) -> int:
    """Put an edited access list in force, at all name servers and brokers.

    \b
    Examples:
      mqmesh acl show > acl.toml
      mqmesh acl apply acl.toml --dry-run
      mqmesh acl apply acl.toml
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{file}: the access list cannot be read: {reason}") from error
    edited = read_access_list(text, str(file), _today())
    if dry_run:
        summary = f"{file} could be applied: {len(edited.user)} users"
        _print_change(summary, edited.version, [])
        return ExitCode.OK
    new = AccessList(edited.version + 1, edited.user, edited.namespace)
    return _put(namesrv, new, f"the access list is version {new.version}")


@acl.command()
@NAME
@click.argument("action", type=click.Choice([one.value for one in Action], case_sensitive=False))
@click.argument("topic", default="")
@click.option("--group", default="", help="As this group; for SUB and FILTER.")
@cluster_options
def check(name: str, action: str, topic: str, group: str, namesrv: str) -> int:
    """Show whether a user may do something, and the rule; exit code 1 if it may not.

    \b
    Examples:
      mqmesh acl check shop PUB orders
      mqmesh acl check shop SUB payments --group billing
    """
    if not topic and not group:
        raise ConfigError("say a topic, or --group, or both")
    permissions = Permissions(_read(namesrv), _today())
    wanted = Action(action.upper())
    found = []
    if topic:
        found.append((f"topic {topic}", permissions.topic(name, wanted, topic)))
    if group:
        found.append((f"group {group}", permissions.group(name, wanted, group)))
    checks = [{"what": what, "allowed": one.allowed, "reason": one.reason} for what, one in found]
    print_answer(
        {"user": name, "action": wanted.value, "checks": checks},
        *(
            f"{name} {'may' if one.allowed else 'may not'} {wanted.value} {what}: {one.reason}"
            for what, one in found
        ),
    )
    return ExitCode.OK if all(one.allowed for _, one in found) else ExitCode.FAILED


@acl.command("status")
@cluster_options
def list_status(namesrv: str) -> int:
    """Show which version is in force where; exit code 1 if they differ.

    \b
    Examples:
      mqmesh acl status
    """
    with AccessClient(namesrv) as client:
        found = client.access_states()
    print_records(_STATES, found)
    same = len({(one.version, one.digest) for one in found}) == 1
    return ExitCode.OK if same and not found[0].problem else ExitCode.FAILED


@key.command()
@OUTPUT
@click.option("--user", "name", default="", help="Whose they are, for messages.")
@click.option(
    "--namesrv-server-key",
    "namesrv_server_keys",
    multiple=True,
    help="Public key of the name servers; twice while it is replaced by another one.",
)
@click.option("--namesrv-addr", default="", help="Name servers, for clients.")
@json_option
def generate(
    output: Path,
    name: str,
    namesrv_server_keys: tuple[str, ...],
    namesrv_addr: str,
) -> None:
    """Make a key file. Without --namesrv-server-key it is that of the name servers themselves.

    \b
    Examples:
      mqmesh key generate --user namesrv -o namesrv.toml
      mqmesh key generate --user broker-a --namesrv-server-key 'rq:rM>…' -o broker-a.toml
    """
    if len(namesrv_server_keys) > MAX_SERVER_KEYS:
        raise ConfigError(
            f"{len(namesrv_server_keys)} times --namesrv-server-key; name servers have one key, or "
            f"{MAX_SERVER_KEYS} while it is replaced"
        )
    trusted = namesrv_server_keys[0] if len(namesrv_server_keys) == 1 else [*namesrv_server_keys]
    made = new_credentials(name, trusted, namesrv_addr)
    save_credentials(output, made)
    print_answer(
        {"user": name, "public_key": made.public_key, "file": str(output)}, made.public_key
    )


def _read(namesrv: str) -> AccessList:
    with AccessClient(namesrv) as client:
        found = client.access_list()
    return read_access_list(found.text, "access list", _today())


def _new_keys(name: str, namesrv: str) -> Credentials:
    own = find_credentials("")
    if own is None:
        raise ConfigError("users are added with an administrator's keys; set MQMESH_CREDENTIALS")
    return new_credentials(name, own.namesrv_server_key, namesrv)


def _set(namesrv: str, name: str, summary: str, **fields: Any) -> int:
    return _change(
        namesrv,
        lambda now: now.with_user(msgspec.structs.replace(now.find(name), **fields)),
        summary,
    )


def _change(
    namesrv: str,
    change: Callable[[AccessList], AccessList],
    summary: str,
    save: Callable[[], None] = lambda: None,
) -> int:
    return _put(namesrv, change(_read(namesrv)), summary, save)


def _put(
    namesrv: str, new: AccessList, summary: str, save: Callable[[], None] = lambda: None
) -> int:
    text = write_access_list(new)
    read_access_list(text, "access list", _today())  # as the servers will
    save()  # a list that is refused here leaves no key file behind, which would be in the way
    with AccessClient(namesrv) as client:
        failed = client.put_access_list(text, new.version - 1)
    _print_change(summary, new.version, failed)
    return ExitCode.FAILED if failed else ExitCode.OK


def _print_change(summary: str, version: int, failed: Sequence[AccessListState]) -> None:
    behind = [{"where": one.where, "problem": one.problem} for one in failed]
    if not print_answer({"done": summary, "version": version, "failed": behind}):
        return
    say(summary)
    for one in failed:
        print_note(f"{one.where} has the former list still: {one.problem}")


def _print_list(found: AccessList) -> None:
    if print_answer(found):
        # TOML refuses a table [[namespace]] that is added behind "namespace = []".
        lines = write_access_list(found).splitlines()
        print_text("\n".join(one for one in lines if not one.endswith(" = []")))


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
