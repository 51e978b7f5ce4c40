"""Takes snapshots into an archive: each message once, whatever is repeated, killed, or done twice.

The position that an archive has come to in a store's log is kept by Delta Lake in the same commit
as the messages up to there. An ingest takes what stands between it and the end of the snapshot,
and replaces what the table has of that stretch of that store, which is nothing unless somebody
else was quicker: then the same rows are written in their place, or Delta Lake refuses, and the
next look finds nothing left to do. So no version of the table has a message twice.
"""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.storage.tools.snapshot_keeping import hold_snapshot
from mqmesh.storage.tools.snapshot_reading import Snapshot

from .failures import NOT_STARTED, as_mqmesh_error
from .settings import load_settings
from .steps import Ingest, Step, chain_to, next_step
from .tables import (
    INGEST_COLUMNS,
    INGESTS,
    KEYS,
    MESSAGES,
    app_id,
    ingests_of,
    position_of,
    table_path,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    spark: "SparkSession",
    path: str,
    archive: str,
    *,
    name: str = "",
    allow_gap: bool = False,
    on_damage: str = "fail",
    topics: str = "",
) -> IngestReport:
    """Takes a snapshot into an archive.

    Args:
        spark: A session of ``mqmesh.spark.session``.
        path: The snapshot.
        archive: Directory of the archive, made if need be; any place that Spark and Delta Lake
            can write to.
        name: Name of the broker in the archive; empty for its own.
        allow_gap: Go on where retention was quicker, and remember what is missing.
        on_damage: ``fail``, or ``skip`` to read around damage.
        topics: Same as for the reader; empty for all but system topics, and those that
            ``archive.toml`` leaves out. Once a stretch of the log is taken in, other topics of it
            do not come any more.

    Raises:
        ConfigError: The snapshot does not fit: a gap, another store, or another course of its log.
        StorageError: The snapshot is damaged, or cannot be read.
    """
    with hold_snapshot(Path(path)):
        snapshot = Snapshot(Path(path))
        store_id = snapshot.manifest.store_id
        broker = name or snapshot.manifest.broker_name
        leave_out = ",".join(load_settings(archive).leave_out)
        options = {"onDamage": on_damage, "topics": topics, "leaveOut": leave_out}
        taken: Step | None = None
        for attempt in range(1, TRIES + 1):
            step, begun = _next(snapshot, archive, broker, allow_gap)
            try:
                if step.to_offset > step.from_offset:
                    _begin(spark, archive, snapshot, broker, step, begun)
                    _take(spark, archive, snapshot, broker, step, options)
                    taken = step
                follow_with_keys(spark, archive, store_id, broker)
            except Exception as error:
                if attempt == TRIES or not _is_passing(error):
                    raise as_mqmesh_error(error) from error
                _log.info(
                    "somebody else writes to %s, or Spark is slow, again: %s", archive, attempt
                )
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
    spark: "SparkSession",
    archive: str,
    snapshot: Snapshot,
    broker: str,
    step: Step,
    options: dict[str, str],
) -> None:
    """Writes the messages of a step, and the position behind it, in one commit."""
    bounds = {"fromOffset": str(step.from_offset), "toOffset": str(step.to_offset)}
    store_id = snapshot.manifest.store_id
    _write(
        _messages(spark, snapshot, broker, **bounds, **options),
        table_path(archive, MESSAGES),
        _where(store_id, broker, step.from_offset, step.to_offset),
        app_id(store_id, broker),
        step.to_offset,
        ["dt", "topic"],
    )


def _messages(
    spark: "SparkSession", snapshot: Snapshot, broker: str, **options: str
) -> "DataFrame":
    path = str(snapshot.directory.absolute())
    messages = spark.read.format("mqmesh").options(**options).load(path)
    if broker == snapshot.manifest.broker_name:
        return messages
    from pyspark.sql.functions import lit

    return messages.withColumn("broker", lit(broker))


def follow_with_keys(spark: "SparkSession", archive: str, store_id: int, broker: str) -> None:
    """Brings the table of keys to where the messages are; also what a crash left undone."""
    application = app_id(store_id, broker)
    position = position_of(archive, MESSAGES, application)
    before = position_of(archive, KEYS, application) or 0
    if position is None or before >= position:
        return
    from pyspark.sql.functions import explode

    where = _where(store_id, broker, before, position)
    rows = (
        spark.read.format("delta")
        .load(table_path(archive, MESSAGES))
        .where(where)
        .select(
            "dt",
            "topic",
            explode("keys").alias("key"),
            "message_id",
            "broker",
            "store_id",
            "commitlog_offset",
            "ordinal",
        )
        .sortWithinPartitions("dt", "key")
    )
    _write(rows, table_path(archive, KEYS), where, application, position, ["dt"])


def _begin(
    spark: "SparkSession",
    archive: str,
    snapshot: Snapshot,
    broker: str,
    step: Step,
    begun: list[Ingest],
) -> None:
    """Notes a step before it is done: a crash must not lose where a gap was."""
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
    if row in begun:
        return
    values: dict[str, Any] = msgspec.structs.asdict(row)
    values["ingested_at"] = datetime.now(UTC)
    frame = spark.createDataFrame([values], INGEST_COLUMNS)
    frame.coalesce(1).write.format("delta").mode("append").save(table_path(archive, INGESTS))


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


def _where(store_id: int, broker: str, from_offset: int, to_offset: int) -> str:
    # Names of brokers have no quotes, see check_group.
    return (
        f"store_id = {store_id} AND broker = '{broker}' AND commitlog_offset >= {from_offset} "
        f"AND commitlog_offset < {to_offset}"
    )


def _write(
    rows: "DataFrame",
    path: str,
    where: str,
    application: str,
    version: int,
    partition_by: list[str],
) -> None:
    (
        rows.write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", where)
        .option("txnAppId", application)
        .option("txnVersion", str(version))
        .partitionBy(*partition_by)
        .save(path)
    )


def _is_passing(error: Exception) -> bool:
    """Returns True if another try may succeed: of another commit meanwhile, or a slow start."""
    text = f"{type(error).__name__}: {error}"
    words = (
        "Concurrent",
        "DELTA_CONCURRENT",
        "ProtocolChangedException",
        "MetadataChangedException",
        NOT_STARTED,
    )
    return any(word in text for word in words)
