"""`mqmesh table …`: tables of keys and values."""

import sys
from itertools import islice

import click

from mqmesh.errors import RevisionConflict
from mqmesh.protocol.route import MAX_HISTORY
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.views.tables import KvEntryView, KvWriteView, entry_view
from mqmesh.sdk.tables.entries import KvEntry
from mqmesh.sdk.tables.key_value import KeyValue
from mqmesh.user_times import parse_duration

from ..notes import answers_json, print_error
from ..options import cluster_options, confirm, max_option, yes_option
from ..render import (
    Column,
    counted,
    print_answer,
    print_as_is,
    print_json,
    print_records,
    say,
    shortened,
    timestamp,
)

_VALUE_WIDTH = 60
_COLUMNS = (
    Column("key", "KEY"),
    Column("revision", "REVISION"),
    Column("stored_ms", "STORED", timestamp, rank=2),
    Column("operation", "OPERATION", rank=1),
    Column("expires_ms", "EXPIRES", lambda ms: timestamp(ms) if ms else "-", rank=3),
    Column("shown", "VALUE", lambda text: shortened(text, _VALUE_WIDTH)),
)


@click.group()
def table() -> None:
    """Tables: topics that keep the newest value of each key.

    \b
    Examples:
      mqmesh table create settings --history 5
      mqmesh table put settings shop/berlin open
      mqmesh table get settings shop/berlin
      mqmesh table ls settings shop/
      mqmesh table watch settings
    """


@table.command()
@click.argument("name")
@click.option(
    "--history",
    type=click.IntRange(1, MAX_HISTORY),
    default=1,
    show_default=True,
    help="Revisions of each key that are kept.",
)
@click.option("--broker", metavar="NAME", default="", help="Broker group. [default: by the name]")
@cluster_options
def create(name: str, history: int, broker: str, namesrv: str) -> None:
    """Create the table NAME, with one queue on one broker group; one that is there stays.

    \b
    Examples:
      mqmesh table create settings
      mqmesh table create settings --history 5 --broker broker-b
    """
    with KeyValue(name, namesrv, create=True, history=history, broker=broker) as kv:
        ((where, (config,)),) = kv.topic_configs(name).items()
    print_answer(
        {"table": name, "broker_name": where, "history": config.history},
        f"table {name} is on {where}, and keeps {counted(config.history, 'revision')} of each key",
    )


@table.command()
@click.argument("name")
@click.argument("key")
@click.argument("value")
@click.option("--revision", type=int, help="Only if this is the newest one; 0 for a new key.")
@click.option("--ttl", metavar="DURATION", help="It expires after so long: 30s, 10m, 2h, 1d.")
@cluster_options
def put(
    name: str, key: str, value: str, revision: int | None, ttl: str | None, namesrv: str
) -> int:
    """Write VALUE for KEY of the table NAME; - reads it from standard input.

    Exit code 1 if KEY has another revision than --revision.

    \b
    Examples:
      mqmesh table put settings shop/berlin open
      mqmesh table put settings shop/berlin closed --revision 7
      mqmesh table put sessions 4711 - --ttl 30m < session.json
    """
    data = sys.stdin.buffer.read() if value == "-" else value.encode()
    ttl_ms = None if ttl is None else parse_duration(ttl, "--ttl")
    with KeyValue(name, namesrv) as kv:
        try:
            if revision is None:
                written = kv.put(key, data, ttl_ms=ttl_ms)
            else:
                written = kv.update(key, data, revision=revision, ttl_ms=ttl_ms)
        except RevisionConflict as conflict:
            print_error(str(conflict))
            return ExitCode.FAILED
    print_answer(KvWriteView(name, key, written), f"{key} has revision {written}")
    return ExitCode.OK


@table.command()
@click.argument("name")
@click.argument("key")
@cluster_options
def get(name: str, key: str, namesrv: str) -> int:
    """Print the value of KEY of the table NAME. Exit code 1 if it has none.

    \b
    Examples:
      mqmesh table get settings shop/berlin
      mqmesh table get settings shop/berlin --json
    """
    with KeyValue(name, namesrv) as kv:
        entry = kv.get(key)
    if entry is None:
        print_error(f"key {key!r} of table {name} has no value")
        return ExitCode.FAILED
    if print_answer(entry_view(entry)):
        print_as_is(entry.value)
    return ExitCode.OK


@table.command()
@click.argument("name")
@click.argument("prefix", default="")
@max_option(1_000, "Keys to show.")
@cluster_options
def ls(name: str, prefix: str, most: int, namesrv: str) -> None:
    """List the keys of the table NAME that begin with PREFIX, with their values.

    \b
    Examples:
      mqmesh table ls settings
      mqmesh table ls settings shop/ --max 20
    """
    with KeyValue(name, namesrv) as kv:
        found = [entry_view(one) for one in islice(kv.entries(prefix), most)]
    _print(found)


@table.command()
@click.argument("name")
@click.argument("key")
@cluster_options
def history(name: str, key: str, namesrv: str) -> None:
    """List the revisions of KEY that the table NAME keeps, oldest first.

    \b
    Examples:
      mqmesh table history settings shop/berlin
    """
    with KeyValue(name, namesrv) as kv:
        found = [entry_view(one) for one in kv.history(key)]
    _print(found)


@table.command()
@click.argument("name")
@click.argument("prefix", default="")
@click.option("--new", is_flag=True, help="Not what the keys have now.")
@max_option(1_000_000, "End after so many entries.")
@cluster_options
def watch(name: str, prefix: str, new: bool, most: int, namesrv: str) -> None:
    """Print the entries of keys of the table NAME that begin with PREFIX, and changes as they come.

    With --json one object a line. It goes on until it is interrupted.

    \b
    Examples:
      mqmesh table watch settings
      mqmesh table watch settings shop/ --new --json
    """
    with KeyValue(name, namesrv) as kv:
        for entry in islice(kv.watch(prefix, include_current=not new), most):
            _show(entry)


@table.command()
@click.argument("name")
@click.argument("key")
@click.option("--revision", type=int, help="Only if this is the newest one.")
@yes_option
@cluster_options
def rm(name: str, key: str, revision: int | None, yes: bool, namesrv: str) -> int:
    """Delete KEY of the table NAME. Exit code 1 if it has another revision than --revision.

    \b
    Examples:
      mqmesh table rm settings shop/berlin
      mqmesh table rm settings shop/berlin --revision 7 --yes
    """
    confirm(f"this deletes key {key!r}", f"Delete {key!r} of table {name}?", yes=yes)
    with KeyValue(name, namesrv) as kv:
        try:
            deleted = kv.delete(key, revision=revision)
        except RevisionConflict as conflict:
            print_error(str(conflict))
            return ExitCode.FAILED
    print_answer(KvWriteView(name, key, deleted), f"{key} is deleted")
    return ExitCode.OK


def _print(found: list[KvEntryView]) -> None:
    if print_answer(found):
        print_records(_COLUMNS, found)


def _show(entry: KvEntry) -> None:
    view = entry_view(entry)
    if answers_json():
        print_json(view)
    else:
        say(f"{view.revision} {view.key} {view.shown or view.operation}")
