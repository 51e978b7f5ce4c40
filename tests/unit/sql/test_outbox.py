from __future__ import annotations

import asyncio
import sqlite3
from types import SimpleNamespace

import pytest
from sqlalchemy import MetaData, create_engine, event, inspect, text
from sqlalchemy.orm import Session
from unit.sql.test_inbox import message

from mqmesh.errors import InvalidArgument
from mqmesh.message import Message
from mqmesh.sql.inbox import Inbox
from mqmesh.sql.outbox import Outbox, encode_fields, message_of
from mqmesh.sql.relay_table import RelayTable
from mqmesh.sql.schema import add_tables, schema
from mqmesh.sql.statements import TableNames

FULL = Message(
    "orders", b"\0body", "paid", ("a", "b"), {"x": "y"}, 7, "key", deliver_at_ms=1_700_000_000_000
)
MESSAGE = message(1)


@pytest.mark.parametrize("one", [Message("orders", b"x"), FULL, Message("t", b"x", tag="a")])
def test_a_row_holds_all_of_a_message(one):
    row = one.topic, one.sharding_key, one.body, encode_fields(one)
    assert message_of(*row, 10) == one


def test_messages_are_part_of_the_transaction(db):
    with pytest.raises(KeyError), db:
        Outbox().add(db, FULL)
        raise KeyError
    assert db.execute("SELECT * FROM mqmesh_outbox").fetchall() == []
    with db:
        Outbox().add(db, FULL, Message("bills", b"1"))
    found = db.execute("SELECT id, topic, sharding_key, body FROM mqmesh_outbox").fetchall()
    assert found == [(1, "orders", "key", b"\0body"), (2, "bills", None, b"1")]


def test_an_illegal_message_adds_nothing(db):
    with pytest.raises(InvalidArgument, match="over the limit"):
        Outbox(max_message_size=3).add(db, Message("orders", b"x"), Message("orders", b"long"))
    assert not db.in_transaction


def test_core_and_orm_of_sqlalchemy(path):
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        Outbox().add(connection, FULL)
    with Session(engine) as session, session.begin():
        Outbox().add(session, FULL)
    with engine.connect() as connection:
        Outbox().add(connection, FULL)  # not committed
    with engine.connect() as connection:
        (count,) = connection.execute(text("SELECT count(*) FROM mqmesh_outbox")).one()
    engine.dispose()
    assert count == 2


class OfPython312(sqlite3.Connection):
    """A connection that was opened with ``autocommit=True``."""

    autocommit = True


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"isolation_level": None}, "isolation_level = None"),
        ({"factory": OfPython312}, "autocommit"),
    ],
)
def test_a_connection_without_a_transaction_is_refused(path, options, setting):
    db = sqlite3.connect(path, **options)
    with pytest.raises(InvalidArgument, match=setting):
        Outbox().add(db, FULL)
    with pytest.raises(InvalidArgument, match=setting):
        Inbox("billing").first_time(db, MESSAGE)
    db.execute("BEGIN")
    Outbox().add(db, FULL)
    assert Inbox("billing").first_time(db, MESSAGE)
    db.execute("COMMIT")
    db.close()


def test_a_connection_of_sqlalchemy_that_commits_by_itself_is_refused(path):
    engine = create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(InvalidArgument, match="commits each state"):
        Outbox().add(connection, FULL)
    with Session(engine) as session, pytest.raises(InvalidArgument, match="commits each statement"):
        Inbox("billing").first_time(session, MESSAGE)
    engine.dispose()
    plain = create_engine(f"sqlite:///{path}")
    with plain.connect() as connection:
        one = connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(InvalidArgument, match="commits each statement by itself"):
            Outbox().add(one, FULL)
    plain.dispose()


def immediate(path):
    """Return an engine as docs/exactly-once.md has it for pysqlite."""
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 5})

    @event.listens_for(engine, "connect")
    def leave_transactions_to_sqlalchemy(connection, record):
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def test_the_recipe_for_pysqlite_reads_and_writes_in_one_transaction(path):
    engine = immediate(path)
    other = sqlite3.connect(path, timeout=0)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM mqmesh_outbox")).scalar() == 0
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO mqmesh_inbox VALUES ('g', 'm', 1)")
        assert Inbox("billing").first_time(connection, MESSAGE)
        Outbox().add(connection, FULL)
    with engine.connect() as connection:  # begins by itself
        assert not Inbox("billing").first_time(connection, MESSAGE)
        Outbox().add(connection, FULL)  # not committed
    with Session(engine) as session:
        Outbox().add(session, FULL)
        session.rollback()
    with Session(engine) as session, session.begin():
        Outbox().add(session, FULL)
    assert other.execute("SELECT id FROM mqmesh_outbox").fetchall() == [(1,), (2,)]
    other.close()
    table = RelayTable(engine.connect, TableNames())
    with table.transaction():
        assert table.change_holder(table.holder(), "one")
        assert len(table.head(10, 1_000, [])) == 2
    table.close()
    engine.dispose()


class Pipelined:
    """A connection of psycopg as far as the check looks at it."""

    __module__ = "psycopg"

    def __init__(self, **settings):
        self.info = SimpleNamespace(**{"pipeline_status": 0, "transaction_status": 0, **settings})
        self.autocommit = not settings

    def execute(self, statement, parameters): ...


@pytest.mark.parametrize(
    ("connection", "reason"),
    [
        (Pipelined(pipeline_status=1), "is in pipeline mode"),
        (Pipelined(), r"commits each statement by itself \(autocommit = True\)"),
    ],
)
def test_what_psycopg_does_not_say_in_time_is_refused(connection, reason):
    with pytest.raises(InvalidArgument, match=reason):
        Outbox().add(connection, FULL)
    with pytest.raises(InvalidArgument, match=reason):
        Inbox("billing").first_time(connection, MESSAGE)


class Cursor:
    """An object of another library."""

    def execute(self, statement, parameters): ...


def test_what_is_no_connection_is_refused():
    with pytest.raises(InvalidArgument, match="Cursor is no connection or session of sqlite3, psy"):
        Outbox().add(Cursor(), FULL)


def test_a_connection_of_asyncio_needs_the_other_method():
    class Other(sqlite3.Connection):
        async def execute(self, *arguments): ...

    db = Other(":memory:")
    with pytest.raises(InvalidArgument, match="await add_async instead of add"):
        Outbox().add(db, FULL)
    asyncio.run(Outbox().add_async(db, FULL))
    db.close()
    plain = sqlite3.connect(":memory:")
    with pytest.raises(InvalidArgument, match="is not for asyncio: add instead of add_async"):
        asyncio.run(Outbox().add_async(plain, FULL))
    plain.close()


def test_another_database_is_refused():
    engine = create_engine("sqlite://")
    engine.dialect.name = "mysql"
    with engine.connect() as connection, pytest.raises(InvalidArgument, match="is mysql; inbox"):
        Outbox().add(connection, FULL)
    engine.dispose()


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a.b.c", "1a", "x" * 49, "a;", "ä", None])
def test_names_of_tables_are_checked(name):
    with pytest.raises(InvalidArgument, match="table name outbox = "):
        TableNames(outbox=name)


def test_metadata_and_statements_make_the_same_tables(tmp_path):
    names = TableNames(outbox="Out", relay="relay_1", inbox="select")
    engines = [create_engine(f"sqlite:///{tmp_path}/{name}") for name in "ab"]
    metadata = MetaData()
    add_tables(metadata, names)
    metadata.create_all(engines[0])
    with engines[1].begin() as connection:
        for statement in schema("sqlite", names) * 2:
            connection.execute(text(statement))
    found = [shape(inspect(engine)) for engine in engines]
    assert found[0] == found[1]
    with engines[0].begin() as connection:
        Outbox(names).add(connection, FULL)
    for engine in engines:
        engine.dispose()


def shape(inspector):
    """Return tables with columns, keys and indexes."""
    return {
        table: (
            [(one["name"], str(one["type"]), one["nullable"]) for one in columns(inspector, table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            [(one["name"], one["column_names"]) for one in inspector.get_indexes(table)],
        )
        for table in inspector.get_table_names()
        if not table.startswith("sqlite_")
    }


def columns(inspector, table):
    return sorted(inspector.get_columns(table), key=lambda one: one["name"])


def test_tables_of_sqlite_may_be_in_a_schema(db):
    db.execute("ATTACH ':memory:' AS shop")
    names = TableNames(outbox="shop.out", relay="shop.relay", inbox="shop.in_box")
    for statement in schema("sqlite", names) * 2:
        db.execute(statement)
    Outbox(names).add(db, FULL)
    assert Inbox("billing", names).first_time(db, MESSAGE)
    found = db.execute("SELECT name FROM shop.sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    assert [name for (name,) in found] == [
        "in_box",
        "in_box_received_at",
        "out",
        "out_error",
        "out_topic",
        "relay",
        "sqlite_sequence",
    ]


def test_another_dialect_is_refused():
    with pytest.raises(InvalidArgument, match="dialect 'mysql' is none of postgresql, sqlite"):
        schema("mysql")
    assert (
        'CREATE TABLE IF NOT EXISTS "shop"."out"'
        in schema("postgresql", TableNames(outbox="shop.out"))[0]
    )
