"""Bills of a shop: of each order one, however often its message comes or a program dies.

The second of three programs; ``orders.py`` takes the orders. Run as many as you like::

    python examples/payments/billing.py

A bill is stored together with the group's progress, both or none: no database is needed.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from mqmesh import AdminClient, App, ConsumeFromWhere, Message

ORDERS, BILLS = "shop-orders", "shop-bills"
GROUP = "shop-billing"
NAMESRV = "127.0.0.1:9876;127.0.0.1:9877"


@dataclass
class Order:
    """An order, as ``orders.py`` sends it."""

    order_id: str
    customer: str
    cents: int


def bill(order: Order) -> Message:
    """Returns the bill of an order."""
    body = json.dumps(asdict(order)).encode()
    return Message(BILLS, body, keys=[order.order_id], sharding_key=order.customer)


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description="Bills orders, each once.")
    parser.add_argument("--namesrv", default=NAMESRV)
    options = parser.parse_args()
    with AdminClient(options.namesrv) as admin:
        admin.create_topic(BILLS, exist_ok=True)
    app = App("shop-billing", namesrv_addr=options.namesrv)
    subscribe = app.subscriber(
        ORDERS,
        group=GROUP,
        exactly_once=True,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
    )
    subscribe(app.publisher(BILLS)(bill))
    app.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
