"""Outbox: messages that are written in the caller's transaction, and sent by a relay."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from mqmesh.clock import Clock, SystemClock
from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, NO_KEYS, Message
from mqmesh.message_checks import check_messages
from mqmesh.sql.statements import (
    DEFAULT_NAMES,
    Parameters,
    TableNames,
    check_async_connection,
    check_connection,
    execute,
    quoted,
)


class RowFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of the column ``fields``, as JSON: a message's fields but topic, key and body."""

    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] | None = None
    flag: int = 0
    delay_level: int = 0
    deliver_at_ms: int = 0


_NO_FIELDS: Final = RowFields()
_decoder = msgspec.json.Decoder(RowFields)


def encode_fields(message: Message) -> str | None:
    """Return the column ``fields`` of a message; None for one that has none of them."""
    fields = RowFields(
        message.tag,
        list(message.keys),
        message.properties,
        message.flag,
        message.delay_level,
        message.deliver_at_ms,
    )
    return None if fields == _NO_FIELDS else msgspec.json.encode(fields).decode()


def message_of(topic: Any, sharding_key: Any, body: Any, fields: Any, most_bytes: int) -> Message:
    """Return the message of a row.

    Args:
        topic: Column of this name; it and the next three may have any value of the database.
        sharding_key: Column of this name.
        body: Column of this name.
        fields: Column of this name.
        most_bytes: Largest body in bytes.

    Raises:
        InvalidArgument: A column is of another type, or the message is illegal.
        msgspec.MsgspecError: ``fields`` is not in the form of ``encode_fields``.
    """
    if not isinstance(body, bytes | memoryview):
        raise InvalidArgument(f"column body is {type(body).__name__}, not bytes")
    if fields is not None and not isinstance(fields, str):
        raise InvalidArgument(f"column fields is {type(fields).__name__}, not text")
    extra = _NO_FIELDS if fields is None else _decoder.decode(fields)
    message = Message(
        topic,
        bytes(body),
        extra.tag,
        tuple(extra.keys) or NO_KEYS,
        extra.properties,
        extra.flag,
        sharding_key,
        extra.delay_level,
        extra.deliver_at_ms,
    )
    return check_messages([message], max_message_size=most_bytes)[0]


class Outbox:
    """Outbox of a database: a message is sent exactly if the transaction that adds it commits.

    An outbox holds no connection and may be shared by threads. An ``OutboxRelay`` sends the
    messages, those with the same sharding key in the order in which they were added.

    Args:
        names: Names of the tables.
        max_message_size: Largest body in bytes, from 1; the setting of brokers has the same name.
        clock: The machine's by default.
    """

    def __init__(
        self,
        names: TableNames = DEFAULT_NAMES,
        *,
        max_message_size: int = MAX_MESSAGE_BYTES_DEFAULT,
        clock: Clock | None = None,
    ) -> None:
        self._max_message_size = max_message_size
        self._clock = clock or SystemClock()
        self._insert = (
            f"INSERT INTO {quoted(names.outbox)} (topic, sharding_key, body, fields, added_at) "
            "VALUES (:topic, :sharding_key, :body, :fields, :added_at)"
        )

    def add(self, connection: Any, *messages: Message) -> None:
        """Add messages in the transaction that a connection is in.

        Args:
            connection: ``Connection`` or ``Session`` of SQLAlchemy, connection of sqlite3 or of
                psycopg (3).
            messages: Messages, also delayed ones.

        Raises:
            InvalidArgument: A message is illegal, or the connection is of another library, commits
                each statement by itself, or is in pipeline mode.
            Exception: The database refused; its library's own error.
        """
        check_connection(connection, "add")
        for row in self._rows(messages):
            execute(connection, self._insert, row)

    async def add_async(self, connection: Any, *messages: Message) -> None:
        """Add messages as ``add``, on a connection of asyncio.

        Args:
            connection: ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy, or psycopg's
                ``AsyncConnection``.
            messages: Messages, also delayed ones.
        """
        await check_async_connection(connection, "add")
        for row in self._rows(messages):
            await execute(connection, self._insert, row)

    def _rows(self, messages: tuple[Message, ...]) -> Iterator[Parameters]:
        now_ms = self._clock.wall_ms()
        limit = self._max_message_size
        # All are checked before the first is added.
        checked = [check_messages([one], max_message_size=limit)[0] for one in messages]
        for one in checked:
            yield {
                "topic": one.topic,
                "sharding_key": one.sharding_key,
                "body": one.body,
                "fields": encode_fields(one),
                "added_at": now_ms,
            }
