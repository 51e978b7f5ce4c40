"""`mqmesh group reset-offset|clone-offset|skip`: lets consumer groups go on elsewhere."""

import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError
from mqmesh.protocol.groups import ResetWhere
from mqmesh.sdk.admin.group_admin import GroupAdmin, OffsetMoves
from mqmesh.sdk.admin.views.groups import OffsetMovesView, offset_moves_view
from mqmesh.user_times import TIME_HELP, parse_time

from ..notes import answers_json
from ..options import cluster_options
from ..render import Column, Table, print_answer, say

_F = TypeVar("_F", bound=Callable[..., Any])

_MOVES: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("old_offset", "OFFSET", lambda offset: "-" if offset < 0 else offset, rank=1),
    Column("new_offset", "NEW OFFSET"),
    Column("reread", "READ AGAIN"),
    Column("skipped", "SKIPPED"),
)


def _moving_options(function: _F) -> _F:
    """Adds the options of all commands that move offsets."""
    function = click.option("-y", "--yes", is_flag=True, help="Do not ask.")(function)
    return click.option(
        "-n", "--dry-run", is_flag=True, help="Change nothing; show what would change."
    )(function)


@click.command("reset-offset")
@click.argument("name")
@click.option("-t", "--topic", required=True, help="Topic to go on elsewhere in.")
@click.option(
    "--to-time",
    metavar="TIME",
    help=f"To the first message stored at this time or later: {TIME_HELP}.",
)
@click.option("--to-first", is_flag=True, help="To the first message that is still there.")
@click.option("--to-last", is_flag=True, help="Behind the last message.")
@click.option("--to-offset", type=click.IntRange(0), help="To this offset; needs --queue.")
@click.option("-q", "--queue", "queue_id", type=click.IntRange(0), help="Only this queue.")
@click.option("-b", "--broker", default="", help="Only this broker group.")
@_moving_options
@cluster_options
def reset_offset(
    name: str,
    topic: str,
    to_time: str | None,
    to_first: bool,
    to_last: bool,
    to_offset: int | None,
    queue_id: int | None,
    broker: str,
    dry_run: bool,
    yes: bool,
    namesrv: str,
) -> None:
    """Let a group go on elsewhere in a topic, backward or forward.

    Works for groups that run and for those that do not. Running consumers drop the messages that
    they hold and go on there at once; calls of their listeners are not interrupted. Members of a
    broadcasting group are moved only while they run.

    \b
    Examples:
      mqmesh group reset-offset billing --topic orders --to-time 2h --dry-run
      mqmesh group reset-offset billing --topic orders --to-time 2026-03-01T12:00Z --yes
      mqmesh group reset-offset billing --topic orders --queue 3 --to-offset 4711
    """
    chosen = [to_time is not None, to_first, to_last, to_offset is not None]
    if sum(chosen) != 1:
        raise ConfigError("say where to: one of --to-time, --to-first, --to-last, --to-offset")
    where = [ResetWhere.TIMESTAMP, ResetWhere.FIRST, ResetWhere.LAST, ResetWhere.OFFSET][
        chosen.index(True)
    ]
    timestamp_ms = (
        0 if to_time is None else parse_time(to_time, SystemClock().wall_ms(), "--to-time")
    )
    with GroupAdmin(namesrv) as admin:

        def move(dry: bool) -> OffsetMoves:
            return admin.reset_offset(
                name,
                topic,
                where,
                timestamp_ms=timestamp_ms,
                queue_offset=-1 if to_offset is None else to_offset,
                queue_id=-1 if queue_id is None else queue_id,
                broker_name=broker,
                dry_run=dry,
            )

        _carry_out(name, move, dry_run=dry_run, yes=yes)


@click.command("clone-offset")
@click.argument("source")
@click.argument("target")
@click.option("-t", "--topic", default="", help="Only this topic. [default: all of SOURCE]")
@_moving_options
@cluster_options
def clone_offset(
    source: str, target: str, topic: str, dry_run: bool, yes: bool, namesrv: str
) -> None:
    """Let group TARGET go on where group SOURCE is.

    TARGET is made if it is not there. Queues that SOURCE never read stay as they are.

    \b
    Examples:
      mqmesh group clone-offset billing billing-v2 --dry-run
      mqmesh group clone-offset billing billing-v2 --topic orders --yes
    """
    with GroupAdmin(namesrv) as admin:
        _carry_out(
            target,
            lambda dry: admin.clone_offset(source, target, topic, dry_run=dry),
            dry_run=dry_run,
            yes=yes,
        )


@click.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only this topic. [default: all of the group]")
@_moving_options
@cluster_options
def skip(name: str, topic: str, dry_run: bool, yes: bool, namesrv: str) -> None:
    """Skip the backlog: let a group go on behind the last message.

    Messages that wait for a retry stay, unless their topic is named: --topic %RETRY%<group>.

    \b
    Examples:
      mqmesh group skip billing --dry-run
      mqmesh group skip billing --topic orders --yes
    """
    with GroupAdmin(namesrv) as admin:
        _carry_out(
            name,
            lambda dry: admin.skip_backlog(name, topic, dry_run=dry),
            dry_run=dry_run,
            yes=yes,
        )


def _carry_out(name: str, move: Callable[[bool], OffsetMoves], *, dry_run: bool, yes: bool) -> None:
    """Shows the moves, asks for confirmation, and carries them out."""
    if not dry_run and not yes:
        if answers_json() or not sys.stdin.isatty():
            raise ConfigError(
                "this makes the group read messages again or never; look with --dry-run, then "
                "add --yes"
            )
        _print_moves(offset_moves_view(name, move(True)))
        click.confirm("Do it?", abort=True)
    done = offset_moves_view(name, move(dry_run))
    if print_answer(done):
        _print_moves(done)


def _print_moves(moves: OffsetMovesView) -> None:
    Table(_MOVES, moves.queues).print()
    counts = (
        f"{moves.reread:,} messages again and {{}} {moves.skipped:,}; {moves.members_notified:,}"
    )
    if moves.dry_run:
        text = f"would read {counts.format('skip')} members would be notified; nothing was changed"
    else:
        text = f"reads {counts.format('skips')} members were notified"
    say(f"group {moves.group} {text}")
