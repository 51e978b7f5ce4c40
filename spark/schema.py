"""Rows of Arrow, made of batches of the log."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mqmesh.batch.record_batch import BatchHeader
from mqmesh.message import StoredMessage
from mqmesh.units import MIB

from .message_columns import COLUMNS
from .options import DAY_MS

ARROW_TYPES: Final = {
    "string": pa.string(),
    "date": pa.date32(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}

MOST_BYTES: Final = 16 * MIB
"""Of the rows of a record batch, as their sizes are in the log."""
_TRANSACTION: Final = 12
_COMMITTED: Final = 8


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Returns Arrow's description of some columns."""
    return pa.schema([(name, ARROW_TYPES[COLUMNS[name]]) for name in columns])


class Rows:
    """Messages on their way to becoming rows: lists of values, a column each.

    Attributes:
        count: Rows.
        size: Bytes of them in the log, before compression, about.
    """

    def __init__(self, columns: Sequence[str], schema: pa.Schema, *, broker: str) -> None:
        """Starts empty.

        Args:
            columns: Names out of ``COLUMNS``.
            schema: Schema of the record batches, the same columns.
            broker: Value of the column ``broker``.
        """
        self._columns = list(columns)
        self._schema = schema
        self._broker = broker
        self._values: dict[str, list[Any]] = {
            name: [] for name in self._columns if name in _PER_MESSAGE
        }
        self._batches: list[tuple[BatchHeader, StoredMessage]] = []
        self._ends: list[int] = []
        self.count = 0
        self.size = 0

    def add(self, header: BatchHeader, messages: Sequence[StoredMessage]) -> None:
        """Takes in messages of one batch."""
        if not messages:
            return
        self.count += len(messages)
        self.size += header.raw_size * len(messages) // header.message_count
        self._batches.append((header, messages[0]))
        self._ends.append(self.count)
        for name, values in self._values.items():
            values += _PER_MESSAGE[name](header, messages)

    def take(self) -> pa.RecordBatch:
        """Returns all rows, and forgets them."""
        arrays = [self._column(name) for name in self._columns]
        for values in self._values.values():
            values.clear()
        self._batches.clear()
        self._ends.clear()
        self.count = self.size = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, name: str) -> pa.Array:
        kind, wanted = COLUMNS[name], self._schema.field(name).type
        if name in self._values:
            return _array(kind, self._values[name], wanted)
        if name == "broker":
            return pa.repeat(pa.scalar(self._broker, wanted), self.count)
        values = _array(kind, [_PER_BATCH[name](*one) for one in self._batches], wanted)
        # Each value stands for all messages of its batch.
        runs = pa.RunEndEncodedArray.from_arrays(pa.array(self._ends, pa.int32()), values)
        return pc.run_end_decode(runs)


def _array(kind: str, values: list[Any], wanted: pa.DataType) -> pa.Array:
    if kind == "timestamp":
        return pa.array(values, pa.int64()).cast(wanted)
    if kind == "date":
        return pa.array(values, pa.int32()).cast(wanted)
    if kind == "map<string,string>":
        return _maps(values, wanted)
    return pa.array(values, wanted)


def _maps(values: list[dict[str, str] | None], wanted: pa.DataType) -> pa.Array:
    offsets = [0]
    names: list[str] = []
    texts: list[str] = []
    for properties in values:
        if properties:
            names += properties.keys()
            texts += properties.values()
        offsets.append(len(names))
    built = pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(texts, pa.string())
    )
    return built.cast(wanted) if built.type != wanted else built


Messages = Sequence[StoredMessage]

_PER_MESSAGE: Final[dict[str, Callable[[BatchHeader, Messages], list[Any]]]] = {
    "topic": lambda header, some: [one.topic for one in some],
    "queue_offset": lambda header, some: [one.queue_offset for one in some],
    "ordinal": lambda header, some: [one.queue_offset - header.base_queue_offset for one in some],
    "message_id": lambda header, some: [one.message_id for one in some],
    "tag": lambda header, some: [one.tag for one in some],
    "keys": lambda header, some: [one.keys for one in some],
    "properties": lambda header, some: [one.properties for one in some],
    "body": lambda header, some: [one.body for one in some],
    "flag": lambda header, some: [one.flag for one in some],
    "sharding_key": lambda header, some: [one.sharding_key for one in some],
    "reconsume_times": lambda header, some: [
        one.reconsume_times if one.properties else 0 for one in some
    ],
}

_PER_BATCH: Final[dict[str, Callable[[BatchHeader, StoredMessage], Any]]] = {
    "dt": lambda header, one: header.store_timestamp // DAY_MS,
    "store_id": lambda header, one: header.store_id,
    "epoch": lambda header, one: header.epoch,
    "queue_id": lambda header, one: header.queue_id,
    "commitlog_offset": lambda header, one: header.commitlog_offset,
    "born_timestamp": lambda header, one: header.born_timestamp * 1_000,
    "store_timestamp": lambda header, one: header.store_timestamp * 1_000,
    "born_host": lambda header, one: one.info.born_host,
    "transaction": lambda header, one: header.attributes & _TRANSACTION == _COMMITTED,
    "physical_topic": lambda header, one: one.info.topic,
}


def batched(rows: Rows, most_rows: int, parts: Iterator[None]) -> Iterator[pa.RecordBatch]:
    """Yields record batches of about so many rows, and ``MOST_BYTES`` at most, about.

    Args:
        rows: Gets rows whenever ``parts`` is resumed.
        most_rows: Rows with which a batch is full.
        parts: Adds a batch of the log each time.
    """
    for _ in parts:
        if rows.count >= most_rows or rows.size >= MOST_BYTES:
            yield rows.take()
    if rows.count:
        yield rows.take()
