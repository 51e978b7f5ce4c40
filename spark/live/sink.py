"""Spark writes into topics: each row a message, and each message once."""

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, MessageQueue, check_topic, is_system_topic
from mqmesh.sdk.connector.numbered_sender import NumberedBatch, NumberedSender
from mqmesh.units import MIB

from ..options import Options, check_names, flag, number
from .options import MOST_PATIENCE_MS, check_namesrv
from .sink_rows import Flights, check_columns, messages_of

OPTIONS: Final = (
    "namesrv",
    "credentials",
    "namespace",
    "topic",
    "idempotent",
    "writeId",
    "maxMessageSize",
    "sendTimeoutMs",
)
_OF_STREAMS: Final = ("checkpointLocation", "queryName")
"""Options of every stream, which Spark hands to its sink as well."""
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
_MOST_ID: Final = 255
_ROWS_BITS: Final = 32
"""Bits of a sequence for the rows of a task; those before count the batches of a stream."""


@dataclass
class Sent(WriterCommitMessage):
    """Commit message of a task whose rows are all stored.

    Attributes:
        rows: Number of rows.
        known: Rows among these that a former try of the task had stored.
    """

    rows: int
    known: int


class _Sink:
    """Base of both sinks: options, and the sending of a task's rows."""

    def __init__(
        self, schema: StructType, options: Options, overwrite: bool, *, of_spark: Sequence[str] = ()
    ) -> None:
        check_names(options, (*OPTIONS, *of_spark), "the sink mqmesh")
        if overwrite:
            raise ConfigError("messages cannot be overwritten: use mode 'append'")
        self.namesrv = check_namesrv(options)
        self.credentials = options.get("credentials") or ""
        self.namespace = options.get("namespace")
        self.topic = options.get("topic") or ""
        if self.topic:
            check_topic(self.topic)
            if is_system_topic(self.topic):
                raise ConfigError(f"option topic is {self.topic!r}, a topic of mqmesh's own")
        self.idempotent = flag(options, "idempotent", True)
        self.write_id = options.get("writeId") or ""
        if len(self.write_id) > _MOST_ID:
            raise ConfigError(
                f"option writeId has {len(self.write_id)} characters; at most {_MOST_ID}"
            )
        self.most_bytes = number(options, "maxMessageSize", MAX_MESSAGE_BYTES_DEFAULT, 1, 16 * MIB)
        self.patience_ms = number(options, "sendTimeoutMs", 60_000, 1, MOST_PATIENCE_MS)
        check_columns({field.name: field.dataType.simpleString() for field in schema}, self.topic)

    def send(
        self, rows: Iterator[pa.RecordBatch], write_id: str, partition: int, first: int
    ) -> Sent:
        """Sends the rows of a task and waits until they are stored.

        Args:
            rows: Rows of the task.
            write_id: Id of the write; the same whenever it is done again.
            partition: Number of the part.
            first: Sequence of the first row.
        """
        name = f"{write_id}/{partition}" if self.idempotent else uuid.uuid4().hex
        key = hashlib.blake2b(name.encode(), digest_size=16).digest()
        with NumberedSender(
            self.namesrv,
            key,
            born_host=f"spark:{partition}",
            max_message_size=self.most_bytes,
            patience_ms=self.patience_ms,
            credentials=self.credentials,
            namespace=self.namespace,
        ) as sender:
            return _send(sender, rows, self.topic, first, partition, self.idempotent)


def _send(
    sender: NumberedSender,
    rows: Iterator[pa.RecordBatch],
    topic: str,
    first: int,
    partition: int,
    idempotent: bool,
) -> Sent:
    @lru_cache(maxsize=1_024)
    def queues_of(name: str) -> Sequence[MessageQueue]:
        found = sender.wait_writable_queues(name)
        if not found:
            raise ConfigError(f"topic {name!r} has no queue that may be written to")
        if idempotent and not sender.readable_queues(name):
            raise ConfigError(
                f"topic {name!r} may not be read, so what a former try stored cannot be found; "
                "allow reading it, or set option idempotent 'false' and get repetitions"
            )
        return found

    flights = Flights(queues_of, first, partition)
    repeats: bool | None = None if idempotent else False
    sent = Sent(0, 0)

    def send(flight: list[NumberedBatch]) -> None:
        nonlocal repeats
        if repeats is None:
            # A former try of this task, perhaps of a driver that was killed, began like this.
            repeats = sender.is_stored(first)
        sent.rows += sum(len(one.messages) for one in flight)
        if repeats:
            left = [one for one in flight if not sender.is_stored(one.first_sequence)]
            sent.known += sum(len(one.messages) for one in flight)
            sent.known -= sum(len(one.messages) for one in left)
            # It sent one flight after the other, so behind this one there is nothing.
            repeats = not left
            flight = left
        if flight:
            sender.send(flight)

    for batch in rows:
        for message in messages_of(batch, topic):
            if sent.rows + 1 >= 1 << _ROWS_BITS:
                raise InvalidArgument(
                    f"a task has over {1 << _ROWS_BITS} rows; repartition what is written"
                )
            if flights.add(message):
                send(flights.take())
    rest = flights.take()
    if rest:
        send(rest)
    return sent


class BatchSink(DataSourceArrowWriter):
    """Sends the rows of a frame; a task that Spark does again adds nothing."""

    def __init__(self, schema: StructType, options: Options, overwrite: bool) -> None:
        """Reads the options.

        Args:
            schema: Columns of the rows.
            options: Options that the user gave.
            overwrite: True in the mode ``overwrite``, which is refused.

        Raises:
            ConfigError: An option or a column is wrong.
        """
        self._sink = _Sink(schema, options, overwrite)
        # One for all tasks of this write and their repetitions.
        self._write_id = self._sink.write_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Sends the rows of a task."""
        return self._sink.send(iterator, self._write_id, _task().partitionId(), 0)


class StreamSink(DataSourceStreamArrowWriter):
    """Sends the rows of a stream; a batch that Spark does again adds nothing."""

    def __init__(self, schema: StructType, options: Options, overwrite: bool) -> None:
        """Reads the options; as ``BatchSink``."""
        self._sink = _Sink(schema, options, overwrite, of_spark=_OF_STREAMS)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Sends the rows of a task."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if self._sink.idempotent and (query is None or batch is None):
            raise ConfigError(
                "Spark does not say which batch of which query this is, so repetitions cannot be "
                "recognised; option idempotent 'false' goes on, and may send messages twice"
            )
        first = int(batch or 0) << _ROWS_BITS
        write_id = self._sink.write_id or str(query)
        return self._sink.send(iterator, write_id, task.partitionId(), first)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing: every task has waited for its acknowledgements."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Leaves stored messages in place; they are recognised when the batch is done again."""


def _task() -> TaskContext:
    found = TaskContext.get()
    assert found is not None, "Spark writes in tasks"
    return found
