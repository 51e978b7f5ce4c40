"""`mqmesh query track`: copies of a message, and its state in each group."""

from typing import Final

import click
from rich.text import Text

from mqmesh.clock import SystemClock
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.tracks import Track, TrackClient, TrackState
from mqmesh.sdk.admin.views.messages import TrackView, track_view

from ..notes import print_note, print_warning
from ..options import cluster_options
from ..render import Column, Table, duration, print_answer, say, timestamp

STYLES: Final = {
    TrackState.CONSUMED: "green",
    TrackState.DEAD: "bold red",
    TrackState.RETRYING: "yellow",
    TrackState.UNKNOWN: "dim",
    TrackState.FILTERED: "dim",
}
_COPIES: Final = (
    Column("store_timestamp", "STORED", timestamp),
    Column("physical_topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("queue_offset", "OFFSET"),
    Column("reconsume_times", "TRIES FAILED"),
)
_GROUPS: Final = (
    Column("group", "GROUP"),
    Column("state", "STATE", lambda state: Text(state, style=STYLES.get(state, ""))),
    Column("members", "MEMBERS"),
    Column("reconsume_times", "TRIES FAILED"),
)


@click.command()
@click.argument("message_id")
@cluster_options
def track(message_id: str, namesrv: str) -> int:
    """Show where a message is stored, and its state in each group.

    CONSUMED: the group's offset has passed it. FILTERED: so it has, but its members'
    expressions leave it out. IN_FLIGHT: a member has it. WAITING: the group has not come so
    far. RETRYING: it failed, and will come again. DEAD: it is in the group's dead letters.
    UNKNOWN: the group broadcasts, and its members keep their offsets by themselves.

    \b
    Examples:
      mqmesh query track 0C6A9F0E5D3B7A12000000000000002A
    """
    with TrackClient(namesrv) as client:
        found = client.track(message_id)
    for name, note in found.notes.items():
        print_warning(f"broker {name}: {note}")
    view = track_view(message_id, found)
    if print_answer(view):
        if view.copies:
            print_track(view)
        else:
            print_note("no message was found")
    return ExitCode.OK if found.copies else ExitCode.FAILED


def print_track(found: TrackView) -> None:
    """Draws the track of a message of which a copy is stored."""
    now_ms = SystemClock().wall_ms()
    Table(_COPIES, found.copies).print()
    say()
    if found.due_ms:
        say(f"it is delayed, and will be delivered {_when(found.due_ms, now_ms)}")
    elif not found.groups:
        say(f"no group reads topic {found.copies[0].topic}")
    if found.groups:
        remark = Column("", "REMARK", str, lambda one: _remark(one, now_ms))
        Table((*_GROUPS, remark), found.groups).print()


def _remark(one: Track, now_ms: int) -> str:
    parts = []
    if one.due_ms and one.state is TrackState.RETRYING:
        parts.append(f"comes again {_when(one.due_ms, now_ms)}")
    if one.messages_before:
        parts.append(f"{one.messages_before:,} messages before it")
    if one.client_id:
        parts.append(f"queue with {one.client_id}")
    if one.last_failure:
        parts.append(f"last failure: {one.last_failure}")
    return "; ".join(parts)


def _when(due_ms: int, now_ms: int) -> str:
    ahead = f"in {duration(due_ms - now_ms)}" if due_ms > now_ms else "now"
    return f"{ahead} ({timestamp(due_ms)})"
