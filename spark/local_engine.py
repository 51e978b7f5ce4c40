"""Writes the tables of an archive in this process: no Java, one machine."""

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import write_deltalake
from deltalake.exceptions import CommitFailedError

from mqmesh.errors import StorageError
from mqmesh.storage.tools.snapshot_reading import Snapshot
from mqmesh.units import MIB

from .addition import Addition, Moved, open_or_make
from .engine import OnProgress, Progress
from .message_files import SCHEMA, write_messages
from .partition_files import NewFile, PartitionFiles, delete_files
from .schema import ARROW_TYPES
from .selection import Selection, plan
from .settings import load_settings
from .steps import Ingest
from .tables import (
    INGEST_COLUMNS,
    INGESTS,
    KEYS,
    MESSAGES,
    PARTITIONS,
    LogStretch,
    dataset_of,
    key_hash,
    require_table,
)

TRIES: Final = 5
"""Attempts to write keys, while others delete messages or compact."""
RUN_BYTES: Final = 32 * MIB
"""Keys that are sorted at a time."""
_OF_MESSAGE: Final = (
    "dt",
    "topic",
    "message_id",
    "broker",
    "store_id",
    "commitlog_offset",
    "ordinal",
)
_KEYS: Final = pa.schema(
    [
        ("month", pa.string()),
        ("key_hash", pa.int64()),
        ("key", pa.string()),
        *[SCHEMA.field(name) for name in _OF_MESSAGE],
    ]
)


class LocalEngine:
    """Engine that needs no Java; it reads with one thread and writes with another."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        """Writes nothing yet; arguments as of ``ingest``."""
        self._on_progress = on_progress

    def note(self, archive: str, row: Ingest) -> None:
        """Adds a row to the table of ingests."""
        columns = [word.strip().split(" ") for word in INGEST_COLUMNS.split(",")]
        schema = pa.schema([(name, ARROW_TYPES[kind]) for name, kind in columns])
        values: dict[str, Any] = msgspec.structs.asdict(row)
        values["ingested_at"] = datetime.now(UTC)
        rows = pa.Table.from_pylist([values], schema=schema)
        write_deltalake(open_or_make(archive, INGESTS, schema), rows, mode="append")

    def write_messages(
        self, archive: str, snapshot: Snapshot, stretch: LogStretch, wanted: Selection
    ) -> None:
        """Writes the messages of a stretch, and the position behind it, in one commit."""
        addition = Addition(archive, MESSAGES, SCHEMA, stretch)
        wanted = selection_of(stretch, wanted)

        def on_read(position: int, messages: int) -> None:
            if self._on_progress is not None:
                done = position - stretch.from_offset
                total = stretch.to_offset - stretch.from_offset
                self._on_progress(Progress(done=done, total=total, messages=messages))

        files = write_messages(
            plan(str(snapshot.directory), wanted),
            wanted,
            addition.place,
            broker=stretch.broker,
            file_bytes=load_settings(archive).file_bytes,
            on_read=on_read,
        )
        addition.commit(files)

    def write_keys(self, archive: str, stretch: LogStretch) -> None:
        """Writes the keys of a stretch's messages, and the position behind it, in one commit."""
        addition = Addition(archive, KEYS, _KEYS, stretch)
        for _ in range(TRIES):
            messages = dataset_of(require_table(archive, MESSAGES), stretch.where)
            files = _write_keys(archive, addition.place, messages, stretch)
            newest = dataset_of(require_table(archive, MESSAGES), stretch.where)
            if set(messages.files) <= set(newest.files):
                addition.commit(files)
                return
            # Messages may have been forgotten: their keys must not come back.
            delete_files(addition.place, files)
        raise StorageError(
            f"{archive}: messages were deleted or compacted before each of {TRIES} tries to add "
            "their keys"
        )

    def is_passing(self, error: Exception) -> bool:
        """Returns True if another try may succeed, since another process committed first."""
        # The latter where two make a table at once.
        return isinstance(error, Moved | CommitFailedError)


def selection_of(stretch: LogStretch, wanted: Selection) -> Selection:
    """Returns a selection within a stretch."""
    return dataclasses.replace(wanted, from_offset=stretch.from_offset, to_offset=stretch.to_offset)


def _write_keys(
    archive: str, place: str, messages: ds.FileSystemDataset, stretch: LogStretch
) -> list[NewFile]:
    """Writes files with the keys of a stretch's messages."""
    waiting: dict[str, list[pa.Table]] = {}
    with PartitionFiles(
        place,
        _KEYS,
        PARTITIONS[KEYS],
        file_bytes=load_settings(archive).file_bytes,
        unlike=("key", "key_hash", "message_id"),
    ) as files:
        for month, keys in _keys(messages, stretch):
            run = waiting.setdefault(month, [])
            run.append(keys)
            if sum(one.nbytes for one in run) >= RUN_BYTES:
                _write_run(files, month, waiting.pop(month))
        for month, run in waiting.items():
            _write_run(files, month, run)
        return files.close()


def _keys(messages: ds.FileSystemDataset, stretch: LogStretch) -> Iterator[tuple[str, pa.Table]]:
    """Yields the keys of a stretch's messages, each time those of some messages of one month."""
    field = ds.field
    condition = (
        (field("store_id") == stretch.store_id)
        & (field("broker") == stretch.broker)
        & (field("commitlog_offset") >= stretch.from_offset)
        & (field("commitlog_offset") < stretch.to_offset)
    )
    columns = ["keys", *_OF_MESSAGE]
    names = [name for name in _KEYS.names if name not in PARTITIONS[KEYS]]
    # A scan of all of them would read up to a GiB ahead of its reader.
    for file in messages.get_fragments(filter=condition):
        for group in file.split_by_row_group(filter=condition, schema=messages.schema):
            rows = group.to_table(messages.schema, columns, filter=condition).combine_chunks()
            parents = pc.list_parent_indices(rows["keys"])
            if not len(parents):
                continue
            keys = pc.list_flatten(rows["keys"])
            hashes = pa.array(map(key_hash, keys.to_pylist()), pa.int64())
            places = [rows[name].take(parents) for name in _OF_MESSAGE]
            # A file has messages of one day.
            month = rows["dt"][0].as_py().isoformat()[:7]
            yield month, pa.table([hashes, keys, *places], names=names)


def _write_run(files: PartitionFiles, month: str, run: list[pa.Table]) -> None:
    """Writes keys of a month, sorted, so that a reader skips groups that cannot have a key."""
    files.write((month,), pa.concat_tables(run).combine_chunks().sort_by("key_hash"))
