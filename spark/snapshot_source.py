"""Spark's data source ``mqmesh`` on snapshots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from mqmesh.errors import ConfigError
from mqmesh.storage.tools.snapshot_reading import Damage, Snapshot
from mqmesh.units import MAX_TIMESTAMP_MS

from .options import DAY_MS, flag, number, time_ms, words
from .schema import ARROW_TYPES, COLUMNS, Rows, arrow_schema, batched
from .selection import RANGE_BYTES, SKIP, ReadTask, Selection, plan, read_task

MAX_ROWS: Final = 8_000
"""Rows of a record batch; more gain nothing."""
_MOST_ROWS: Final = 1_000_000
SUMMARY: Final = {
    "snapshot": "string",
    "start_offset": "bigint",
    "end_offset": "bigint",
    "messages": "bigint",
    "_damage": "bigint",
}
"""Columns of a summary."""


@dataclass
class SnapshotPart(InputPartition):
    """A task of a reader; None of one that has nothing to read."""

    task: ReadTask | None = None


class SnapshotReader(DataSourceReader):
    """Reads snapshots; everything that a task needs is in its partition or set at the start."""

    def __init__(self, schema: StructType, options: dict[str, str]) -> None:
        """Reads the options.

        Args:
            schema: Wanted columns.
            options: Options that the user gave.

        Raises:
            ConfigError: One is wrong.
        """
        self.columns = list(schema.names)
        unknown = [name for name in self.columns if name not in COLUMNS]
        if unknown:
            raise ConfigError(f"messages have no column {unknown[0]!r}; there are: {list(COLUMNS)}")
        self.paths = words(options.get("path"))
        if not self.paths:
            raise ConfigError("a snapshot is read by .load(path), or by the option path")
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
    """A row a range of the log: how many of the wanted messages are in it, and what is damaged."""

    def __init__(self, schema: StructType, options: dict[str, str]) -> None:
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


class PushdownReader(SnapshotReader):
    """Reader of a snapshot that also uses the filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Narrows what is read; Spark checks every filter again, since topics may be beginnings."""
        for one in filters:
            attribute: tuple[str, ...] = getattr(one, "attribute", ())
            if len(attribute) == 1:
                self.wanted = _narrowed(self.wanted, attribute[0], one)
            yield one


def _narrowed(wanted: Selection, column: str, one: Filter) -> Selection:
    values = None
    if isinstance(one, EqualTo):
        values = (one.value,)
    elif isinstance(one, In):
        values = tuple(one.value)
    if values is not None and column == "physical_topic" and not wanted.topics:
        return replace(wanted, topics=tuple(str(value) for value in values))
    if values is not None and column == "message_id" and wanted.message_ids is None:
        return replace(wanted, message_ids=tuple(str(value) for value in values))
    if column == "topic" and values is not None and not wanted.topics:
        # Retries have the topic that the message was sent to, and stand in another.
        return (
            wanted
            if wanted.include_system
            else replace(wanted, topics=tuple(str(value) for value in values))
        )
    if column in ("store_timestamp", "dt"):
        return _between(wanted, one)
    return wanted


def _between(wanted: Selection, one: Filter) -> Selection:
    low, high = 0, MAX_TIMESTAMP_MS
    value = getattr(one, "value", None)
    if not isinstance(value, date):
        return wanted
    first, last = _span(value)
    if isinstance(one, EqualTo):
        low, high = first, last
    elif isinstance(one, GreaterThan | GreaterThanOrEqual):
        low = first
    elif isinstance(one, LessThan | LessThanOrEqual):
        high = last
    return replace(wanted, from_ms=max(wanted.from_ms, low), to_ms=min(wanted.to_ms, high))


def _span(value: date) -> tuple[int, int]:
    """Returns first and last ms that a time of microseconds, or a day, may stand for."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        ms = int(moment.timestamp() * 1_000)
        return ms - 1, ms + 1
    start = int(datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp() * 1_000)
    return start, start + DAY_MS - 1


def selection_of(options: Any) -> Selection:
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
