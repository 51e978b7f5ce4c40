"""Tables of an archive, and their state as far as it shows without Spark."""

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from mqmesh.errors import ConfigError

from .message_files import PARTITION_BY
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


class PartitionStats(msgspec.Struct, frozen=True, kw_only=True):
    """One topic and day of an archive."""

    topic: str
    dt: str
    rows: int
    bytes: int
    files: int


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
    """Opens a table; None if it was not made yet."""
    try:
        return DeltaTable(table_path(archive, table))
    except TableNotFoundError:
        return None


def require_table(archive: str, table: str) -> DeltaTable:
    """Opens a table that must be there.

    Raises:
        ConfigError: The table is missing, so this is no archive.
    """
    found = open_table(archive, table)
    if found is None:
        raise ConfigError(f"{archive} is no archive: it has no table {table!r}")
    return found


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
    rows = table.to_pyarrow_table(columns=list(Ingest.__struct_fields__)).to_pylist()
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


def partitions(archive: str) -> list[PartitionStats]:
    """Returns rows and bytes, about, of each topic and day; reads a small column of all files."""
    table = require_table(archive, MESSAGES)
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    files = {action["path"]: action for action in actions}
    sums: dict[tuple[str, str], list[int]] = {}
    for fragment in table.to_pyarrow_dataset().get_fragments():
        action = files[fragment.path]
        for one in pc.value_counts(fragment.to_table(columns=["topic"])["topic"]).to_pylist():
            total = sums.setdefault((one["values"], str(action["partition.dt"])), [0, 0, 0])
            total[0] += one["counts"]
            total[1] += action["size_bytes"] * one["counts"] // action["num_records"]
            total[2] += 1
    return [
        PartitionStats(topic=topic, dt=dt, rows=rows, bytes=size, files=files)
        for (topic, dt), (rows, size, files) in sorted(sums.items())
    ]


def rows_where(
    table: DeltaTable, condition: ds.Expression | None, columns: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields rows that fulfil a condition, as they are met."""
    for batch in table.to_pyarrow_dataset().to_batches(filter=condition, columns=columns):
        yield from batch.to_pylist()
