"""The queue table: queues' bounds, producers' last batches, deletions; as a document.

It saves a start from reading every consume queue file and the whole log. It is made in steps
while batches come in, so its rows are from different moments, all of them at or behind
``through``. That does no harm: reading the log again from ``through`` skips batches that a row
knows already, and a cut of the log takes them back.

Layout of the document: frames, each a u32 length, little endian, and so many
bytes of msgpack. The first is a ``Head``, the others are ``Rows``.

Deletions have control records in the log, too. The table has them because damage may take the
control record: then the remaining batches of a deleted topic would pass for the beginning of the
new topic of that name.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.storage.queues.consume_queue import ConsumeQueue
from mqmesh.storage.queues.producer_states import Key, StoredBatch

ROWS_PER_FRAME: Final = 256
_LENGTH = struct.Struct("<I")


class QueueTableHead(msgspec.Struct, array_like=True, frozen=True):
    """Head of the table. Array positions are on disk and never change.

    Attributes:
        through: Commit-log offset; the table covers everything before it.
        epoch: Epoch of the log at that place.
        log_start: Commit-log offset of the beginning of the log; the queues begin behind it.
    """

    through: int
    epoch: int
    log_start: int = 0


class QueueRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Bounds of one queue; entries before ``end`` are in its files."""

    topic: str
    queue_id: int
    first: int
    end: int


class QueueRows(msgspec.Struct, array_like=True, frozen=True):
    """A piece of the table."""

    queues: list[QueueRow] = []
    producers: list[tuple[Key, list[StoredBatch]]] = []
    deletions: list[tuple[str, int]] = []


class QueueTable(msgspec.Struct, frozen=True):
    """A table that was read."""

    head: QueueTableHead
    queues: list[QueueRow]
    producers: list[tuple[Key, list[StoredBatch]]]
    deletions: dict[str, int] = {}


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(QueueTableHead)
_rows_decoder = msgspec.msgpack.Decoder(QueueRows)


def encode_table(
    head: QueueTableHead,
    queues: Iterable[ConsumeQueue],
    producers: Iterable[tuple[Key, list[StoredBatch]]],
    deletions: Iterable[tuple[str, int]] = (),
) -> Iterator[bytes]:
    """Makes a table frame by frame, so that the caller may do other work in between.

    Args:
        head: Head of the table.
        queues: All queues; each with all entries of batches before ``through`` in its files.
        producers: Windows from ``ProducerStates.dump``.
        deletions: Topics, and the commit-log offset before which no batch belongs to the topic any
            more. They are as new as the list of ``queues``, so that no row is older than they are.
    """
    yield _frame(_encoder.encode(head))
    deletions = iter(deletions)
    while deleted := list(islice(deletions, ROWS_PER_FRAME)):
        yield _frame(_encoder.encode(QueueRows(deletions=deleted)))
    queues = iter(queues)
    while some := list(islice(queues, ROWS_PER_FRAME)):
        rows = [
            QueueRow(q.topic, q.queue_id, min(q.first, q.written), q.written)
            for q in some
            if q.written
        ]
        yield _frame(_encoder.encode(QueueRows(queues=rows)))
    producers = iter(producers)
    while windows := list(islice(producers, ROWS_PER_FRAME)):
        yield _frame(_encoder.encode(QueueRows(producers=windows)))


def encode_without_files(table: QueueTable, log_start: int) -> bytes:
    """Encode a table for a log whose consume queue files are missing and have to be made anew.

    A queue begins at its end, until recovery meets its first batch: so a queue that has no batch
    any more keeps its offsets.

    Args:
        table: An older table.
        log_start: Commit-log offset where the log begins.
    """
    rows = [QueueRow(row.topic, row.queue_id, row.end, row.end) for row in table.queues]
    head = QueueTableHead(table.head.through, table.head.epoch, log_start)
    deletions = list(table.deletions.items())
    parts = [
        QueueRows(deletions=deletions),
        QueueRows(queues=rows),
        QueueRows(producers=table.producers),
    ]
    return b"".join(_frame(_encoder.encode(part)) for part in [head, *parts])


def decode_table(document: bytes) -> QueueTable:
    """Reads a table.

    Raises:
        CorruptRecord: The document is no queue table.
    """
    frames = _frames(document)
    try:
        head = _head_decoder.decode(next(frames))
        table = QueueTable(head, [], [], {})
        for frame in frames:
            rows = _rows_decoder.decode(frame)
            table.queues.extend(rows.queues)
            table.producers.extend(rows.producers)
            table.deletions.update(rows.deletions)
    except (msgspec.MsgspecError, StopIteration) as error:
        raise CorruptRecord(f"the queue table cannot be decoded: {error}") from error
    return table


def _frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _frames(document: bytes) -> Iterator[memoryview]:
    view = memoryview(document)
    position = 0
    while position < len(view):
        if position + _LENGTH.size > len(view):
            raise CorruptRecord("the queue table ends inside a length")
        (size,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if position + size > len(view):
            raise CorruptRecord("the queue table ends inside a frame")
        yield view[position : position + size]
        position += size
