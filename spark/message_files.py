"""Files of the table of messages, made of tasks of a snapshot, by any process that can see both."""

from collections.abc import Callable, Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from mqmesh.batch.record_batch import BatchHeader
from mqmesh.message import StoredMessage
from mqmesh.storage.tools.snapshot_reading import Snapshot
from mqmesh.units import MIB

from .message_columns import COLUMNS
from .options import DAY_MS
from .partition_files import NewFile, PartitionFiles
from .schema import Rows, arrow_schema
from .selection import ReadTask, Selection, read_task

PARTITION_BY: Final = ["dt"]
"""Columns that divide the table: a topic each would be a thousand files a day."""
RUN_BYTES: Final = 32 * MIB
"""Rows that are sorted by topic at a time, as they are in the log, and ``ROW_BYTES`` for each."""
ROW_BYTES: Final = 256
BATCH_ROWS: Final = 8_000
"""Rows that become Arrow's at a time; Python's own objects take several times the room."""
PROGRESS_BYTES: Final = 4 * MIB
SCHEMA: Final = arrow_schema(list(COLUMNS))
_EPOCH: Final = date(1970, 1, 1)

OnRead = Callable[[int, int], None]
"""Called with the commit-log offset up to which was read, and the messages so far."""


def write_messages(
    tasks: Iterable[ReadTask],
    wanted: Selection,
    place: str,
    *,
    broker: str,
    file_bytes: int,
    on_read: OnRead | None = None,
) -> list[NewFile]:
    """Writes the wanted messages of tasks into files.

    Args:
        tasks: Ranges of a snapshot's log, ascending.
        wanted: Selection of messages.
        place: Table of messages.
        broker: Name of the store in the archive.
        file_bytes: Size at which a file is complete.
        on_read: Called now and then.

    Raises:
        CorruptRecord: There is damage, and ``on_damage`` says ``fail``.
        StorageError: The snapshot cannot be read, or a file cannot be written.
    """
    with PartitionFiles(
        place,
        SCHEMA,
        PARTITION_BY,
        file_bytes=file_bytes,
        bloom="message_id",
        unlike=("body", "message_id"),
    ) as files:
        runs = _Runs(files, broker)
        shown = 0
        for task in tasks:
            for header, messages in read_task(Snapshot(Path(task.path)), task, wanted):
                runs.add(header, messages)
                if on_read is not None and header.end_offset - shown >= PROGRESS_BYTES:
                    shown = header.end_offset
                    on_read(shown, runs.count)
        runs.flush()
        return files.close()


def do_task(task: ReadTask, **options: Any) -> bytes:
    """Does a task in a process of Spark, which loads no more than this module needs.

    Args:
        task: Range of a snapshot's log.
        options: Arguments of ``write_messages``.

    Returns:
        JSON of a list of ``NewFile``.
    """
    # Arrow's own allocators keep 20 MB more of freed memory.
    pa.set_memory_pool(pa.system_memory_pool())
    return msgspec.json.encode(write_messages([task], **options))


class _Runs:
    """Messages on their way into runs of rows, each of one day and sorted by topic.

    Attributes:
        count: Messages so far.
    """

    def __init__(self, files: PartitionFiles, broker: str) -> None:
        self.count = 0
        self._files = files
        columns = [name for name in COLUMNS if name not in PARTITION_BY]
        self._rows = Rows(columns, arrow_schema(columns), broker=broker)
        self._batches: list[pa.RecordBatch] = []
        self._topics: set[str] = set()
        self._size = 0
        self._day = 0

    def add(self, header: BatchHeader, messages: Sequence[StoredMessage]) -> None:
        """Takes in messages of one batch, at least one."""
        day = header.store_timestamp // DAY_MS
        if day != self._day or self._size >= RUN_BYTES:
            self.flush()
            self._day = day
        self.count += len(messages)
        self._size += header.raw_size * len(messages) // header.message_count
        self._size += ROW_BYTES * len(messages)
        self._topics.update([one.topic for one in messages])
        self._rows.add(header, messages)
        if self._rows.count >= BATCH_ROWS:
            self._batches.append(self._rows.take())

    def flush(self) -> None:
        """Hands all rows on."""
        if self._rows.count:
            self._batches.append(self._rows.take())
        if self._batches:
            rows = pa.Table.from_batches(self._batches)
            if len(self._topics) > 1:
                # Arrow's sort keeps the order of the log within a topic.
                rows = rows.combine_chunks().sort_by("topic")
            self._files.write(((_EPOCH + timedelta(self._day)).isoformat(),), rows)
        self._batches.clear()
        self._topics.clear()
        self._size = 0
