"""`mqmesh trace`: trace data that clients recorded of a message; see docs/tracing.md."""

from typing import Final

import click
from rich.text import Text

from mqmesh.errors import InvalidArgument
from mqmesh.message import TRACE_TOPIC, parse_message_id
from mqmesh.protocol.queries import MAX_QUERY_MESSAGES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.traces import MessageSpans, TraceClient, TraceSpan
from mqmesh.sdk.admin.tracks import MessageTrack
from mqmesh.sdk.admin.views.messages import TraceView, trace_view, trace_views

from ..notes import print_note, print_warning
from ..options import cluster_options, max_option
from ..render import Column, Table, print_answer, say, timestamp
from .track import print_track

STYLES = {"SUCCESS": "green", "COMMIT": "green", "RUNNING": "dim", "UNKNOWN": "dim"}

NO_TRACE = (
    "there is no trace of this message: its clients write none (msg_trace), chose others, or it "
    "is gone"
)


def _remark(one: TraceSpan) -> str:
    facts = []
    if one.store_host:
        facts.append(f"{one.topic} at {one.store_host}")
    if one.message_type in ("HALF", "DELAY"):
        facts.append(one.message_type.lower())
    if one.retry_times:
        facts.append(f"retry {one.retry_times}")
    if one.from_check:
        facts.append("the broker had asked")
    return ", ".join(facts)


_SPANS: Final = (
    Column("time_ms", "TIME", timestamp),
    Column("cost_ms", "MS", rank=1),
    Column("kind", "WHAT", lambda kind: kind.lower().replace("_", " ")),
    Column("group", "GROUP", str),
    Column("client", "CLIENT", str, rank=2),
    Column("result", "RESULT", lambda result: Text(result, style=STYLES.get(result, "yellow"))),
    Column("", "REMARK", str, value=_remark),
)

_topic_option = click.option(
    "--trace-topic",
    metavar="TOPIC",
    default=TRACE_TOPIC,
    show_default=True,
    help="Where clients write their trace.",
)


@click.group()
def trace() -> None:
    """Show what clients recorded of a message: its producer, its consumers, times and outcomes.

    \b
    Examples:
      mqmesh trace show 0C6A9F0E5D3B7A12000000000000002A
      mqmesh trace by-key orders 4711
    """


@trace.command()
@click.argument("message_id")
@_topic_option
@cluster_options
def show(message_id: str, trace_topic: str, namesrv: str) -> int:
    """Show the trace of a message, by time; without one, the answer of `mqmesh query track`.

    \b
    Examples:
      mqmesh trace show 0C6A9F0E5D3B7A12000000000000002A
    """
    with TraceClient(namesrv) as client:
        found = client.trace(message_id, trace_topic=trace_topic)
        track = None if found.spans else _track(client, message_id)
    _warn(found)
    view = trace_view(found, track)
    if print_answer(view):
        _print_trace(view)
        if view.track and view.track.copies:
            say("what is stored says:")
            print_track(view.track)
    is_known = found.spans or (track is not None and track.copies)
    return ExitCode.OK if is_known else ExitCode.FAILED


@trace.command("by-key")
@click.argument("topic")
@click.argument("key")
@_topic_option
@max_option(64, "Messages to show, the newest.", MAX_QUERY_MESSAGES)
@cluster_options
def by_key(topic: str, key: str, trace_topic: str, most: int, namesrv: str) -> int:
    """The trace of the messages of TOPIC that have KEY among their keys.

    \b
    Examples:
      mqmesh trace by-key orders 4711
    """
    with TraceClient(namesrv) as client:
        found = client.trace_by_key(topic, key, trace_topic=trace_topic, max_count=most)
    for one in found:
        _warn(one)
    views = trace_views(found)
    if print_answer(views):
        for view in views:
            say(f"message {view.message_id}")
            _print_trace(view)
    if not found:
        print_note(f"no message of {topic} with key {key} was found, nor a trace of one")
    return ExitCode.OK if found else ExitCode.FAILED


def _track(client: TraceClient, message_id: str) -> MessageTrack | None:
    try:
        parse_message_id(message_id)
    except InvalidArgument:
        return None  # RocketMQ's ids are others
    return client.track(message_id)


def _warn(found: MessageSpans) -> None:
    for name, note in found.notes.items():
        print_warning(f"broker {name}: {note}")
    if found.strange:
        print_warning(f"{found.strange} records of the trace topic cannot be read")


def _print_trace(found: TraceView) -> None:
    if found.spans:
        Table(_SPANS, found.spans).print()
    else:
        print_note(NO_TRACE)
