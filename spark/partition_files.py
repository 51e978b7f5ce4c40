"""Parquet files of the partitions of a Delta table, written while their rows come in."""

import json
import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from mqmesh.errors import StorageError
from mqmesh.storage.files.atomic_file import sync_directory
from mqmesh.units import MIB

from .failures import place_error

MOST_OPEN: Final = 4
"""Files that are written at a time; a partition may get a second one where there are more."""
GROUP_BYTES: Final = 8 * MIB
"""Size of a group of rows before it is compressed, about; readers skip whole groups."""
PAGE_ROWS: Final = 2_000
_WAITING: Final = 1
"""Runs of rows that wait for the thread that writes them."""
_TEXT: Final = 32
"""Characters of the least and greatest text in statistics, as in Spark's."""
_LAST: Final = "\U0010ffff"


class NewFile(msgspec.Struct, frozen=True):
    """File that is whole, and no part of its table yet.

    Attributes:
        path: Path in the table.
        size: Bytes.
        values: Value of each column that divides the table.
        modified_ms: When it was written, ms since 1970.
        statistics: JSON of its statistics in Delta Lake, see ``statistics_of``.
    """

    path: str
    size: int
    values: dict[str, str]
    modified_ms: int
    statistics: str


class PartitionFiles:
    """New files of a table; as a context they are deleted where its block fails.

    A thread of its own compresses and writes rows. The caller waits where it falls behind.
    """

    def __init__(
        self,
        place: str,
        schema: pa.Schema,
        partition_by: Sequence[str],
        *,
        file_bytes: int,
        bloom: str = "",
        unlike: Sequence[str] = (),
    ) -> None:
        """Writes nothing yet.

        Args:
            place: The table: a directory, or a URL that Delta Lake can write to.
            schema: Schema of the table's rows.
            partition_by: Columns that divide it.
            file_bytes: Size at which a file is complete.
            bloom: Column with a Bloom filter; empty for none.
            unlike: Columns of which few values are the same.
        """
        self._fs = _file_system(place)
        self._place = place
        self._schema = pa.schema([field for field in schema if field.name not in partition_by])
        self._partition_by = list(partition_by)
        self._file_bytes = file_bytes
        self._bloom = bloom
        self._alike = [name for name in self._schema.names if name not in unlike]
        self._open: dict[tuple[str, ...], _File] = {}
        self._paths: list[str] = []
        self._done: list[NewFile] = []
        self._thread = ThreadPoolExecutor(1, "parquet")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._discard()

    def write(self, values: tuple[str, ...], rows: pa.Table) -> None:
        """Writes rows of a partition.

        Args:
            values: Its values of the columns that divide the table.
            rows: Rows without these columns.

        Raises:
            StorageError: Earlier rows could not be written.
        """
        while len(self._waiting) >= _WAITING:
            self._result(self._waiting.popleft())
        self._waiting.append(self._thread.submit(self._write, values, rows))

    def close(self) -> list[NewFile]:
        """Completes all files, and returns them; on this machine they are durable.

        Raises:
            StorageError: Something could not be written.
        """
        self._waiting.append(self._thread.submit(self._finish_all))
        while self._waiting:
            self._result(self._waiting.popleft())
        self._thread.shutdown()
        return self._done

    def _discard(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        for file in self._open.values():
            file.writer.is_open = False  # else it would write its end when it is collected
            file.sink.close()
        _delete(self._fs, self._paths)

    def _result(self, job: "Future[None]") -> None:
        try:
            job.result()
        except OSError as error:
            raise place_error(error, f"cannot write to {self._place}") from error

    def _write(self, values: tuple[str, ...], rows: pa.Table) -> None:
        group_rows = max(rows.num_rows * GROUP_BYTES // max(rows.nbytes, GROUP_BYTES), 1)
        file = self._open.pop(values, None) or self._begin(values, group_rows)
        self._open[values] = file
        file.writer.write_table(rows, row_group_size=group_rows)
        if file.sink.tell() >= self._file_bytes:
            self._finish(values)
        elif len(self._open) > MOST_OPEN:
            # The one that was written to longest ago.
            self._finish(next(iter(self._open)))

    def _begin(self, values: tuple[str, ...], group_rows: int) -> "_File":
        # Names and directories as Spark writes them; values are days and months.
        folder = "/".join(map("=".join, zip(self._partition_by, values, strict=True)))
        self._fs.create_dir(folder, recursive=True)
        path = f"{folder}/part-00000-{uuid.uuid4()}.c000.zstd.parquet"
        self._paths.append(path)
        sink = self._fs.open_output_stream(path)
        found: list[pq.FileMetaData] = []
        writer = pq.ParquetWriter(
            sink,
            self._schema,
            compression="zstd",
            use_dictionary=self._alike,
            bloom_filter_options={self._bloom: {"ndv": group_rows}} if self._bloom else None,
            max_rows_per_page=PAGE_ROWS,
            write_page_index=True,
            store_schema=False,
            metadata_collector=found,
        )
        return _File(path, sink, writer, found)

    def _finish(self, values: tuple[str, ...]) -> None:
        file = self._open.pop(values)
        file.writer.close()
        size = file.sink.tell()
        file.sink.close()
        if is_local(self._place):
            sync_file(Path(self._place) / file.path)
        self._done.append(
            NewFile(
                file.path,
                size,
                dict(zip(self._partition_by, values, strict=True)),
                time.time_ns() // 1_000_000,
                json.dumps(statistics_of(file.found[0], self._schema)),
            )
        )

    def _finish_all(self) -> None:
        for values in list(self._open):
            self._finish(values)
        if is_local(self._place):
            place = Path(self._place)
            folders = {(place / file.path).parent for file in self._done}
            for folder in sorted(folders | {place}):
                sync_directory(folder)


class _File:
    """File that is being written."""

    def __init__(
        self, path: str, sink: Any, writer: pq.ParquetWriter, found: "list[pq.FileMetaData]"
    ) -> None:
        self.path = path
        self.sink = sink
        self.writer = writer
        self.found = found


def check_files(place: str, files: list[NewFile]) -> None:
    """Looks whether files that are to be committed are still there.

    Raises:
        StorageError: One is gone, or has another size.
    """
    try:
        found = _file_system(place).get_file_info([file.path for file in files])
    except OSError as error:
        raise place_error(error, f"cannot look at new files of {place}") from error
    for file, one in zip(files, found, strict=True):
        if one.type != pafs.FileType.File or one.size != file.size:
            state = f"has {one.size} bytes" if one.type == pafs.FileType.File else "is gone"
            raise StorageError(
                f"{place}/{file.path} {state}, and {file.size} bytes were written; nothing is "
                "committed. `archive vacuum` removes what is not committed for a day: do it again"
            )


def is_local(place: str) -> bool:
    """Returns True if a place is a directory of this machine."""
    return "://" not in place


def sync_file(path: Path) -> None:
    """Makes a file durable that was written by any means.

    Raises:
        OSError: The sync failed.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def delete_files(place: str, files: Iterable[NewFile]) -> None:
    """Deletes files of which none may have been committed."""
    _delete(_file_system(place), [file.path for file in files])


def _file_system(place: str) -> pafs.FileSystem:
    if is_local(place):
        return pafs.SubTreeFileSystem(place, pafs.LocalFileSystem())
    # Workers of Spark that need none do without it: it takes 100 MB.
    from deltalake.fs import DeltaStorageHandler

    return pafs.PyFileSystem(DeltaStorageHandler(place))


def _delete(fs: pafs.FileSystem, paths: Iterable[str]) -> None:
    for path in paths:
        if fs.get_file_info(path).type == pafs.FileType.File:
            fs.delete_file(path)


def statistics_of(file: "pq.FileMetaData", schema: pa.Schema) -> dict[str, Any]:
    """Returns the statistics of a file as Delta Lake keeps them: rows, and bounds of the columns.

    Args:
        file: Metadata of the file, in which each group of rows has statistics.
        schema: Schema of its rows.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    places = {file.schema.column(number).path: number for number in range(file.num_columns)}
    for field in schema:
        if field.name not in places:
            continue  # a list or map
        groups = range(file.num_row_groups)
        chunks = [file.row_group(group).column(places[field.name]) for group in groups]
        found = [one.statistics for one in chunks if one.statistics is not None]
        if len(found) < len(chunks):
            continue
        nulls[field.name] = sum(one.null_count for one in found)
        known = [one for one in found if one.has_min_max]
        # A group of nulls has neither; one with texts over Arrow's limit has them unknown.
        is_known = known and not any(one.num_values and not one.has_min_max for one in found)
        if not is_known or pa.types.is_binary(field.type) or pa.types.is_boolean(field.type):
            continue
        least[field.name] = _plain(min(one.min for one in known), is_least=True)
        greatest = max(one.max for one in known)
        # Nothing of the same length is greater than a text that goes on with the last character.
        if not (isinstance(greatest, str) and greatest[_TEXT : _TEXT + 1] == _LAST):
            most[field.name] = _plain(greatest, is_least=False)
    return {"numRecords": file.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}


def _plain(value: Any, *, is_least: bool) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, str) and len(value) > _TEXT:
        return value[:_TEXT] if is_least else value[:_TEXT] + _LAST
    return value if isinstance(value, str | int) else str(value)
