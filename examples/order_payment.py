"""Order payment: money in SQLite and a message about it, both or none, whatever crashes.

Needs a running ``mqmesh up``. Pays some orders and ships what was paid::

    python examples/order_payment.py                # all of it
    python examples/order_payment.py pay --orders 5 # only the payments …
    python examples/order_payment.py ship           # … only the shipments
    python examples/order_payment.py audit          # is every payment shipped, and no other?

A payment is a local transaction of the shop's database. Its message is a *half message* until
that transaction has ended; the shipping department sees it only then. If this program is killed
anywhere in between, the broker asks the next one that is started how the payment ended, and
``check_local_transaction`` answers from the database, which alone knows.
"""

import argparse
import json
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mqmesh import (
    ConsumeFromWhere,
    LocalTransactionState,
    Message,
    PushConsumer,
    StoredMessage,
    TransactionListener,
    TransactionProducer,
)

TOPIC = "payments"
NAMESRV = "127.0.0.1:9876;127.0.0.1:9877"
SCHEMA = """
CREATE TABLE IF NOT EXISTS payments(order_id TEXT PRIMARY KEY, cents INTEGER, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shipments(order_id TEXT PRIMARY KEY, message_id TEXT NOT NULL,
                                     times INTEGER NOT NULL);
"""


@contextmanager
def database(path: str) -> Iterator[sqlite3.Connection]:
    """The shop's database; what is written in the block is committed at its end, or not at all."""
    connection = sqlite3.connect(path, timeout=30)
    try:
        with connection:
            connection.executescript("PRAGMA journal_mode = WAL;" + SCHEMA)
        with connection:
            yield connection
    finally:
        connection.close()


class Payments(TransactionListener):
    """The cash desk.

    Args:
        path: The shop's database.
        pause_at: Wait for a line on standard input at this step, so that the program may be
            killed there: ``half-stored`` or ``paid``.
    """

    def __init__(self, path: str, pause_at: str = "") -> None:
        self._path = path
        self._pause_at = pause_at

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        """Takes the money."""
        order = json.loads(message.body)
        step("half-stored", order["order_id"], self._pause_at)
        if order["cents"] > 100_00:
            return LocalTransactionState.ROLLBACK  # the bank says no
        try:
            with database(self._path) as db:
                db.execute(
                    "INSERT INTO payments VALUES (?, ?, 'paid')",
                    (order["order_id"], order["cents"]),
                )
        except sqlite3.IntegrityError:
            return LocalTransactionState.ROLLBACK  # given up in the meantime, see below
        step("paid", order["order_id"], self._pause_at)
        step("committing", order["order_id"], self._pause_at)
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        """Looks how a payment ended; one that did not is given up, so that it never will be."""
        order_id = message.keys[0]
        with database(self._path) as db:
            # Without this row the payment might still come after we said that it will not.
            db.execute("INSERT OR IGNORE INTO payments VALUES (?, 0, 'given up')", (order_id,))
            (state,) = db.execute(
                "SELECT state FROM payments WHERE order_id = ?", (order_id,)
            ).fetchone()
        say(f"checked {order_id} {state}")
        paid = state == "paid"
        return LocalTransactionState.COMMIT if paid else LocalTransactionState.ROLLBACK


def say(line: str) -> None:
    """Prints a line at once.

    ``print`` writes a line and its end one after the other, so that lines of two threads mix; here
    the broker's questions are answered beside the payments.
    """
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def step(name: str, order_id: str, pause_at: str) -> None:
    """Says how far an order is, and waits where it was asked to."""
    say(f"{name} {order_id}")
    if name == pause_at:
        sys.stdin.readline()


def pay(path: str, namesrv: str, orders: int, pause_at: str, serve: bool) -> None:
    """Pays some orders; every seventh is too expensive."""
    listener = Payments(path, pause_at)
    with TransactionProducer("cash-desk", listener, namesrv_addr=namesrv) as producer:
        say("ready")
        for number in range(orders):
            order_id = uuid.uuid4().hex
            cents = 500_00 if number % 7 == 6 else 20_00 + number
            body = json.dumps({"order_id": order_id, "cents": cents}).encode()
            result = producer.send_message_in_transaction(Message(TOPIC, body, keys=[order_id]))
            step("ended", order_id, pause_at)
            if not result.is_ended:
                say(f"left {order_id} to the check-back")
        if serve:
            sys.stdin.readline()  # for the broker's questions


def ship(path: str, namesrv: str, idle_s: float) -> None:
    """Ships what was paid, until nothing has come for a while."""
    came = threading.Event()

    def listen(messages: list[StoredMessage]) -> None:
        with database(path) as db:
            for message in messages:
                db.execute(
                    "INSERT INTO shipments VALUES (?, ?, 1) ON CONFLICT (order_id) "
                    "DO UPDATE SET times = times + 1",
                    (message.keys[0], message.message_id),
                )
        came.set()

    consumer = PushConsumer(
        "shipping", namesrv_addr=namesrv, consume_from_where=ConsumeFromWhere.FIRST_OFFSET
    )
    consumer.subscribe(TOPIC, listener=listen)
    with consumer:
        while came.wait(idle_s):
            came.clear()


def audit(path: str) -> int:
    """Compares payments and shipments; returns the program's exit code."""
    with database(path) as db:
        paid = {row[0] for row in db.execute("SELECT order_id FROM payments WHERE state = 'paid'")}
        shipped = {row[0] for row in db.execute("SELECT order_id FROM shipments")}
        (twice,) = db.execute("SELECT count(*) FROM shipments WHERE times > 1").fetchone()
    print(
        f"{len(paid)} paid, {len(shipped)} shipped, {len(paid - shipped)} paid and not shipped, "
        f"{len(shipped - paid)} shipped and not paid, {twice} shipped twice"
    )
    return 0 if paid == shipped else 1


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description="Order payment with transactions.")
    parser.add_argument("what", nargs="?", choices=["all", "pay", "ship", "audit"], default="all")
    parser.add_argument("--database", default="order_payment.sqlite")
    parser.add_argument("--namesrv", default=NAMESRV)
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--pause-at", choices=["half-stored", "paid", "ended"], default="")
    parser.add_argument("--serve", action="store_true", help="stay, and answer the broker")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds without a shipment")
    options = parser.parse_args()
    path = options.database
    if options.what in ("all", "pay"):
        pay(path, options.namesrv, options.orders, options.pause_at, options.serve)
    if options.what in ("all", "ship"):
        ship(path, options.namesrv, options.idle)
    return audit(path) if options.what in ("all", "audit") else 0


if __name__ == "__main__":
    sys.exit(main())
