"""Statements on connections of sqlite3, psycopg and SQLAlchemy, whose forms differ.

A statement is written once, with parameters as ``:name``. sqlite3 and SQLAlchemy take it so,
psycopg wants ``%(name)s``. None of the libraries is imported here but by a connection of it.
"""

import inspect
import re
import sqlite3
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote
from weakref import WeakKeyDictionary

import msgspec

from mqmesh.errors import ConfigError, InvalidArgument

_LIBRARIES: Final[WeakKeyDictionary[type[Any], str]] = WeakKeyDictionary()
"""Library by class of connections."""
Parameters = Mapping[str, str | bytes | int | None]

_NAME: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,47}\.)?[A-Za-z_][A-Za-z0-9_]{0,47}\Z")
_PARAMETER: Final = re.compile(r":([a-z_0-9]+)")
_IDLE: Final = 0
"""psycopg's transaction status outside of a transaction."""
DURABLE: Final = (
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
    "WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)"
)
"""Statement of PostgreSQL: the commit of this transaction waits for the disk, and with it for what
was committed before."""
BOUNDED: Final = (
    "SELECT set_config('idle_in_transaction_session_timeout', '10000', true), "
    "set_config('lock_timeout', '5000', true)"
)
"""Statement of PostgreSQL, for this transaction: it ends when its client says nothing for 10 s, as
one whose machine is lost, or that is stopped; and when it has to wait for a lock for 5 s."""
_POSTGRES: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
}
"""Settings of connections that their URL does not give: a server that is lost is noticed."""


class TableNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the tables: up to 48 letters, digits and ``_``, with a schema in front if wanted.

    They are quoted in every statement, so capitals count.

    Attributes:
        outbox: Messages that wait to be sent.
        relay: One row: which relay works, and the batches that it is sending.
        inbox: Ids of messages that were processed.

    Raises:
        InvalidArgument: A name has other characters, or is too long.
    """

    outbox: str = "mqmesh_outbox"
    relay: str = "mqmesh_outbox_relay"
    inbox: str = "mqmesh_inbox"

    def __post_init__(self) -> None:
        """Check the names."""
        for field in self.__struct_fields__:
            name = getattr(self, field)
            if not isinstance(name, str) or not _NAME.match(name):
                raise InvalidArgument(
                    f"table name {field} = {name!r} is not of the form name or schema.name; each "
                    "has 1 to 48 letters, digits and _, and no digit in front"
                )


DEFAULT_NAMES: Final = TableNames()


def quoted(name: str) -> str:
    """Return a name of ``TableNames`` as it stands in statements."""
    return ".".join(f'"{part}"' for part in name.split("."))


def library_of(connection: Any) -> str:
    """Return the name of the library that a connection or session is of.

    Raises:
        InvalidArgument: It is none of sqlite3, psycopg and SQLAlchemy.
    """
    return _LIBRARIES.get(type(connection)) or _library_of(type(connection))


def _library_of(kind: type[Any]) -> str:
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for name in ("sqlite3", "psycopg", "sqlalchemy"):
        if name in roots and hasattr(kind, "execute"):
            _LIBRARIES[kind] = name
            return name
    raise InvalidArgument(
        f"{kind.__module__}.{kind.__qualname__} is no connection or session of sqlite3, psycopg "
        "or SQLAlchemy"
    )


def execute(connection: Any, statement: str, parameters: Parameters) -> Any:
    """Execute a statement on a connection; a coroutine on one of asyncio.

    Args:
        connection: Of sqlite3, psycopg (3) or SQLAlchemy, also a session.
        statement: With parameters as ``:name``.
        parameters: Their values.

    Returns:
        The library's cursor or result: it has ``rowcount``, ``fetchone`` and ``fetchall``.
    """
    return connection.execute(_in_form(library_of(connection), statement), parameters)


def is_async(connection: Any) -> bool:
    """Return True for a connection or session of asyncio."""
    return inspect.iscoroutinefunction(type(connection).execute)


def check_connection(connection: Any, method: str) -> str:
    """Check that a connection is not for asyncio, and that its transaction is the caller's.

    Returns:
        Name of the database: ``postgresql`` or ``sqlite``.

    Raises:
        InvalidArgument: It is for asyncio, commits each statement by itself, is in pipeline mode,
            or is of another library or database.
    """
    library = library_of(connection)
    if is_async(connection):
        name = type(connection).__name__
        raise InvalidArgument(f"{name} is for asyncio: await {method}_async instead of {method}")
    if library == "sqlalchemy" and not hasattr(connection, "dialect"):
        connection = connection.connection()  # of a session
    if _begins_late(library, connection):
        execute(connection, "SELECT 1", {})
    return _check_transaction(library, connection)


async def check_async_connection(connection: Any, method: str) -> str:
    """Check a connection for asyncio as ``check_connection`` checks others."""
    library = library_of(connection)
    if not is_async(connection):
        name = type(connection).__name__
        raise InvalidArgument(f"{name} is not for asyncio: {method} instead of {method}_async")
    if library == "sqlalchemy" and not hasattr(connection, "dialect"):
        connection = await connection.connection()
    if _begins_late(library, connection):
        await execute(connection, "SELECT 1", {})
    return _check_transaction(library, getattr(connection, "sync_connection", connection))


def _begins_late(library: str, connection: Any) -> bool:
    """Return True for SQLite by SQLAlchemy without a transaction: an event may execute BEGIN."""
    return (
        library == "sqlalchemy"
        and connection.dialect.name == "sqlite"
        and not connection.in_transaction()
    )


def _check_transaction(library: str, connection: Any) -> str:
    if library == "sqlite3":
        _check_sqlite(connection)
        return "sqlite"
    if library == "psycopg":
        if connection.info.pipeline_status:
            raise InvalidArgument(
                "the connection is in pipeline mode, which does not say in time how a statement "
                "ended; leave `with connection.pipeline()` first"
            )
        if connection.autocommit and connection.info.transaction_status == _IDLE:
            raise InvalidArgument(
                "the connection commits each statement by itself (autocommit = True); use it "
                "in `with connection.transaction()`"
            )
        return "postgresql"
    name = str(connection.dialect.name)
    if name == "sqlite":
        _check_sqlite(connection.connection.driver_connection)
    elif name != "postgresql":
        raise InvalidArgument(f"the database is {name}; inbox and outbox need postgresql or sqlite")
    elif connection.connection.dbapi_connection.autocommit:
        raise InvalidArgument(
            "the connection commits each statement by itself (isolation_level = AUTOCOMMIT); use "
            "another isolation level"
        )
    return name


def _check_sqlite(connection: Any) -> None:
    # Python 3.12 has the attribute autocommit; there -1 means that isolation_level decides.
    is_autocommit = getattr(connection, "autocommit", None) is True
    if not connection.in_transaction and (is_autocommit or connection.isolation_level is None):
        setting = "autocommit = True" if is_autocommit else "isolation_level = None"
        raise InvalidArgument(
            f"the connection commits each statement by itself ({setting}); execute BEGIN first"
        )


@lru_cache(maxsize=256)
def _in_form(library: str, statement: str) -> Any:
    if library == "sqlalchemy":
        from sqlalchemy import text

        return text(statement)
    if library == "psycopg":
        return _PARAMETER.sub(r"%(\1)s", statement)
    return statement


def database_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the libraries that this process has loaded, and of what they open."""
    found: list[type[Exception]] = [sqlite3.Error, OSError]
    if "psycopg" in sys.modules:
        import psycopg

        found.append(psycopg.Error)
    if "sqlalchemy" in sys.modules:
        from sqlalchemy.exc import SQLAlchemyError

        found.append(SQLAlchemyError)
    return tuple(found)


def connect(url: str) -> Any:
    """Open a connection without SQLAlchemy.

    Args:
        url: ``sqlite:///path`` (relative), ``sqlite:////path`` (absolute) or ``postgresql://…``.

    Raises:
        ConfigError: Another form, or psycopg is not installed.
        Exception: The library's own: it cannot connect, or the file is not there.
    """
    if url.startswith("sqlite:///"):
        # A wrong path is an error and makes no empty file.
        # Writers of one file wait for one another.
        path = quote(url.removeprefix("sqlite:///"))
        connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=30)
        connection.execute("PRAGMA synchronous = FULL")
        return connection
    if url.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict, make_conninfo
        except ImportError as error:
            raise ConfigError("psycopg is missing: pip install 'mqmesh[sql]'") from error
        url = url.replace("postgresql+psycopg://", "postgresql://")
        given = conninfo_to_dict(url)
        settings = {name: value for name, value in _POSTGRES.items() if name not in given}
        # Prepared statements stay with a server connection, which PgBouncer gives to others.
        return psycopg.connect(make_conninfo(url, **settings), prepare_threshold=None)
    raise ConfigError(f"{url.partition(':')[0]!r} is no database: sqlite:///PATH or postgresql://…")
