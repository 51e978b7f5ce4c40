"""Deletes rows of a table: files that have such rows are replaced by files without them.

This is done by Arrow, so that all files are alike: those that Delta Lake's Rust library writes for
a deletion have types of text by which Arrow cannot filter.
"""

import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import RemoveAction

from mqmesh.errors import StorageError
from mqmesh.units import MIB

from .addition import COMMITS, action_of
from .partition_files import NewFile, PartitionFiles, check_files, delete_files
from .settings import load_settings
from .tables import KEYS, MESSAGES, PARTITIONS, dataset_of, require_table, table_path

TRIES: Final = 5
"""Attempts to replace files, while others compact or delete."""
RUN_BYTES: Final = 32 * MIB
"""Rows that are written at a time."""
BATCH_ROWS: Final = 8_000
STYLES: Final[dict[str, dict[str, Any]]] = {
    MESSAGES: {"bloom": "message_id", "unlike": ("body", "message_id")},
    KEYS: {"unlike": ("key", "key_hash", "message_id")},
}
"""Style of a table's files, see ``PartitionFiles``."""

_MARK: Final = "mqmesh.deletion"
"""Name under which a commit says which deletion it is of."""
_READ: Final = {"batch_size": BATCH_ROWS, "batch_readahead": 2, "fragment_readahead": 1}

Gone = Callable[[pa.RecordBatch], pa.BooleanArray]
"""Returns for each row of the columns of a condition and of ``PLACE`` whether it goes."""


def delete_rows(
    archive: str,
    name: str,
    condition: ds.Expression,
    *,
    columns: tuple[str, ...] = (),
    is_gone: Gone | None = None,
) -> int:
    """Deletes the rows that fulfil a condition, in one commit.

    Args:
        archive: Directory of the archive.
        name: Table.
        condition: Condition of the rows; by statistics it leaves out files.
        columns: Columns that ``is_gone`` looks at.
        is_gone: Decides about each row that fulfils the condition; None deletes all of them.

    Returns:
        Rows that went.

    Raises:
        StorageError: Others change the table all the time, or a file cannot be written.
    """
    place = table_path(archive, name)
    for _ in range(TRIES):
        table = require_table(archive, name)
        dataset = dataset_of(table)
        gone: dict[str, int] = {}
        with PartitionFiles(
            place,
            dataset.schema,
            PARTITIONS[name],
            file_bytes=load_settings(archive).file_bytes,
            **STYLES[name],
        ) as files:
            for fragment in dataset.get_fragments(filter=condition):
                count = _count(fragment, dataset.schema, condition, columns, is_gone)
                if not count:
                    continue
                gone[fragment.path] = count
                if count < fragment.count_rows():
                    _write_rest(files, name, fragment, dataset.schema, condition, is_gone)
            new = files.close()
        if not gone or _replace(archive, name, table, set(gone), new):
            return sum(gone.values())
    raise StorageError(f"{place}: others changed its files before each of {TRIES} tries")


def _count(
    fragment: ds.Fragment,
    schema: pa.Schema,
    condition: ds.Expression,
    columns: tuple[str, ...],
    is_gone: Gone | None,
) -> int:
    """Returns how many rows of a file go."""
    if is_gone is None:
        return int(fragment.scanner(schema=schema, filter=condition).count_rows())
    batches = fragment.to_batches(schema, columns=list(columns), filter=condition, **_READ)
    return sum(is_gone(batch).true_count for batch in batches)


def _write_rest(
    files: PartitionFiles,
    name: str,
    fragment: ds.Fragment,
    schema: pa.Schema,
    condition: ds.Expression,
    is_gone: Gone | None,
) -> None:
    keys = ds.get_partition_keys(fragment.partition_expression)
    values = tuple(str(keys[column]) for column in PARTITIONS[name])
    run: list[pa.Table] = []
    size = 0
    for batch in fragment.to_batches(schema, **_READ):
        rows = pa.Table.from_batches([batch])
        if is_gone is None:
            rest = rows.filter(~condition)
        else:
            rest = rows.filter(pc.invert(is_gone(batch)))
        run.append(rest.drop_columns(PARTITIONS[name]))
        size += rest.nbytes
        if size >= RUN_BYTES:
            files.write(values, pa.concat_tables(run))
            run, size = [], 0
    if run:
        files.write(values, pa.concat_tables(run))


def _replace(archive: str, name: str, table: DeltaTable, old: set[str], new: list[NewFile]) -> bool:
    """Commits new files in place of old ones; False if another commit has removed one of those."""
    place = table_path(archive, name)
    mark = str(uuid.uuid4())
    first = table.version()
    for attempt in range(COMMITS):
        now_ms = time.time_ns() // 1_000_000
        there = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        removed = [
            RemoveAction(
                one["path"],
                True,
                now_ms,
                one["size_bytes"],
                {column: str(one[f"partition.{column}"]) for column in PARTITIONS[name]},
            )
            for one in there
            if one["path"] in old
        ]
        if len(removed) < len(old):
            # After an attempt the new files stay: its commit may become visible late.
            if not attempt:
                delete_files(place, new)
            return False
        check_files(place, new)
        try:
            # Without retries it follows the very version in which the old files were seen.
            table.create_write_transaction(
                [*removed, *map(action_of, new)],
                "append",
                table.schema(),
                PARTITIONS[name],
                commit_properties=CommitProperties(
                    custom_metadata={_MARK: mark}, max_commit_retries=0
                ),
            )
        except CommitFailedError:
            # A store may have done what it answered an error to: then the next try met our own
            # commit, and the new files are the only ones that have the rows.
            table = require_table(archive, name)
            since = table.history(table.version() - first)
            if any(one.get(_MARK) == mark for one in since):
                return True
        else:
            return True
    raise StorageError(f"{place}: others committed before each of {COMMITS} tries")
