from __future__ import annotations

import itertools
import logging
import sqlite3
import threading

import pytest

from mqmesh.errors import (
    ConfigError,
    EndpointUnreachable,
    InvalidArgument,
    NoPermission,
    SequenceConflict,
)
from mqmesh.message import Message
from mqmesh.sql.outbox import Outbox
from mqmesh.sql.relay_table import RelayTable
from mqmesh.sql.statements import TableNames

AWAY = EndpointUnreachable("the broker is away")


def add(db, *numbers, topic="orders", key=None, **fields):
    """Commit a row for each number."""
    with db:
        Outbox().add(
            db, *(Message(topic, b"%04d" % one, sharding_key=key, **fields) for one in numbers)
        )


def rows(db):
    return db.execute("SELECT count(*) FROM mqmesh_outbox").fetchone()[0]


def drain(relay, most=200):
    """Take steps until there is nothing to do."""
    for _ in range(most):
        if relay.try_step():
            return
    raise AssertionError("it never rests")


def test_rows_are_sent_and_deleted(relay_on, cluster, db):
    add(db, *range(7))
    with db:  # rolled back
        Outbox().add(db, Message("orders", b"never"))
        db.rollback()
    relay = relay_on()
    drain(relay)
    assert cluster.bodies("orders") == [b"%04d" % one for one in range(7)]
    assert rows(db) == 0
    assert relay.status.works
    assert relay.status.sent == 7
    add(db, 8)
    drain(relay)
    assert relay.status.sent == 8


def test_rows_of_a_key_go_to_one_queue_in_order_and_others_in_turn(relay_on, cluster, db):
    for number in range(40):
        add(db, number, key="abc"[number % 3] if number % 4 else None)
    drain(relay_on(batch_rows=7))
    for key in "abc":
        wanted = [b"%04d" % one for one in range(40) if one % 4 and "abc"[one % 3] == key]
        (found,) = [some for some in cluster.queues.values() if wanted[0] in some]
        assert [one for one in found if one in wanted] == wanted
    assert all(some for some in cluster.queues.values())


def test_a_read_is_bounded_by_rows_and_by_bytes(relay_on, cluster, db, path):
    sends = []
    cluster.step = lambda: sends.append(len(cluster.bodies("orders")))
    add(db, *range(10))
    drain(relay_on(batch_rows=4))
    assert sends == [0, 4, 4, 8, 8, 10]
    add(db, *range(3))
    table = RelayTable(lambda: sqlite3.connect(path), TableNames())
    with table.transaction():
        found = [len(table.head(10, most, [])) for most in (1, 4, 5, 100)]
        assert table.head(10, 100, ["bills", "orders"]) == []
        assert table.backlog()[0] == 3
    table.close()
    assert found == [1, 1, 2, 3]


class DyingConnection(sqlite3.Connection):
    """A connection that may be the end before or after a commit."""

    step = staticmethod(lambda: None)

    def commit(self):
        self.step()
        super().commit()
        self.step()


def test_a_relay_that_is_killed_at_any_point_loses_and_repeats_nothing(
    relay_on, cluster, db, path, clock, monkeypatch
):
    sent, kills = 0, 0
    for last in itertools.count(1):
        left = last

        def step():
            nonlocal left, kills
            left -= 1
            if left == 0:
                kills += 1
                raise cluster.Killed

        cluster.step = step
        monkeypatch.setattr(DyingConnection, "step", staticmethod(step))
        for number in range(4):
            add(db, sent + number, key=str(number % 2))
        sent += 4
        dying = relay_on(lambda: sqlite3.connect(path, factory=DyingConnection), batch_rows=3)
        try:
            dying.try_step()  # sees the one before
            clock.advance(20_000)
            drain(dying)
        except cluster.Killed:
            assert left == 0
            continue
        break
    assert kills >= 20
    assert cluster.bodies("orders") == [b"%04d" % one for one in range(sent)]
    assert rows(db) == 0
    for some in cluster.queues.values():
        assert some == sorted(some)


def test_a_second_relay_waits_and_takes_over_when_the_beat_stands_still(
    relay_on, cluster, db, clock
):
    first, second = relay_on(), relay_on()
    drain(first)
    second.try_step()
    for _ in range(10):
        clock.advance(10_000)
        first.try_step()
        second.try_step()
    assert (first.status.works, second.status.works) == (True, False)
    clock.advance(15_000)
    add(db, 1)
    drain(second)
    assert second.status.works
    add(db, 2)
    drain(first)  # notices
    assert not first.status.works
    drain(second)
    assert cluster.bodies("orders") == [b"0001", b"0002"]


def test_a_late_send_of_a_replaced_relay_is_recognised(relay_on, cluster, db, clock):
    add(db, 1, 2, 3)
    first, second = relay_on(), relay_on()
    late = []

    def hang():
        if not late:
            late.append("")
            second.try_step()
            clock.advance(20_000)
            drain(second)
            assert rows(db) == 0

    cluster.step = hang
    first.try_step()
    drain(first)
    assert not first.status.works
    assert cluster.bodies("orders") == [b"0001", b"0002", b"0003"]


def test_a_relay_that_ends_in_order_leaves_no_wait(relay_on, path, db):
    with relay_on():
        pass
    drain(next_one := relay_on())
    assert next_one.status.works


def test_a_broker_that_is_away_is_waited_for(relay_on, cluster, db, clock, caplog):
    add(db, 1, 2)
    cluster.refused["orders"] = AWAY
    relay = relay_on()
    for pause_ms in (100, 200, 400, 800, 1_600, 3_200, 3_750, 3_750):
        drain(relay)
        assert f"rows of topic 'orders' wait for {pause_ms} ms: rows 1 to 2 for " in caplog.text
        caplog.clear()
        clock.advance(pause_ms)
    assert relay.status.in_flight == 2
    cluster.refused.clear()
    drain(relay)
    assert cluster.bodies("orders") == [b"0001", b"0002"]
    assert relay.status.in_flight == 0


def test_without_a_name_server_nothing_is_lost(relay_on, cluster, db, clock):
    add(db, 1)
    cluster.refused["route"] = AWAY
    relay = relay_on()
    assert relay.try_step() > 0
    cluster.refused.clear()
    clock.advance(100)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001"]


@pytest.mark.parametrize("reason", ["refused", "missing"])
def test_a_topic_that_refuses_holds_up_its_own_rows_only(
    relay_on, cluster, db, clock, reason, caplog
):
    if reason == "refused":
        cluster.refused["bills"] = NoPermission("may not send")
    else:
        del cluster.topics["bills"]
    for number in range(6):
        add(db, number, topic=("orders", "bills")[number % 2])
    relay = relay_on(batch_rows=3)
    drain(relay)
    assert len(cluster.bodies("orders")) == 3
    assert set(relay.status.blocked) == {"bills"}
    assert "rows of topic 'bills' wait for 1000 ms" in caplog.text
    clock.advance(1_000)
    drain(relay)
    assert "wait for 2000 ms" in caplog.text
    cluster.refused.clear()
    cluster.topics["bills"] = 2
    clock.advance(2_000)
    drain(relay)
    assert cluster.bodies("bills") == [b"0001", b"0003", b"0005"]
    assert relay.status.blocked == {}
    assert rows(db) == 0


def test_delayed_and_other_messages_of_a_queue_are_batches_of_their_own(relay_on, cluster, db):
    add(db, 1, key="k")
    add(db, 2, key="k", delay_level=3)
    add(db, 3, key="k", deliver_at_ms=5_000)
    add(db, 4, key="k")
    drain(relay_on())
    assert cluster.bodies("orders") == [b"0001", b"0002", b"0003", b"0004"]
    (batches,) = cluster.stored.values()
    assert batches == {0: [b"0001", b"0004"], 2: [b"0002"], 3: [b"0003"]}


@pytest.mark.parametrize(("in_doubt", "found"), [("send", [b"0001", b"0001"]), ("drop", [b"0001"])])
def test_what_nobody_knows_any_more_is_decided_by_the_user(
    relay_on, cluster, db, clock, in_doubt, found, caplog
):
    add(db, 1)
    relay = relay_on()
    relay.try_step()

    steps = itertools.count()

    def die_after_the_send():
        if next(steps) == 1:
            raise cluster.Killed

    cluster.step = die_after_the_send
    with pytest.raises(cluster.Killed):
        relay.try_step()
    cluster.step = lambda: None
    cluster.forgets = True
    cluster.stored.clear()
    stopping = relay_on()
    stopping.try_step()
    clock.advance(15_000)
    add(db, 2, topic="bills")
    drain(stopping)
    drain(stopping)
    assert "may be stored or not" in stopping.status.blocked["orders"]
    assert cluster.bodies("bills") == [b"0002"]  # other topics go on
    assert rows(db) == 1
    assert [one.levelname for one in caplog.records if "may be stored or" in one.message] == [
        "ERROR"
    ]
    stopping.close()
    other = relay_on(in_doubt=in_doubt)
    other.try_step()
    clock.advance(15_000)
    drain(other)
    assert cluster.bodies("orders") == found
    assert rows(db) == 0
    assert f"in_doubt = {in_doubt}" in caplog.text


def test_rows_that_somebody_deletes_while_they_are_in_flight_are_given_up(relay_on, cluster, db):
    add(db, 1, 2, key="k")
    cluster.refused["orders"] = AWAY
    relay = relay_on()
    relay.try_step()
    relay.try_step()
    relay.close()
    with db:
        db.execute("DELETE FROM mqmesh_outbox WHERE body = ?", (b"0001",))
        db.execute("UPDATE mqmesh_outbox_relay SET holder = ''")
    cluster.refused.clear()
    drain(relay_on())
    assert cluster.bodies("orders") == [b"0002"]
    assert rows(db) == 0


def test_a_database_that_is_away_is_waited_for(relay_on, cluster, db, path, caplog):
    def connect():
        if broken:
            raise sqlite3.OperationalError("unable to open database file")
        return sqlite3.connect(path)

    broken = False
    relay = relay_on(connect)
    add(db, 1)
    drain(relay)
    relay.close()
    broken = True
    assert relay.try_step() == 1_000
    assert "unable to open database file" in caplog.text
    broken = False
    add(db, 2)
    drain(relay)
    assert cluster.bodies("orders") == [b"0001", b"0002"]


def test_a_key_that_somebody_else_has_ends_the_relay(relay_on, cluster, db):
    add(db, 1)
    cluster.refused["orders"] = SequenceConflict("other content")
    relay = relay_on()
    relay.try_step()
    with pytest.raises(SequenceConflict):
        relay.try_step()


def test_an_old_row_is_an_entry_of_the_log_each_minute(relay_on, cluster, db, clock, caplog):
    caplog.set_level(logging.WARNING)
    Outbox(clock=clock).add(db, Message("orders", b"1"))
    db.commit()
    clock.advance(90_000)
    cluster.refused["route"] = AWAY
    relay = relay_on()
    for _ in range(3):
        relay.try_step()
    assert caplog.text.count("the oldest row of mqmesh_outbox waits for 90 s") == 1
    assert relay.status.oldest_ms == 90_000
    clock.advance(60_000)
    relay.try_step()
    assert "waits for 150 s" in caplog.text


def test_missing_tables_and_a_wrong_flight_are_named(relay_on, db, tmp_path):
    with pytest.raises(ConfigError, match="table mqmesh_outbox cannot be read: no such table"):
        relay_on(lambda: sqlite3.connect(tmp_path / "other")).start()
    drain(relay_on())
    with db:
        db.execute("UPDATE mqmesh_outbox_relay SET holder = '', flight = '{}'")
    with pytest.raises(ConfigError, match="table mqmesh_outbox_relay, column flight: "):
        relay_on().try_step()


def test_options_have_bounds(relay_on):
    with pytest.raises(InvalidArgument, match="lease_ms = 10 must be 1,000 to 600,000"):
        relay_on(lease_ms=10)
    with pytest.raises(InvalidArgument, match="poll_ms = 501 must be 1 to 500"):
        relay_on(lease_ms=1_000, poll_ms=501)  # its beat would stand still
    with pytest.raises(InvalidArgument, match="in_doubt = 'x' must be stop, send or drop"):
        relay_on(in_doubt="x")


def test_a_thread_works_until_it_is_closed_and_says_why_it_ended(relay_on, cluster, db):
    stored = threading.Event()
    cluster.step = lambda: cluster.bodies("orders") and stored.set()
    add(db, 1)
    with relay_on() as relay:
        assert stored.wait(30)
    assert relay.closed
    assert rows(db) == 0
    cluster.refused["orders"] = SequenceConflict("other content")
    stored.clear()
    add(db, 2)
    relay = relay_on()
    relay.start()
    assert stored.wait(30)
    with pytest.raises(SequenceConflict):
        relay.close()
