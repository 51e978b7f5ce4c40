"""Orders of a shop: an order in its database and the message about it, both or none.

The first of three programs; the others bill the orders and keep the balances. Needs a running
``mqmesh up``, and a database: an SQLite file by default, PostgreSQL by ``--url``::

    python examples/payments/orders.py create            # tables, and the topic
    python examples/payments/orders.py take --orders 20  # takes orders
    mqmesh sql relay --url sqlite:///payments.sqlite     # sends what they left in the outbox
    python examples/payments/orders.py sums              # cents by customer, as JSON

Kill any of them at any time and start it again. The message of an order has its id as key, and
its customer as sharding key: what concerns one customer comes in order.
"""

import argparse
import json
import random
import sqlite3
import sys
import uuid
from contextlib import closing
from typing import Any

from mqmesh import AdminClient, Message
from mqmesh.sql import Outbox, schema

TOPIC = "shop-orders"
NAMESRV = "127.0.0.1:9876;127.0.0.1:9877"
URL = "sqlite:///payments.sqlite"
CUSTOMERS = "ada", "bob", "eve"
ORDERS = (
    "CREATE TABLE IF NOT EXISTS orders "
    "(id TEXT PRIMARY KEY, customer TEXT NOT NULL, cents INTEGER NOT NULL)"
)

outbox = Outbox()


def connect(url: str) -> Any:
    """Opens the shop's database."""
    if url.startswith("sqlite:///"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    import psycopg

    return psycopg.connect(url)


def create(url: str) -> None:
    """Creates the shop's table and those of the outbox, where they are missing."""
    dialect = "sqlite" if url.startswith("sqlite") else "postgresql"
    with closing(connect(url)) as db:
        if dialect == "sqlite":
            db.execute("PRAGMA journal_mode = WAL")
        for statement in [*schema(dialect), ORDERS]:
            db.execute(statement)
        db.commit()


def take(db: Any, customer: str, cents: int) -> None:
    """Takes an order: row and message in one transaction."""
    order_id = uuid.uuid4().hex
    mark = "?" if isinstance(db, sqlite3.Connection) else "%s"
    row = order_id, customer, cents
    db.execute(f"INSERT INTO orders VALUES ({mark}, {mark}, {mark})", row)
    body = json.dumps({"order_id": order_id, "customer": customer, "cents": cents}).encode()
    outbox.add(db, Message(TOPIC, body, keys=[order_id], sharding_key=customer))
    db.commit()


def sums(db: Any) -> dict[str, int]:
    """Returns the cents of all orders, by customer."""
    found = db.execute("SELECT customer, sum(cents) FROM orders GROUP BY customer").fetchall()
    return {customer: int(cents) for customer, cents in sorted(found)}


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description="Orders, each with its message.")
    parser.add_argument("what", choices=["create", "take", "sums"])
    parser.add_argument("--url", default=URL, help="sqlite:///PATH or postgresql://…")
    parser.add_argument("--namesrv", default=NAMESRV)
    parser.add_argument("--orders", type=int, default=10)
    options = parser.parse_args()
    if options.what == "create":
        create(options.url)
        with AdminClient(options.namesrv) as admin:
            admin.create_topic(TOPIC, exist_ok=True)
        return 0
    with closing(connect(options.url)) as db:
        if options.what == "take":
            for _ in range(options.orders):
                take(db, random.choice(CUSTOMERS), random.randrange(1, 100_00))
        else:
            print(json.dumps(sums(db)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
