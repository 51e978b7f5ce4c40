"""`mqmesh broker config`, `broker set`, `namesrv config`, `namesrv set`: settings of what runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

from mqmesh.protocol.admin import ConfigChange, ConfigEntry
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin
from mqmesh.sdk.client.options import namesrv_addresses

from ..notes import tell_warning
from ..options import json_option, namesrv_option
from ..render import print_json, print_table, say

_HEADS = ("KEY", "VALUE", "DEFAULT", "AT THE START", "SET", "MAY BE SET")

changed_option = click.option(
    "--changed", "only_changed", is_flag=True, help="Only what is not the default, or was set."
)
unset_option = click.option(
    "--unset", multiple=True, metavar="KEY", help="What the configuration file says holds again."
)


@click.command("config")
@click.argument("name")
@changed_option
@namesrv_option
@json_option
def broker_config(name: str, only_changed: bool, namesrv: str, as_json: bool) -> None:
    """Show the settings of the broker NAME that are in force.

    \b
    Examples:
      mqmesh broker config broker-a
      mqmesh broker config broker-a --changed
    """
    with BrokerAdmin(namesrv) as admin:
        found = admin.config(name)
    first, *others = found
    entries = found[first]
    values = {one.key: one.value for one in entries}
    differing = [
        {"broker_id": other, "key": one.key, "value": _plain(one.value)}
        for other in others
        for one in found[other]
        # What is each replica's own is no difference.
        if one.is_changeable and one.value != values.get(one.key)
    ]
    shown = _chosen(entries, only_changed)
    if as_json:
        print_json({"broker_name": name, "settings": shown, "differing": differing})
        return
    _print_settings(shown)
    for one in differing:
        tell_warning(f"id {one['broker_id']} has {one['key']} = {_word(one['value'])}")


@click.command("set")
@click.argument("name")
@click.argument("settings", metavar="KEY=VALUE…", nargs=-1)
@unset_option
@namesrv_option
@json_option
def broker_set(
    name: str, settings: Sequence[str], unset: Sequence[str], namesrv: str, as_json: bool
) -> None:
    """Change settings of the broker NAME while it runs, all of its replicas.

    It holds at once and over restarts. The configuration file stays as it is.

    \b
    Examples:
      mqmesh broker set broker-a long_polling_max_ms=15000 storage.file_reserved_time=48
      mqmesh broker set broker-a --unset long_polling_max_ms
    """
    asked = _pairs(settings, unset)
    with BrokerAdmin(namesrv) as admin:
        done = admin.set_config(name, asked, unset)
    replicas = [
        {"broker_id": broker_id, "changes": list(map(_change, changes))}
        for broker_id, changes in done.items()
    ]
    if as_json:
        print_json({"broker_name": name, "replicas": replicas})
        return
    for broker_id, changes in done.items():
        _tell_changes(f"broker {name}, id {broker_id}", changes)


@click.command("config")
@click.argument("address", default="")
@changed_option
@namesrv_option
@json_option
def namesrv_config(address: str, only_changed: bool, namesrv: str, as_json: bool) -> None:
    """Show the settings of the name server at ADDRESS, or of all.

    \b
    Examples:
      mqmesh namesrv config
      mqmesh namesrv config 10.0.0.1:9876 --changed
    """
    with NamesrvAdmin(namesrv) as admin:
        found = {
            one: _chosen(admin.config(one), only_changed)
            for one in ([address] if address else namesrv_addresses(namesrv))
        }
    if as_json:
        print_json([{"endpoint": one, "settings": shown} for one, shown in found.items()])
        return
    for one, shown in found.items():
        say(f"name server {one}")
        _print_settings(shown)


@click.command("set")
@click.argument("settings", metavar="KEY=VALUE…", nargs=-1)
@unset_option
@namesrv_option
@json_option
def namesrv_set(settings: Sequence[str], unset: Sequence[str], namesrv: str, as_json: bool) -> int:
    """Change settings of all name servers while they run: broker_expire_ms, scan_interval_ms.

    It holds at once; over restarts, too, where a name server has a data_dir.

    \b
    Examples:
      mqmesh namesrv set broker_expire_ms=60000
      mqmesh namesrv set --unset broker_expire_ms
    """
    asked = _pairs(settings, unset)
    with NamesrvAdmin(namesrv) as admin:
        done = admin.set_config(asked, unset)
    if as_json:
        changes = {one: list(map(_change, found)) for one, found in done.changes.items()}
        print_json({**msgspec.structs.asdict(done), "changes": changes})
    else:
        for address, found in done.changes.items():
            _tell_changes(f"name server {address}", found)
    if not done.silent_namesrvs:
        return ExitCode.OK
    tell_warning(f"no answer from name server {', '.join(done.silent_namesrvs)}; repeat it later")
    return ExitCode.FAILED


def _pairs(settings: Iterable[str], unset: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for one in settings:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{one!r} is not of the form KEY=VALUE")
        pairs[key] = value
    if not pairs and not unset:
        raise click.UsageError("say what to change: KEY=VALUE, or --unset KEY")
    return pairs


def _chosen(entries: Iterable[ConfigEntry], only_changed: bool) -> list[dict[str, Any]]:
    return [
        msgspec.structs.asdict(one)
        | {name: _plain(getattr(one, name)) for name in ("value", "default", "at_start")}
        for one in entries
        if not only_changed or one.is_overridden or one.value != one.default
    ]


def _change(change: ConfigChange) -> dict[str, Any]:
    return {"key": change.key, "before": _plain(change.before), "after": _plain(change.after)}


def _plain(text: str) -> Any:
    return msgspec.json.decode(text)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _print_settings(shown: Iterable[dict[str, Any]]) -> None:
    print_table(
        _HEADS,
        [
            (
                one["key"],
                _word(one["value"]),
                _word(one["default"]),
                _word(one["at_start"]),
                "yes" if one["is_overridden"] else "-",
                "yes" if one["is_changeable"] else "-",
            )
            for one in shown
        ],
        optional=("MAY BE SET", "AT THE START", "SET"),
    )


def _tell_changes(where: str, changes: Sequence[ConfigChange]) -> None:
    for one in changes:
        before, after = _word(_plain(one.before)), _word(_plain(one.after))
        say(f"{where}: {one.key} = {after}, before {before}")
    if not changes:
        say(f"{where}: no setting has another value")
