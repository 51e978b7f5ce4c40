"""`mqmesh broker show`, `drain`, …: brokers that run."""

from collections.abc import Iterable
from typing import Any, Final

import click
import msgspec

from mqmesh.metrics import Distribution, MetricReading, MetricValue
from mqmesh.protocol.admin import MAX_QUEUE_ENTRIES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin
from mqmesh.sdk.admin.namesrv_admin import Draining, NamesrvAdmin

from ..notes import tell_error, tell_note, tell_warning
from ..options import confirm, json_option, namesrv_option, yes_option
from ..render import Column, duration, print_json, print_records, print_table, say
from .clusters import ping_role, role_state

_CLIENTS: Final = (
    Column("client_id", "CLIENT"),
    Column("language", "LANGUAGE", rank=3),
    Column("version", "VERSION", rank=2),
    Column("connected", "CONNECTED"),
    Column("silent_ms", "SILENT", duration, rank=1),
    Column("producer_groups", "PRODUCES FOR"),
    Column("consumer_groups", "CONSUMES FOR"),
)


@click.command()
@click.argument("name")
@namesrv_option
@json_option
def show(name: str, namesrv: str, as_json: bool) -> int:
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
            tell_error(f"no broker group {name!r}; there are {known}")
            return ExitCode.FAILED
        metrics = admin.runtime_info(name)[name]
    group = groups[name]
    infos = {
        broker_id: ping_role(namesrv, address.tcp)
        for broker_id, address in sorted(group.addresses.items())
    }
    members: list[dict[str, Any]] = [
        {
            "role": "broker",
            "cluster": group.cluster_name,
            "name": name,
            "broker_id": broker_id,
            "endpoint": group.addresses[broker_id].tcp,
        }
        | role_state(info)
        for broker_id, info in infos.items()
    ]
    if as_json:
        print_json({"broker_name": name, "members": members, "metrics": metrics_as_json(metrics)})
        return ExitCode.OK
    for one in members:
        say(
            f"broker {name} of {group.cluster_name}, id {one['broker_id']}, at {one['endpoint']}: "
            f"{one['state']} for {duration(one['uptime_ms'])}, version {one['version'] or '-'}"
        )
    print_table(
        ("METRIC", "OF", "VALUE", "UNIT"),
        metric_rows(metrics),
        optional=("UNIT",),
    )
    return ExitCode.OK


@click.command()
@click.argument("name")
@yes_option
@namesrv_option
@json_option
def drain(name: str, yes: bool, namesrv: str, as_json: bool) -> None:
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
        as_json=as_json,
    )
    with NamesrvAdmin(namesrv) as admin:
        done = admin.drain(name)
    _tell_draining(name, done, "gets nothing new", as_json)


@click.command()
@click.argument("name")
@namesrv_option
@json_option
def undrain(name: str, namesrv: str, as_json: bool) -> None:
    """Let producers come back to the broker NAME.

    \b
    Examples:
      mqmesh broker undrain broker-a
    """
    with NamesrvAdmin(namesrv) as admin:
        done = admin.undrain(name)
    _tell_draining(name, done, "is written to again", as_json)


@click.command()
@click.argument("name")
@click.option("--producers", is_flag=True, help="Only those that send.")
@click.option("--consumers", is_flag=True, help="Only those that consume.")
@namesrv_option
@json_option
def clients(name: str, producers: bool, consumers: bool, namesrv: str, as_json: bool) -> None:
    """List who is registered at the broker NAME: what it is, and for which groups.

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
    print_records(_CLIENTS, found, as_json=as_json)


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
@namesrv_option
@json_option
def queue(
    name: str, topic: str, queue_id: int, start: int, count: int, namesrv: str, as_json: bool
) -> None:
    """Show entries of a queue as the broker NAME has stored them; damaged ones say so.

    \b
    Examples:
      mqmesh broker queue broker-a orders 0 --from 17 --count 100
    """
    with BrokerAdmin(namesrv) as admin:
        found = admin.queue_entries(name, topic, queue_id, start=start, count=count)
    if as_json:
        place = {"broker_name": name, "topic": topic, "queue_id": queue_id}
        print_json(place | _named(found))
        return
    print_table(
        ("OFFSET", "LOG OFFSET", "SIZE", "TAG HASH", "PROBLEM"),
        [
            (
                one.queue_offset,
                str(one.commitlog_offset) if one.commitlog_offset >= 0 else "-",
                str(one.size),
                f"{one.tag_hash:016x}",
                one.problem or "-",
            )
            for one in found.entries
        ],
        optional=("TAG HASH", "SIZE"),
    )
    if found.min_queue_offset == found.max_queue_offset:
        say(f"the queue is empty; its next message gets offset {found.max_queue_offset}")
    else:
        say(f"the queue has {found.min_queue_offset} to {found.max_queue_offset}")


@click.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@namesrv_option
@json_option
def clean(name: str, dry_run: bool, namesrv: str, as_json: bool) -> None:
    """Have the broker NAME remove old log segments now, whatever the hour is.

    Its other limits count: storage.file_reserved_time, storage.delete_files_batch_max.

    \b
    Examples:
      mqmesh broker clean broker-a --dry-run
    """
    with BrokerAdmin(namesrv) as admin:
        done = admin.clean(name, dry_run=dry_run)
    if as_json:
        print_json({"broker_name": name, "dry_run": dry_run, **_named(done)})
        return
    size = sum(one.size for one in done.segments)
    word = "would go" if dry_run else "went"
    say(f"{len(done.segments)} segments of {size:,} bytes {word}: {done.reason}")
    if not done.topics:
        return
    print_table(
        ("TOPIC", "QUEUES", "MESSAGES", "FIRST OFFSET", "FIRST AFTER"),
        [
            (one.topic, one.queues, one.messages, one.min_before, one.min_after)
            for one in done.topics
        ],
        optional=("FIRST OFFSET",),
    )
    if done.more_topics:
        tell_note(f"and {done.more_topics} topics that lose fewer messages")


def _named(value: msgspec.Struct) -> dict[str, Any]:
    """Converts a struct that is an array on the wire to a dict by names, inner structs too."""
    told: dict[str, Any] = {}
    for name, inner in msgspec.structs.asdict(value).items():
        is_list = isinstance(inner, list) and inner and isinstance(inner[0], msgspec.Struct)
        told[name] = [msgspec.structs.asdict(one) for one in inner] if is_list else inner
    return told


def _tell_draining(name: str, done: Draining, what: str, as_json: bool) -> None:
    if as_json:
        print_json({"broker_name": name, **msgspec.structs.asdict(done)})
        return
    say(f"broker {name} {what}: routes of {done.topic_count} topics changed")
    if done.silent_namesrvs:
        tell_warning(
            f"no answer from name server {', '.join(done.silent_namesrvs)}; repeat it later"
        )


def metrics_as_json(readings: Iterable[MetricReading]) -> dict[str, Any]:
    """Returns metrics by name: their kind, and ``value``, or ``values`` with their labels."""
    shown: dict[str, Any] = {}
    for metric, samples in ((one.metric, one.samples) for one in readings):
        told: dict[str, Any] = {"kind": metric.kind, "unit": metric.unit, "help": metric.help}
        if metric.rocketmq_name:
            told["rocketmq_name"] = metric.rocketmq_name
        values = [_plain(one.value) for one in samples]
        if metric.labels:
            labels = [dict(zip(metric.labels, one.labels, strict=True)) for one in samples]
            pairs = zip(labels, values, strict=True)
            told["values"] = [{"labels": label, "value": value} for label, value in pairs]
        else:
            (told["value"],) = values
        shown[metric.name] = told
    return shown


def metric_rows(readings: Iterable[MetricReading]) -> list[tuple[str, str, str, str]]:
    """Returns metrics for a table: name, labels, value and unit; sorted by name."""
    return [
        (reading.metric.name, " ".join(one.labels), _shown(one.value), reading.metric.unit)
        for reading in sorted(readings, key=lambda one: one.metric.name)
        for one in reading.samples
    ]


def _plain(value: MetricValue) -> Any:
    if not isinstance(value, Distribution):
        return value
    return {"bounds": value.bounds, "counts": value.counts, "total": value.total}


def _shown(value: MetricValue) -> str:
    if isinstance(value, Distribution):
        middle, high = value.quantile(0.5), value.quantile(0.99)
        return f"{value.count}, half within {middle:g}, 99 % within {high:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
