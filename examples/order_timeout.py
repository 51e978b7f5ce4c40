"""Order timeout: an order that is not paid in half an hour is cancelled, by a delayed message.

Needs a running ``mqmesh up``. Opens some orders, pays every second one, and waits for the others
to time out. The delay is an argument, so that nobody has to wait::

    python examples/order_timeout.py --delay 3

With the order a delayed message is sent, which is delivered when the time is over. A payment
cancels it. A payment in the last moment may be too late to cancel it (``CancelRefused``), so the
consumer checks the order before it cancels it: the message only means "check now".
"""

import argparse
import json
import sys
import threading
import time

from mqmesh import (
    ConsumeFromWhere,
    Message,
    Producer,
    PushConsumer,
    SendResult,
)
from mqmesh.errors import CancelRefused

TOPIC = "order-timeouts"
HALF_AN_HOUR_S = 1_800.0


class Shop:
    """Orders, and what becomes of them."""

    def __init__(self, producer: Producer, delay_s: float) -> None:
        self._producer = producer
        self._delay_ms = int(delay_s * 1_000)
        self._lock = threading.Lock()
        self._timeouts: dict[int, SendResult] = {}
        self.states: dict[int, str] = {}

    def open(self, order: int) -> None:
        """Takes an order, and has us reminded of it."""
        with self._lock:
            self.states[order] = "open"
        body = json.dumps({"order": order}).encode()
        reminder = Message(TOPIC, body, keys=[f"order-{order}"]).delayed_by(self._delay_ms)
        self._timeouts[order] = self._producer.send(reminder)

    def pay(self, order: int) -> None:
        """Takes the money; the reminder is not needed any more."""
        with self._lock:
            self.states[order] = "paid"
        try:
            self._producer.cancel_delayed(self._timeouts.pop(order))
        except CancelRefused:
            print(f"order {order}: the reminder comes all the same, and will be ignored")

    def look(self, order: int) -> None:
        """The time of an order is over."""
        with self._lock:
            if self.states.get(order) == "open":
                self.states[order] = "given up"


def main() -> int:
    """Runs the example; the exit code is 1 when an order ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namesrv", default="127.0.0.1:9876;127.0.0.1:9877")
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--delay", type=float, default=HALF_AN_HOUR_S, help="seconds")
    arguments = parser.parse_args()
    orders = range(1, arguments.orders + 1)
    unpaid = [order for order in orders if order % 2]
    done = threading.Event()
    with Producer("shop", namesrv_addr=arguments.namesrv) as producer:
        shop = Shop(producer, arguments.delay)

        def on_timeout(messages):  # type: ignore[no-untyped-def]
            for message in messages:
                order = json.loads(message.body)["order"]
                late_ms = time.time() * 1_000 - message.deliver_at_ms
                shop.look(order)
                print(
                    f"order {order} is {shop.states.get(order)} ({late_ms:.0f} ms after its time)"
                )
            if all(shop.states.get(order) == "given up" for order in unpaid):
                done.set()

        consumer = PushConsumer(
            "shop-timeouts",
            namesrv_addr=arguments.namesrv,
            consume_from_where=ConsumeFromWhere.LAST_OFFSET,
        )
        consumer.subscribe(TOPIC, listener=on_timeout)
        with consumer:
            for order in orders:
                shop.open(order)
            for order in orders:
                if order % 2 == 0:
                    shop.pay(order)
            print(
                f"{len(orders) - len(unpaid)} orders are paid; {len(unpaid)} have "
                f"{arguments.delay:g} s left"
            )
            done.wait(arguments.delay + 30)
    print(json.dumps(shop.states))
    wanted = {order: "given up" if order % 2 else "paid" for order in orders}
    return 0 if shop.states == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
