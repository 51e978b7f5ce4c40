"""One measured program: sends or reads messages of one system.

Run as ``python client.py SYSTEM ACTION KIND ADDRESS COUNT``. It says ``ready`` when it is set up,
waits for a line, works, and ends with a line of JSON: seconds, processor time of its own, and
latencies where the action takes them. Each system does what its documentation tells a user to do
for throughput; the loops around it are the same for all.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator

from orders import BATCH, Order, make_orders
from systems import Client, open_client

SENDS_BEFORE = 200


def produce_batches(client: Client, orders: list[Order], count: int) -> list[float]:
    """Explicit batches of 500, many on their way."""
    for batch in _batches(orders, count):
        client.send_batch(batch)
    client.wait_sent()
    return []


def produce_singles(client: Client, orders: list[Order], count: int) -> list[float]:
    """One call a message; the system makes batches by itself if it does."""
    send = client.send
    for batch in _batches(orders, count):
        for order in batch:
            send(order)
    client.wait_sent()
    return []


def send_sync(client: Client, orders: list[Order], count: int) -> list[float]:
    """One message after the other, each acknowledged before the next."""
    for order in orders[:SENDS_BEFORE]:
        client.send_sync(order)
    latencies_us = []
    for number in range(count):
        begin_ns = time.perf_counter_ns()
        client.send_sync(orders[number % len(orders)])
        latencies_us.append((time.perf_counter_ns() - begin_ns) / 1_000)
    return latencies_us


def drain_bodies(client: Client, orders: list[Order], count: int) -> list[float]:
    """Reads every body."""
    client.drain(count, every_field=False)
    return []


def drain_fields(client: Client, orders: list[Order], count: int) -> list[float]:
    """Reads id, tag, key, properties and body of every message."""
    client.drain(count, every_field=True)
    return []


ACTIONS: dict[str, Callable[[Client, list[Order], int], list[float]]] = {
    "produce_batches": produce_batches,
    "produce_singles": produce_singles,
    "send_sync": send_sync,
    "drain_bodies": drain_bodies,
    "drain_fields": drain_fields,
}


def main() -> None:
    """Does what the command line says."""
    system, action, kind, address, count = sys.argv[1:]
    orders = make_orders(kind)
    with open_client(system, address, reads=action.startswith("drain")) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        used, begin_s = _cpu_s(), time.monotonic()
        latencies_us = ACTIONS[action](client, orders, int(count))
        end_s = time.monotonic()
        report = {
            "begin_s": client.first_message_s or begin_s,
            "end_s": end_s,
            "cpu_s": _cpu_s() - used,
            "latencies_us": latencies_us,
        }
    print(json.dumps(report), flush=True)


def _batches(orders: list[Order], count: int) -> Iterator[list[Order]]:
    for first in range(0, count, BATCH):
        begin = first % len(orders)
        yield orders[begin : begin + BATCH]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
