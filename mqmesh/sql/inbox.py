"""Inbox: ids of processed messages, so that a message that comes again changes nothing."""

from typing import Any, Final

from mqmesh.clock import Clock, SystemClock
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import StoredMessage, check_group
from mqmesh.sql.statements import (
    DEFAULT_NAMES,
    DURABLE,
    Parameters,
    TableNames,
    check_async_connection,
    check_connection,
    execute,
    quoted,
)

KEEP_MS: Final = 30 * 24 * 3_600_000
"""Time for which ids are kept by default."""
CLEAN_ROWS: Final = 10_000
"""Ids that one call of ``clean`` deletes at most, by default."""


class Inbox:
    """Inbox of a consumer group in a database: each message is processed once.

    A message has the same id whenever it comes again: after a failure, a crash, a failover, or
    as a dead letter that was sent to the group once more. An inbox holds no connection and may be
    shared by threads.

    Args:
        group: Consumer group; groups with the same table do not see each other's ids.
        names: Names of the tables.
        clock: The machine's by default.

    Raises:
        InvalidArgument: The group's name is illegal.
    """

    def __init__(
        self, group: str, names: TableNames = DEFAULT_NAMES, *, clock: Clock | None = None
    ) -> None:
        self._group = check_group(group)
        self._clock = clock or SystemClock()
        table = quoted(names.inbox)
        self._insert = (
            f"INSERT INTO {table} (consumer_group, message_id, received_at) "
            "VALUES (:consumer_group, :message_id, :received_at) ON CONFLICT DO NOTHING"
        )
        self._delete = (
            f"DELETE FROM {table} WHERE (consumer_group, message_id) IN (SELECT consumer_group, "
            f"message_id FROM {table} WHERE received_at < :before AND consumer_group = "
            ":consumer_group ORDER BY received_at LIMIT :most)"
        )

    def first_time(self, connection: Any, message: StoredMessage) -> bool:
        """Note a message in the transaction that a connection is in.

        While another transaction has noted the same message and has not ended, PostgreSQL waits
        for its end; SQLite has one writer at a time.

        Args:
            connection: ``Connection`` or ``Session`` of SQLAlchemy, connection of sqlite3 or of
                psycopg (3).
            message: As a consumer received it.

        Returns:
            True if it was not noted before: process it in this transaction. False: a transaction
            that committed has processed it; return.

        Raises:
            InvalidArgument: The connection is of another library, commits each statement by itself,
                or is in pipeline mode.
            ConfigError: The library does not say how many rows it inserted.
            Exception: The database refused; its library's own error.
        """
        if check_connection(connection, "first_time") == "postgresql":
            execute(connection, DURABLE, {})
        return _is_inserted(execute(connection, self._insert, self._row(message)))

    async def first_time_async(self, connection: Any, message: StoredMessage) -> bool:
        """Note a message as ``first_time``, on a connection of asyncio."""
        if await check_async_connection(connection, "first_time") == "postgresql":
            await execute(connection, DURABLE, {})
        return _is_inserted(await execute(connection, self._insert, self._row(message)))

    def clean(self, connection: Any, *, keep_ms: int = KEEP_MS, most: int = CLEAN_ROWS) -> int:
        """Delete the oldest ids, in the transaction that a connection is in.

        Args:
            connection: As of ``first_time``.
            keep_ms: Age in ms up to which ids stay, from 1; the default is 30 days. A message that
                comes again later than that is processed again: see docs/exactly-once.md.
            most: Ids to delete at most, from 1.

        Returns:
            Number of ids deleted; call again after a commit while it is ``most``.

        Raises:
            InvalidArgument: A number is out of bounds.
        """
        if keep_ms < 1 or most < 1:
            raise InvalidArgument(f"keep_ms = {keep_ms} and most = {most} must be 1 or more")
        check_connection(connection, "clean")
        before = self._clock.wall_ms() - keep_ms
        values: Parameters = {"before": before, "consumer_group": self._group, "most": most}
        return int(execute(connection, self._delete, values).rowcount)

    def _row(self, message: StoredMessage) -> Parameters:
        return {
            "consumer_group": self._group,
            "message_id": message.message_id,
            "received_at": self._clock.wall_ms(),
        }


def _is_inserted(done: Any) -> bool:
    if done.rowcount not in (0, 1):
        # Taken for a number, it would let the message be processed again.
        raise ConfigError(
            f"the database's library says that {done.rowcount} rows were inserted, not 0 or 1"
        )
    return bool(done.rowcount)
