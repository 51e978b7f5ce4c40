"""`mqmesh archive export`: messages of an archive as files, or back into a topic."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import msgspec

from mqmesh.errors import ConfigError
from mqmesh.message import Message, as_plain
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.sdk.producer.producer import Producer
from mqmesh.storage.files.atomic_file import load_document, save_document

from ..main import INTERRUPTED
from ..notes import print_note
from ..options import cluster_options
from ..render import print_answer
from ..streams import json_line, standard_output
from .archive_parts import archive_module, plain_row

ORIGIN: Final = "ARCHIVE_ORIGIN"
"""Property of a message that was sent again: broker, commit-log offset and ordinal of the old."""
RESEND_BATCH: Final = 1_000
"""Messages that are sent, and noted as sent, at a time."""


class Resent(msgspec.Struct, frozen=True):
    """Progress of a resending; the next one starts behind it.

    Attributes:
        dt: Day.
        broker: Broker in that day.
        commitlog_offset: Commit-log offset of the last batch.
        ordinal: Index of the last message in that batch.
    """

    dt: str
    broker: str
    commitlog_offset: int
    ordinal: int


@click.command()
@click.argument("archive", metavar="ARCHIVE")
@click.option("-t", "--topic", required=True, help="Messages of this topic.")
@click.option("--since", default="", metavar="DAY", help="Only days (UTC) from this one on.")
@click.option("--until", default="", metavar="DAY", help="Only days (UTC) up to this one.")
@click.option(
    "-f",
    "--format",
    "kind",
    type=click.Choice(["ndjson", "parquet", "resend"]),
    default="ndjson",
    show_default=True,
    help="JSON lines, Parquet files, or messages of a topic again.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File, or directory.")
@click.option("--into", default="", help="With resend: the topic; else that of the message.")
@click.option("--rate", type=click.IntRange(1), help="With resend: messages a second at most.")
@click.option("--dry-run", is_flag=True, help="With resend: only count.")
@cluster_options
def export(
    archive: str,
    topic: str,
    since: str,
    until: str,
    kind: str,
    output: Path | None,
    into: str,
    rate: int | None,
    dry_run: bool,
    namesrv: str,
) -> int:
    """Write messages of a topic into files, or send them again.

    With resend they get new ids and the property ARCHIVE_ORIGIN; OUTPUT is a small file that
    records its progress, so that a command that was stopped goes on where it was.

    \b
    Examples:
      mqmesh archive export archive --topic orders --since 2026-03-01 -o orders.ndjson
      mqmesh archive export archive --topic orders --format parquet -o orders
      mqmesh archive export archive --topic orders --format resend -o resent.state --into again
    """
    work = archive_module("export")
    if kind == "parquet":
        if output is None:
            raise ConfigError("--format parquet: say the directory, -o DIR")
        count = work.write_parquet(archive, topic, since, until, str(output))
    elif kind == "ndjson":
        with ExitStack() as stack:
            target: BinaryIO
            if output is None:
                target = standard_output().buffer
            else:
                target = stack.enter_context(output.open("xb"))
            count = _write_lines(work.rows(archive, topic, since, until), target)
        if output is None:
            if not count:
                print_note("no message was found")
            return ExitCode.OK
    elif dry_run:
        count = sum(1 for _ in _behind(work.rows(archive, topic, since, until), _state(output)))
    else:
        if output is None:
            raise ConfigError("--format resend: say a file for how far it has come, -o FILE")
        found = work.rows(archive, topic, since, until)
        with Interrupt() as interrupt, Producer("mqmesh-archive", namesrv_addr=namesrv) as producer:
            count = _resend(producer, found, output, into, rate, interrupt)
            if interrupt:
                print_note(f"interrupted after {count} messages")
                return INTERRUPTED
    print_answer({"messages": count}, f"{count:,} messages")
    return ExitCode.OK


def _write_lines(found: Iterator[dict[str, Any]], target: BinaryIO) -> int:
    count = 0
    for row in found:
        target.write(json_line(plain_row(row)))
        count += 1
    return count


def _resend(
    producer: Producer,
    found: Iterator[dict[str, Any]],
    state: Path,
    into: str,
    rate: int | None,
    interrupt: Interrupt,
) -> int:
    count = 0
    began = time.monotonic()
    waiting: list[dict[str, Any]] = []
    for row in _behind(found, _state(state)):
        if len(waiting) == RESEND_BATCH:
            count += send_again(producer, waiting, state, into)
            waiting = []
            if interrupt or (rate and interrupt.wait(began + count / rate - time.monotonic())):
                return count
        waiting.append(row)
    return count + (send_again(producer, waiting, state, into) if waiting else 0)


def send_again(producer: Producer, rows: list[dict[str, Any]], state: Path, into: str) -> int:
    """Sends rows as messages, notes the place of the last one, and returns their number."""
    # Messages of one sharding key stay in order, also without waiting for each.
    for future in [producer.send_async(_again(row, into)) for row in rows]:
        future.result()
    save_document(state, msgspec.json.encode(_place(rows[-1])))
    return len(rows)


def _again(row: dict[str, Any], into: str) -> Message:
    origin = f"{row['broker']}#{row['commitlog_offset']:X}#{row['ordinal']:X}"
    old = Message(
        row["topic"],
        row["body"],
        row["tag"],
        tuple(row["keys"] or ()),
        dict(row["properties"] or ()),
        row["flag"],
        row["sharding_key"],
    )
    plain = as_plain(old)
    return msgspec.structs.replace(
        plain,
        topic=into or row["topic"],
        properties={**(plain.properties or {}), ORIGIN: origin},
    )


def _place(row: dict[str, Any]) -> Resent:
    return Resent(str(row["dt"]), row["broker"], row["commitlog_offset"], row["ordinal"])


def _state(path: Path | None) -> Resent | None:
    document = None if path is None else load_document(path)
    if document is None:
        return None
    try:
        return msgspec.json.decode(document, type=Resent)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not record the progress of an export: {error}") from error


def _behind(found: Iterator[dict[str, Any]], done: Resent | None) -> Iterator[dict[str, Any]]:
    """Yields rows behind the one that was sent last; the input is sorted by places."""
    last = None if done is None else msgspec.structs.astuple(done)
    for row in found:
        if last is None or msgspec.structs.astuple(_place(row)) > last:
            yield row
