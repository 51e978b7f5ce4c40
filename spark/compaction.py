"""Makes large files of an archive's small ones, without Spark or Java.

A partition is rewritten when two of its files are small: those are joined. Keys of a month that is
over are sorted as well, so that a look-up reads a group of rows of one file. The rows of just the
files that a commit replaced are counted and hashed, before and after. Such commits change no data,
and the positions of stores in the table's log stay.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import BloomFilterProperties, ColumnProperties, DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError

from mqmesh.errors import ConfigError, StorageError
from mqmesh.units import MIB

from .settings import load_settings
from .tables import (
    INGESTS,
    KEYS,
    MESSAGES,
    PARTITIONS,
    dataset_of,
    open_table,
    require_table,
    table_path,
)

TRIES: Final = 5
"""Attempts of a commit, while an ingest commits to the same partition."""
HISTORY: Final = 100
"""Newest commits among which that of a compaction is looked for."""
SMALL: Final = 0.5
"""Part of the wanted size below which a file is small."""
SORT_BYTES: Final = 512 * MIB
"""Memory for sorting; further rows wait on the disk, in the directory for temporary files."""
GROUP_BYTES: Final = 4 * MIB
"""Compressed size of a group of rows, about; a reader skips groups by their statistics."""
MOST_GROUP_ROWS: Final = 50_000
PAGE_ROWS: Final = 2_000
READ_ROWS: Final = 8_000

_CHECKED: Final = {
    MESSAGES: ("store_id", "broker", "commitlog_offset", "ordinal", "body"),
    KEYS: ("store_id", "broker", "commitlog_offset", "ordinal", "key"),
    INGESTS: ("store_id", "broker", "from_offset", "to_offset", "gap_before", "mark"),
}
"""Columns of each table that a compaction is checked by."""


def compact(archive: str, today: date, *, since: str = "") -> dict[str, int]:
    """Makes large files of small ones in all tables; readers go on with the old ones.

    Args:
        archive: Directory of the archive.
        today: Present day in UTC; keys of earlier months are sorted.
        since: Only days, and months of keys, from this one on, ``2026-03-01``; empty for all.

    Returns:
        Files before and after, of all tables together.

    Raises:
        ConfigError: The directory is no archive, or ``since`` is no day.
        StorageError: The rows were others afterwards; ``restore`` of Delta Lake goes back.
    """
    require_table(archive, MESSAGES)
    first = since and date_of(since).isoformat()
    before = after = 0
    for name in (MESSAGES, KEYS, INGESTS):
        table = open_table(archive, name)
        if table is None:
            continue
        before += len(table.file_uris())
        for value, size in _with_small_files(archive, table, name, first):
            is_sorted = name == KEYS and value < today.isoformat()[:7]
            _rewrite(archive, name, value, size, is_sorted=is_sorted)
        table.update_incremental()
        after += len(table.file_uris())
    return {"files_before": before, "files_after": after}


def _with_small_files(
    archive: str, table: DeltaTable, name: str, first: str
) -> Iterator[tuple[str, float]]:
    """Yields partitions with more than one small file, and the compressed bytes of a row there."""
    limit = load_settings(archive).file_bytes * SMALL
    column = f"partition.{PARTITIONS[name][0]}" if PARTITIONS[name] else ""
    small: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        value = str(action[column]) if column else ""
        small[value] += action["size_bytes"] < limit
        sizes[value] += action["size_bytes"]
        rows[value] += action["num_records"] or 0
    for value, count in sorted(small.items()):
        # A month begins with "2026-03", so it is compared by as much of the day.
        if count > 1 and value >= first[: len(value)]:
            yield value, max(sizes[value] / max(rows[value], 1), 1.0)


def _rewrite(archive: str, name: str, value: str, mean_bytes: float, *, is_sorted: bool) -> None:
    for attempt in range(1, TRIES + 1):
        table = require_table(archive, name)
        options: dict[str, Any] = {
            "partition_filters": [(PARTITIONS[name][0], "=", value)] if value else None,
            "target_size": load_settings(archive).file_bytes,
            "max_spill_size": SORT_BYTES,
            "max_concurrent_tasks": 1,
            "writer_properties": _writer_properties(name, mean_bytes),
        }
        try:
            if is_sorted:
                done = table.optimize.z_order(["key_hash"], **options)
            else:
                done = table.optimize.compact(**options)
        except CommitFailedError as error:
            if attempt == TRIES:
                raise StorageError(f"{archive}: others commit all the time: {error}") from error
            continue
        if done["numFilesAdded"]:
            _check(archive, name, table)
        return


def _writer_properties(name: str, mean_bytes: float) -> WriterProperties:
    """Returns how files of a table are written.

    Args:
        name: Table.
        mean_bytes: Compressed bytes of a row, about.
    """
    group_rows = int(min(MOST_GROUP_ROWS, max(PAGE_ROWS, GROUP_BYTES / mean_bytes)))
    bloom = BloomFilterProperties(set_bloom_filter_enabled=True, ndv=group_rows)
    unlike = ColumnProperties(dictionary_enabled=False)
    columns = {
        MESSAGES: {
            "message_id": ColumnProperties(dictionary_enabled=False, bloom_filter_properties=bloom),
            "body": unlike,
        },
        KEYS: {"message_id": unlike, "key": unlike},
    }
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=group_rows,
        data_page_row_count_limit=PAGE_ROWS,
        column_properties=columns.get(name),
    )


def _check(archive: str, name: str, table: DeltaTable) -> None:
    """Compares the rows that a commit removed with those that it added."""
    # Ingests may have committed since; nothing else rewrites files.
    version = next(
        (one["version"] for one in table.history(HISTORY) if one["operation"] == "OPTIMIZE"), None
    )
    if version is None:
        raise StorageError(f"{archive}: {HISTORY} commits came before a compaction was checked")
    old, new = (
        dataset_of(DeltaTable(table_path(archive, name), version=number))
        for number in (version - 1, version)
    )
    before, after = ({one.path: one for one in found.get_fragments()} for found in (old, new))
    removed = content_of_files(old, [before[path] for path in before.keys() - after.keys()], name)
    added = content_of_files(new, [after[path] for path in after.keys() - before.keys()], name)
    if removed != added:
        raise StorageError(
            f"compaction changed {name} of {archive}: {removed[0]:,} rows became {added[0]:,}, or "
            f"others; go back by DeltaTable({table_path(archive, name)!r}).restore({version - 1})"
        )


def content_of_files(
    dataset: ds.FileSystemDataset, fragments: list[ds.Fragment], name: str
) -> tuple[int, int]:
    """Returns the number of rows in files, and a sum of hashes over them, in no order."""
    some = ds.FileSystemDataset(fragments, dataset.schema, dataset.format, dataset.filesystem)
    count = total = 0
    for batch in some.to_batches(
        columns=list(_CHECKED[name]),
        batch_size=READ_ROWS,
        batch_readahead=2,
        fragment_readahead=1,
    ):
        count += batch.num_rows
        total += sum(map(hash, zip(*(column.to_pylist() for column in batch.columns), strict=True)))
    return count, total


def date_of(text: str) -> date:
    """Reads a day.

    Raises:
        ConfigError: The text is no day.
    """
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no day; write 2026-03-01") from None
