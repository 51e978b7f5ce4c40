"""`mqmesh broker show`, `drain`, …: brokers that run."""

from collections.abc import Iterable
from typing import Final

import click

from mqmesh.metrics import Distribution, MetricReading, MetricValue
from mqmesh.protocol.admin import MAX_QUEUE_ENTRIES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.namesrv_admin import Draining, NamesrvAdmin
from mqmesh.sdk.admin.views.clusters import (
    BrokerView,
    broker_member_view,
    clean_view,
    client_views,
    draining_view,
    metric_views,
    queue_entries_view,
)

from ..notes import print_error, print_note, warn_of_silent
from ..options import cluster_options, confirm, yes_option
from ..render import (
    Column,
    Table,
    duration,
    print_answer,
    print_records,
    print_table,
    say,
)
from .clusters import ping_role

_CLIENTS: Final = (
    Column("client_id", "CLIENT"),
    Column("language", "LANGUAGE", rank=3),
    Column("version", "VERSION", rank=2),
    Column("connected", "CONNECTED"),
    Column("silent_ms", "SILENT", duration, rank=1),
    Column("producer_groups", "PRODUCES FOR"),
    Column("consumer_groups", "CONSUMES FOR"),
)
_ENTRIES: Final = (
    Column("queue_offset", "OFFSET"),
    Column("commitlog_offset", "LOG OFFSET", lambda offset: "-" if offset < 0 else str(offset)),
    Column("size", "SIZE", str, rank=1),
    Column("tag_hash", "TAG HASH", lambda tag_hash: f"{tag_hash:016x}", rank=2),
    Column("problem", "PROBLEM"),
)
_CLEANED: Final = (
    Column("topic", "TOPIC"),
    Column("queues", "QUEUES"),
    Column("messages", "MESSAGES"),
    Column("min_before", "FIRST OFFSET", rank=1),
    Column("min_after", "FIRST AFTER"),
)


@click.command()
@click.argument("name")
@cluster_options
def show(name: str, namesrv: str) -> int:
    """Show the broker NAME: where it is, how it is, and its metrics.

    \b
    Examples:
      mqmesh broker show broker-a
      mqmesh broker show broker-a --namesrv 10.0.0.1:9876 --json
    """
    with AdminClient(namesrv) as admin:
        groups = {one.broker_name: one for one in admin.cluster().brokers}
        if name not in groups:
            known = ", ".join(sorted(groups)) or "none"
            print_error(f"no broker group {name!r}; there are {known}")
            return ExitCode.FAILED
        metrics = admin.runtime_info(name)[name]
    group = groups[name]
    members = [
        broker_member_view(group, broker_id, ping_role(namesrv, address.tcp))
        for broker_id, address in sorted(group.addresses.items())
    ]
    view = BrokerView(broker_name=name, members=members, metrics=metric_views(metrics))
    if print_answer(view):
        for one in members:
            say(
                f"broker {name} of {one.cluster}, id {one.broker_id}, at {one.endpoint}: "
                f"{one.state} for {duration(one.uptime_ms)}, version {one.version or '-'}"
            )
        rows = metric_rows(metrics)
        print_table(("METRIC", "OF", "VALUE", "UNIT"), rows, optional=("UNIT",))
    return ExitCode.OK


@click.command()
@click.argument("name")
@yes_option
@cluster_options
def drain(name: str, yes: bool, namesrv: str) -> None:
    """Let producers leave the broker NAME: no route offers its queues for writing any more.

    Consumers go on reading it. It lasts until `mqmesh broker undrain`, over restarts, too.

    \b
    Examples:
      mqmesh broker drain broker-a
      mqmesh broker drain broker-a --yes
    """
    confirm(
        "this keeps producers away from the broker until `mqmesh broker undrain`",
        f"Keep producers away from broker {name} until it is undrained?",
        yes=yes,
    )
    with NamesrvAdmin(namesrv) as admin:
        done = admin.drain(name)
    _print_draining(name, done, "gets nothing new")


@click.command()
@click.argument("name")
@cluster_options
def undrain(name: str, namesrv: str) -> None:
    """Let producers come back to the broker NAME.

    \b
    Examples:
      mqmesh broker undrain broker-a
    """
    with NamesrvAdmin(namesrv) as admin:
        done = admin.undrain(name)
    _print_draining(name, done, "is written to again")


@click.command()
@click.argument("name")
@click.option("--producers", is_flag=True, help="Only those that send.")
@click.option("--consumers", is_flag=True, help="Only those that consume.")
@cluster_options
def clients(name: str, producers: bool, consumers: bool, namesrv: str) -> None:
    """List the clients that are registered at the broker NAME, with their kinds and groups.

    \b
    Examples:
      mqmesh broker clients broker-a
      mqmesh broker clients broker-a --consumers --json
    """
    with BrokerAdmin(namesrv) as admin:
        found = [
            one
            for one in admin.clients(name)
            if (one.producer_groups or not producers) and (one.consumer_groups or not consumers)
        ]
    print_records(_CLIENTS, client_views(found))


@click.command()
@click.argument("name")
@click.argument("topic")
@click.argument("queue_id", metavar="QUEUE", type=click.IntRange(0, 2**32 - 1))
@click.option("--from", "start", type=click.IntRange(0), default=0, help="First queue offset.")
@click.option(
    "--count",
    type=click.IntRange(1, MAX_QUEUE_ENTRIES),
    default=32,
    show_default=True,
    help="Most entries.",
)
@cluster_options
def queue(name: str, topic: str, queue_id: int, start: int, count: int, namesrv: str) -> None:
    """Show entries of a queue as the broker NAME has stored them; damaged ones say so.

    \b
    Examples:
      mqmesh broker queue broker-a orders 0 --from 17 --count 100
    """
    with BrokerAdmin(namesrv) as admin:
        found = admin.queue_entries(name, topic, queue_id, start=start, count=count)
    view = queue_entries_view(name, topic, queue_id, found)
    line = f"the queue has {found.min_queue_offset} to {found.max_queue_offset}"
    if found.min_queue_offset == found.max_queue_offset:
        line = f"the queue is empty; its next message gets offset {found.max_queue_offset}"
    print_answer(view, Table(_ENTRIES, view.entries), line)


@click.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@cluster_options
def clean(name: str, dry_run: bool, namesrv: str) -> None:
    """Have the broker NAME remove old log segments now, at any hour of the day.

    Its other limits count: storage.file_reserved_time, storage.delete_files_batch_max.

    \b
    Examples:
      mqmesh broker clean broker-a --dry-run
    """
    with BrokerAdmin(namesrv) as admin:
        done = clean_view(name, admin.clean(name, dry_run=dry_run), dry_run=dry_run)
    size = sum(one.size for one in done.segments)
    verb = "would go" if dry_run else "went"
    line = f"{len(done.segments)} segments of {size:,} bytes {verb}: {done.reason}"
    table = [Table(_CLEANED, done.topics)] if done.topics else []
    if print_answer(done, line, *table) and done.more_topics:
        print_note(f"and {done.more_topics} topics that lose fewer messages")


def _print_draining(name: str, done: Draining, what: str) -> None:
    print_answer(
        draining_view(name, done),
        f"broker {name} {what}: routes of {done.topic_count} topics changed",
    )
    warn_of_silent(done.silent_namesrvs)


def metric_rows(readings: Iterable[MetricReading]) -> list[tuple[str, str, str, str]]:
    """Returns metrics for a table: name, labels, value and unit; sorted by name."""
    return [
        (reading.metric.name, " ".join(one.labels), _shown(one.value), reading.metric.unit)
        for reading in sorted(readings, key=lambda one: one.metric.name)
        for one in reading.samples
    ]


def _shown(value: MetricValue) -> str:
    if isinstance(value, Distribution):
        middle, high = value.quantile(0.5), value.quantile(0.99)
        return f"{value.count}, half within {middle:g}, 99 % within {high:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
