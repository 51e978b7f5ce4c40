"""Tables of an archive, and their state as far as it shows without Spark."""

import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from mqmesh.errors import ConfigError

from .steps import Ingest, chain_to

MESSAGES: Final = "messages"
KEYS: Final = "keys"
INGESTS: Final = "ingests"

INGEST_COLUMNS: Final = (
    "broker string, store_id bigint, epoch bigint, from_offset bigint, to_offset bigint, "
    "gap_before bigint, snapshot string, last_offset bigint, mark string, ingested_at timestamp"
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
    """Returns rows and bytes of each topic and day, from the table's log."""
    table = require_table(archive, MESSAGES)
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    sums: dict[tuple[str, str], list[int]] = {}
    for action in actions:
        place = (str(action["partition.topic"]), str(action["partition.dt"]))
        total = sums.setdefault(place, [0, 0, 0])
        total[0] += action["num_records"] or 0
        total[1] += action["size_bytes"]
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
