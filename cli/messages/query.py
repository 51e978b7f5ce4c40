"""`mqmesh query`: finds messages by id, by key, by where they stand."""

import json
import string
from collections.abc import Sequence
from typing import Final

import click

from mqmesh.checksum import crc32
from mqmesh.clock import SystemClock
from mqmesh.message import StoredMessage
from mqmesh.protocol.client_rpc import HandedResult
from mqmesh.protocol.queries import DEFAULT_QUERY_MESSAGES, MAX_QUERY_MESSAGES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.members import MemberClient
from mqmesh.sdk.admin.queries import QueryClient, QueryResult
from mqmesh.sdk.admin.views.messages import handed_over_view, messages_view
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import TIME_HELP, parse_time

from ..notes import print_note, print_warning
from ..options import cluster_options, max_option
from ..render import (
    counted,
    duration,
    print_answer,
    print_body,
    print_fields,
    say,
    timestamp,
)
from .track import track

DUMP_LINE_BYTES: Final = 16
DUMP_BYTES: Final = 4_096
"""A body that is no text is shown so far."""

_PRINTABLE: Final = frozenset(string.printable.encode()) - frozenset(b"\t\n\r\x0b\x0c")

_max_option = max_option(DEFAULT_QUERY_MESSAGES, "Messages to show.", MAX_QUERY_MESSAGES)


@click.group()
def query() -> None:
    """Find messages by id, by key, or by where they stand.

    \b
    Examples:
      mqmesh query by-key 4711 --topic orders
      mqmesh query by-id 0C6A9F0E5D3B7A12000000000000002A
      mqmesh query by-offset --topic orders --queue 3 --offset 42
      mqmesh query track 0C6A9F0E5D3B7A12000000000000002A
      mqmesh query hand-to 0C6A9F0E5D3B7A12000000000000002A --group billing --client ID
    """


query.add_command(track)


@query.command("by-key")
@click.argument("key")
@click.option("-t", "--topic", required=True, help="Topic of the messages.")
@click.option(
    "--from",
    "from_text",
    metavar="TIME",
    help=f"Stored at this time or later: {TIME_HELP}.",
)
@click.option("--to", "to_text", metavar="TIME", help="Stored at this time or before, UTC.")
@_max_option
@cluster_options
def by_key(
    key: str,
    topic: str,
    from_text: str | None,
    to_text: str | None,
    most: int,
    namesrv: str,
) -> int:
    """Messages that have KEY among their keys, newest first.

    \b
    Examples:
      mqmesh query by-key 4711 --topic orders
      mqmesh query by-key 4711 --topic orders --from 2h --to 1h --max 100 --json
      mqmesh query by-key 4711 --topic %RETRY%billing
    """
    now_ms = SystemClock().wall_ms()
    with QueryClient(namesrv) as client:
        result = client.by_key(
            topic,
            key,
            from_ms=time_option("--from", from_text, now_ms, 0),
            to_ms=time_option("--to", to_text, now_ms, MAX_TIMESTAMP_MS),
            max_count=most,
        )
    return _print_result(result)


@query.command("by-id")
@click.argument("message_id")
@_max_option
@click.option("--all", "with_system", is_flag=True, help="Copies in system topics, too.")
@cluster_options
def by_id(message_id: str, most: int, with_system: bool, namesrv: str) -> int:
    """The message with an id, and its copies: retries and dead letters.

    \b
    Examples:
      mqmesh query by-id 0C6A9F0E5D3B7A12000000000000002A
    """
    with QueryClient(namesrv) as client:
        result = client.by_id(message_id, max_count=most, with_system=with_system)
    if result.hidden:
        print_note(
            f"topics of the system, where delayed messages wait, have "
            f"{counted(result.hidden, 'more copy', 'more copies')}; --all shows them"
        )
    return _print_result(result)


@query.command("by-offset-id")
@click.argument("offset_message_id")
@cluster_options
def by_offset_id(offset_message_id: str, namesrv: str) -> int:
    """The message at a place in a broker's log, which no index is needed for.

    \b
    Examples:
      mqmesh query by-offset-id 127.0.0.1:10911#1F40#2
    """
    with QueryClient(namesrv) as client:
        message = client.by_offset_id(offset_message_id)
    return _print_result(QueryResult([message]))


@query.command("by-offset")
@click.option("-t", "--topic", required=True, help="Topic.")
@click.option("-q", "--queue", "queue_id", type=click.IntRange(0), required=True, help="Queue id.")
@click.option("-o", "--offset", type=click.IntRange(0), required=True, help="Offset in the queue.")
@click.option("-b", "--broker", default="", help="Broker group, where several carry the topic.")
@cluster_options
def by_offset(topic: str, queue_id: int, offset: int, broker: str, namesrv: str) -> int:
    """The message at an offset of a queue.

    \b
    Examples:
      mqmesh query by-offset --topic orders --queue 3 --offset 42
      mqmesh query by-offset --topic orders --broker broker-b --queue 0 --offset 0
    """
    with QueryClient(namesrv) as client:
        message = client.by_offset(topic, queue_id, offset, broker_name=broker)
    return _print_result(QueryResult([message]))


@query.command("hand-to")
@click.argument("message_id")
@click.option("-g", "--group", required=True, help="Consumer group.")
@click.option("-c", "--client", "client_id", required=True, help="Member of the group.")
@cluster_options
def hand_to(message_id: str, group: str, client_id: str, namesrv: str) -> int:
    """Have one member of a group consume a message now, and show the result.

    Its listener is called at once, beside what it consumes otherwise. No offset moves and
    nothing is retried; the listener can see it (message.is_handed_over). MESSAGE_ID is a message
    id or an offset id. Members of groups that broadcast or consume in order take none. Exit code
    1 if the message was not consumed within 10 s.

    \b
    Examples:
      mqmesh group connections billing      shows the members
      mqmesh query hand-to 0C6A9F0E5D3B7A12000000000000002A --group billing --client ID
    """
    with MemberClient(namesrv) as client:
        found = client.hand_to(message_id, group, client_id)
    text = f": {found.text}" if found.text else ""
    print_answer(
        handed_over_view(message_id, group, client_id, found),
        f"{found.result} in {duration(found.took_ms)} by {client_id}{text}",
    )
    return ExitCode.OK if found.result == HandedResult.SUCCESS else ExitCode.FAILED


def time_option(option: str, text: str | None, now_ms: int, default: int) -> int:
    """Returns the time that an option gives, as ms since 1970.

    Args:
        option: Name of the option.
        text: Value of the option; None if it is not given.
        now_ms: Wall clock.
        default: Result if the option is not given, ms since 1970.

    Raises:
        ConfigError: The text is no time.
    """
    return default if text is None else parse_time(text, now_ms, option)


def _print_result(result: QueryResult) -> int:
    for name, note in result.notes.items():
        print_warning(f"broker {name}: {note}")
    if not result.messages:
        print_note("no message was found")
    if print_answer(messages_view(result)):
        _print_messages(result)
    return ExitCode.OK if result.messages else ExitCode.FAILED


def _print_messages(result: QueryResult) -> None:
    for number, message in enumerate(result.messages):
        if number:
            say()
        print_fields(fields_of(message))
        print_body(body_lines(message.body))
    if result.more:
        print_note("there are more; --max shows further ones")


def fields_of(message: StoredMessage) -> list[tuple[str, str]]:
    """Returns every field of a message but its body, for people."""
    info = message.info
    fields: Sequence[tuple[str, object]] = [
        ("message id", message.message_id),
        ("offset id", message.offset_message_id),
        ("topic", message.topic),
        ("stored in topic", info.topic if info.topic != message.topic else ""),
        ("queue", f"{message.broker_name}/{message.queue_id}@{message.queue_offset}"),
        ("tag", message.tag or ""),
        ("keys", ", ".join(message.keys)),
        *((f"property {name}", value) for name, value in (message.properties or {}).items()),
        ("sharding key", message.sharding_key or ""),
        ("flag", message.flag or ""),
        ("reconsume times", message.reconsume_times or ""),
        ("delay level", message.delay_level or ""),
        ("deliver at", timestamp(message.deliver_at_ms) if message.deliver_at_ms else ""),
        ("born", f"{timestamp(message.born_timestamp)} at {message.born_host or '-'}"),
        ("stored", f"{timestamp(message.store_timestamp)} at {message.store_host or '-'}"),
        ("log", f"offset {message.commitlog_offset}, number {message.ordinal} of its batch"),
        ("batch size", f"{message.store_size:,} bytes"),
        ("body size", f"{len(message.body):,} bytes, CRC-32 {crc32(message.body):08x}"),
    ]
    return [(name, str(value)) for name, value in fields if value != ""]


def body_lines(body: bytes) -> list[str]:
    """Formats a body for people: JSON with indents, text unchanged, anything else as a hex dump."""
    for read in (_json_lines, _text_lines):
        lines = read(body)
        if lines is not None:
            return lines
    return _dump_lines(body)


def _json_lines(body: bytes) -> list[str] | None:
    if body[:1] not in (b"{", b"["):
        return None
    try:
        value = json.loads(body)
        text = json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.splitlines()


def _text_lines(body: bytes) -> list[str] | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    if any(ord(character) < 32 and character not in "\t\r\n" for character in text):
        return None
    return text.splitlines() or [""]


def _dump_lines(body: bytes) -> list[str]:
    lines = []
    for start in range(0, min(len(body), DUMP_BYTES), DUMP_LINE_BYTES):
        piece = body[start : start + DUMP_LINE_BYTES]
        shown = "".join(chr(byte) if byte in _PRINTABLE else "." for byte in piece)
        lines.append(f"{start:08x}  {piece.hex(' '):<{3 * DUMP_LINE_BYTES - 1}}  {shown}")
    if len(body) > DUMP_BYTES:
        lines.append(f"… and {len(body) - DUMP_BYTES:,} bytes more")
    return lines
