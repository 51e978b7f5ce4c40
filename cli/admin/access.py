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
from mqmesh.security.keys import MAX_SERVER_KEYS, save_credentials
from mqmesh.security.permissions import Permissions

from ..notes import tell_note
from ..options import confirm, json_option, namesrv_option, yes_option
from ..processes.secure import new_credentials
from ..render import print_json, print_table, print_text, say

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
@click.option("--role", type=click.Choice([one.value for one in UserRole]), default="none")
@click.option("--broker", multiple=True, metavar="NAME", help="Broker group, for role broker.")
@click.option("--expires", type=DAY, help="First day, by UTC, on which nobody is it any more.")
@namesrv_option
@json_option
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
    namesrv: str,
    as_json: bool,
) -> int:
    """Add a user, and write a key file for it.

    Who may do something may also write the message trace of it; see docs/tracing.md.

    \b
    Examples:
      mqmesh user add shop --pub 'orders*' --sub payments --group billing -o shop.toml
      mqmesh user add watcher --role view -o watcher.toml
      mqmesh user add guest --pub orders --expires 2027-12-31 -o guest.toml
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
        rules.append(Rule([Action.PUB, Action.CREATE], [TRACE_TOPIC]))

    def change(now: AccessList) -> AccessList:
        if any(one.name == name for one in now.user):
            raise ConfigError(f"there is a user {name!r} already")
        made = _write_keys(output, name, namesrv)
        new = User(
            name,
            [made],
            UserRole(role),
            expires=None if expires is None else expires.date(),
            brokers=list(broker),
            allow=rules,
        )
        return now.with_user(new)

    return _change(namesrv, as_json, change, f"user {name} is added; its keys are in {output}")


@user.command("list")
@namesrv_option
@json_option
def list_users(namesrv: str, as_json: bool) -> None:
    """List all users.

    \b
    Examples:
      mqmesh user list
    """
    found = _read(namesrv).user
    if as_json:
        print_json([msgspec.to_builtins(one) for one in found])
        return
    print_table(
        ("USER", "ROLE", "ENABLED", "EXPIRES", "KEYS", "RULES"),
        [
            (
                one.name,
                one.role.value,
                "yes" if one.enabled else "no",
                one.expires.isoformat() if one.expires else "-",
                len(one.keys),
                len(one.allow) + len(one.deny),
            )
            for one in found
        ],
        optional=("RULES", "KEYS"),
    )


@user.command()
@NAME
@namesrv_option
@json_option
def show(name: str, namesrv: str, as_json: bool) -> None:
    """Show a user as the access list has it.

    \b
    Examples:
      mqmesh user show billing
    """
    now = _read(namesrv)
    _tell_list(AccessList(now.version, [now.find(name)]), as_json)


@user.command()
@NAME
@namesrv_option
@json_option
def disable(name: str, namesrv: str, as_json: bool) -> int:
    """Let nobody be this user; its connections end.

    \b
    Examples:
      mqmesh user disable billing
    """
    return _set(namesrv, as_json, name, f"user {name} is disabled", enabled=False)


@user.command()
@NAME
@namesrv_option
@json_option
def enable(name: str, namesrv: str, as_json: bool) -> int:
    """Let whoever has its key be this user again.

    \b
    Examples:
      mqmesh user enable billing
    """
    return _set(namesrv, as_json, name, f"user {name} is enabled", enabled=True)


@user.command()
@NAME
@click.argument("day", type=DAY, required=False)
@click.option("--never", is_flag=True, help="It does not expire any more.")
@namesrv_option
@json_option
def expire(
    name: str, day: datetime.datetime | None, never: bool, namesrv: str, as_json: bool
) -> int:
    """Let nobody be this user from DAY on, by UTC; its connections end then.

    \b
    Examples:
      mqmesh user expire shop 2027-12-31
      mqmesh user expire shop --never
    """
    if never == (day is not None):
        raise ConfigError("say a day, as 2027-12-31, or --never")
    said = "does not expire" if day is None else f"expires on {day.date()}"
    expires = None if day is None else day.date()
    return _set(namesrv, as_json, name, f"user {name} {said}", expires=expires)


@user.command()
@NAME
@yes_option
@namesrv_option
@json_option
def delete(name: str, yes: bool, namesrv: str, as_json: bool) -> int:
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
        as_json=as_json,
    )
    return _change(namesrv, as_json, lambda now: now.without_user(name), f"user {name} is deleted")


@user.command()
@NAME
@click.option("--send-messages", type=RATE, help="Messages a second, to each broker.")
@click.option("--send-bytes", type=RATE, help="Bytes a second, to each broker.")
@click.option("--read-messages", type=RATE, help="Messages a second, from each broker.")
@click.option("--read-bytes", type=RATE, help="Bytes a second, from each broker.")
@click.option("--connections", type=click.IntRange(1, 1_000_000), help="To each server.")
@click.option("--none", "is_none", is_flag=True, help="Take the quota away.")
@namesrv_option
@json_option
def quota(
    name: str,
    send_messages: int | None,
    send_bytes: int | None,
    read_messages: int | None,
    read_bytes: int | None,
    connections: int | None,
    is_none: bool,
    namesrv: str,
    as_json: bool,
) -> int:
    """Limit how much a user may use; what is not said is not limited from now on.

    \b
    Examples:
      mqmesh user quota shop --send-messages 5000 --connections 20
      mqmesh user quota shop --none
    """
    wanted = Quota(send_messages, send_bytes, read_messages, read_bytes, connections)
    if is_none == (wanted != Quota()):
        raise ConfigError("say what to limit, or --none")
    said = "no quota" if is_none else "this quota"
    return _set(
        namesrv, as_json, name, f"user {name} has {said}", quota=None if is_none else wanted
    )


@user.command("rotate-key")
@NAME
@OUTPUT
@namesrv_option
@json_option
def rotate_key(name: str, output: Path, namesrv: str, as_json: bool) -> int:
    """Give a user another key. The former is good until `mqmesh user remove-key`.

    \b
    Examples:
      mqmesh user rotate-key shop -o shop-2.toml
      mqmesh user remove-key shop 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'
    """

    def change(now: AccessList) -> AccessList:
        one = now.find(name)
        made = _write_keys(output, name, namesrv)
        return now.with_user(msgspec.structs.replace(one, keys=[*one.keys, made]))

    return _change(namesrv, as_json, change, f"user {name} has another key, in {output}")


@user.command("remove-key")
@NAME
@click.argument("public_key")
@yes_option
@namesrv_option
@json_option
def remove_key(name: str, public_key: str, yes: bool, namesrv: str, as_json: bool) -> int:
    """Take a key from a user; connections with it end.

    \b
    Examples:
      mqmesh user remove-key shop 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' --yes
    """
    confirm(
        "this ends all connections with the key, for good",
        f"Take the key from user {name}, and end all connections with it?",
        yes=yes,
        as_json=as_json,
    )

    def change(now: AccessList) -> AccessList:
        one = now.find(name)
        if public_key not in one.keys:
            raise ConfigError(f"user {name!r} has no key {public_key}")
        left = [known for known in one.keys if known != public_key]
        return now.with_user(msgspec.structs.replace(one, keys=left))

    return _change(namesrv, as_json, change, f"user {name} has the key no more")


@acl.command("show")
@namesrv_option
@json_option
def show_list(namesrv: str, as_json: bool) -> None:
    """Show the access list, to be edited and applied.

    \b
    Examples:
      mqmesh acl show > access.toml
    """
    _tell_list(_read(namesrv), as_json)


@acl.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Only check it.")
@namesrv_option
@json_option
def apply(file: Path, dry_run: bool, namesrv: str, as_json: bool) -> int:
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
        said = f"{file} could be applied: {len(edited.user)} users"
        _tell(said, edited.version, [], as_json)
        return ExitCode.OK
    new = AccessList(edited.version + 1, edited.user)
    return _put(namesrv, as_json, new, f"the access list is version {new.version}")


@acl.command()
@NAME
@click.argument("action", type=click.Choice([one.value for one in Action], case_sensitive=False))
@click.argument("topic", default="")
@click.option("--group", default="", help="As this group; for SUB and FILTER.")
@namesrv_option
@json_option
def check(name: str, action: str, topic: str, group: str, namesrv: str, as_json: bool) -> int:
    """Tell what a user may do, and by which rule; exit code 1 if it may not.

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
    if as_json:
        told = [{"what": what, "allowed": one.allowed, "reason": one.reason} for what, one in found]
        print_json({"user": name, "action": wanted.value, "checks": told})
    for what, one in () if as_json else found:
        may = "may" if one.allowed else "may not"
        say(f"{name} {may} {wanted.value} {what}: {one.reason}")
    return ExitCode.OK if all(one.allowed for _, one in found) else ExitCode.FAILED


@acl.command("status")
@namesrv_option
@json_option
def list_status(namesrv: str, as_json: bool) -> int:
    """Show which version is in force where; exit code 1 if they differ.

    \b
    Examples:
      mqmesh acl status
    """
    with AccessClient(namesrv) as client:
        found = client.access_states()
    if as_json:
        print_json([msgspec.to_builtins(one) for one in found])
    else:
        print_table(
            ("ADDRESS", "VERSION", "DIGEST", "PROBLEM"),
            [(one.where, one.version or "-", one.digest, one.problem) for one in found],
            optional=("DIGEST",),
        )
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
    as_json: bool,
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
    if as_json:
        print_json({"user": name, "public_key": made.public_key, "file": str(output)})
    else:
        say(made.public_key)


def _read(namesrv: str) -> AccessList:
    with AccessClient(namesrv) as client:
        told = client.access_list()
    return read_access_list(told.text, "access list", _today())


def _write_keys(output: Path, name: str, namesrv: str) -> str:
    own = find_credentials("")
    if own is None:
        raise ConfigError("users are added with an administrator's keys; set MQMESH_CREDENTIALS")
    made = new_credentials(name, own.namesrv_server_key, namesrv)
    save_credentials(output, made)
    return made.public_key


def _set(namesrv: str, as_json: bool, name: str, said: str, **fields: Any) -> int:
    return _change(
        namesrv,
        as_json,
        lambda now: now.with_user(msgspec.structs.replace(now.find(name), **fields)),
        said,
    )


def _change(
    namesrv: str, as_json: bool, change: Callable[[AccessList], AccessList], said: str
) -> int:
    return _put(namesrv, as_json, change(_read(namesrv)), said)


def _put(namesrv: str, as_json: bool, new: AccessList, said: str) -> int:
    text = write_access_list(new)
    read_access_list(text, "access list", _today())  # as the servers will
    with AccessClient(namesrv) as client:
        failed = client.put_access_list(text, new.version - 1)
    _tell(said, new.version, failed, as_json)
    return ExitCode.FAILED if failed else ExitCode.OK


def _tell(said: str, version: int, failed: Sequence[AccessListState], as_json: bool) -> None:
    if as_json:
        behind = [{"where": one.where, "problem": one.problem} for one in failed]
        print_json({"done": said, "version": version, "failed": behind})
        return
    say(said)
    for one in failed:
        tell_note(f"{one.where} has the former list still: {one.problem}")


def _tell_list(found: AccessList, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        print_text(write_access_list(found))


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
