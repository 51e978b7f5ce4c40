"""`mqmesh broker config`, `broker set`, `namesrv config`, `namesrv set`: settings of processes."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import click
import msgspec

from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin
from mqmesh.sdk.admin.views.clusters import (
    NamesrvSettingsView,
    SettingChangeView,
    broker_changes_view,
    broker_settings_view,
    namesrv_changes_view,
    setting_views,
)
from mqmesh.sdk.client.options import namesrv_addresses

from ..notes import print_warning, warn_of_silent
from ..options import cluster_options
from ..render import Column, Table, print_answer, say


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _yes(value: bool) -> str:
    return "yes" if value else "-"


_SETTINGS: Final = (
    Column("key", "KEY"),
    Column("value", "VALUE", _value_text),
    Column("default", "DEFAULT", _value_text),
    Column("at_start", "AT THE START", _value_text, rank=2),
    Column("is_overridden", "SET", _yes, rank=1),
    Column("is_changeable", "MAY BE SET", _yes, rank=3),
)

changed_option = click.option(
    "--changed", "only_changed", is_flag=True, help="Only what is not the default, or was set."
)
unset_option = click.option(
    "--unset", multiple=True, metavar="KEY", help="What the configuration file says holds again."
)


@click.command("config")
@click.argument("name")
@changed_option
@cluster_options
def broker_config(name: str, only_changed: bool, namesrv: str) -> None:
    """Show the settings of the broker NAME that are in force.

    \b
    Examples:
      mqmesh broker config broker-a
      mqmesh broker config broker-a --changed
    """
    with BrokerAdmin(namesrv) as admin:
        found = broker_settings_view(name, admin.config(name), only_changed=only_changed)
    if not print_answer(found):
        return
    Table(_SETTINGS, found.settings).print()
    for one in found.differing:
        print_warning(f"id {one.broker_id} has {one.key} = {_value_text(one.value)}")


@click.command("set")
@click.argument("name")
@click.argument("settings", metavar="KEY=VALUE…", nargs=-1)
@unset_option
@cluster_options
def broker_set(name: str, settings: Sequence[str], unset: Sequence[str], namesrv: str) -> None:
    """Change settings of the broker NAME while it runs, all of its replicas.

    It holds at once and over restarts. The configuration file stays as it is.

    \b
    Examples:
      mqmesh broker set broker-a long_polling_max_ms=15000 storage.file_reserved_time=48
      mqmesh broker set broker-a --unset long_polling_max_ms
    """
    changes = _pairs(settings, unset)
    with BrokerAdmin(namesrv) as admin:
        done = broker_changes_view(name, admin.set_config(name, changes, unset))
    if print_answer(done):
        for one in done.replicas:
            _print_changes(f"broker {name}, id {one.broker_id}", one.changes)


@click.command("config")
@click.argument("address", default="")
@changed_option
@cluster_options
def namesrv_config(address: str, only_changed: bool, namesrv: str) -> None:
    """Show the settings of the name server at ADDRESS, or of all.

    \b
    Examples:
      mqmesh namesrv config
      mqmesh namesrv config 10.0.0.1:9876 --changed
    """
    with NamesrvAdmin(namesrv) as admin:
        found = [
            NamesrvSettingsView(
                endpoint=one,
                settings=setting_views(admin.config(one), only_changed=only_changed),
            )
            for one in ([address] if address else namesrv_addresses(namesrv))
        ]
    if print_answer(found):
        for one in found:
            say(f"name server {one.endpoint}")
            Table(_SETTINGS, one.settings).print()


@click.command("set")
@click.argument("settings", metavar="KEY=VALUE…", nargs=-1)
@unset_option
@cluster_options
def namesrv_set(settings: Sequence[str], unset: Sequence[str], namesrv: str) -> int:
    """Change settings of all name servers while they run: broker_expire_ms, scan_interval_ms.

    It holds at once; over restarts, too, where a name server has a data_dir.

    \b
    Examples:
      mqmesh namesrv set broker_expire_ms=60000
      mqmesh namesrv set --unset broker_expire_ms
    """
    requested = _pairs(settings, unset)
    with NamesrvAdmin(namesrv) as admin:
        done = namesrv_changes_view(admin.set_config(requested, unset))
    if print_answer(done):
        for address, changes in done.changes.items():
            _print_changes(f"name server {address}", changes)
    warn_of_silent(done.silent_namesrvs)
    return ExitCode.FAILED if done.silent_namesrvs else ExitCode.OK


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


def _print_changes(where: str, changes: Sequence[SettingChangeView]) -> None:
    for one in changes:
        say(f"{where}: {one.key} = {_value_text(one.after)}, before {_value_text(one.before)}")
    if not changes:
        say(f"{where}: no setting has another value")
