"""Spark's data source ``mqmesh`` on snapshots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from mqmesh.errors import ConfigError
from mqmesh.storage.tools.snapshot_reading import Damage, Snapshot
from mqmesh.units import MAX_TIMESTAMP_MS

from .message_columns import SUMMARY, check_columns
from .options import Options, check_names, flag, number, time_ms, words
from .schema import ARROW_TYPES, Rows, arrow_schema, batched
from .selection import RANGE_BYTES, SKIP, ReadTask, Selection, plan, read_task

MAX_ROWS: Final = 8_000
"""Rows of a record batch; more gain nothing."""
_MOST_ROWS: Final = 1_000_000
OPTIONS: Final = (
    "path",
    "topics",
    "includeSystem",
    "columns",
    "key",
    "messageId",
    "from",
    "to",
    "fromOffset",
    "toOffset",
    "leaveOut",
    "onDamage",
    "summary",
    "maxRowsPerBatch",
    "rangeBytes",
)


@dataclass
class SnapshotPart(InputPartition):
    """A task of a reader; None of one that has nothing to read."""

    task: ReadTask | None = None


class SnapshotReader(DataSourceReader):
    """Reads snapshots; everything that a task needs is in its partition or set at the start."""

    def __init__(self, schema: StructType, options: Options) -> None:
        """Reads the options.

        Args:
            schema: Wanted columns.
            options: Options that the user gave.

        Raises:
            ConfigError: One is wrong, or unknown.
        """
        check_names(options, OPTIONS, "a snapshot")
        self.columns = list(schema.names)
        check_columns(self.columns)
        self.paths = words(options.get("path"))
        if not self.paths:
            raise ConfigError(
                "say what to read: a snapshot by .load(path), or topics of a cluster by option "
                "namesrv"
            )
        self.wanted = selection_of(options)
        self.most_rows = number(options, "maxRowsPerBatch", MAX_ROWS, 1, _MOST_ROWS)
        self.range_bytes = number(options, "rangeBytes", RANGE_BYTES, 1, 1 << 40)

    def partitions(self) -> Sequence[InputPartition]:
        """Returns one partition a range of the log, or places that the index knows."""
        tasks = [
            task
            for path in self.paths
            for task in plan(path, self.wanted, range_bytes=self.range_bytes)
        ]
        # An empty list would become a partition that is None.
        return [SnapshotPart(task) for task in tasks] or [SnapshotPart(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition."""
        assert isinstance(partition, SnapshotPart)
        if partition.task is None:
            return
        snapshot = Snapshot(Path(partition.task.path))
        rows = Rows(self.columns, arrow_schema(self.columns), broker=snapshot.manifest.broker_name)

        def parts(task: ReadTask) -> Iterator[None]:
            for header, messages in read_task(snapshot, task, self.wanted):
                rows.add(header, messages)
                yield

        yield from batched(rows, self.most_rows, parts(partition.task))


class SummaryReader(SnapshotReader):
    """A row a range of the log: number of the wanted messages in it, and damage."""

    def __init__(self, schema: StructType, options: Options) -> None:
        """Reads the options; those of ``SnapshotReader``, of which damage is never an error."""
        super().__init__(StructType(), options)
        self.wanted = replace(self.wanted, on_damage=SKIP)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the row of a partition."""
        assert isinstance(partition, SnapshotPart)
        task = partition.task
        if task is None:
            return
        damaged: list[Damage] = []
        snapshot = Snapshot(Path(task.path))
        count = sum(
            len(messages) for _, messages in read_task(snapshot, task, self.wanted, damaged.append)
        )
        row = (snapshot.directory.name, task.start_offset, task.end_offset, count, len(damaged))
        columns = [[value] for value in row]
        yield pa.RecordBatch.from_pydict(
            dict(zip(SUMMARY, columns, strict=True)),
            schema=pa.schema([(name, ARROW_TYPES[kind]) for name, kind in SUMMARY.items()]),
        )


def selection_of(options: Options) -> Selection:
    """Returns the selection that the options of a reader make.

    Raises:
        ConfigError: One is wrong.
    """
    message_ids = words(options.get("messageId"))
    return Selection(
        topics=tuple(words(options.get("topics"))),
        include_system=flag(options, "includeSystem"),
        key=options.get("key") or "",
        message_ids=tuple(message_ids) or None,
        from_ms=time_ms(options.get("from"), 0),
        to_ms=time_ms(options.get("to"), MAX_TIMESTAMP_MS),
        from_offset=number(options, "fromOffset", 0, 0, 1 << 62),
        to_offset=number(options, "toOffset", 1 << 62, 0, 1 << 62),
        leave_out=tuple(words(options.get("leaveOut"))),
        on_damage=options.get("onDamage") or "fail",
    )
