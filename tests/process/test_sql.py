"""Inbox, outbox and relay on a real PostgreSQL and a real broker, by each library."""

from __future__ import annotations

import asyncio
import json
import random
import runpy
import subprocess
import sys
from contextlib import contextmanager

import psycopg
import pytest
from harness.patience import PATIENCE_S, until
from harness.postgres import Postgres
from harness.pulled import INFO
from harness.topic_reader import read_topic
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from mqmesh.cli.main import main
from mqmesh.errors import InvalidArgument, SendInDoubt, SequenceConflict, TopicNotFound
from mqmesh.message import Message, MessageQueue, StoredMessage
from mqmesh.producer_key import new_key
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.connector.numbered_sender import NumberedBatch, NumberedSender
from mqmesh.sql import Inbox, Outbox, OutboxRelay, TableNames, add_tables, schema
from mqmesh.sql.relay_table import RelayTable
from mqmesh.sql.statements import connect
from mqmesh.testing.processes import ProcessCluster
from mqmesh.units import QueueOffset

OUTBOX = Outbox()
INBOX = Inbox("billing")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # Few producers are remembered, so that a test can have one forgotten.
    settings = {"storage.max_producer_states": "16", "storage.producer_state_min_age_ms": "0"}
    with ProcessCluster(tmp_path_factory.mktemp("c"), broker_settings=settings) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            for topic in ("sold", "numbered", "delayed"):
                admin.create_topic(topic, queues=2)
        yield cluster


@pytest.fixture(scope="module")
def url():
    with Postgres() as postgres:
        with psycopg.connect(postgres.url) as connection:
            for statement in schema("postgresql"):
                connection.execute(statement)
        yield postgres.url


@contextmanager
def disposing(engine):
    """Close the engine's connections."""
    try:
        yield
    finally:
        engine.dispose()


def alchemy(url):
    return url.replace("postgresql://", "postgresql+psycopg://")


def by_psycopg(url, use):
    with psycopg.connect(url) as connection:
        return use(connection)


def by_autocommit(url, use):
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(InvalidArgument, match="autocommit = True"):
            use(connection)
        with connection.transaction():
            return use(connection)


def by_pipeline(url, use):
    with psycopg.connect(url) as connection, connection.pipeline():
        return use(connection)


def by_autocommit_core(url, use):
    engine = create_engine(alchemy(url), isolation_level="AUTOCOMMIT")
    with disposing(engine), engine.begin() as connection:
        return use(connection)


def by_autocommit_orm(url, use):
    engine = create_engine(alchemy(url), isolation_level="AUTOCOMMIT")
    with disposing(engine), Session(engine) as session:
        return use(session)


def by_core(url, use):
    engine = create_engine(alchemy(url))
    with disposing(engine), engine.begin() as connection:
        return use(connection)


def by_orm(url, use):
    engine = create_engine(alchemy(url))
    with disposing(engine), Session(engine) as session, session.begin():
        return use(session)


async def by_async_psycopg(url, use):
    async with await psycopg.AsyncConnection.connect(url) as connection:
        return await use(connection)


async def by_async_core(url, use):
    engine = create_async_engine(alchemy(url))
    async with engine.begin() as connection:
        found = await use(connection)
    await engine.dispose()
    return found


async def by_async_orm(url, use):
    engine = create_async_engine(alchemy(url))
    async with AsyncSession(engine) as session, session.begin():
        found = await use(session)
    await engine.dispose()
    return found


async def by_autocommit_async_orm(url, use):
    engine = create_async_engine(alchemy(url), isolation_level="AUTOCOMMIT")
    try:
        async with AsyncSession(engine) as session:
            return await use(session)
    finally:
        await engine.dispose()


SYNC = [by_psycopg, by_autocommit, by_core, by_orm]
ASYNC = [by_async_psycopg, by_async_core, by_async_orm]


def test_every_library_adds_to_the_outbox_and_asks_the_inbox(cluster, url):
    for number, by in enumerate(SYNC):
        message = Message("sold", b"s%d" % number, "new", ("k",), {"a": "b"}, sharding_key="one")
        by(url, lambda connection, message=message: OUTBOX.add(connection, message))
    for number, by in enumerate(ASYNC):
        message = Message("sold", b"a%d" % number, sharding_key="one")
        asyncio.run(by(url, lambda one, message=message: OUTBOX.add_async(one, message)))
    engine = create_engine(alchemy(url))
    with OutboxRelay(engine, cluster.namesrv_addr, poll_ms=10) as relay:
        wait_until_empty(url)
    engine.dispose()
    assert relay.status.sent == 7
    found = read_topic(cluster.namesrv_addr, "sold")
    assert [one.body for one in found] == [b"s0", b"s1", b"s2", b"s3", b"a0", b"a1", b"a2"]
    assert (found[0].tag, found[0].keys, found[0].properties) == ("new", ("k",), {"a": "b"})
    for message, by in zip(found, SYNC, strict=False):
        seen = [by(url, lambda one, it=message: INBOX.first_time(one, it)) for _ in range(2)]
        assert seen == [True, False]
    for message, by in zip(found[4:], ASYNC, strict=True):
        first = [
            asyncio.run(by(url, lambda one, it=message: INBOX.first_time_async(one, it)))
            for _ in range(2)
        ]
        assert first == [True, False]
    assert by_core(url, INBOX.clean) == 0
    assert by_psycopg(url, lambda one: Inbox("billing").clean(one, keep_ms=1)) == 7


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        (by_pipeline, "pipeline mode"),
        (by_autocommit_core, "isolation_level = AUTOCOMMIT"),
        (by_autocommit_orm, "isolation_level = AUTOCOMMIT"),
    ],
)
def test_a_connection_that_cannot_keep_the_promise_is_refused(url, by, reason):
    first = StoredMessage("t", b"x", queue_offset=QueueOffset(3), batch=INFO)
    with pytest.raises(InvalidArgument, match=reason):
        by(url, lambda one: OUTBOX.add(one, Message("sold", b"x")))
    with pytest.raises(InvalidArgument, match=reason):
        by(url, lambda one: INBOX.first_time(one, first))


def test_a_connection_of_asyncio_that_commits_by_itself_is_refused(url):
    message = Message("sold", b"x")
    with pytest.raises(InvalidArgument, match="isolation_level = AUTOCOMMIT"):
        asyncio.run(by_autocommit_async_orm(url, lambda one: OUTBOX.add_async(one, message)))


def test_a_commit_that_counts_waits_for_the_disk(url):
    """The server's own setting is off; see ``harness.postgres``."""
    first = StoredMessage("t", b"x", queue_offset=QueueOffset(4), batch=INFO)
    with psycopg.connect(url) as connection:
        assert level(connection) == "off"
        assert INBOX.first_time(connection, first)
        assert level(connection) == "on"
        connection.rollback()
        connection.execute("SET LOCAL synchronous_commit = remote_apply")
        assert INBOX.first_time(connection, first)
        assert level(connection) == "remote_apply"
        connection.rollback()
    connection = connect(url)
    table = RelayTable(lambda: connection, TableNames())
    with table.transaction():
        assert table.change_holder(table.holder(), "")
        assert level(connection) == "on"
        (idle,) = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
        assert idle == "10s"  # of a relay that is stopped
        (lock,) = connection.execute("SHOW lock_timeout").fetchone()
        assert lock == "5s"  # of one that meets another's lock
    assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)
    table.close()


def level(connection):
    """Return what commits of a connection of psycopg wait for, in its transaction."""
    return connection.execute("SHOW synchronous_commit").fetchone()[0]


def test_a_connection_of_the_command_notices_a_lost_server(url):
    with connect(url) as connection:
        given = connection.info.get_parameters()
        assert (connection.prepare_threshold, given["keepalives_idle"]) == (None, "10")
    with connect(f"{url}&connect_timeout=3") as connection:
        assert connection.info.get_parameters()["connect_timeout"] == "3"


def wait_until_empty(url):
    """Wait until the outbox has no row."""
    with psycopg.connect(url, autocommit=True) as connection:
        first = "SELECT FROM mqmesh_outbox LIMIT 1"
        until(lambda: connection.execute(first).fetchone() is None)


def test_a_relay_as_a_process_sends_and_ends_in_order(cluster, url, capsys):
    by_psycopg(url, lambda one: OUTBOX.add(one, *[Message("numbered", b"x")] * 600))
    status = ["sql", "status", "--url", url, "--max-waiting", "0"]
    assert main(status) == 1
    assert "600" in capsys.readouterr().out
    command = [sys.executable, "-m", "mqmesh.cli", "sql", "relay", "--url", url]
    relay = subprocess.Popen(
        [*command, "--namesrv", cluster.namesrv_addr], stdout=subprocess.PIPE, text=True
    )
    wait_until_empty(url)
    relay.terminate()
    out, _ = relay.communicate(timeout=PATIENCE_S)
    assert (relay.returncode, out) == (0, "600 messages were sent\n")
    assert main(status) == 0
    found = capsys.readouterr().out
    assert "relay" in found
    assert "none" in found  # the next one begins at once
    assert main(["sql", "status", "--url", url.replace("?host=", "?host=/none")]) == 2
    assert "the postgresql database: connection" in capsys.readouterr().err


def test_tables_may_be_in_a_schema_and_are_the_metadatas(url):
    names = TableNames(outbox="shop.Out", relay="shop.relay", inbox="shop.select")
    metadata = MetaData()
    add_tables(metadata, names)
    engine = create_engine(alchemy(url))
    with disposing(engine), engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA shop"))
        metadata.create_all(connection)
        for statement in schema("postgresql", names):  # all are there
            connection.execute(text(statement))
        Outbox(names).add(connection, Message("sold", b"1"))
        found = connection.execute(text('SELECT id, topic FROM shop."Out"')).all()
    assert found == [(1, "sold")]


def test_a_message_in_another_transaction_is_waited_for(url):
    def ask(connection, first):
        connection.execute("SET lock_timeout = '50ms'")
        return INBOX.first_time(connection, first)

    first = StoredMessage("t", b"x", queue_offset=QueueOffset(2), batch=INFO)
    with psycopg.connect(url) as one, psycopg.connect(url) as other:
        assert ask(one, first)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            ask(other, first)
        other.rollback()
        one.rollback()
        assert ask(other, first)


def batch(topic, first, body=b"x", **fields):
    """Return a batch for queue 0."""
    queue = MessageQueue(topic, "broker-a", 0)
    return NumberedBatch(queue, [Message(topic, body, **fields)] * 2, first)


def test_a_sender_finds_out_what_it_has_sent_however_long_ago(cluster):
    key = new_key(random.SystemRandom())

    def open_sender(key=key):
        return NumberedSender(cluster.namesrv_addr, key, born_host="h:1", patience_ms=20_000)

    one, other, later = batch("numbered", 0), batch("numbered", 2), batch("numbered", 4)
    with open_sender() as sender:
        end = sender.log_end(one.queue)
        assert not sender.is_sent(one, end)
        assert sender.try_send([one]) == [(one, None)]
        assert sender.is_sent(one, end)
        assert not sender.is_sent(other, end)
        assert sender.try_send([one]) == [(one, None)]  # again, at another time
        ((_, error),) = sender.try_send([batch("numbered", 1)])
        assert isinstance(error, SequenceConflict)
        delayed = batch("delayed", 6, delay_level=18)
        assert not sender.is_sent(delayed, end)
        sender.send([delayed])
        assert sender.is_sent(delayed, end)
        assert not sender.is_sent(batch("delayed", 8, delay_level=18), end)
        missing = batch("missing", 0)
        ((_, error),) = sender.try_send([batch("numbered", 10, b"")])
        assert isinstance(error, InvalidArgument)
        with pytest.raises(TopicNotFound):
            sender.is_sent(missing, end)
    for _ in range(20):  # as many as are remembered, and more
        with open_sender(new_key(random.SystemRandom())) as stranger:
            stranger.send([later])
    with open_sender() as sender:
        assert sender.is_sent(one, end)  # by the index
        assert not sender.is_sent(other, end)
        with pytest.raises(SendInDoubt, match="may be stored or not"):
            sender.is_sent(other, -1)
        assert not sender.is_sent(other, sender.log_end(one.queue))


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_orders_of_the_payment_example_are_messages(
    cluster, url, project_root, tmp_path, dialect, capsys, monkeypatch
):
    orders = runpy.run_path(str(project_root / "examples" / "payments" / "orders.py"))
    url = f"sqlite:///{tmp_path / 'shop.sqlite'}" if dialect == "sqlite" else url
    before = 0

    def sent():
        found = read_topic(cluster.namesrv_addr, orders["TOPIC"])
        return sum(json.loads(one.body)["cents"] for one in found)

    for what in ("create", "take", "sums"):
        arguments = [what, "--url", url, "--namesrv", cluster.namesrv_addr, "--orders", "20"]
        monkeypatch.setattr(sys, "argv", ["orders.py", *arguments])
        assert orders["main"]() == 0
        if what == "create":
            before = sent()
    sums = json.loads(capsys.readouterr().out)
    with OutboxRelay(lambda: connect(url), cluster.namesrv_addr, poll_ms=10) as relay:
        until(lambda: relay.status.sent == 20)
    assert sent() - before == sum(sums.values())


def test_the_example_bills_each_order_once(cluster, project_root, tmp_path):
    program = str(project_root / "examples" / "order_outbox.py")
    for total in (9, 18):  # of 10, one is rolled back
        done = subprocess.run(
            [sys.executable, program, "--namesrv", cluster.namesrv_addr, "--idle", "1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{total} orders, {total} bills: equal\n"
