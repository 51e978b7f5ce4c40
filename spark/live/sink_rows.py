"""Rows on their way to becoming messages: columns, and how they are divided into batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import NO_KEYS, RESERVED_PROPERTIES, Message, MessageQueue
from mqmesh.sdk.connector.numbered_sender import NumberedBatch
from mqmesh.sdk.producer.queue_selector import queue_index

from ..message_columns import COLUMNS

BATCH_ROWS: Final = 500
"""Rows without a sharding key that go to a queue before it is the next one's turn."""
FLIGHT_ROWS: Final = 2_000
"""Rows that are sent, and acknowledged, before the next ones."""
FLIGHT_BYTES: Final = 1 << 20
"""Size of the bodies at which a flight is full, for any number of rows."""

_TEXT: Final = ("string",)
WRITABLE: Final = {
    "topic": _TEXT,
    "body": ("binary", *_TEXT),
    "value": ("binary", *_TEXT),
    "tag": _TEXT,
    "keys": ("array<string>",),
    "properties": ("map<string,string>",),
    "sharding_key": _TEXT,
    "flag": ("int", "bigint"),
    "delay_level": ("int", "bigint"),
    "deliver_at": ("timestamp", "bigint"),
}
"""Columns that become part of a message, and the types they may have."""


def check_columns(types: dict[str, str], topic: str) -> None:
    """Checks the columns of rows that are to be written.

    Args:
        types: Spark's name of the type, by column.
        topic: Topic of the option; empty if there is none.

    Raises:
        ConfigError: One is unknown or has a wrong type, or one is missing.
    """
    for name, kind in types.items():
        if name in WRITABLE:
            if kind not in WRITABLE[name]:
                raise ConfigError(
                    f"column {name!r} is of type {kind}; it must be {' or '.join(WRITABLE[name])}"
                )
        elif name not in COLUMNS:
            # Other columns of the source are passed over, so that its rows can be written as read.
            raise ConfigError(
                f"messages have no column {name!r}; rows may have {', '.join(WRITABLE)}"
            )
    if ("body" in types) == ("value" in types):
        raise ConfigError("rows need one of the columns body and value, and not both")
    if not topic and "topic" not in types:
        raise ConfigError("say where to: by option topic, or by a column topic")
    if "delay_level" in types and "deliver_at" in types:
        raise ConfigError("columns delay_level and deliver_at exclude each other; drop one of them")


def messages_of(batch: pa.RecordBatch, topic: str) -> Iterator[Message]:
    """Yields the messages that rows stand for, in order.

    Args:
        batch: Rows whose columns were checked.
        topic: Topic of all messages; empty where rows name it.

    Raises:
        InvalidArgument: A row has no topic, or no body.
    """
    names = [name for name in batch.schema.names if name in WRITABLE]
    columns = {name: _values(batch.column(name)) for name in names}
    if "value" in columns:
        columns["body"] = columns.pop("value")
    if topic:
        columns["topic"] = [topic] * batch.num_rows
    if "deliver_at" in columns:
        columns["deliver_at_ms"] = columns.pop("deliver_at")
    names = list(columns)
    for row in zip(*columns.values(), strict=True):
        # A null column means the message's default.
        fields = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        yield _message(fields)


def _message(fields: dict[str, Any]) -> Message:
    body = fields.get("body")
    if not body:
        raise InvalidArgument(
            "a row has an empty body, which a message may not have; leave such rows out"
        )
    if "topic" not in fields:
        raise InvalidArgument("a row has no topic; fill the column, or set option topic")
    if isinstance(body, str):
        fields["body"] = body.encode()
    if "keys" in fields:
        fields["keys"] = tuple(fields["keys"]) or NO_KEYS
    if "properties" in fields:
        own = {key: value for key, value in fields["properties"] if key not in RESERVED_PROPERTIES}
        fields["properties"] = own or None
    return Message(**fields)


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        return [None if value is None else value // 1_000 for value in column.to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


class Flights:
    """Divides messages into flights: batches that are sent together, at most one of a queue.

    The same messages in the same order, with the same queues, give the same batches under the same
    sequences: so work that is done again can be recognised.
    """

    def __init__(
        self, queues_of: Callable[[str], Sequence[MessageQueue]], first_sequence: int, turn: int
    ) -> None:
        """Starts empty.

        Args:
            queues_of: Writable queues of a topic, at least one.
            first_sequence: Sequence of the first message.
            turn: Index of the queue that the first messages without a sharding key go to.
        """
        self._queues_of = queues_of
        self._sequence = first_sequence
        self._turn = turn
        self._row = 0
        self._groups: dict[tuple[MessageQueue, int], list[Message]] = {}
        self._rows = 0
        self._bytes = 0

    def add(self, message: Message) -> bool:
        """Takes a message; True if the flight is full and must be taken."""
        queues = self._queues_of(message.topic)
        if message.sharding_key is not None:
            at = queue_index(message.sharding_key, len(queues))
        else:
            at = (self._turn + self._row // BATCH_ROWS) % len(queues)
            self._row += 1
        delay = -1 if message.deliver_at_ms else message.delay_level
        self._groups.setdefault((queues[at], delay), []).append(message)
        self._rows += 1
        self._bytes += len(message.body)
        return self._rows >= FLIGHT_ROWS or self._bytes >= FLIGHT_BYTES

    def take(self) -> list[NumberedBatch]:
        """Returns the batches of the flight, and forgets them."""
        found = []
        for (queue, _), messages in self._groups.items():
            found.append(NumberedBatch(queue, messages, self._sequence))
            self._sequence += len(messages)
        self._groups = {}
        self._rows = self._bytes = 0
        return found
