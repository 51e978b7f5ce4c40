"""Tables of an archive, and their state as far as it shows without Spark."""

import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from mqmesh.errors import ConfigError
from mqmesh.storage.files.atomic_file import sync_directory

from .failures import place_error
from .message_files import PARTITION_BY
from .partition_files import is_local, sync_file
from .steps import Ingest, chain_to

MESSAGES: Final = "messages"
KEYS: Final = "keys"
INGESTS: Final = "ingests"
PARTITIONS: Final[dict[str, list[str]]] = {MESSAGES: PARTITION_BY, KEYS: ["month"], INGESTS: []}
"""Columns by which a table is divided."""

INGEST_COLUMNS: Final = (
    "broker string, store_id bigint, epoch bigint, from_offset bigint, to_offset bigint, "
    "gap_before bigint, snapshot string, last_offset bigint, mark string, ingested_at timestamp"
)


_FEED: Final = "delta.enableChangeDataFeed"


class LogStretch(NamedTuple):
    """Part of a store's log, and its messages in the tables.

    Attributes:
        store_id: Identity of the store.
        broker: Name of the store in the archive.
        from_offset: Commit-log offset at which it begins.
        to_offset: Commit-log offset behind it.
    """

    store_id: int
    broker: str
    from_offset: int
    to_offset: int

    @property
    def application(self) -> str:
        """Application id of the store."""
        return app_id(self.store_id, self.broker)

    @property
    def where(self) -> str:
        """Condition of SQL that the messages of the stretch fulfil."""
        # Names of brokers have no quotes, see check_group.
        return (
            f"store_id = {self.store_id} AND broker = '{self.broker}' AND "
            f"commitlog_offset >= {self.from_offset} AND commitlog_offset < {self.to_offset}"
        )


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A store of which an archive has messages.

    Attributes:
        broker: Name of the store in the archive.
        store_id: Identity of the store.
        position: Commit-log offset to which its messages are there.
        keys_position: Commit-log offset to which their keys are in the table of keys.
        ingests: Steps that led there, oldest first.
    """

    broker: str
    store_id: int
    position: int
    keys_position: int
    ingests: list[Ingest]

    @property
    def gaps(self) -> list[Ingest]:
        """Steps before which something is missing."""
        return [one for one in self.ingests if one.gap_before]


class ArchivedDay(msgspec.Struct, frozen=True, kw_only=True):
    """One day (UTC) of an archive's messages."""

    dt: str
    rows: int
    bytes: int
    files: int


class ArchivedTopic(msgspec.Struct, frozen=True):
    """Messages of one topic.

    Attributes:
        topic: Their topic.
        messages: Number of them.
        first_day: Day (UTC) of the first, ``2026-03-01``.
        last_day: Day of the last.
    """

    topic: str
    messages: int
    first_day: str
    last_day: str


def app_id(store_id: int, broker: str) -> str:
    """Returns the application id of a store, under which Delta Lake keeps its position."""
    return f"mqmesh/{store_id:08x}/{broker}"


def archive_place(archive: str) -> str:
    """Returns the path of an archive; absolute, as Java has a working directory of its own."""
    return archive.rstrip("/") if "://" in archive else os.path.abspath(archive)


def table_path(archive: str, table: str) -> str:
    """Returns a table's path."""
    return f"{archive_place(archive)}/{table}"


def open_table(archive: str, table: str) -> DeltaTable | None:
    """Opens a table; None if it was not made yet.

    Raises:
        StorageError: Its place cannot be reached.
    """
    place = table_path(archive, table)
    try:
        return DeltaTable(place)
    except TableNotFoundError:
        return None
    except OSError as error:
        raise place_error(error, f"cannot open {place}") from error


def require_table(archive: str, table: str) -> DeltaTable:
    """Opens a table that must be there.

    Raises:
        ConfigError: The table is missing, so this is no archive.
    """
    found = open_table(archive, table)
    if found is None:
        raise ConfigError(f"{archive} is no archive: it has no table {table!r}")
    return found


def turn_on_change_data_feed(archive: str) -> None:
    """Has Delta Lake keep what changes in messages and keys from now on."""
    for name in (MESSAGES, KEYS):
        table = open_table(archive, name)
        if table is not None and table.metadata().configuration.get(_FEED) != "true":
            # If another process commits at this moment, the next ingest does it.
            with suppress(CommitFailedError):
                table.alter.set_table_properties({_FEED: "true"})


def sync_logs(archive: str) -> None:
    """Makes the tables' commits durable where they are on this machine; Delta Lake does not.

    Files of messages and keys are durable before they are committed.

    Raises:
        OSError: A sync failed.
    """
    for name in (MESSAGES, KEYS, INGESTS):
        place = table_path(archive, name)
        if not is_local(place):
            continue
        log = Path(place) / "_delta_log"
        # Delta Lake itself writes the few rows of this one.
        for folder in (log, Path(place)) if name == INGESTS else (log,):
            for path in folder.iterdir() if folder.is_dir() else ():
                # Another command may remove old ones meanwhile.
                with suppress(FileNotFoundError):
                    if path.is_file():
                        sync_file(path)
            if folder.is_dir():
                sync_directory(folder)


def position_of(archive: str, table: str, application: str) -> int | None:
    """Returns the position of a store in a table; None if the table has nothing of it."""
    found = open_table(archive, table)
    version = None if found is None else found.transaction_version(application)
    return None if version is None else int(version)


def ingests_of(archive: str) -> list[Ingest]:
    """Returns all steps that were begun; nothing came in of those that were given up."""
    table = open_table(archive, INGESTS)
    if table is None:
        return []
    rows = dataset_of(table).to_table(list(Ingest.__struct_fields__)).to_pylist()
    return [Ingest(**row) for row in rows]


def sources(archive: str) -> list[Source]:
    """Returns the stores of an archive, by name."""
    begun = ingests_of(archive)
    found = []
    for broker, store_id in sorted({(one.broker, one.store_id) for one in begun}):
        application = app_id(store_id, broker)
        position = position_of(archive, MESSAGES, application)
        if position is not None:
            ours = [one for one in begun if (one.broker, one.store_id) == (broker, store_id)]
            found.append(
                Source(
                    broker=broker,
                    store_id=store_id,
                    position=position,
                    keys_position=position_of(archive, KEYS, application) or 0,
                    ingests=chain_to(ours, position),
                )
            )
    return found


def days(archive: str) -> list[ArchivedDay]:
    """Returns rows and bytes of each day, from the table's log."""
    table = require_table(archive, MESSAGES)
    sums: dict[str, list[int]] = {}
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        total = sums.setdefault(str(action["partition.dt"]), [0, 0, 0])
        total[0] += action["num_records"] or 0
        total[1] += action["size_bytes"]
        total[2] += 1
    return [
        ArchivedDay(dt=dt, rows=rows, bytes=size, files=files)
        for dt, (rows, size, files) in sorted(sums.items())
    ]


def topics(archive: str) -> list[ArchivedTopic]:
    """Counts the messages of each topic; it reads one small column of all files."""
    dataset = dataset_of(require_table(archive, MESSAGES))
    return by_topic(dataset.to_batches(columns=["topic", "dt"]))


def by_topic(batches: Iterable[pa.Table | pa.RecordBatch]) -> list[ArchivedTopic]:
    """Counts rows of the columns ``topic`` and ``dt``."""
    counts = by_topic_and_day(batches)
    found: dict[str, list[date]] = {}
    for topic, day in sorted(counts):
        found.setdefault(topic, []).append(day)
    return [
        ArchivedTopic(
            topic,
            sum(counts[topic, day] for day in dates),
            dates[0].isoformat(),
            dates[-1].isoformat(),
        )
        for topic, dates in found.items()
    ]


def by_topic_and_day(batches: Iterable[pa.Table | pa.RecordBatch]) -> Counter[tuple[str, date]]:
    """Counts rows by the columns ``topic`` and ``dt``."""
    counts: Counter[tuple[str, date]] = Counter()
    for batch in batches:
        rows = pa.table({name: batch[name] for name in ("topic", "dt")})
        for row in rows.group_by(["topic", "dt"]).aggregate([([], "count_all")]).to_pylist():
            counts[row["topic"], row["dt"]] += row["count_all"]
    return counts


def key_hash(key: str) -> int:
    """Returns the CRC-32 of a key, which the table of keys is sorted by: keys have any length, and
    statistics of files only their beginnings."""
    return zlib.crc32(key.encode())


def dataset_of(table: DeltaTable, where: str = "") -> ds.FileSystemDataset:
    """Returns the rows of a table, which Arrow reads by itself where they are on this machine.

    Delta Lake's own way leads through Python: slower, and where Arrow still reads ahead when the
    process ends, it aborts or hangs. So a scan of a bucket is read to its end, see ``rows_where``.

    Args:
        table: Table to read.
        where: Condition of SQL, by which files are left out; empty for all files.
    """
    files: pafs.FileSystem | None = None
    if table.table_uri.startswith("file://"):
        disk, path = pafs.FileSystem.from_uri(table.table_uri.rstrip("/"))
        files = pafs.SubTreeFileSystem(path, disk)
    return table.to_pyarrow_dataset(filesystem=files, file_pruning_predicate=where or None)


def rows_where(
    table: DeltaTable, condition: ds.Expression | None, columns: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields rows that fulfil a condition, as they are met; a caller may stop at any of them.

    A group of rows is read to its end before the next one is begun: of a scan that is left early,
    threads would read on while the process ends, for a bucket by way of Python.
    """
    dataset = dataset_of(table)
    for file in dataset.get_fragments(filter=condition):
        for group in file.split_by_row_group(filter=condition, schema=dataset.schema):
            yield from group.to_table(dataset.schema, columns, filter=condition).to_pylist()
