"""`mqmesh store`: looks at a stopped store, checks it, and makes its index anew."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from mqmesh.batch.record_batch import decode_messages
from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError, CorruptBatch, CorruptRecord, StorageError, StoreLocked
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.views.messages import message_view
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.storage.tools.stopped_store import Item, StoppedCommitLog, StoppedStore, open_stopped
from mqmesh.storage.tools.verify import VerifyReport, verify_store

from ..main import INTERRUPTED
from ..messages.shown_message import parts_of
from ..notes import answers_json, print_note
from ..options import json_option
from ..progress_bar import progress_bar
from ..render import print_answer, print_json, say, timestamp

INDEX_DIRECTORY: Final = "index"

_directory = click.argument("directory", type=click.Path(path_type=Path))


@click.group()
def store() -> None:
    """Check, show and mend the store of a broker that is not running.

    DIRECTORY is the broker's store_path_root_dir; `mqmesh up` has one for each broker in its
    data directory.

    \b
    Examples:
      mqmesh store verify mqmesh-data/broker-a
      mqmesh store dump mqmesh-data/broker-a --topic orders --limit 10
      mqmesh store rebuild-index mqmesh-data/broker-a
    """


@store.command()
@_directory
@json_option
def verify(directory: Path) -> int:
    """Read the whole log and all queues, and report damage.

    Nothing is changed. The exit code is 1 if something is damaged, 2 if the store cannot be read.

    \b
    Examples:
      mqmesh store verify mqmesh-data/broker-a
      mqmesh store verify mqmesh-data/broker-a --json
    """
    with _open(directory) as stopped, Interrupt() as interrupt, progress_bar() as on_progress:
        report = verify_store(stopped, on_progress, lambda: bool(interrupt))
    if report is None:
        print_note("interrupted")
        return INTERRUPTED
    if print_answer(report):
        _print_report(report)
    return ExitCode.OK if report.sound else ExitCode.FAILED


@contextmanager
def _open(directory: Path) -> Iterator[StoppedStore]:
    """Opens a store to look at it; one that cannot be read is not reported as damaged."""
    try:
        with open_stopped(directory) as stopped:
            yield stopped
    except CorruptRecord:
        raise
    except StorageError as error:
        raise ConfigError(str(error)) from error


def _print_report(report: VerifyReport) -> None:
    size = report.end_offset - report.start_offset
    say(
        f"{report.backend}: {report.batches:,} batches, {report.messages:,} messages, "
        f"{report.queues:,} queues, {size:,} bytes of log from offset {report.start_offset}"
    )
    if report.torn_bytes:
        say(f"{report.torn_bytes:,} bytes behind the end are torn; the next start cuts them off")
    for lost in report.log_damage:
        say(f"damaged: log {lost.start_offset} to {lost.end_offset}: {lost.reason}")
    for one in report.queue_damage:
        where = f"queue {one.queue_id} of {one.topic}, offsets {one.first} to {one.end - 1}"
        say(f"damaged: {where}: {one.reason}")
    for begun in report.epoch_damage:
        where = f"epoch {begun.epoch} begins at {begun.start_offset}"
        say(
            f"damaged: epochs: {where}, and the table does not say so; remove epochs and "
            f"epochs.bak, and the next start reads them from the log"
        )
    if report.further_damage:
        say(f"damaged: {report.further_damage:,} further ranges")
    if report.sound:
        say("sound")


@store.command()
@_directory
@click.option("-t", "--topic", help="Only this topic, as stored: retries are in %RETRY%group.")
@click.option("-q", "--queue", "queue_id", type=click.IntRange(0), help="Only this queue.")
@click.option("-o", "--offset", type=click.IntRange(0), help="From this queue offset on.")
@click.option("-n", "--limit", type=click.IntRange(1), help="Stop after so many.")
@click.option("--batches", is_flag=True, help="Show batches in place of messages.")
@json_option
def dump(
    directory: Path,
    topic: str | None,
    queue_id: int | None,
    offset: int | None,
    limit: int | None,
    batches: bool,
) -> int:
    """Print the messages of the log, oldest first, a line each.

    Damaged stretches are passed over and reported on standard error; the exit code is then 1. It is
    2 if the store cannot be read.

    \b
    Examples:
      mqmesh store dump mqmesh-data/broker-a --topic orders --queue 3 --offset 100 --limit 10
      mqmesh store dump mqmesh-data/broker-a --json > messages.jsonl
      mqmesh store dump mqmesh-data/broker-a --batches
    """
    left = sys.maxsize if limit is None else limit
    code = ExitCode.OK
    with _open(directory) as stopped:
        for item in stopped.items():
            if item.wrong is not None:
                code = ExitCode.FAILED
                print_note(f"damaged: log {item.start} to {item.end}: {item.wrong}")
            elif _is_wanted(item, topic, queue_id, offset or 0):
                if batches:
                    left -= _print_batch(item)
                else:
                    left -= _print_messages(item, offset or 0, left)
                if not left:
                    break
    return code


def _is_wanted(item: Item, topic: str | None, queue_id: int | None, offset: int) -> bool:
    header, meta = item.header, item.meta
    return (
        header is not None
        and meta is not None
        and topic in (None, meta.topic)
        and queue_id in (None, header.queue_id)
        and header.next_queue_offset > offset
    )


def _print_batch(item: Item) -> int:
    header, meta = item.header, item.meta
    assert header is not None and meta is not None
    values = {
        "commitlog_offset": item.start,
        "size": header.total_size,
        "topic": meta.topic,
        "queue_id": header.queue_id,
        "queue_offset": header.base_queue_offset,
        "messages": header.message_count,
        "store_timestamp": header.store_timestamp,
        "born_timestamp": header.born_timestamp,
        "epoch": header.epoch,
        "producer_id": header.producer_id,
        "first_sequence": header.first_sequence,
        "attributes": header.attributes,
        "codec": header.codec,
    }
    if answers_json():
        print_json(values, flush=False)
    else:
        values["store_timestamp"] = timestamp(header.store_timestamp)
        values["born_timestamp"] = timestamp(header.born_timestamp)
        say("  ".join(f"{name}={value}" for name, value in values.items()))
    return 1


def _print_messages(item: Item, offset: int, most: int) -> int:
    """Prints messages of a batch from a queue offset on; returns how many."""
    assert item.header is not None
    try:
        messages = decode_messages(item.data, item.header)
    except CorruptBatch as error:
        print_note(f"damaged: log {item.start} to {item.end}: {error}")
        return 0
    wanted = [message for message in messages if message.queue_offset >= offset][:most]
    for message in wanted:
        if answers_json():
            print_json(message_view(message), flush=False)
        else:
            texts = (text for text, _ in parts_of(message)[2:])
            place = f"{message.info.topic}/{message.queue_id}@{message.queue_offset}"
            moment = timestamp(message.store_timestamp)
            say("  ".join([moment, place, message.message_id, *texts]))
    return len(wanted)


@store.command("rebuild-index")
@_directory
@json_option
def rebuild_index(directory: Path) -> int:
    """Remove the index of keys and message ids, and make it anew from the log.

    \b
    Examples:
      mqmesh store rebuild-index mqmesh-data/broker-a
    """
    # Only this command needs the index, and LMDB with it.
    from mqmesh.storage.tools.index_rebuild import rebuild_index as rebuild

    with open_stopped(directory) as stopped, progress_bar() as on_progress:
        try:
            covered = rebuild(
                _with_index(stopped),
                directory / INDEX_DIRECTORY,
                clock=SystemClock(),
                on_progress=on_progress,
            )
        except StoreLocked as error:
            raise ConfigError(f"{error}; stop the index process first") from error
    print_answer({"indexed_bytes": covered}, f"the index covers {covered:,} bytes of log")
    return ExitCode.OK


def _with_index(stopped: StoppedStore) -> StoppedCommitLog:
    if not isinstance(stopped, StoppedCommitLog):
        raise ConfigError(f"stores of the backend {stopped.backend!r} have no index")
    return stopped
