"""What a relay does with batches that may be stored, are refused, or are too large."""

from __future__ import annotations

import itertools
import random
import sqlite3
from pathlib import Path

import msgspec
import pytest
from harness.patience import until
from msgspec.structs import replace
from unit.sql.conftest import FakeSender
from unit.sql.test_relay import AWAY, add, drain, rows

from mqmesh.errors import (
    AuthenticationFailed,
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    RemoteProtocolError,
    RequestTimeout,
    TopicNotFound,
)
from mqmesh.message import Message
from mqmesh.producer_key import producer_id_of
from mqmesh.sdk.connector.numbered_sender import NumberedSender
from mqmesh.sql import relay as relay_module
from mqmesh.sql import relay_topics
from mqmesh.sql.outbox import Outbox
from mqmesh.sql.relay import OutboxRelay
from mqmesh.sql.relay_table import FlightBatch, RelayRow, RelayTable
from mqmesh.sql.statements import TableNames


@pytest.mark.parametrize(
    "error",
    [
        NoPermission("the right was taken away after the first try"),
        AuthenticationFailed("the key was taken away after the first try"),
        RemoteProtocolError("an answer that cannot be read"),
        MessageIllegal("a queue that was taken away after the first try"),
        RequestTimeout("no answer"),
    ],
)
@pytest.mark.parametrize("is_killed", [False, True])
def test_rows_that_were_stored_and_refused_are_not_sent_again(
    relay_on, cluster, db, clock, error, is_killed
):
    add(db, 1, 2)
    cluster.stored_and_refused["orders"] = error
    relay = relay_on()
    drain(relay)
    assert rows(db) == 2
    assert relay.status.in_flight == 2
    if is_killed:
        relay = relay_on()
        relay.try_step()
        clock.advance(15_000)
    clock.advance(1_000)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001", b"0002"]
    assert cluster.asked == ["orders"]
    assert rows(db) == 0


def test_rows_that_are_not_safe_stay_in_flight_until_they_are(relay_on, cluster, db, clock):
    add(db, 1, 2)
    cluster.unsafe.add("orders")
    relay = relay_on()
    for _ in range(5):
        drain(relay)
        clock.advance(4_000)
        assert rows(db) == 2
    add(db, 3)
    add(db, 4, topic="bills")
    drain(relay)
    assert "stored, and not safe" in relay.status.blocked["orders"]
    assert cluster.bodies("bills") == [b"0004"]
    cluster.unsafe.clear()
    clock.advance(4_000)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001", b"0002", b"0003"]
    assert rows(db) == 0
    assert relay.status.blocked == {}


def test_rows_that_are_refused_keep_their_numbers(relay_on, cluster, db, clock):
    add(db, 1, key="k")
    cluster.refused["orders"] = NoPermission("may not send")
    relay = relay_on()
    drain(relay)
    cluster.refused.clear()
    clock.advance(1_000)
    drain(relay)
    (stored,) = cluster.stored.values()
    assert stored == {0: [b"0001"]}


def test_a_batch_that_is_not_there_is_looked_for_behind_the_end_of_then(
    relay_on, cluster, db, clock
):
    add(db, 1, key="k")
    cluster.refused["orders"] = NoPermission("may not send")
    relay = relay_on()
    drain(relay)
    add(db, *range(5), topic="bills")
    drain(relay)
    for _ in range(2):  # asked, then written
        clock.advance(60_000)
        drain(relay)
    (text,) = db.execute("SELECT flight FROM mqmesh_outbox_relay").fetchone()
    assert msgspec.json.decode(text)[0]["log_end"] == 5


def test_rows_of_a_queue_that_is_gone_get_another_one(relay_on, cluster, db, clock):
    cluster.topics["orders"] = 8
    for number in range(8):
        add(db, number, key=str(number))
    relay = relay_on()
    relay.try_step()  # the routes
    cluster.topics["orders"] = 1
    drain(relay)
    clock.advance(1_000)
    drain(relay)
    assert cluster.bodies("orders") == [b"%04d" % one for one in range(8)]
    assert rows(db) == 0


@pytest.mark.parametrize("error", [AWAY, NoPermission("may not ask")])
def test_a_question_without_an_answer_holds_up_its_topic_only(relay_on, cluster, db, clock, error):
    add(db, 1)
    cluster.refused["orders"] = AWAY
    relay = relay_on()
    drain(relay)
    cluster.refused.clear()
    cluster.silent["orders"] = error
    for number in range(3):
        clock.advance(4_000)
        add(db, number, topic="bills")
        drain(relay)
    assert len(cluster.bodies("bills")) == 3
    assert "row 1 for " in relay.status.blocked["orders"]
    assert cluster.bodies("orders") == []
    cluster.silent.clear()
    clock.advance(60_000)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001"]


def test_a_silent_broker_is_asked_for_one_topic_at_a_time_and_holds_up_no_other(
    relay_on, cluster, db, clock, monkeypatch
):
    """Each request to it costs 3 s: eight topics have their queues there."""
    silent = [f"silent-{number}" for number in range(8)]
    asked = []

    def wait(topic):
        if topic in silent and clock.monotonic_ms() < end_ms:
            asked.append(topic)
            clock.advance(3_000)
            raise RequestTimeout("no answer")

    class TwoBrokers(FakeSender):
        def writable_queues(self, topic):
            name = "silent" if topic in silent else "b"
            return tuple(replace(one, broker_name=name) for one in super().writable_queues(topic))

        def log_end(self, queue):
            wait(queue.topic)
            return super().log_end(queue)

        def try_send(self, batches):
            for one in batches:
                wait(one.queue.topic)
            return super().try_send(batches)

    monkeypatch.setattr(cluster, "sender", lambda key: TwoBrokers(cluster, producer_id_of(key)))
    cluster.topics |= dict.fromkeys(silent, 2)
    end_ms = clock.monotonic_ms() + 300_000
    relay = relay_on()
    for number in range(60):
        for topic in silent:
            add(db, number, topic=topic)
        add(db, number, topic="orders")
        before_ms, before = clock.monotonic_ms(), len(asked)
        drain(relay)
        assert len(asked) - before <= 1
        assert clock.monotonic_ms() - before_ms <= 3_000
        assert len(cluster.bodies("orders")) == number + 1
        clock.advance(1_000)
    assert len(relay.status.blocked) == 8
    assert 5 <= len(asked) <= 60
    clock.advance(300_000)
    drain(relay)
    assert all(len(cluster.bodies(topic)) == 60 for topic in silent)


def test_a_topic_that_cannot_be_looked_up_holds_up_no_other(relay_on, cluster, db):
    cluster.refused["route orders"] = AWAY
    add(db, 1)
    add(db, 2, topic="bills")
    relay = relay_on()
    drain(relay)
    assert cluster.bodies("bills") == [b"0002"]
    assert relay.status.blocked == {"orders": "the broker is away"}


@pytest.mark.parametrize(("in_doubt", "found"), [("send", [b"0001"]), ("drop", [])])
def test_rows_at_a_broker_group_that_is_lost_are_decided_by_the_user(
    relay_on, cluster, db, clock, in_doubt, found, monkeypatch
):
    add(db, 1)
    cluster.refused["orders"] = AWAY
    drain(relay := relay_on())
    monkeypatch.setattr(cluster, "broker", "c")
    cluster.refused.clear()
    cluster.silent["orders"] = AWAY  # nobody answers for the old one
    clock.advance(4_000)
    drain(relay)
    next_one = relay_on(in_doubt=in_doubt, lost_brokers=["b"])
    next_one.try_step()  # sees the one before
    clock.advance(15_000)
    drain(next_one)
    assert cluster.bodies("orders") == found
    assert rows(db) == 0


def test_a_batch_that_is_too_large_is_divided_until_it_fits(relay_on, cluster, db):
    cluster.most_messages = 3
    add(db, *range(40), key="k")
    drain(relay_on())
    (some,) = cluster.queues.values()
    assert some == [b"%04d" % one for one in range(40)]
    assert rows(db) == 0


def test_a_row_that_fits_into_no_batch_is_set_aside_and_named(relay_on, cluster, db, caplog):
    cluster.poison = b"0007"
    add(db, *range(20), key="k")
    relay = relay_on()
    drain(relay)
    (some,) = cluster.queues.values()
    assert some == [b"%04d" % one for one in range(20) if one != 7]
    assert db.execute("SELECT id, error FROM mqmesh_outbox").fetchall() == [(8, "too large")]
    assert "table mqmesh_outbox, row 8 is set aside: too large" in caplog.text
    cluster.poison = b""
    with db:
        db.execute("UPDATE mqmesh_outbox SET error = NULL")
    drain(relay)
    assert some[-1] == b"0007"
    assert rows(db) == 0


def test_a_message_that_the_broker_refuses_is_found_and_holds_up_its_topic(
    relay_on, cluster, db, clock
):
    add(db, *range(8), key="k")
    cluster.refused["orders"] = MessageIllegal("an illegal message")
    relay = relay_on()
    for _ in range(4):
        drain(relay)
        clock.advance(60_000)
    assert relay.status.blocked["orders"].startswith("row 1 for ")
    assert rows(db) == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("fields = '{'", "Input data was truncated"),
        ("fields = x'00'", "column fields is bytes, not text"),
        ("body = 'text'", "column body is str, not bytes"),
        ("body = 5", "column body is int, not bytes"),
        ("body = zeroblob(5000000)", "body of 5000000 bytes is over the limit (max_message_size"),
        ("sharding_key = x'00'", "sharding_key must be a str"),
        ("topic = 'a b'", "topic name 'a b' has a character outside of"),
    ],
)
def test_a_row_that_is_no_message_is_set_aside_and_holds_up_none(
    relay_on, cluster, db, change, reason, caplog
):
    add(db, 1, 2, 3, key="k")
    with db:
        db.execute(f"UPDATE mqmesh_outbox SET {change} WHERE id = 2")
    drain(relay_on())
    assert cluster.bodies("orders") == [b"0001", b"0003"]
    ((row_id, error),) = db.execute("SELECT id, error FROM mqmesh_outbox").fetchall()
    assert row_id == 2
    assert reason in error
    assert "table mqmesh_outbox, row 2 is set aside: " in caplog.text


def test_a_row_whose_time_is_no_number_is_sent_and_has_no_age(relay_on, cluster, db, path):
    add(db, 1, 2)
    with db:
        db.execute("UPDATE mqmesh_outbox SET added_at = CURRENT_TIMESTAMP")
    table = RelayTable(lambda: sqlite3.connect(path), TableNames())
    with table.transaction():
        assert table.backlog() == (2, None, 0)
    table.close()
    relay = relay_on()
    drain(relay)
    assert cluster.bodies("orders") == [b"0001", b"0002"]
    assert relay.status.oldest_ms == 0


def test_many_topics_that_wait_are_no_loop_without_a_pause(relay_on, cluster, db, clock):
    with db:
        topics = [f"missing-{number}" for number in range(700)]
        Outbox().add(db, *(Message(topic, b"x") for topic in topics))
    add(db, 1)
    relay = relay_on()
    steps = 0
    while relay.try_step() == 0:
        steps += 1
        assert steps < 10
    for _ in range(20):  # of those beyond the limit some are read when others have their turn
        clock.advance(1_000)
        drain(relay)
    assert cluster.bodies("orders") == [b"0001"]


def test_rows_of_a_topic_that_their_broker_does_not_know_keep_their_numbers(
    relay_on, cluster, db, clock
):
    add(db, 1, key="k")
    cluster.stored_and_refused["orders"] = AWAY
    relay = relay_on()
    drain(relay)
    cluster.silent["orders"] = TopicNotFound("a broker that has not the topic yet")
    clock.advance(1_000)
    drain(relay)
    assert "has not the topic yet" in relay.status.blocked["orders"]
    assert relay.status.in_flight == 1
    cluster.silent.clear()
    clock.advance(2_000)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001"]
    assert rows(db) == 0


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_row_in_flight_that_cannot_be_read_any_more_is_asked_for_by_its_number(
    relay_on, cluster, db, clock, is_stored
):
    add(db, 1)
    outcomes = cluster.stored_and_refused if is_stored else cluster.refused
    outcomes["orders"] = AWAY
    drain(relay_on())
    outcomes.clear()
    smaller = relay_on(max_message_size=3)
    smaller.try_step()  # sees the one before
    clock.advance(15_000)
    drain(smaller)
    assert cluster.asked == ["orders"]
    assert smaller.status.in_flight == 0
    assert rows(db) == (0 if is_stored else 1)  # the one that is set aside


def test_a_topic_whose_rows_are_deleted_is_not_blocked_any_more(relay_on, cluster, db, clock):
    add(db, 1, topic="missing")
    relay = relay_on()
    drain(relay)
    assert set(relay.status.blocked) == {"missing"}
    with db:
        db.execute("DELETE FROM mqmesh_outbox")
    clock.advance(1_000)
    drain(relay)
    assert relay.status.blocked == {}


def test_an_outbox_that_is_slow_to_read_is_read_less_often(
    relay_on, cluster, db, clock, monkeypatch
):
    add(db, 1, topic="missing")
    relay = relay_on()
    drain(relay)
    has_rows = RelayTable.has_rows

    def slow(self, without):
        clock.advance(durations_ms.pop())
        return has_rows(self, without)

    monkeypatch.setattr(RelayTable, "has_rows", slow)
    durations_ms = [760, 90]
    assert relay.try_step() == 900
    assert relay.try_step() == 7_500  # half of the lease, at whose end another one takes over


def test_only_the_holder_writes_a_flight(path):
    table = RelayTable(lambda: sqlite3.connect(path), TableNames())
    with table.transaction():
        assert table.change_holder(table.holder(), "one")
        assert table.set_flight(RelayRow("one", 1, None), [])
        assert not table.set_flight(RelayRow("one", 0, None), [])
        assert not table.set_flight(RelayRow("two", 1, None), [])
    table.close()


def test_a_relay_that_lost_its_lease_changes_no_row(relay_on, cluster, db, clock):
    add(db, 1)
    first, second = relay_on(), relay_on()
    first.try_step()
    taken = itertools.count()

    def take_over():
        if next(taken) == 0:
            cluster.refused["orders"] = AWAY
            second.try_step()
            clock.advance(20_000)
            drain(second)
            cluster.refused.clear()

    cluster.step = take_over
    first.try_step()  # the send is stored after the other one has tried
    before = db.execute("SELECT * FROM mqmesh_outbox_relay").fetchall()
    drain(first)
    assert not first.status.works
    assert db.execute("SELECT * FROM mqmesh_outbox_relay").fetchall() == before
    assert rows(db) == 1
    clock.advance(4_000)
    drain(second)
    assert cluster.bodies("orders") == [b"0001"]
    assert rows(db) == 0


def test_a_connection_that_commits_by_itself_is_refused(relay_on, path):
    with pytest.raises(InvalidArgument, match="isolation_level = None"):
        relay_on(lambda: sqlite3.connect(path, isolation_level=None)).start()


def test_relays_of_forked_processes_have_names_of_their_own(relay_on, db, monkeypatch):
    relay = relay_on()
    monkeypatch.setattr(relay_module, "born_host", lambda: "the process that works")
    relay.try_step()
    (holder,) = db.execute("SELECT holder FROM mqmesh_outbox_relay").fetchone()
    assert holder.startswith("the process that works:")


def test_a_body_that_is_not_sent_is_not_read(path, db):
    with db:
        Outbox().add(db, *[Message("orders", bytes(1 << 20), properties={"a": "b"})] * 20)
    table = RelayTable(lambda: sqlite3.connect(path), TableNames())

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    with table.transaction():
        before = bytes_read()
        assert len(table.head(500, 1, [])) == 1
        assert bytes_read() - before < 3 << 20
        assert table.backlog()[0] == 20
        assert bytes_read() - before < 3 << 20
    table.close()


class CountingConnection(sqlite3.Connection):
    """A connection that counts what its database does, in steps of ten instructions."""

    steps = 0

    def count(self):
        """Begin to count."""

        def step():
            self.steps += 1

        self.set_progress_handler(step, 10)


def test_rows_that_wait_in_front_are_not_read_again_and_again(path, db):
    with db:
        Outbox().add(db, *[Message("missing", b"x")] * 10_000)
        db.execute("UPDATE mqmesh_outbox SET error = 'x' WHERE id % 2")
        Outbox().add(db, Message("bills", b"1"), Message("orders", b"2"), Message("bills", b"3"))
    connection = sqlite3.connect(path, factory=CountingConnection)
    table = RelayTable(lambda: connection, TableNames())
    with table.transaction():
        connection.count()
        assert table.has_rows(["missing"])
        assert not table.has_rows(["bills", "missing", "orders"])
        found = table.head(500, 1_000, ["missing"])
        assert [one.message.body for one in found] == [b"1", b"2", b"3"]
        assert [one.id for one in table.head(1, 1_000, ["missing", "orders"])] == [10_001]
        assert table.head(500, 1_000, ["bills", "missing", "orders"]) == []
        assert connection.steps < 200
    table.close()


def test_the_state_of_an_outbox_is_counted_by_its_indexes(path, db):
    with db:
        Outbox().add(db, *[Message("orders", bytes(100_000))] * 20)
        db.execute("UPDATE mqmesh_outbox SET error = 'x' WHERE id % 10 = 0")
    connection, said = sqlite3.connect(path), []
    table = RelayTable(lambda: connection, TableNames())
    with table.transaction():
        connection.set_trace_callback(said.append)
        assert table.backlog()[::2] == (18, 2)
        connection.set_trace_callback(None)
        plans = [row[3] for one in said for row in db.execute(f"EXPLAIN QUERY PLAN {one}")]
    table.close()
    assert [one for one in plans if "USING" in one] == [
        "SCAN mqmesh_outbox USING INDEX mqmesh_outbox_topic",
        "SCAN mqmesh_outbox USING INDEX mqmesh_outbox_error",
    ]


def test_batches_that_are_due_together_are_not_read_together(
    relay_on, cluster, db, path, monkeypatch
):
    cluster.topics = {f"topic-{number}": 1 for number in range(12)}
    with db:
        for topic in cluster.topics:
            Outbox().add(db, *[Message(topic, bytes(3_000))] * 3)
    flight = [
        FlightBatch("00" * 16, topic, "b", 0, 0, 3 * at, [3 * at + 1, 3 * at + 2, 3 * at + 3])
        for at, topic in enumerate(cluster.topics)
    ]
    table = RelayTable(lambda: sqlite3.connect(path), TableNames())
    with table.transaction():
        assert table.change_holder(table.holder(), "")
        assert table.set_flight(RelayRow("", 1, None), flight)
    table.close()
    held, real = [0], RelayTable.rows

    def count(self, ids):
        held[-1] += len(ids)
        return real(self, ids)

    monkeypatch.setattr(RelayTable, "rows", count)
    cluster.step = lambda: held.append(0)
    drain(relay_on(batch_bytes=10_000))
    assert rows(db) == 0
    assert sum(held) == 36
    assert max(held) == 6  # those of two batches


def test_what_a_relay_sends_is_in_its_namespace(path, db, monkeypatch):
    made = []

    class Noted(NumberedSender):
        def __init__(self, *arguments, **options):
            made.append(options["namespace"])
            raise AWAY

    monkeypatch.setattr(relay_module, "NumberedSender", Noted)
    add(db, 1)
    with OutboxRelay(lambda: sqlite3.connect(path), namespace="shop") as relay:
        until(lambda: made)
    assert set(made) == {"shop"}
    assert not relay.status.sent


def test_failures_of_some_topics_are_remembered_not_of_any_number(clock, monkeypatch):
    monkeypatch.setattr(relay_topics, "MOST_REMEMBERED", 3)
    topics = relay_topics.RelayTopics(clock, 1_000, ())
    for number in range(5):
        topics.block(f"topic-{number}", "it is away", AWAY)
    assert [*topics.reasons()] == ["topic-2", "topic-3", "topic-4"]


ERRORS = [
    AWAY,
    AuthenticationFailed("no key"),
    MessageIllegal("illegal"),
    NoPermission("no right"),
    RemoteProtocolError("no answer that can be read"),
]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_sends_and_relays_each_row_is_sent_once(
    relay_on, cluster, db, clock, seed
):
    """Sends are stored and refused, questions fail, relays die and overtake one another."""
    chance = random.Random(seed)
    sent = 0
    relays = [relay_on(batch_rows=5) for _ in range(2)]

    def fate():
        """Change what happens from now on; time passes, and a relay may die here."""
        clock.advance(chance.choice([0, 0, 0, 4_000, 8_000]))
        topic = chance.choice(["orders", "bills"])
        for outcomes in (cluster.refused, cluster.stored_and_refused, cluster.silent):
            outcomes.pop(topic, None)
            if chance.random() < 0.25:
                outcomes[topic] = chance.choice(ERRORS)
        cluster.unsafe ^= {topic} if chance.random() < 0.2 else set()
        cluster.most_messages = chance.choice([1, 2, 1_000])
        if chance.random() < 0.1:
            raise cluster.Killed

    cluster.step = fate
    for _ in range(150):
        topic, key = chance.choice(["orders", "bills"]), chance.choice("abc")
        add(db, *range(sent, sent + 3), topic=topic, key=key)
        sent += 3
        at = chance.randrange(2)
        try:
            for _ in range(chance.randrange(4)):
                relays[at].try_step()
        except cluster.Killed:
            relays[at] = relay_on(batch_rows=5)
        clock.advance(chance.choice([10, 500, 5_000, 20_000]))
    cluster.step, cluster.most_messages = lambda: None, 1_000
    for outcomes in (cluster.refused, cluster.stored_and_refused, cluster.silent, cluster.unsafe):
        outcomes.clear()
    for _ in range(20):
        for relay in relays:
            drain(relay, 1_000)
        clock.advance(20_000)
    found = sorted(cluster.bodies("orders") + cluster.bodies("bills"))
    assert found == [b"%04d" % one for one in range(sent)]
    assert rows(db) == 0
    for some in cluster.queues.values():
        assert some == sorted(some)


def test_nothing_is_sent_after_a_transaction_that_took_half_a_lease(
    relay_on, cluster, db, clock, path, monkeypatch
):
    add(db, 1)
    relay = relay_on()
    relay.try_step()  # the routes
    real = RelayTable.set_flight

    def slow(self, held, flight):
        clock.advance(7_500)
        return real(self, held, flight)

    monkeypatch.setattr(RelayTable, "set_flight", slow)
    relay.try_step()
    assert relay.status.in_flight == 1
    assert cluster.bodies("orders") == []
    monkeypatch.undo()
    drain(relay)
    assert cluster.bodies("orders") == [b"0001"]
