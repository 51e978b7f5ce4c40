"""`mqmesh group running`: how the running members of a group are, as they say themselves."""

from typing import Any, Final

import click

from mqmesh.errors import ClientNotOnline, NoPermission, UnsupportedCommand
from mqmesh.message import retry_topic
from mqmesh.protocol.client_rpc import NEVER
from mqmesh.protocol.membership import TopicConsumption
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.members import MemberClient
from mqmesh.sdk.admin.views.groups import RunningGroupView, RunningView, running_view

from ..notes import print_warning
from ..options import cluster_options
from ..render import Column, Table, duration, print_answer, rate, say, timestamp


def _ago(ms: int) -> str:
    return "-" if ms == NEVER else duration(ms)


def _failed_per_s(topic: TopicConsumption) -> float:
    return topic.recent_failed * 1_000 / max(topic.recent_ms, 1)


def _sum(field: str) -> Any:
    return lambda member: sum(getattr(one, field) for one in member.queues)


def _last(field: str) -> Any:
    def ago(member: RunningView) -> str:
        known = [ms for one in member.queues if (ms := getattr(one, field)) != NEVER]
        return _ago(min(known, default=NEVER))

    return ago


def _own_queues(member: RunningView) -> int:
    return sum(one.topic != retry_topic(member.group) for one in member.queues)


_MEMBERS: Final = (
    Column("client_id", "MEMBER"),
    Column("kind", "KIND", rank=5),
    Column("", "QUEUES", value=_own_queues),
    Column("", "CACHED", value=_sum("cached_messages"), rank=4),
    Column("", "BYTES", value=_sum("cached_bytes"), rank=6),
    Column("", "IN FLIGHT", value=_sum("in_flight")),
    Column("topics", "OK/S", lambda topics: rate(sum(one.ok_per_s for one in topics))),
    Column("topics", "FAILED/S", lambda topics: rate(sum(map(_failed_per_s, topics)))),
    Column(
        "topics",
        "HANDLING",
        lambda topics: duration(int(max((one.handling_ms for one in topics), default=0))),
        rank=1,
    ),
    Column("", "LAST PULL", value=_last("since_pull_ms"), rank=3),
    Column("", "LAST COMMIT", value=_last("since_commit_ms"), rank=2),
)
_QUEUES: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("state", "STATE"),
    Column("next_offset", "NEXT"),
    Column("done_offset", "DONE"),
    Column("committed_offset", "COMMITTED", lambda offset: "-" if offset < 0 else offset),
    Column("cached_messages", "CACHED", rank=4),
    Column("cached_bytes", "BYTES", rank=5),
    Column("in_flight", "IN FLIGHT", rank=1),
    Column("since_pull_ms", "LAST PULL", _ago, rank=3),
    Column("since_commit_ms", "LAST COMMIT", _ago, rank=2),
)
_WORK: Final = (
    Column("topic", "TOPIC"),
    Column("ok_per_s", "OK/S", rate),
    Column("", "FAILED/S", rate, value=_failed_per_s),
    Column("failed_last_hour", "FAILED IN 1 H", rank=1),
    Column("handling_ms", "HANDLING", lambda ms: duration(int(ms))),
    Column("pulled_per_s", "PULLED/S", rate, rank=2),
    Column("pull_wait_ms", "PULL WAIT", lambda ms: duration(int(ms)), rank=3),
)
_IN_FLIGHT: Final = (
    Column("message_id", "IN FLIGHT"),
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER", rank=1),
    Column("queue_id", "QUEUE"),
    Column("queue_offset", "OFFSET"),
    Column(
        "since_ms",
        "WITH THE LISTENER",
        lambda since_ms: "< 1 s" if since_ms == NEVER else duration(since_ms),
    ),
)


@click.command()
@click.argument("name")
@click.option("-c", "--client", "client_id", default="", help="Only this member, with all of it.")
@click.option("--stack", is_flag=True, help="Also where its threads and asyncio tasks stand.")
@cluster_options
def running(name: str, client_id: str, stack: bool, namesrv: str) -> int:
    """Show the state of the running members of a group.

    Each member gets the request by way of a broker and answers itself: its settings, its queues and
    the messages that it holds of them, the messages that are with its listener right now, its
    rates of the last half minute; FAILED/S of the last ten minutes, in which most retries come
    again. HANDLING is the average time of a listener's call; it grows while one hangs. A consumer
    with admin_introspection = False answers nothing.

    \b
    Examples:
      mqmesh group running billing
      mqmesh group running billing --client 'vm1:4711@DEFAULT#1f2e3d4c5b6a' --stack
    """
    found: list[RunningView] = []
    silent: dict[str, str] = {}
    with MemberClient(namesrv) as client:
        members = [client_id] if client_id else [one.client_id for one in client.connections(name)]
        if not members:
            client.groups(name)  # a group that is not there at all is an error
        for one in members:
            try:
                info = client.running_info(name, one, with_stacks=stack)
                found.append(running_view(info))
            except (ClientNotOnline, NoPermission, UnsupportedCommand) as error:
                if client_id:
                    raise
                silent[one] = str(error)
    if print_answer(RunningGroupView(group=name, members=found, silent=silent)):
        for one, why in silent.items():
            print_warning(f"{one}: {why}")
        if client_id:
            _print_member(found[0])
        else:
            Table(_MEMBERS, found).print()
        for member in found:
            _print_stacks(member)
    return ExitCode.FAILED if silent else ExitCode.OK


def _print_member(one: RunningView) -> None:
    say(f"member {one.client_id} of {one.group}, {one.kind}, since {timestamp(one.started_ms)}")
    wanted = ", ".join(f"{sub.topic} {sub.expression}" for sub in one.subscriptions)
    say(f"subscriptions: {wanted or '-'}")
    say("settings: " + ", ".join(f"{k} = {v}" for k, v in one.properties.items()))
    Table(_QUEUES, one.queues).print()
    Table(_WORK, one.topics).print()
    if one.in_flight:
        Table(_IN_FLIGHT, one.in_flight).print()


def _print_stacks(one: RunningView) -> None:
    if one.stacks:
        say()
        say(f"stacks of {one.client_id}:")
        for line in one.stacks.splitlines():
            say(line)
