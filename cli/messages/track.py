"""`mqmesh query track`: what happened to a message."""

from typing import Any, Final

import click
import msgspec
from rich.text import Text

from mqmesh.clock import SystemClock
from mqmesh.message import StoredMessage
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.tracks import MessageTrack, Track, TrackClient, TrackState

from ..notes import tell_note, tell_warning
from ..options import json_option, namesrv_option
from ..render import duration, print_json, print_table, say, timestamp

STYLES: Final = {
    TrackState.CONSUMED: "green",
    TrackState.DEAD: "bold red",
    TrackState.RETRYING: "yellow",
    TrackState.UNKNOWN: "dim",
    TrackState.FILTERED: "dim",
}


@click.command()
@click.argument("message_id")
@namesrv_option
@json_option
def track(message_id: str, namesrv: str, as_json: bool) -> int:
    """Show what happened to a message: where it is stored, and what each group has done about it.

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
        tell_warning(f"broker {name}: {note}")
    if as_json:
        print_json(track_dict(message_id, found))
    elif found.copies:
        show_track(found)
    else:
        tell_note("no message was found")
    return ExitCode.OK if found.copies else ExitCode.FAILED


def show_track(found: MessageTrack) -> None:
    """Draws what happened to a message of which something is stored."""
    now_ms = SystemClock().wall_ms()
    print_table(
        ("STORED", "TOPIC", "BROKER", "QUEUE", "OFFSET", "TRIES FAILED"),
        [
            (
                timestamp(copy.store_timestamp),
                copy.info.topic,
                copy.broker_name,
                copy.queue_id,
                copy.queue_offset,
                copy.reconsume_times,
            )
            for copy in reversed(found.copies)
        ],
    )
    say()
    if found.due_ms:
        say(f"it is delayed, and will be delivered {_when(found.due_ms, now_ms)}")
    elif not found.tracks:
        say(f"no group reads topic {found.copies[0].topic}")
    if found.tracks:
        print_table(
            ("GROUP", "STATE", "MEMBERS", "TRIES FAILED", "REMARK"),
            [
                (
                    one.group,
                    Text(one.state, style=STYLES.get(one.state, "")),
                    one.members,
                    one.reconsume_times,
                    _remark(one, now_ms),
                )
                for one in found.tracks
            ],
        )


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


def track_dict(message_id: str, found: MessageTrack) -> dict[str, Any]:
    """Returns the track of a message as JSON."""
    return {
        "message_id": message_id,
        "due_ms": found.due_ms,
        "copies": [_copy_dict(copy) for copy in reversed(found.copies)],
        "groups": [msgspec.structs.asdict(one) for one in found.tracks],
        "notes": found.notes,
    }


def _copy_dict(copy: StoredMessage) -> dict[str, Any]:
    return {
        "topic": copy.topic,
        "physical_topic": copy.info.topic,
        "broker_name": copy.broker_name,
        "queue_id": copy.queue_id,
        "queue_offset": copy.queue_offset,
        "store_timestamp": copy.store_timestamp,
        "reconsume_times": copy.reconsume_times,
        "offset_message_id": copy.offset_message_id,
    }
