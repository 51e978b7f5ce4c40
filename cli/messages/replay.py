"""`mqmesh replay`: messages of a topic once more, for one group or into another topic."""

import click
from rich.progress import TextColumn

from mqmesh.clock import SystemClock
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.replays import MAX_SPEED, MIN_SPEED, ReplayClient
from mqmesh.sdk.admin.searches import MessageFilter
from mqmesh.sdk.admin.views.fields import view_of
from mqmesh.sdk.admin.views.messages import ReplayView
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import TIME_HELP

from ..notes import print_note, print_warning
from ..options import broker_option, cluster_options
from ..progress_bar import bar_of
from ..render import counted, print_answer, timestamp
from .query import time_option


@click.command()
@click.argument("topic")
@click.option("--from", "from_text", metavar="TIME", help=f"Stored then or later: {TIME_HELP}.")
@click.option(
    "--to", "to_text", metavar="TIME", help=f"Stored then or before: {TIME_HELP}. [default: now]"
)
@click.option("--key", default="", help="Only messages with this key.")
@click.option("--tags", default="*", help="Only messages with these tags: 'A || B'.")
@click.option("--sql", default="", help="Only messages for which this SQL92 expression is true.")
@click.option("--into", "group", metavar="GROUP", default="", help="Group that gets them.")
@click.option("-t", "--topic", "into_topic", default="", help="Topic that they are copied into.")
@click.option(
    "--speed",
    type=click.FloatRange(MIN_SPEED, MAX_SPEED),
    help="1 keeps the gaps between them, 10 is ten times as fast. [default: as fast as it goes]",
)
@click.option("--dry-run", is_flag=True, help="Only count them.")
@broker_option
@cluster_options
def replay(
    topic: str,
    from_text: str | None,
    to_text: str | None,
    key: str,
    tags: str,
    sql: str,
    group: str,
    into_topic: str,
    speed: float | None,
    dry_run: bool,
    broker: str,
    namesrv: str,
) -> int:
    """Have one group, or another topic, get messages of TOPIC once more.

    They are copied by their brokers, under the ids that they have. A group gets them as retries of
    TOPIC, beside what it consumes; its offsets do not move, and no other group gets anything. A
    replay that is repeated copies them again. Exit code 1 if nothing fits.

    \b
    Examples:
      mqmesh replay orders --from 2h --to 1h --into billing --dry-run
      mqmesh replay orders --from 2h --key order-4711 --into billing
      mqmesh replay orders --from 2h --sql "amount > 100" --topic orders-test --speed 1
    """
    now_ms = SystemClock().wall_ms()
    wanted = MessageFilter(
        tags=tags,
        sql=sql,
        from_ms=time_option("--from", from_text, now_ms, 0),
        to_ms=time_option("--to", to_text, now_ms, MAX_TIMESTAMP_MS),
        broker_name=broker,
    )
    with (
        ReplayClient(namesrv) as client,
        bar_of("{task.description}", TextColumn("{task.completed:,} messages")) as update,
    ):
        found = client.replay(
            topic,
            wanted,
            key=key,
            group=group,
            into_topic=into_topic,
            speed=speed or 0.0,
            dry_run=dry_run,
            on_progress=None if update is None else lambda count: update(completed=count),
        )
    if found.unreadable:
        print_warning(f"{counted(found.unreadable, 'batch', 'batches')} cannot be decoded")
    done = f"{'would be' if dry_run else 'are'} replayed into {group or into_topic}"
    stored = f", stored {timestamp(found.first_ms)} to {timestamp(found.last_ms)}"
    if not found.found:
        print_note("no message fits")
    view = view_of(
        ReplayView, found, topic=topic, group=group, into_topic=into_topic, dry_run=dry_run
    )
    print_answer(view, f"{counted(found.found, 'message')} {done}{stored if found.found else ''}")
    return ExitCode.OK if found.found else ExitCode.FAILED
