"""Spark reads a running cluster: batches, and streams whose offsets Spark keeps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from mqmesh.clock import SystemClock
from mqmesh.message import MessageQueue
from mqmesh.sdk.connector.queue_reader import QueueReader, Stretch
from mqmesh.units import MIB

from ..message_columns import check_columns
from ..options import Options
from ..schema import Rows, arrow_schema
from .options import LiveOptions, Place, read_options, to_json
from .planning import on_loss, queues_of, resolve, split, stretch_of
from .position import StreamPosition

MOST_ROW_BYTES: Final = 16 * MIB
"""Size of the encoded messages at which a record batch is full, for any number of them."""


@dataclass
class LivePart(InputPartition):
    """A task of a reader; an end of 0 says that it has nothing to read."""

    topic: str = ""
    broker_name: str = ""
    queue_id: int = 0
    start: int = 0
    end: int = 0
    epoch: int = 0


class _Parts:
    """Base of both readers: columns, options, and the reading of a part."""

    def __init__(self, schema: StructType, options: Options, *, stream: bool) -> None:
        self.columns = list(schema.names)
        check_columns(self.columns)
        self.options: LiveOptions = read_options(options, stream=stream)

    def parts(self, stretches: list[Stretch]) -> list[LivePart]:
        return [
            LivePart(
                one.queue.topic,
                one.queue.broker_name,
                one.queue.queue_id,
                one.start,
                one.end,
                one.epoch,
            )
            for one in split(stretches, self.options.min_partitions)
        ]

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, LivePart)
        if not part.end:
            return
        options = self.options
        queue = MessageQueue(part.topic, part.broker_name, part.queue_id)
        rows = Rows(self.columns, arrow_schema(self.columns), broker=part.broker_name)
        size = 0
        with options.client() as client:
            for header, messages in client.read(
                Stretch(queue, part.start, part.end, part.epoch),
                selector=options.selector,
                max_bytes=options.fetch_bytes,
                on_loss=on_loss(options.fail_on_loss),
            ):
                rows.add(header, messages)
                size += header.raw_size
                if rows.count >= options.most_rows or size >= MOST_ROW_BYTES:
                    size = 0
                    yield rows.take()
        if rows.count:
            yield rows.take()


class LiveReader(DataSourceReader):
    """Reads topics of a running cluster once, from some place up to another."""

    def __init__(self, schema: StructType, options: Options) -> None:
        """Reads the options.

        Args:
            schema: Wanted columns.
            options: Options that the user gave.

        Raises:
            ConfigError: One is wrong.
        """
        self._parts = _Parts(schema, options, stream=False)

    def partitions(self) -> Sequence[InputPartition]:
        """Returns one partition a queue, or parts of queues if ``minPartitions`` is higher."""
        options = self._parts.options
        lost = on_loss(options.fail_on_loss)
        stretches = []
        with options.client() as client:
            for queue in queues_of(client, options):
                edges = client.edges(queue)
                start = resolve(client, options.starting, queue, edges)
                assert options.ending is not None, "only streams have no end"
                end = resolve(client, options.ending, queue, edges)
                found = stretch_of(client, queue, start, end, lost)
                if found is not None:
                    stretches.append(found)
        # An empty list would become a partition that is None.
        return self._parts.parts(stretches) or [LivePart()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition."""
        return self._parts.read(partition)


class LiveStreamReader(DataSourceStreamReader):
    """Reads topics of a running cluster as they grow.

    Spark asks one instance for offsets and plans, and others, in its tasks, for rows. Offsets
    live in Spark's checkpoint, each with the epoch of the broker's log in which it was right.
    """

    def __init__(self, schema: StructType, options: Options) -> None:
        """Reads the options.

        Args:
            schema: Wanted columns.
            options: Options that the user gave.

        Raises:
            ConfigError: One is wrong.
        """
        self._parts = _Parts(schema, options, stream=True)
        self._client: QueueReader | None = None
        self._position = StreamPosition(self._parts.options)

    def initialOffset(self) -> dict[str, Any]:
        """Returns the position where a new query begins."""
        return to_json(self._position.initial(self._planner()))

    def latestOffset(self) -> dict[str, Any]:
        """Returns the end of the next batch, and of queues that go on behind it their ends."""
        return self._position.advance(self._planner(), SystemClock().monotonic_ms())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plans a batch; Spark also calls it with start and end alike to give the position."""
        begins, ends = self._position.plan(start, end)
        lost = on_loss(self._parts.options.fail_on_loss)
        stretches = []
        for queue, place in sorted(ends.items()):
            if begins.get(queue) == place:
                continue
            client = self._planner()
            begin = begins.get(queue) or Place(client.edges(queue).first)
            found = stretch_of(client, queue, begin, place, lost)
            if found is not None:
                stretches.append(found)
        return self._parts.parts(stretches)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition."""
        return self._parts.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: the checkpoint has the offsets, and brokers need none."""

    def stop(self) -> None:
        """Closes connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _planner(self) -> QueueReader:
        if self._client is None:
            self._client = self._parts.options.client()
        return self._client
