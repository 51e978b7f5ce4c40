"""`mqmesh group …`: consumer groups, their settings, their members and how far they are."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec
from rich.text import Text

from mqmesh.errors import ConfigError
from mqmesh.message import check_consumer_group, retry_topic
from mqmesh.protocol.groups import (
    BY_CONSUMER,
    ConsumerConnection,
    GroupConfig,
    GroupFailures,
    GroupSummary,
)
from mqmesh.protocol.membership import ConsumerData, MessageModel
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.sdk.admin.group_admin import GroupAdmin, GroupProgress, QueueLag

from ..notes import tell_error, tell_warning
from ..options import broker_option, confirm, json_option, namesrv_option, yes_option
from ..render import counted, duration, print_json, print_table, rate, say, timestamp
from .group_offsets import clone_offset, reset_offset, skip
from .running import running

TOPICS_SHOWN = 3
_UNKNOWN = {"lag": None, "lag_ms": None, "in_flight": None}
"""Values of a group that broadcasts: its members keep their offsets by themselves."""

_F = TypeVar("_F", bound=Callable[..., Any])


@click.group()
def group() -> None:
    """Consumer groups: who is in them, how far they are, and where they go on.

    \b
    Examples:
      mqmesh group list
      mqmesh group show billing
      mqmesh group progress billing
      mqmesh group connections billing
      mqmesh group running billing
      mqmesh group reset-offset billing --topic orders --to-time 2h --dry-run
    """


group.add_command(reset_offset)
group.add_command(clone_offset)
group.add_command(skip)
group.add_command(running)


@group.command("list")
@click.option(
    "--lag-over", type=click.IntRange(min=0), help="Only groups with more messages to do than this."
)
@broker_option
@namesrv_option
@json_option
def list_groups(lag_over: int | None, broker: str, namesrv: str, as_json: bool) -> None:
    """List all groups, with and without members.

    LAG counts messages that are not done, RETRYING those of them that failed and come again, now or
    later, DEAD those in the dead letters. FAILED/S are messages a second whose listener failed, in
    the last ten minutes, as members said with their last heartbeat, 30 s ago at most. The numbers
    are sums over the brokers.

    \b
    Examples:
      mqmesh group list
      mqmesh group list --lag-over 10000 --broker broker-a
    """
    with GroupAdmin(namesrv, broker_name=broker) as admin:
        rows = _merged(admin.groups())
    if lag_over is not None:
        rows = [row for row in rows if (row["lag"] or 0) > lag_over]
    if as_json:
        print_json(rows)
        return
    print_table(
        (
            "GROUP",
            "MODEL",
            "MEMBERS",
            "LAG",
            "MSG/S",
            "FAILED/S",
            "RETRYING",
            "DEAD",
            "TOPICS",
            "REMARK",
        ),
        [
            (
                row["group"],
                (row["message_model"] or "-").lower(),
                row["members"],
                "-" if row["lag"] is None else row["lag"],
                rate(row["consume_tps"]),
                rate(row["failed_per_s"]),
                row["retrying"],
                row["dead"],
                _topics(row["topics"]),
                _remark(row),
            )
            for row in rows
        ],
        optional=("MODEL", "TOPICS", "MSG/S"),
    )


@group.command("show")
@click.argument("name")
@namesrv_option
@json_option
def show_group(name: str, namesrv: str, as_json: bool) -> None:
    """Show a group: what was set on each broker, and how it stands.

    \b
    Examples:
      mqmesh group show billing
      mqmesh group show billing --json
    """
    with GroupAdmin(namesrv) as admin:
        by_broker = admin.groups(name)
    (row,) = _merged(by_broker)
    if as_json:
        print_json(row)
        return
    _show_settings(row)
    lag = "unknown" if row["lag"] is None else f"{row['lag']:,}"
    say(
        f"{counted(row['members'], 'member')}, {(row['message_model'] or 'none').lower()}; lag "
        f"{lag}, {row['retrying']:,} of them failed and come again, "
        f"{counted(row['dead'], 'dead letter')}; "
        f"topics: {', '.join(row['topics']) or '-'}"
    )


def _settings(function: _F) -> _F:
    """Adds the options that settings have."""
    for option in (
        click.option(
            "--notify/--no-notify",
            default=None,
            help="Members are told at once when others come and go. [default: yes]",
        ),
        click.option(
            "--retry-max-times",
            type=click.IntRange(BY_CONSUMER, 1_000_000),
            help="Retries before a message becomes a dead letter; -1 as each consumer says. "
            "Ordered consumers go by their own number. [default: -1]",
        ),
        click.option(
            "--broadcast/--no-broadcast", default=None, help="Members may broadcast. [default: yes]"
        ),
        click.option(
            "--consume/--no-consume", default=None, help="Members may consume. [default: yes]"
        ),
    ):
        function = option(function)
    return function


@group.command()
@click.argument("name")
@_settings
@click.option("--if-missing", is_flag=True, help="Where it exists it is left as it is.")
@namesrv_option
@json_option
def create(
    name: str,
    consume: bool | None,
    broadcast: bool | None,
    retry_max_times: int | None,
    notify: bool | None,
    if_missing: bool,
    namesrv: str,
    as_json: bool,
) -> None:
    """Create a group on every broker.

    Needed only where brokers do not do that by themselves
    (auto_create_subscription_group = false), or for settings of its own.

    \b
    Examples:
      mqmesh group create billing
      mqmesh group create billing --retry-max-times 5 --if-missing
    """
    check_consumer_group(name)
    config = msgspec.structs.replace(
        GroupConfig(name), **_changes(consume, broadcast, retry_max_times, notify)
    )
    with GroupAdmin(namesrv) as admin:
        done = admin.create_group(config, exist_ok=if_missing)
    _show_configs(name, done, as_json)


@group.command()
@click.argument("name")
@_settings
@namesrv_option
@json_option
def update(
    name: str,
    consume: bool | None,
    broadcast: bool | None,
    retry_max_times: int | None,
    notify: bool | None,
    namesrv: str,
    as_json: bool,
) -> None:
    """Change the settings of a group on every broker; what is not said stays.

    \b
    Examples:
      mqmesh group update billing --no-consume      members get nothing for a while
      mqmesh group update billing --consume
    """
    check_consumer_group(name)
    changes = _changes(consume, broadcast, retry_max_times, notify)
    if not changes:
        raise ConfigError("nothing to change; say --consume, --broadcast, --retry-max-times, …")
    with GroupAdmin(namesrv) as admin:
        present = admin.groups(name)
        wanted = {broker: GroupConfig(name) for broker in masters_of(admin.cluster().brokers)}
        wanted |= {broker: one.config for broker, (one,) in present.items()}
        done = admin.put_group(
            {broker: msgspec.structs.replace(one, **changes) for broker, one in wanted.items()}
        )
    _show_configs(name, done, as_json)


@group.command()
@click.argument("name")
@click.option("--with-topics", is_flag=True, help="Its retry and dead letter topics, too.")
@yes_option
@namesrv_option
@json_option
def delete(name: str, with_topics: bool, yes: bool, namesrv: str, as_json: bool) -> None:
    """Delete a group without members: its settings and offsets, on every broker.

    If it is used again it begins as a new group does. Messages that wait for a delayed retry
    are not deleted, --with-topics or not: they reach the group if it is used again.

    \b
    Examples:
      mqmesh group delete billing --yes
      mqmesh group delete billing --with-topics
    """
    what = "its offsets"
    if with_topics:
        what += ", and what is due for a retry or dead (not what is delayed until a retry)"
    confirm(
        "this forgets how far the group has come",
        f"Delete group {name}, {what}?",
        yes=yes,
        as_json=as_json,
    )
    with GroupAdmin(namesrv) as admin:
        brokers = admin.delete_group(name, remove_topics=with_topics)
    if as_json:
        print_json({"group": name, "deleted_from": brokers, "with_topics": with_topics})
        return
    say(f"group {name} is deleted from {', '.join(brokers)}")


@group.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only this topic.")
@namesrv_option
@json_option
def progress(name: str, topic: str, namesrv: str, as_json: bool) -> None:
    """Show how far a group is: lag in messages and in time, queue by queue.

    OFFSET is the next message to be done, STORED the time when it was stored. END stands behind
    the queue's last one. IN FLIGHT are messages that members have and are not done with. WAITING
    tells how long the oldest message that is not done has been there. What failed and waits for its
    retry is lag, in no queue; what is delayed or half a transaction is none. Members of a group
    that broadcasts keep their offsets by themselves: how far they are `mqmesh group running` asks
    them.

    \b
    Examples:
      mqmesh group progress billing
      mqmesh group progress billing --topic orders --json
    """
    with GroupAdmin(namesrv) as admin:
        found = admin.progress(name, topic)
    if as_json:
        print_json(_progress_dict(found))
        return
    print_table(
        (
            "TOPIC",
            "BROKER",
            "QUEUE",
            "OFFSET",
            "STORED",
            "END",
            "LAG",
            "IN FLIGHT",
            "WAITING",
            "MEMBER",
        ),
        [
            (
                one.progress.topic,
                one.broker_name,
                one.progress.queue_id,
                "-" if one.progress.consumer_offset < 0 else one.progress.consumer_offset,
                timestamp(one.progress.oldest_timestamp),
                one.progress.max_queue_offset,
                one.lag if one.is_known else "-",
                one.in_flight if one.is_known else "-",
                duration(one.lag_ms) if one.lag else "-",
                one.progress.client_id or "-",
            )
            for one in found.queues
        ],
        optional=("STORED", "IN FLIGHT", "OFFSET", "END", "WAITING"),
    )
    waiting = f", the oldest waiting for {duration(found.lag_ms)}" if found.lag else ""
    lag = f"lag {counted(found.lag, 'message')}{waiting}; {found.in_flight:,} in flight"
    if found.broadcasts:
        lag = "lag unknown"
    say(
        f"{lag}; "
        f"{rate(found.consume_tps)} messages/s; {rate(found.failures.failed_per_s)} failures/s; "
        f"{found.retrying:,} failed and come again; "
        f"{counted(found.dead, 'dead letter')}; {counted(found.members, 'member')}"
    )
    _warn(found.members, found.differing, found.message_model)


@group.command()
@click.argument("name")
@click.option("--producers", is_flag=True, help="Of the producer group of that name.")
@namesrv_option
@json_option
def connections(name: str, producers: bool, namesrv: str, as_json: bool) -> int:
    """Show the members of a group, and who subscribes differently from the others.

    All members must subscribe to the same topics with the same expressions, or messages are
    missed: each queue is read by one member, with that member's expression.

    \b
    Examples:
      mqmesh group connections billing
      mqmesh group connections shop --producers
    """
    with GroupAdmin(namesrv) as admin:
        if producers:
            return _show_producers(admin, name, as_json)
        members = admin.connections(name)
        if not members:
            admin.groups(name)  # a group that is not there at all is an error
    if as_json:
        print_json({"group": name, "members": [_member_dict(one) for one in members]})
        return ExitCode.OK
    print_table(
        ("MEMBER", "STATE", "LAST WORD", "VERSION", "MODEL", "SUBSCRIPTIONS"),
        [
            (
                one.client_id,
                _state(one.connected),
                duration(one.silent_ms),
                one.version or "-",
                one.data.message_model.lower(),
                _subscriptions(one.data),
            )
            for one in members
        ],
        optional=("MODEL", "VERSION", "LAST WORD"),
    )
    for one in members:
        if one.difference:
            _tell(f"{one.client_id} subscribes differently from the group: {one.difference}")
    return ExitCode.OK


def _show_producers(admin: GroupAdmin, name: str, as_json: bool) -> int:
    found = admin.producer_connections(name)
    if not found:
        # Nothing is kept of a producer group but its members.
        tell_error(f"no producer of a group {name!r} is connected")
        return ExitCode.FAILED
    if as_json:
        print_json({"group": name, "members": [msgspec.structs.asdict(one) for one in found]})
        return ExitCode.OK
    print_table(
        ("MEMBER", "STATE", "LAST WORD", "VERSION"),
        [
            (one.client_id, _state(one.connected), duration(one.silent_ms), one.version or "-")
            for one in found
        ],
        optional=("VERSION", "LAST WORD"),
    )
    return ExitCode.OK


def _changes(
    consume: bool | None, broadcast: bool | None, retry_max_times: int | None, notify: bool | None
) -> dict[str, Any]:
    changes = {
        "consume_enable": consume,
        "consume_broadcast_enable": broadcast,
        "retry_max_times": retry_max_times,
        "notify_consumer_ids_changed_enable": notify,
    }
    return {key: value for key, value in changes.items() if value is not None}


def _show_configs(name: str, configs: dict[str, GroupConfig], as_json: bool) -> None:
    rows = [_broker_dict(broker, one, True) for broker, one in configs.items()]
    found = {"group": name, "brokers": rows}
    if as_json:
        print_json(found)
    else:
        _show_settings(found)


def _broker_dict(broker_name: str, config: GroupConfig, is_configured: bool) -> dict[str, Any]:
    """Returns the settings of a group on a broker, with the same keys in all answers."""
    settings = msgspec.structs.asdict(config)
    del settings["group"]
    return {"broker_name": broker_name, "is_configured": is_configured} | settings


def _show_settings(found: dict[str, Any]) -> None:
    for row in found["brokers"]:
        times = row["retry_max_times"]
        say(
            f"group {found['group']} on {row['broker_name']}: "
            f"{'may' if row['consume_enable'] else 'may not'} consume, "
            f"{'may' if row['consume_broadcast_enable'] else 'may not'} broadcast, "
            + (
                "retries as each consumer says"
                if times == BY_CONSUMER
                else counted(times, "retry", "retries")
            )
            + (
                ""
                if row["notify_consumer_ids_changed_enable"]
                else ", members are not told of others"
            )
            + ("" if row["is_configured"] else " (nothing was set: defaults)")
        )


def _merged(by_broker: dict[str, list[GroupSummary]]) -> list[dict[str, Any]]:
    """Returns one row a group: numbers summed over the brokers."""
    found: dict[str, dict[str, Any]] = {}
    for broker_name, summaries in by_broker.items():
        for one in summaries:
            row = found.setdefault(
                one.config.group,
                {
                    "group": one.config.group,
                    "message_model": "",
                    "members": 0,
                    "lag": 0,
                    "consume_tps": 0.0,
                    "retrying": 0,
                    "recent_deliveries": 0,
                    "recent_failures": 0,
                    "failed_per_s": 0.0,
                    "dead": 0,
                    "differing": 0,
                    "consume_enable": True,
                    "topics": set(),
                    "brokers": [],
                },
            )
            row["message_model"] = row["message_model"] or one.message_model
            # Every member is connected to every broker.
            row["members"] = max(row["members"], one.members)
            row["differing"] = max(row["differing"], one.differing)
            for key in ("lag", "consume_tps", "retrying", "dead"):
                row[key] += getattr(one, key)
            if one.failures.deliveries >= row["recent_deliveries"]:
                row |= _failures(one.failures)
            row["consume_enable"] = row["consume_enable"] and one.config.consume_enable
            row["topics"] |= set(one.topics)
            row["brokers"].append(_broker_dict(broker_name, one.config, one.is_configured))
    for row in found.values():
        row["topics"] = sorted(row["topics"])
        if row["message_model"] == MessageModel.BROADCASTING:
            row["lag"] = None
    return [found[name] for name in sorted(found)]


def _failures(one: GroupFailures) -> dict[str, Any]:
    """Returns failures of ten minutes, which each member reports to all of its brokers alike."""
    return {
        "recent_deliveries": one.deliveries,
        "recent_failures": one.failed,
        "failed_per_s": one.failed_per_s,
    }


def _progress_dict(found: GroupProgress) -> dict[str, Any]:
    return {
        "group": found.group,
        "message_model": found.message_model,
        "members": found.members,
        "differing": found.differing,
        "lag": found.lag,
        "lag_ms": found.lag_ms,
        "in_flight": found.in_flight,
        "consume_tps": found.consume_tps,
        "retrying": found.retrying,
        "waiting_retries": found.waiting_retries,
        **_failures(found.failures),
        "dead": found.dead,
        "queues": [_queue_dict(one, found.group) for one in found.queues],
        **(_UNKNOWN if found.broadcasts else {}),
    }


def _queue_dict(one: QueueLag, group_name: str) -> dict[str, Any]:
    queue = one.progress
    return {
        "topic": queue.topic,
        "is_retry": queue.topic == retry_topic(group_name),
        "broker_name": one.broker_name,
        "queue_id": queue.queue_id,
        "consumer_offset": queue.consumer_offset,
        "min_queue_offset": queue.min_queue_offset,
        "max_queue_offset": queue.max_queue_offset,
        "lag": one.lag,
        "lag_ms": one.lag_ms,
        "oldest_timestamp": queue.oldest_timestamp,
        "in_flight": one.in_flight,
        "client_id": queue.client_id,
        **({} if one.is_known else _UNKNOWN),
    }


def _member_dict(one: ConsumerConnection) -> dict[str, Any]:
    return {
        "client_id": one.client_id,
        "connected": one.connected,
        "silent_ms": one.silent_ms,
        "language": one.language,
        "version": one.version,
        "message_model": one.data.message_model,
        "consume_from_where": one.data.consume_from_where,
        "subscriptions": [msgspec.structs.asdict(each) for each in one.data.subscriptions],
        "difference": one.difference,
        "stats": [msgspec.structs.asdict(each) for each in one.stats],
    }


def _warn(members: int, differing: int, model: str) -> None:
    if differing:
        _tell(
            f"{differing} of {members} members subscribe differently from the group; messages "
            "are missed; `mqmesh group connections` tells more"
        )
    if model == MessageModel.BROADCASTING:
        _tell("members of a broadcasting group keep their offsets by themselves")


def _remark(row: dict[str, Any]) -> Text:
    remarks = []
    if row["differing"]:
        remarks.append(f"{row['differing']} subscribe differently")
    if not row["consume_enable"]:
        remarks.append("may not consume")
    return Text(", ".join(remarks), style="yellow")


def _topics(topics: list[str]) -> str:
    more = len(topics) - TOPICS_SHOWN
    shown = ", ".join(topics[:TOPICS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def _subscriptions(data: ConsumerData) -> str:
    own = retry_topic(data.group)
    return ", ".join(
        f"{one.topic} {one.expression}" for one in data.subscriptions if one.topic != own
    )


def _state(connected: bool) -> Text:
    return Text("connected", style="green") if connected else Text("lost", style="yellow")


def _tell(text: str) -> None:
    tell_warning(text)
