"""Orders by the outbox, bills by the inbox: each order is billed once, whatever crashes.

Needs a running ``mqmesh up``. Takes some orders and bills them::

    python examples/order_outbox.py              # all of it
    python examples/order_outbox.py order --orders 5
    python examples/order_outbox.py relay        # sends what orders left in the outbox
    python examples/order_outbox.py bill
    python examples/order_outbox.py audit        # is every order billed, and once?

An order and its message are one transaction of the shop's database, here an SQLite file; so are a
bill and the note that the message was processed. Kill any part at any time and start it again.
"""

import argparse
import json
import sqlite3
import sys
import threading
import time
import uuid
from contextlib import closing

from mqmesh import AdminClient, ConsumeFromWhere, Message, PushConsumer, StoredMessage, run
from mqmesh.sql import Inbox, Outbox, OutboxRelay, schema

TOPIC = "orders"
NAMESRV = "127.0.0.1:9876;127.0.0.1:9877"
TABLES = (
    "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS bills (order_id TEXT NOT NULL, cents INTEGER NOT NULL)",
)

outbox = Outbox()
inbox = Inbox("billing")


def connect(path: str) -> sqlite3.Connection:
    """Opens the shop's database; writers wait for one another."""
    return sqlite3.connect(path, timeout=30)


def create_tables(path: str) -> None:
    """Creates the shop's tables, and those of outbox and inbox."""
    with closing(connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in [*schema("sqlite"), *TABLES]:
            db.execute(statement)


def order(path: str, count: int) -> None:
    """Takes orders: row and message in one transaction."""
    with closing(connect(path)) as db:
        for number in range(count):
            order_id, cents = uuid.uuid4().hex, 20_00 + number
            db.execute("INSERT INTO orders VALUES (?, ?)", (order_id, cents))
            body = json.dumps({"order_id": order_id, "cents": cents}).encode()
            outbox.add(db, Message(TOPIC, body, keys=[order_id]))
            if number % 7 == 6:
                db.rollback()  # the customer left: neither order nor message
            else:
                db.commit()


def bill(path: str, message: StoredMessage) -> None:
    """Writes a bill, unless that message was billed before."""
    found = json.loads(message.body)
    with closing(connect(path)) as db:
        if inbox.first_time(db, message):
            db.execute("INSERT INTO bills VALUES (:order_id, :cents)", found)
            db.commit()


def bill_all(path: str, namesrv: str, idle_s: float) -> None:
    """Bills what comes, until nothing has come for a while."""
    came = threading.Event()

    def listen(messages: list[StoredMessage]) -> None:
        came.set()
        for message in messages:
            bill(path, message)
            bill(path, message)  # as after a crash: it changes nothing

    first = ConsumeFromWhere.FIRST_OFFSET
    consumer = PushConsumer("billing", namesrv_addr=namesrv, consume_from_where=first)
    consumer.subscribe(TOPIC, listener=listen)
    with consumer:
        while came.wait(idle_s):
            came.clear()


def audit(path: str) -> int:
    """Compares orders and bills; returns the program's exit code."""
    with closing(connect(path)) as db:
        orders = sorted(db.execute("SELECT id, cents FROM orders").fetchall())
        bills = sorted(db.execute("SELECT order_id, cents FROM bills").fetchall())
    print(
        f"{len(orders)} orders, {len(bills)} bills: {'equal' if orders == bills else 'DIFFERENT'}"
    )
    return 0 if orders == bills else 1


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description="Orders and bills, each once.")
    steps = ["all", "order", "relay", "bill", "audit"]
    parser.add_argument("what", nargs="?", choices=steps, default="all")
    parser.add_argument("--database", default="order_outbox.sqlite")
    parser.add_argument("--namesrv", default=NAMESRV)
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--idle", type=float, default=2.0, help="seconds without a message")
    options = parser.parse_args()
    path, namesrv = options.database, options.namesrv
    create_tables(path)
    with AdminClient(namesrv) as admin:
        admin.create_topic(TOPIC, exist_ok=True)
    if options.what in ("all", "order"):
        order(path, options.orders)
    relay = OutboxRelay(lambda: connect(path), namesrv)
    if options.what == "relay":
        run(relay)
    if options.what == "all":
        with relay:
            wanted = options.orders - options.orders // 7
            while relay.status.sent < wanted and not relay.closed:
                time.sleep(0.05)
    if options.what in ("all", "bill"):
        bill_all(path, namesrv, options.idle)
    return audit(path) if options.what in ("all", "audit") else 0


if __name__ == "__main__":
    sys.exit(main())
