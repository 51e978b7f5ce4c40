"""`mqmesh group …`: consumer groups, their settings, their members and how far they are."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click
import msgspec
from rich.text import Text

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError
from mqmesh.message import check_consumer_group, retry_topic
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import BY_CONSUMER, GroupConfig
from mqmesh.protocol.membership import MessageModel, Subscription
from mqmesh.protocol.policies import FOREVER_MS, KEEP
from mqmesh.protocol.retries import DEFAULT_MAX_RECONSUME_TIMES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.views.groups import (
    ConsumerGroupView,
    ConsumersView,
    DeletedGroupView,
    GroupBrokerView,
    GroupSettingsView,
    ReleasedLeasesView,
    consumers_view,
    group_settings_view,
    group_views,
    lease_views,
    producers_view,
    progress_view,
)
from mqmesh.user_times import is_duration, parse_duration, parse_time

from ..notes import print_error, print_warning
from ..options import broker_option, cluster_options, confirm, yes_option
from ..render import (
    Column,
    Table,
    counted,
    duration,
    print_answer,
    print_records,
    rate,
    timestamp,
)
from .group_offsets import clone_offset, reset_offset, skip
from .running import running

TOPICS_SHOWN = 3

_F = TypeVar("_F", bound=Callable[..., Any])


def _topics(topics: list[str]) -> str:
    more = len(topics) - TOPICS_SHOWN
    shown = ", ".join(topics[:TOPICS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def _remark(group: ConsumerGroupView) -> Text:
    remarks = []
    if group.differing:
        remarks.append(f"{group.differing} subscribe differently")
    if not group.consume_enable:
        remarks.append("may not consume")
    paused_ms = max((one.paused_until for one in group.brokers), default=0)
    if paused_ms > SystemClock().wall_ms():
        remarks.append(f"paused until {_until(paused_ms)}")
    return Text(", ".join(remarks), style="yellow")


def _state(connected: bool) -> Text:
    return Text("connected", style="green") if connected else Text("lost", style="yellow")


_GROUPS: Final = (
    Column("group", "GROUP"),
    Column("message_model", "MODEL", lambda model: model.lower() or "-", rank=5),
    Column("members", "MEMBERS"),
    Column("lag", "LAG"),
    Column("consume_tps", "MSG/S", rate, rank=3),
    Column("failed_per_s", "FAILED/S", rate, rank=2),
    Column("retrying", "RETRYING", rank=1),
    Column("dead", "DEAD"),
    Column("topics", "TOPICS", _topics, rank=4),
    Column("", "REMARK", value=_remark),
)
_PROGRESS: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("consumer_offset", "OFFSET", lambda offset: "-" if offset < 0 else offset, rank=3),
    Column("oldest_timestamp", "STORED", timestamp, rank=5),
    Column("max_queue_offset", "END", rank=2),
    Column("lag", "LAG"),
    Column("in_flight", "IN FLIGHT", rank=4),
    Column("", "WAITING", value=lambda one: duration(one.lag_ms) if one.lag else "-", rank=1),
    Column("client_id", "MEMBER"),
)
_WINDOWS: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("consumer_offset", "DONE TO", lambda offset: "-" if offset < 0 else offset, rank=3),
    Column("max_queue_offset", "END", rank=2),
    Column("lag", "LAG"),
    Column("ready", "READY", lambda count: "-" if count is None else count),
    Column("in_flight", "IN FLIGHT"),
    Column("waiting", "WAITING", lambda count: "-" if count is None else count),
    Column("redelivered", "REDELIVERED", lambda count: "-" if count is None else count, rank=4),
    Column("oldest_held_ms", "HELD", lambda ms: duration(ms) if ms else "-", rank=1),
)
_LEASES: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("first", "FIRST"),
    Column("count", "MESSAGES"),
    Column("attempt", "ATTEMPT"),
    Column("state", "STATE"),
    Column("member", "MEMBER", lambda member: member or "-"),
    Column("held_ms", "HELD", lambda ms: duration(ms) if ms else "-", rank=1),
    Column("left_ms", "LEFT", lambda ms: duration(ms) if ms else "-", rank=2),
)
_PRODUCERS: Final = (
    Column("client_id", "MEMBER"),
    Column("connected", "STATE", _state),
    Column("silent_ms", "LAST WORD", duration, rank=1),
    Column("version", "VERSION", rank=2),
)


@click.group()
def group() -> None:
    """Consumer groups: their members, their progress, and their offsets.

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
@cluster_options
def list_groups(lag_over: int | None, broker: str, namesrv: str) -> None:
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
        found = group_views(admin.groups())
    if lag_over is not None:
        found = [one for one in found if (one.lag or 0) > lag_over]
    print_records(_GROUPS, found)


@group.command("show")
@click.argument("name")
@cluster_options
def show_group(name: str, namesrv: str) -> None:
    """Show a group: its settings on each broker, and its state.

    \b
    Examples:
      mqmesh group show billing
      mqmesh group show billing --json
    """
    with GroupAdmin(namesrv) as admin:
        (found,) = group_views(admin.groups(name))
    lag = "unknown" if found.lag is None else f"{found.lag:,}"
    members = counted(found.members, "member") if found.members else "no members"
    model = f", {found.message_model.lower()}" if found.message_model else ""
    print_answer(
        found,
        *_setting_lines(name, found.brokers),
        f"{members}{model}; lag {lag}, {found.retrying:,} of them to be retried, "
        f"{counted(found.dead, 'dead letter')}; topics: {', '.join(found.topics) or '-'}",
    )


def _duration(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_duration(text, option.opts[0])


def _delivery_settings(function: _F) -> _F:
    """Adds the options of groups that acknowledge each message, as ``_settings`` does."""
    for option in (
        click.option(
            "--priority-fairness",
            type=click.IntRange(0, 1_000_000),
            help="Of topics with priorities: each N-th receive begins with the oldest message; "
            "0 for never. [default: 0]",
        ),
        click.option(
            "--lost-grace",
            "lost_grace_ms",
            callback=_duration,
            metavar="DURATION",
            help="So long a member whose connection broke keeps its messages. [default: 10s]",
        ),
        click.option(
            "--max-unsettled",
            type=click.IntRange(1, 1_000_000),
            help="Messages of a queue that members may hold. [default: 10000]",
        ),
        click.option(
            "--invisible",
            "invisible_ms",
            callback=_duration,
            metavar="DURATION",
            help="So long no other member gets a received message. [default: 60s]",
        ),
        click.option(
            "--delivery",
            type=click.Choice([mode.value for mode in DeliveryMode]),
            help="Members share queues, or acknowledge each message; with fifo in the order of "
            "sharding keys. [default: queue]",
        ),
    ):
        function = option(function)
    return function


def _settings(function: _F) -> _F:
    """Adds the options that settings have: the command gets them as keywords, None where absent."""
    for option in (
        click.option(
            "--notify/--no-notify",
            "notify_consumer_ids_changed_enable",
            default=None,
            help="Members are notified at once when others join or leave. [default: yes]",
        ),
        click.option(
            "--max-messages-per-s",
            type=click.IntRange(0, 1_000_000_000),
            help="Messages that each broker hands out to the group in a second; 0 for no limit. "
            "[default: 0]",
        ),
        click.option(
            "--dead-letter",
            metavar="keep|drop|TOPIC",
            help="Keep dead letters in %DLQ%GROUP, drop them, or send them to a topic. "
            "[default: keep]",
        ),
        click.option(
            "--retry-delays",
            metavar="DELAYS",
            help="'10s 30s 1m 5m' or 'exp 1s x2 max 2h', with 'jitter 20%' behind it if you like; "
            "'' for the delay levels of the broker. [default: '']",
        ),
        click.option(
            "--retry-max-times",
            type=click.IntRange(BY_CONSUMER, 1_000_000),
            help="Retries before a message becomes a dead letter; -1 as each consumer says. "
            "Ordered consumers go by their own number. [default: -1]",
        ),
        click.option(
            "--broadcast/--no-broadcast",
            "consume_broadcast_enable",
            default=None,
            help="Members may broadcast. [default: yes]",
        ),
        click.option(
            "--consume/--no-consume",
            "consume_enable",
            default=None,
            help="Members may consume. [default: yes]",
        ),
    ):
        function = option(function)
    return function


@group.command()
@click.argument("name")
@_settings
@_delivery_settings
@click.option("--if-missing", is_flag=True, help="Where it exists it is left as it is.")
@cluster_options
def create(name: str, if_missing: bool, namesrv: str, **settings: Any) -> None:
    """Create a group on every broker.

    Needed only where brokers do not do that by themselves
    (auto_create_subscription_group = false), or for settings of its own.

    \b
    Examples:
      mqmesh group create billing
      mqmesh group create billing --retry-max-times 5 --if-missing
      mqmesh group create billing --retry-delays '10s 30s 1m 5m' --dead-letter drop
      mqmesh group create billing --delivery message --invisible 60s --max-unsettled 10000
    """
    check_consumer_group(name)
    config = GroupConfig(name, **_changes(settings))
    with GroupAdmin(namesrv) as admin:
        done = admin.create_group(config, exist_ok=if_missing)
    _print_settings(group_settings_view(name, done))


@group.command()
@click.argument("name")
@_settings
@_delivery_settings
@cluster_options
def update(name: str, namesrv: str, **settings: Any) -> None:
    """Change the settings of a group on every broker; settings that are left out stay.

    \b
    Examples:
      mqmesh group update billing --no-consume      members get nothing for a while
      mqmesh group update billing --consume
      mqmesh group update billing --retry-delays 'exp 1s x2 max 2h jitter 20%'
      mqmesh group update billing --max-messages-per-s 100
    """
    check_consumer_group(name)
    changes = _changes(settings)
    if not changes:
        raise ConfigError("nothing to change; say --consume, --broadcast, --retry-max-times, …")
    with GroupAdmin(namesrv) as admin:
        done = admin.change_group(name, lambda one: msgspec.structs.replace(one, **changes))
    _print_settings(group_settings_view(name, done))


@group.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only messages of this topic.")
@click.option(
    "--until", metavar="TIME", help="2h from now, or 2026-03-01T12:00 (UTC). [default: resume]"
)
@cluster_options
def pause(name: str, topic: str, until: str | None, namesrv: str) -> None:
    """Pause a group: its members get nothing more, on any broker, until then.

    Members keep running, and finish the messages that they have. With --topic, failed messages of
    the topic come again all the same.

    \b
    Examples:
      mqmesh group pause billing --until 2h
      mqmesh group pause billing --topic orders
      mqmesh group resume billing
    """
    now_ms = SystemClock().wall_ms()
    until_ms = FOREVER_MS
    if until is not None:
        is_from_now = is_duration(until)
        until_ms = (
            now_ms + parse_duration(until, "--until")
            if is_from_now
            else parse_time(until, now_ms, "--until", "a duration like 2h, ")
        )
        if until_ms <= now_ms:
            raise ConfigError(f"--until {until!r}: must be later than now, {timestamp(now_ms)}")
    with GroupAdmin(namesrv) as admin:
        done = admin.pause_group(name, topic, until_ms=until_ms)
    _print_settings(group_settings_view(name, done))


@group.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only messages of this topic. [default: all]")
@cluster_options
def resume(name: str, topic: str, namesrv: str) -> None:
    """Let a paused group go on at once.

    \b
    Examples:
      mqmesh group resume billing
      mqmesh group resume billing --topic orders
    """
    with GroupAdmin(namesrv) as admin:
        done = admin.resume_group(name, topic)
    _print_settings(group_settings_view(name, done))


@group.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only messages of this topic. [default: all]")
@cluster_options
def leases(name: str, topic: str, namesrv: str) -> None:
    """Show who holds messages of a group that acknowledges each, since when, and which attempt.

    FIRST is the queue offset of the first message, MESSAGES how many there are; HELD is the time
    since they were handed out, LEFT what is left of the lease, or of the wait.

    \b
    Examples:
      mqmesh group leases billing
      mqmesh group leases billing --topic orders --json
    """
    with GroupAdmin(namesrv) as admin:
        _check_has_leases(admin, name)
        print_records(_LEASES, lease_views(admin.leases(name, topic)))


@group.command()
@click.argument("name")
@click.option("-m", "--member", required=True, help="Client id, as `mqmesh group leases` shows it.")
@cluster_options
def release(name: str, member: str, namesrv: str) -> None:
    """End the leases of a member: others get its messages at once.

    The member may be working on it still: then it is worked on twice.

    \b
    Examples:
      mqmesh group release billing --member 10.0.0.7@4711@7f3a
    """
    with GroupAdmin(namesrv) as admin:
        _check_has_leases(admin, name)
        count = admin.release_leases(name, member)
    print_answer(
        ReleasedLeasesView(group=name, member=member, messages=count),
        f"{counted(count, 'message')} of {name} released from {member}",
    )


@group.command()
@click.argument("name")
@click.option("--with-topics", is_flag=True, help="Its retry and dead letter topics, too.")
@yes_option
@cluster_options
def delete(name: str, with_topics: bool, yes: bool, namesrv: str) -> None:
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
    confirm("this forgets how far the group has come", f"Delete group {name}, {what}?", yes=yes)
    with GroupAdmin(namesrv) as admin:
        brokers = admin.delete_group(name, remove_topics=with_topics)
    view = DeletedGroupView(group=name, deleted_from=brokers, with_topics=with_topics)
    print_answer(view, f"group {name} is deleted from {', '.join(brokers)}")


@group.command()
@click.argument("name")
@click.option("-t", "--topic", default="", help="Only this topic.")
@cluster_options
def progress(name: str, topic: str, namesrv: str) -> None:
    """Show how far a group is: lag in messages and in time, queue by queue.

    OFFSET is the next message to be done, STORED the time when it was stored. END stands behind
    the queue's last one. IN FLIGHT are messages that members have and are not done with. WAITING
    is the age of the oldest message that is not done. Failed messages that wait for their retry
    count as lag, in no queue; delayed messages and half messages do not. Members of a
    broadcasting group keep their offsets by themselves; `mqmesh group running` gets them from the
    members. In a group that acknowledges each message, READY messages were never handed out, IN
    FLIGHT ones are with members, WAITING ones come again, and HELD is the age of the oldest lease.

    \b
    Examples:
      mqmesh group progress billing
      mqmesh group progress billing --topic orders --json
    """
    with GroupAdmin(namesrv) as admin:
        found = progress_view(admin.progress(name, topic))
    lag = "lag unknown"
    if found.lag is not None:
        waiting = f", the oldest waiting for {duration(found.lag_ms or 0)}" if found.lag else ""
        lag = f"lag {counted(found.lag, 'message')}{waiting}; {found.in_flight:,} in flight"
    is_window = any(one.ready is not None for one in found.queues)
    is_for_people = print_answer(
        found,
        Table(_WINDOWS if is_window else _PROGRESS, found.queues),
        f"{lag}; {rate(found.consume_tps)} messages/s; {rate(found.failed_per_s)} failures/s; "
        f"{found.retrying:,} to be retried; "
        f"{counted(found.dead, 'dead letter')}; {counted(found.members, 'member')}",
    )
    if is_for_people and found.differing:
        print_warning(
            f"{found.differing} of {found.members} members subscribe differently from the group; "
            "messages are missed; `mqmesh group connections` shows them"
        )
    if is_for_people and found.message_model == MessageModel.BROADCASTING:
        print_warning("members of a broadcasting group keep their offsets by themselves")


@group.command()
@click.argument("name")
@click.option("--producers", is_flag=True, help="Of the producer group of that name.")
@cluster_options
def connections(name: str, producers: bool, namesrv: str) -> int:
    """Show the members of a group, and those whose subscriptions differ from the others'.

    All members must subscribe to the same topics with the same expressions, or messages are
    missed: each queue is read by one member, with that member's expression.

    \b
    Examples:
      mqmesh group connections billing
      mqmesh group connections shop --producers
    """
    with GroupAdmin(namesrv) as admin:
        if producers:
            return _print_producers(admin, name)
        found = consumers_view(name, admin.connections(name))
        if not found.members:
            admin.groups(name)  # a group that is not there at all is an error
    if print_answer(found):
        _print_consumers(found)
    return ExitCode.OK


def _print_consumers(found: ConsumersView) -> None:
    columns = (
        *_PRODUCERS,
        Column("message_model", "MODEL", str.lower, rank=3),
        Column("subscriptions", "SUBSCRIPTIONS", lambda all_: _subscriptions(found.group, all_)),
    )
    Table(columns, found.members).print()
    for one in found.members:
        if one.difference:
            print_warning(
                f"{one.client_id} subscribes differently from the group: {one.difference}"
            )


def _print_producers(admin: GroupAdmin, name: str) -> int:
    found = producers_view(name, admin.producer_connections(name))
    if not found.members:
        # Nothing is kept of a producer group but its members.
        print_error(f"no producer of a group {name!r} is connected")
        return ExitCode.FAILED
    print_answer(found, Table(_PRODUCERS, found.members))
    return ExitCode.OK


def _check_has_leases(admin: GroupAdmin, name: str) -> None:
    found = group_views(admin.groups(name))
    if all(one.delivery == DeliveryMode.QUEUE for group in found for one in group.brokers):
        raise ConfigError(
            f"group {name!r} has delivery = queue, so it has no leases; `mqmesh group progress` "
            "shows its messages in flight"
        )


def _changes(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _print_settings(found: GroupSettingsView) -> None:
    print_answer(found, *_setting_lines(found.group, found.brokers))


def _setting_lines(group: str, brokers: Sequence[GroupBrokerView]) -> list[str]:
    lines = []
    for one in brokers:
        retries = "retries as each consumer says"
        if one.retry_max_times != BY_CONSUMER:
            retries = counted(one.retry_max_times, "retry", "retries")
        elif one.delivery != DeliveryMode.QUEUE:
            retries = counted(DEFAULT_MAX_RECONSUME_TIMES, "retry", "retries")
        notified = one.notify_consumer_ids_changed_enable
        lines.append(
            f"group {group} on {one.broker_name}: "
            f"{'may' if one.consume_enable else 'may not'} consume, "
            f"{'may' if one.consume_broadcast_enable else 'may not'} broadcast, {retries}"
            f"{'' if notified else ', members are not notified of others'}"
            f"{_policies(one)}"
            f"{'' if one.is_configured else ' (nothing was set: defaults)'}"
        )
    return lines


def _policies(one: GroupBrokerView) -> str:
    """Return the policies that are not the default, for people."""
    texts = []
    if one.retry_delays:
        texts.append(f"retry delays {one.retry_delays}")
    if one.dead_letter != KEEP:
        texts.append(f"dead letters: {one.dead_letter}")
    if one.delivery != DeliveryMode.QUEUE:
        texts.append(
            f"acknowledges each message, {duration(one.invisible_ms)} a lease, up to "
            f"{one.max_unsettled:,} unsettled a queue"
        )
    if one.priority_fairness:
        texts.append(f"one of {one.priority_fairness:,} receives begins with the oldest message")
    if one.max_messages_per_s:
        texts.append(f"at most {one.max_messages_per_s:,} messages/s")
    if one.paused_until:
        texts.append(f"paused until {_until(one.paused_until)}")
    texts += [f"{topic} paused until {_until(ms)}" for topic, ms in one.paused_topics.items()]
    return "".join(f", {text}" for text in texts)


def _until(ms: int) -> str:
    return "it is resumed" if ms == FOREVER_MS else timestamp(ms)


def _subscriptions(group: str, subscriptions: Sequence[Subscription]) -> str:
    own = retry_topic(group)
    return ", ".join(f"{one.topic} {one.expression}" for one in subscriptions if one.topic != own)
