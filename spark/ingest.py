"""Takes snapshots into an archive: each message once, even if ingests are repeated or killed.

Delta Lake keeps the position of an archive in a store's log in the same commit as the messages up
to there. An ingest takes the messages between this position and the end of the snapshot.
Two engines write the tables, and go on with each other's: Spark, and this process alone.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.storage.tools.snapshot_keeping import hold_snapshot
from mqmesh.storage.tools.snapshot_reading import Snapshot

from .engine import Engine, OnProgress
from .failures import errors_of_place
from .local_engine import LocalEngine
from .options import words
from .selection import Selection
from .settings import load_settings
from .spark_engine import SparkEngine
from .steps import Ingest, Step, chain_to, next_step
from .tables import (
    KEYS,
    MESSAGES,
    LogStretch,
    app_id,
    ingests_of,
    position_of,
    sync_logs,
    turn_on_change_data_feed,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRIES: Final = 10
"""Attempts of a commit, when others commit at once or Spark cannot start a process in time."""

_log = logging.getLogger(__name__)


class IngestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of taking in a snapshot.

    Attributes:
        snapshot: Name of the snapshot.
        broker: Name of the store in the archive.
        from_offset: Commit-log offset at which the stretch taken in begins.
        to_offset: Commit-log offset at which it ends; equal if there was nothing new.
        gap_before: Bytes of log that are missing before ``from_offset``.
    """

    snapshot: str
    broker: str
    from_offset: int
    to_offset: int
    gap_before: int


def ingest(
    spark: "SparkSession | None",
    path: str,
    archive: str,
    *,
    name: str = "",
    allow_gap: bool = False,
    on_damage: str = "fail",
    topics: str = "",
    on_progress: OnProgress | None = None,
) -> IngestReport:
    """Takes a snapshot into an archive; durably, where that is on this machine.

    Args:
        spark: A session of ``mqmesh.spark.session``; None for the local engine, which writes the
            same tables in this process, without Java.
        path: The snapshot.
        archive: Directory of the archive, made if need be; any place that the engine and Delta
            Lake can write to.
        name: Name of the broker in the archive; empty for its own.
        allow_gap: Go on where retention was quicker, and remember the gap.
        on_damage: ``fail``, or ``skip`` to read around damage.
        topics: Same as for the reader; empty for all but system topics, and those that
            ``archive.toml`` leaves out. Once a stretch of the log is taken in, other topics of it
            do not come any more.
        on_progress: Called now and then, by another thread where Spark writes.

    Raises:
        ConfigError: The snapshot does not fit: a gap, another store, or another course of its log.
            Or the local engine cannot write a table of this kind.
        StorageError: The snapshot is damaged, or cannot be read; or a table cannot be written.
    """
    with errors_of_place(f"cannot take {path} into {archive}"), hold_snapshot(Path(path)):
        engine: Engine = (
            LocalEngine(on_progress) if spark is None else SparkEngine(spark, on_progress)
        )
        settings = load_settings(archive)
        wanted = Selection(
            topics=tuple(words(topics)),
            leave_out=tuple(settings.leave_out),
            on_damage=on_damage,
        )
        snapshot = Snapshot(Path(path))
        report = _ingest(engine, snapshot, archive, name, wanted, allow_gap=allow_gap)
        if settings.change_data_feed:
            turn_on_change_data_feed(archive)
        sync_logs(archive)
        return report


def _ingest(
    engine: Engine,
    snapshot: Snapshot,
    archive: str,
    name: str,
    wanted: Selection,
    *,
    allow_gap: bool,
) -> IngestReport:
    broker = name or snapshot.manifest.broker_name
    taken: Step | None = None
    for attempt in range(1, TRIES + 1):
        step, begun = _next(snapshot, archive, broker, allow_gap)
        try:
            if step.to_offset > step.from_offset:
                _take(engine, archive, snapshot, broker, step, begun, wanted)
                taken = step
            _follow_with_keys(engine, archive, snapshot.manifest.store_id, broker)
        except Exception as error:
            if attempt == TRIES or not engine.is_passing(error):
                raise
            _log.info("somebody else writes to %s, or Spark is slow, again: %s", archive, attempt)
            continue
        # Of several tries that one counts which took something in.
        done = taken or step
        return IngestReport(
            snapshot=snapshot.directory.name,
            broker=broker,
            from_offset=done.from_offset,
            to_offset=done.to_offset,
            gap_before=done.gap_before,
        )
    raise AssertionError("the last attempt returns or raises")


def _next(
    snapshot: Snapshot, archive: str, broker: str, allow_gap: bool
) -> tuple[Step, list[Ingest]]:
    """Returns the next step for a snapshot, and the steps of its store that were begun so far."""
    manifest = snapshot.manifest
    position = position_of(archive, MESSAGES, app_id(manifest.store_id, broker))
    begun = ingests_of(archive)
    _check_store(begun, broker, manifest.store_id)
    ours = [one for one in begun if (one.broker, one.store_id) == (broker, manifest.store_id)]
    if position is not None:
        _check_course(snapshot, ours, position, broker)
    start, end = manifest.start_offset, manifest.end_offset
    return next_step(position, start, end, broker=broker, allow_gap=allow_gap), ours


def _take(
    engine: Engine,
    archive: str,
    snapshot: Snapshot,
    broker: str,
    step: Step,
    begun: list[Ingest],
    wanted: Selection,
) -> None:
    """Notes a step, then does it: a crash must not lose where a gap was."""
    manifest = snapshot.manifest
    last_offset, mark = snapshot.last_mark(step.to_offset)
    row = Ingest(
        broker=broker,
        store_id=manifest.store_id,
        epoch=manifest.epoch,
        from_offset=step.from_offset,
        to_offset=step.to_offset,
        gap_before=step.gap_before,
        snapshot=snapshot.directory.name,
        last_offset=last_offset,
        mark=mark,
    )
    if row not in begun:
        engine.note(archive, row)
    stretch = LogStretch(manifest.store_id, broker, step.from_offset, step.to_offset)
    engine.write_messages(archive, snapshot, stretch, wanted)


def _follow_with_keys(engine: Engine, archive: str, store_id: int, broker: str) -> None:
    """Brings the table of keys to where the messages are, also after a crash."""
    application = app_id(store_id, broker)
    position = position_of(archive, MESSAGES, application)
    before = position_of(archive, KEYS, application) or 0
    if position is not None and before < position:
        engine.write_keys(archive, LogStretch(store_id, broker, before, position))


def _check_store(begun: list[Ingest], broker: str, store_id: int) -> None:
    for one in begun:
        if one.broker == broker and one.store_id != store_id:
            raise ConfigError(
                f"range {one.from_offset}-{one.to_offset} of {broker} is already there from "
                f"another store (store_id {one.store_id:#x} against {store_id:#x}): was the store "
                f"made anew? --as {broker}-2 archives it under another name"
            )


def _check_course(snapshot: Snapshot, begun: list[Ingest], position: int, broker: str) -> None:
    """Refuses a log that is not the archived one, as of a store restored from a backup."""
    chain = chain_to(begun, position)
    last = chain[-1] if chain else None
    if last is None or last.last_offset < 0:
        return
    manifest = snapshot.manifest
    if not manifest.start_offset <= last.last_offset < manifest.end_offset:
        return
    if snapshot.went_otherwise(last.last_offset, last.mark):
        raise ConfigError(
            f"the log of {broker} in {snapshot.directory} is not the one that was archived up to "
            f"{position}: was the store restored from a backup? --as {broker}-2 archives it under "
            "another name"
        )
