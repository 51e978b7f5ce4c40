"""Program that forks a member for each line it reads, which is the kind of the member.

Members make a bill of each order, and live until they are killed.
"""

import logging
import random
import sys
import threading

from harness.forks import fork_for_lines
from harness.processing_scene import EACH
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, StoredMessage
from mqmesh.sdk.consumer.processing import Processing
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

LEASE_MS = 8_000
MOST = (1, 8, 64)
FAIL_SHARE = 0.03
HOLD_S = 0.02


def bill(kind: str, bills: str, block: Processing, messages: list[StoredMessage]) -> None:
    """Make a bill of each order; some blocks fail."""
    with block as out:
        for message in messages:
            out.send(Message(bills, kind.encode() + b" " + bytes(message.body)))
        threading.Event().wait(random.random() * HOLD_S)
        if random.random() < FAIL_SHARE:
            raise ValueError("by chance")


def receive(namesrv_addr: str, orders: str, bills: str) -> None:
    """Acknowledge each message."""
    consumer = SimpleConsumer(EACH, namesrv_addr=namesrv_addr)
    consumer.subscribe(orders)
    consumer.start()
    while True:
        messages = consumer.receive(random.choice(MOST), LEASE_MS, 1_000)
        if messages:
            try:
                bill(EACH, bills, consumer.processing(messages), messages)
            except (MQMeshError, ValueError) as error:
                logging.info("a block failed: %r", error)


def own(kind: str, namesrv_addr: str, orders: str, bills: str) -> None:
    """Own queues, and consume them in order."""
    consumer = PushConsumer(
        kind,
        namesrv_addr=namesrv_addr,
        consume_from_where="FIRST_OFFSET",
        consume_orderly=True,
        consume_message_batch_max_size=16,
        suspend_current_queue_time_ms=10,
        persist_consumer_offset_interval_ms=100,
        rebalance_interval_ms=1_000,
    )

    def listen(messages: list[StoredMessage]) -> None:
        bill(kind, bills, consumer.processing(messages), messages)

    consumer.subscribe(orders, listener=listen)
    consumer.start()
    threading.Event().wait()


def main() -> None:
    """Fork until standard input ends; arguments: name servers, topics of orders and of bills."""
    namesrv_addr, orders, bills = sys.argv[1:]

    def live(kind: str) -> None:
        if kind == EACH:
            receive(namesrv_addr, orders, bills)
        own(kind, namesrv_addr, orders, bills)

    fork_for_lines(live)


if __name__ == "__main__":
    main()
