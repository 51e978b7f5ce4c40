"""Balances of a shop's customers: the sum of their bills, in a table of the broker.

The third of three programs; ``billing.py`` makes the bills. Run as many as you like::

    python examples/payments/balances.py
    python examples/payments/balances.py sums   # cents by customer, as JSON

A balance is written by its revision, so two programs cannot overwrite each other's. With it stands
how far the bills are counted, so a bill that comes again changes nothing.
"""

import argparse
import json
import sys

from mqmesh import ConsumeFromWhere, KeyValue, PushConsumer, RevisionConflict, StoredMessage, run

BILLS = "shop-bills"
TABLE = "shop-balances"
GROUP = "shop-balances"
NAMESRV = "127.0.0.1:9876;127.0.0.1:9877"


def count(table: KeyValue, message: StoredMessage) -> None:
    """Adds a bill to the balance of its customer, once."""
    bill = json.loads(message.body)
    queue = f"{message.info.broker_name}/{message.info.queue_id}"
    while True:
        entry = table.get(bill["customer"])
        balance = json.loads(entry.value) if entry else {"cents": 0, "counted": {}}
        # A customer's bills come in the order of their queue.
        if message.queue_offset < balance["counted"].get(queue, 0):
            return
        balance["cents"] += bill["cents"]
        balance["counted"][queue] = message.queue_offset + 1
        value = json.dumps(balance).encode()
        try:
            table.update(bill["customer"], value, revision=entry.revision if entry else 0)
            return
        except RevisionConflict:
            continue  # somebody else counted meanwhile


def sums(table: KeyValue) -> dict[str, int]:
    """Returns the balances, by customer."""
    return {one.key: json.loads(one.value)["cents"] for one in table.entries()}


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description="Counts bills, each once.")
    parser.add_argument("what", nargs="?", choices=["count", "sums"], default="count")
    parser.add_argument("--namesrv", default=NAMESRV)
    options = parser.parse_args()
    with KeyValue(TABLE, options.namesrv, create=True, history=5) as table:
        if options.what == "sums":
            print(json.dumps(sums(table)))
            return 0
        consumer = PushConsumer(
            GROUP,
            namesrv_addr=options.namesrv,
            consume_orderly=True,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        )
        consumer.subscribe(BILLS, listener=lambda messages: [count(table, one) for one in messages])
        run(consumer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
