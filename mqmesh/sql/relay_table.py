"""Rows of the outbox as a relay reads and deletes them, and the row that says which relay works."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, Message, MessageQueue
from mqmesh.sql.outbox import message_of
from mqmesh.sql.statements import (
    BOUNDED,
    DURABLE,
    TableNames,
    check_connection,
    database_errors,
    execute,
    is_async,
    quoted,
)

MOST_COUNTED: Final = 100_000
"""Rows that are counted at most: the count of a longer outbox stops there."""
_IDS: Final = 100
"""Ids of one statement."""
_COLUMNS: Final = "id, topic, sharding_key, fields, body"

_log = logging.getLogger(__name__)


class OutboxRow(msgspec.Struct, frozen=True):
    """A row of the outbox.

    Attributes:
        id: Place in the order of sending.
        message: Its message.
    """

    id: int
    message: Message


class FlightBatch(msgspec.Struct, frozen=True):
    """Rows that go to one queue as one batch, and their numbers.

    Batches that are in flight stand in the database, as JSON, from before the first try on.

    Attributes:
        key: Producer key that they are sent under, as hex digits.
        topic: Topic of the queue.
        broker: Broker group of the queue.
        queue_id: Its number.
        log_end: Where the broker's log ended before they were sent.
        first: Sequence of the first row; the others follow by one.
        rows: Ids of the rows, ascending.
    """

    key: str
    topic: str
    broker: str
    queue_id: int
    log_end: int
    first: int
    rows: list[int]

    @property
    def queue(self) -> MessageQueue:
        """The queue."""
        return MessageQueue(self.topic, self.broker, self.queue_id)

    @property
    def numbers(self) -> tuple[str, int]:
        """Key and first sequence, which no other batch has."""
        return self.key, self.first

    def __str__(self) -> str:
        """Return where it goes, and the ids of its rows as a range."""
        first, last = self.rows[0], self.rows[-1]
        return f"{f'row {first}' if first == last else f'rows {first} to {last}'} for {self.queue}"


class RelayRow(msgspec.Struct, frozen=True):
    """Row that says which relay works.

    Attributes:
        holder: Name of the relay; "" for none.
        beat: Grows with each sign of life of the holder.
        flight: Batches that are in flight, as JSON; None for none.
    """

    holder: str
    beat: int
    flight: str | None


class RelayTable:
    """Tables of one outbox for one relay, by one connection.

    Args:
        connect: Opens a connection: of sqlite3, psycopg or SQLAlchemy (not asyncio).
        names: Names of the tables.
        max_message_size: Largest body in bytes.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        names: TableNames,
        max_message_size: int = MAX_MESSAGE_BYTES_DEFAULT,
    ) -> None:
        self._connect = connect
        self._names = names
        self._max_message_size = max_message_size
        self._dialect = ""
        self._outbox, self._relay = quoted(names.outbox), quoted(names.relay)
        self._connection: Any = None

    def close(self) -> None:
        """Close the connection; the next transaction opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block in a transaction; an error rolls it back and closes the connection.

        On PostgreSQL neither a lock that others hold nor a client that is stopped lasts for ever.
        """
        if self._connection is None:
            self._connection = self._connect()
            if is_async(self._connection):
                raise ConfigError("a relay works in a thread: connect must not be for asyncio")
            self._dialect = check_connection(self._connection, "connect")
        try:
            if self._dialect == "postgresql":
                self._run(BOUNDED)
            yield
            self._connection.commit()
        except BaseException:
            # Closed without a commit: libraries roll back in any state of the connection.
            self.close()
            raise

    def check(self) -> None:
        """Check that the tables are there.

        Raises:
            ConfigError: One is missing, or has other columns; the command creates them.
        """
        with self.transaction():
            pass  # a database that cannot be reached is another error
        for table, columns in (
            (self._names.outbox, f"{_COLUMNS}, added_at, error"),
            (self._names.relay, "id, holder, beat, flight"),
        ):
            try:
                with self.transaction():
                    self._run(f"SELECT {columns} FROM {quoted(table)} WHERE 1 = 0")
            except database_errors() as error:
                raise ConfigError(
                    f"table {table} cannot be read: {error}; `mqmesh sql schema` prints the "
                    "statements that create it"
                ) from error

    # ---- Calls inside of a transaction -------------------------------------------------

    def holder(self) -> RelayRow:
        """Return the row that says which relay works; add it when it is missing."""
        select = f"SELECT holder, beat, flight FROM {self._relay} WHERE id = 1"
        found = self._run(select).fetchone()
        if found is None:
            self._run(
                f"INSERT INTO {self._relay} (id, holder, beat) VALUES (1, '', 0) "
                "ON CONFLICT DO NOTHING"
            )
            found = self._run(select).fetchone()
        return RelayRow(*found)

    def change_holder(self, before: RelayRow, holder: str) -> bool:
        """Write another holder if the row is as it was seen; the flight stays.

        On PostgreSQL the commit waits for the disk: the relay must not forget the batches that it
        sends next.

        Returns:
            False if the holder or its beat is another one by now.
        """
        if self._dialect == "postgresql":
            self._run(DURABLE)
        done = self._run(
            f"UPDATE {self._relay} SET holder = :holder, beat = beat + 1 "
            "WHERE id = 1 AND holder = :old AND beat = :beat",
            holder=holder,
            old=before.holder,
            beat=before.beat,
        )
        return bool(done.rowcount == 1)

    def set_flight(self, held: RelayRow, flight: Sequence[FlightBatch]) -> bool:
        """Write the batches that are in flight from now on.

        Returns:
            False if the holder or its beat is another one by now.
        """
        done = self._run(
            f"UPDATE {self._relay} SET flight = :flight "
            "WHERE id = 1 AND holder = :holder AND beat = :beat",
            flight=msgspec.json.encode(flight).decode() if flight else None,
            holder=held.holder,
            beat=held.beat,
        )
        return bool(done.rowcount == 1)

    def oldest(self) -> int | None:
        """Return when the first row was added, in ms; None without a row, or if it has no time."""
        found = self._run(
            f"SELECT added_at FROM {self._outbox} WHERE error IS NULL ORDER BY id LIMIT 1"
        ).fetchone()
        return None if found is None else _time_of(found[0])

    def has_rows(self, without: Sequence[str]) -> bool:
        """Return True if there is a row but for those of some topics."""
        topics, names = self._topics(without)
        return self._run(f"{topics} LIMIT 1", **names).fetchone() is not None

    def head(self, rows: int, most_bytes: int, without: Sequence[str]) -> list[OutboxRow]:
        """Return the first rows, by id; one at least if there is any that can be read.

        A row that cannot be read is set aside.

        Args:
            rows: Rows at most.
            most_bytes: Stop behind the row whose content exceeds this together with those before.
            without: Topics to leave out.
        """
        head, names = self._head(without)
        # The sizes come first: a body that is not returned is not read.
        found = self._run(
            f"SELECT {_COLUMNS} FROM {self._outbox} JOIN (SELECT id AS head_id, "
            f"sum(size) OVER (ORDER BY id) - size AS ahead FROM ({head}) AS head) AS sized "
            "ON id = head_id WHERE ahead < :bytes ORDER BY id",
            rows=rows,
            bytes=most_bytes,
            **names,
        )
        return self._rows_of(found)

    def rows(self, ids: Sequence[int]) -> list[OutboxRow]:
        """Return the rows with these ids that are there and can be read, by id."""
        found: list[OutboxRow] = []
        for marks, values in _slices(ids):
            done = self._run(
                f"SELECT {_COLUMNS} FROM {self._outbox} WHERE id IN ({marks}) AND error IS NULL",
                **values,
            )
            found += self._rows_of(done)
        return sorted(found, key=lambda one: one.id)

    def present(self, ids: Sequence[int]) -> set[int]:
        """Return which of these ids have a row, also one that cannot be read."""
        found: set[int] = set()
        for marks, values in _slices(ids):
            done = self._run(f"SELECT id FROM {self._outbox} WHERE id IN ({marks})", **values)
            found.update(row_id for (row_id,) in done.fetchall())
        return found

    def set_aside(self, row_id: int, reason: str) -> None:
        """Write an error into a row: it is not read again until the error is set to NULL."""
        _log.error("table %s, row %d is set aside: %s", self._names.outbox, row_id, reason)
        self._run(
            f"UPDATE {self._outbox} SET error = :reason WHERE id = :id", reason=reason, id=row_id
        )

    def delete(self, ids: Sequence[int]) -> None:
        """Delete rows."""
        for marks, values in _slices(ids):
            self._run(f"DELETE FROM {self._outbox} WHERE id IN ({marks})", **values)

    def backlog(self) -> tuple[int, int | None, int]:
        """Count rows by their indexes, up to ``MOST_COUNTED`` of each kind.

        Returns:
            How many wait, when the first of these was added in ms, and how many are set aside.
        """
        waiting, set_aside = (
            self._run(
                f"SELECT count(*) FROM (SELECT 1 FROM {self._outbox} WHERE error IS {state} "
                "LIMIT :most) AS head",
                most=MOST_COUNTED,
            ).fetchone()[0]
            for state in ("NULL", "NOT NULL")
        )
        return int(waiting), self.oldest(), int(set_aside)

    def _head(self, without: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Return a query for ids and sizes of the first rows but for some topics, and parameters.

        It reads each other topic by the index, so that rows of the excluded topics cost nothing.
        """
        size = "length(body) + coalesce(length(fields), 0) AS size"
        waiting = f"FROM {self._outbox} WHERE error IS NULL"
        if not without:
            return f"SELECT id, {size} {waiting} ORDER BY id LIMIT :rows", {}
        topics, names = self._topics(without)
        # A range has the order of the index; for one topic PostgreSQL took the primary key.
        own = (
            f"{waiting} AND topic BETWEEN free.topic AND free.topic ORDER BY topic, id LIMIT :rows"
        )
        if self._dialect == "postgresql":
            join, columns = f"LATERAL (SELECT id, {size} {own}) AS own ON true", "id, size"
        else:
            join, columns = f"{self._outbox} ON id IN (SELECT id {own})", f"id, {size}"
        head = f"SELECT {columns} FROM ({topics}) AS free JOIN {join} ORDER BY id LIMIT :rows"
        return head, names

    def _topics(self, without: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Return a query for the topics that have rows but for some, and its parameters.

        It goes from one topic to the next by the index, so it costs a step for each.
        """
        names = {f"t{number}": topic for number, topic in enumerate(without)}
        marks = ", ".join(f":{name}" for name in names)
        first = f"SELECT min(topic) FROM {self._outbox} WHERE error IS NULL"
        statement = (
            f"WITH RECURSIVE steps(topic) AS ({first} UNION ALL SELECT ({first} "
            "AND topic > steps.topic) FROM steps WHERE topic IS NOT NULL) "
            "SELECT topic FROM steps WHERE topic IS NOT NULL"
        )
        return f"{statement} AND topic NOT IN ({marks})" if names else statement, names

    def _rows_of(self, found: Any) -> list[OutboxRow]:
        rows, bad = [], []
        for row_id, topic, sharding_key, fields, body in found.fetchall():
            try:
                message = message_of(topic, sharding_key, body, fields, self._max_message_size)
            except (msgspec.MsgspecError, InvalidArgument) as error:
                bad.append((row_id, str(error)))
            else:
                rows.append(OutboxRow(row_id, message))
        for row_id, reason in bad:
            self.set_aside(row_id, reason)
        return rows

    def _run(self, statement: str, **values: str | bytes | int | None) -> Any:
        return execute(self._connection, statement, values)


def _time_of(added_at: object) -> int | None:
    # SQLite keeps a text, such as CURRENT_TIMESTAMP, in a column of numbers: the row has no age.
    return added_at if isinstance(added_at, int) else None


def _slices(ids: Sequence[int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield parameters of statements, always as many, so that libraries know the statement."""
    marks = ", ".join(f":i{number}" for number in range(_IDS))
    for start in range(0, len(ids), _IDS):
        some = [*ids[start : start + _IDS]]
        some += some[-1:] * (_IDS - len(some))
        yield marks, {f"i{number}": one for number, one in enumerate(some)}
