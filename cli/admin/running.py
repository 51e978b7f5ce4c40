"""`mqmesh group running`: how the running members of a group are, as they say themselves."""

from typing import Any

import click
import msgspec

from mqmesh.errors import ClientNotOnline, NoPermission, UnsupportedCommand
from mqmesh.message import retry_topic
from mqmesh.protocol.client_rpc import NEVER, RunningInfo
from mqmesh.protocol.membership import TopicConsumption
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.members import MemberClient

from ..notes import tell_warning
from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, rate, say, timestamp


@click.command()
@click.argument("name")
@click.option("-c", "--client", "client_id", default="", help="Only this member, with all of it.")
@click.option("--stack", is_flag=True, help="Also where its threads and asyncio tasks stand.")
@namesrv_option
@json_option
def running(name: str, client_id: str, stack: bool, namesrv: str, as_json: bool) -> int:
    """Ask the running members of a group how they are.

    Each is asked by way of a broker and answers itself: its settings, its queues and what it has
    of them, the messages that are with its listener right now, what it did in the last half
    minute; FAILED/S in the last ten minutes, in which most retries come again. HANDLING is the
    average time of a listener's call; it grows while one hangs. A consumer with
    admin_introspection = False tells nothing.

    \b
    Examples:
      mqmesh group running billing
      mqmesh group running billing --client 'vm1:4711@DEFAULT#1f2e3d4c5b6a' --stack
    """
    found: list[RunningInfo] = []
    silent: dict[str, str] = {}
    with MemberClient(namesrv) as client:
        members = [client_id] if client_id else [one.client_id for one in client.connections(name)]
        if not members:
            client.groups(name)  # a group that is not there at all is an error
        for one in members:
            try:
                found.append(client.running_info(name, one, with_stacks=stack))
            except (ClientNotOnline, NoPermission, UnsupportedCommand) as error:
                if client_id:
                    raise
                silent[one] = str(error)
    if as_json:
        print_json({"group": name, "members": [_as_dict(one) for one in found], "silent": silent})
        return _exit_code(silent)
    for member, why in silent.items():
        tell_warning(f"{member}: {why}")
    if client_id:
        _show_member(found[0])
    else:
        _show_members(found)
    return _exit_code(silent)


def _exit_code(silent: dict[str, str]) -> int:
    return ExitCode.FAILED if silent else ExitCode.OK


def _show_members(found: list[RunningInfo]) -> None:
    print_table(
        (
            "MEMBER",
            "KIND",
            "QUEUES",
            "CACHED",
            "BYTES",
            "IN FLIGHT",
            "OK/S",
            "FAILED/S",
            "HANDLING",
            "LAST PULL",
            "LAST COMMIT",
        ),
        [
            (
                one.client_id,
                one.kind,
                len(_own_queues(one)),
                sum(queue.cached_messages for queue in one.queues),
                sum(queue.cached_bytes for queue in one.queues),
                sum(queue.in_flight for queue in one.queues),
                rate(sum(topic.ok_per_s for topic in one.topics)),
                rate(sum(_failed_per_s(topic) for topic in one.topics)),
                duration(int(max((topic.handling_ms for topic in one.topics), default=0))),
                _ago(
                    min((q.since_pull_ms for q in one.queues if q.since_pull_ms >= 0), default=-1)
                ),
                _ago(
                    min(
                        (q.since_commit_ms for q in one.queues if q.since_commit_ms >= 0),
                        default=-1,
                    )
                ),
            )
            for one in found
        ],
        optional=("BYTES", "KIND", "CACHED", "LAST PULL", "LAST COMMIT", "HANDLING"),
    )
    for one in found:
        _show_stacks(one)


def _show_member(one: RunningInfo) -> None:
    say(f"member {one.client_id} of {one.group}, {one.kind}, since {timestamp(one.started_ms)}")
    wanted = ", ".join(f"{sub.topic} {sub.expression}" for sub in one.subscriptions)
    say(f"subscriptions: {wanted or '-'}")
    say("settings: " + ", ".join(f"{k} = {v}" for k, v in one.properties.items()))
    print_table(
        (
            "TOPIC",
            "BROKER",
            "QUEUE",
            "STATE",
            "NEXT",
            "DONE",
            "COMMITTED",
            "CACHED",
            "BYTES",
            "IN FLIGHT",
            "LAST PULL",
            "LAST COMMIT",
        ),
        [
            (
                queue.topic,
                queue.broker_name,
                queue.queue_id,
                queue.state,
                queue.next_offset,
                queue.done_offset,
                "-" if queue.committed_offset < 0 else queue.committed_offset,
                queue.cached_messages,
                queue.cached_bytes,
                queue.in_flight,
                _ago(queue.since_pull_ms),
                _ago(queue.since_commit_ms),
            )
            for queue in one.queues
        ],
        optional=("BYTES", "CACHED", "LAST PULL", "LAST COMMIT", "IN FLIGHT"),
    )
    _show_work(one)
    _show_stacks(one)


def _show_work(one: RunningInfo) -> None:
    print_table(
        ("TOPIC", "OK/S", "FAILED/S", "FAILED IN 1 H", "HANDLING", "PULLED/S", "PULL WAIT"),
        [
            (
                topic.topic,
                rate(topic.ok_per_s),
                rate(_failed_per_s(topic)),
                topic.failed_last_hour,
                duration(int(topic.handling_ms)),
                rate(topic.pulled_per_s),
                duration(int(topic.pull_wait_ms)),
            )
            for topic in one.topics
        ],
        optional=("PULL WAIT", "PULLED/S", "FAILED IN 1 H"),
    )
    if one.in_flight:
        print_table(
            ("IN FLIGHT", "TOPIC", "BROKER", "QUEUE", "OFFSET", "WITH THE LISTENER"),
            [
                (
                    each.message_id,
                    each.topic,
                    each.broker_name,
                    each.queue_id,
                    each.queue_offset,
                    "< 1 s" if each.since_ms == NEVER else duration(each.since_ms),
                )
                for each in one.in_flight
            ],
            optional=("BROKER",),
        )


def _failed_per_s(topic: TopicConsumption) -> float:
    return topic.recent_failed * 1_000 / max(topic.recent_ms, 1)


def _show_stacks(one: RunningInfo) -> None:
    if one.stacks:
        say()
        say(f"stacks of {one.client_id}:")
        for line in one.stacks.splitlines():
            say(line)


def _own_queues(one: RunningInfo) -> list[Any]:
    own = retry_topic(one.group)
    return [queue for queue in one.queues if queue.topic != own]


def _as_dict(one: RunningInfo) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.structs.asdict(one)
    for name in ("subscriptions", "queues", "topics", "in_flight"):
        told[name] = [msgspec.structs.asdict(each) for each in told[name]]
    return told


def _ago(ms: int) -> str:
    return "-" if ms == NEVER else duration(ms)
