"""One measured program: sends or reads messages of one system.

Run as ``python client.py SYSTEM ACTION KIND ADDRESS MESSAGES TOPICS``. It says ``ready`` when it is
set up, waits for a line, works, and ends with a line of JSON: seconds, processor time of its own,
and latencies where the action takes them. Each system does what its documentation tells a user to
do; the loops around it are the same for all.
"""

import asyncio
import json
import resource
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from orders import BATCH, Order, make_orders, topic_names
from systems import ASYNCIO, BLOCKING, AsyncioClient, Client

SENDS_BEFORE: Final = 200
"""Sends at the beginning that are not counted among the latencies."""
THREADS: Final = 16
GATHERED: Final = 1_000
RATE: Final = 10_000
"""Messages a second that a program sends which does not wait for outcomes."""
LONE_RATE: Final = 500
"""Messages a second of which each is waited for, where the time to the reader is measured."""
_SENT_AT: Final = struct.Struct("<q")


class Task(NamedTuple):
    """Work of a measured program.

    Attributes:
        orders: Messages to send, again and again.
        messages: How many to send or read in all.
        topics: Topics to send to.
    """

    orders: list[Order]
    messages: int
    topics: list[str]

    def each(self) -> Iterator[Order]:
        """Yields the messages to send."""
        for number in range(self.messages):
            yield self.orders[number % len(self.orders)]

    def batches(self) -> Iterator[list[Order]]:
        """Yields them in batches."""
        for first in range(0, self.messages, BATCH):
            begin = first % len(self.orders)
            yield self.orders[begin : begin + BATCH]

    def topic(self, number: int) -> str:
        """Returns where a message goes."""
        return self.topics[number % len(self.topics)]


def produce_batches(client: Client, task: Task) -> list[float]:
    """Explicit batches of 500, many on their way."""
    for batch in task.batches():
        client.send_batch(batch)
    client.wait_sent()
    return []


def produce_singles(client: Client, task: Task) -> list[float]:
    """One call a message; the system makes batches by itself if it does."""
    send = client.send
    for order in task.each():
        send(order)
    client.wait_sent()
    return []


async def produce_singles_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same from a coroutine."""
    for order in task.each():
        await client.send_soon(order, task.topic(0))
    await client.wait_sent()
    return []


def send_sync(client: Client, task: Task) -> list[float]:
    """One message after the other, each acknowledged before the next."""
    latencies_us = []
    for order in task.each():
        begin_ns = time.monotonic_ns()
        client.send_sync(order)
        latencies_us.append(_since_us(begin_ns))
    return latencies_us[SENDS_BEFORE:]


async def send_coroutine(client: AsyncioClient, task: Task) -> list[float]:
    """The same from one coroutine."""
    latencies_us = []
    for order in task.each():
        begin_ns = time.monotonic_ns()
        await client.send(order)
        latencies_us.append(_since_us(begin_ns))
    return latencies_us[SENDS_BEFORE:]


def send_threads(client: Client, task: Task) -> list[float]:
    """Threads that send one message after the other each."""
    left = iter(list(task.each()))

    def work(send: Callable[[Order], None]) -> None:
        for order in left:
            send(order)

    threads = [
        threading.Thread(target=work, args=(client.sender_of_thread(),)) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if next(left, None) is not None:
        raise RuntimeError("the threads failed; their error stands above")
    return []


async def send_gather(client: AsyncioClient, task: Task) -> list[float]:
    """A thousand sends side by side, again and again."""
    orders = list(task.each())
    for first in range(0, task.messages, GATHERED):
        await asyncio.gather(*map(client.send, orders[first : first + GATHERED]))
    return []


def send_at_rate(client: Client, task: Task) -> list[float]:
    """Messages at a steady rate, whose outcome nobody waits for; by turns to each topic."""
    begin_s = time.monotonic()
    for number, order in enumerate(task.each()):
        wait_s = begin_s + number / RATE - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        client.send_soon(order, task.topic(number))
    client.wait_sent()
    return []


async def send_at_rate_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same from a coroutine."""
    begin_s = time.monotonic()
    for number, order in enumerate(task.each()):
        wait_s = begin_s + number / RATE - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await client.send_soon(order, task.topic(number))
    await client.wait_sent()
    return []


def send_stamped(client: Client, task: Task) -> list[float]:
    """Messages at a low rate, each of which says when it was sent."""
    begin_s = time.monotonic()
    for number, order in enumerate(task.each()):
        time.sleep(max(begin_s + number / LONE_RATE - time.monotonic(), 0))
        client.send_sync(_stamped(order))
    return []


async def send_stamped_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same from a coroutine."""
    begin_s = time.monotonic()
    for number, order in enumerate(task.each()):
        await asyncio.sleep(max(begin_s + number / LONE_RATE - time.monotonic(), 0))
        await client.send(_stamped(order))
    return []


def listen(client: Client, task: Task) -> list[float]:
    """Reads stamped messages when they come; how long each was on its way."""
    latencies_us: list[float] = []
    client.listen(task.messages, lambda body: latencies_us.append(_on_its_way_us(body)))
    return latencies_us[SENDS_BEFORE:]


async def listen_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same by ``async for``."""
    latencies_us: list[float] = []
    bodies: AsyncIterator[bytes] = client.bodies()
    async for body in bodies:
        latencies_us.append(_on_its_way_us(body))
        if len(latencies_us) >= task.messages:
            break
    return latencies_us[SENDS_BEFORE:]


def drain_bodies(client: Client, task: Task) -> list[float]:
    """Reads every body."""
    client.drain(task.messages, every_field=False)
    return []


async def drain_bodies_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same from a coroutine."""
    await client.drain(task.messages, every_field=False)
    return []


def drain_fields(client: Client, task: Task) -> list[float]:
    """Reads id, tag, key, properties and body of every message."""
    client.drain(task.messages, every_field=True)
    return []


async def drain_fields_asyncio(client: AsyncioClient, task: Task) -> list[float]:
    """The same from a coroutine."""
    await client.drain(task.messages, every_field=True)
    return []


class Action(NamedTuple):
    """An action, as a blocking program and as one of coroutines.

    Attributes:
        blocking: None where the row is about asyncio.
        asyncio: For systems without a blocking client; None where the row is about blocking ones.
        reads: It reads.
    """

    blocking: Callable[[Client, Task], list[float]] | None
    asyncio: Callable[[AsyncioClient, Task], Awaitable[list[float]]] | None
    reads: bool = False


ACTIONS: Final[Mapping[str, Action]] = {
    "produce_batches": Action(produce_batches, produce_singles_asyncio),
    "produce_singles": Action(produce_singles, produce_singles_asyncio),
    "send_sync": Action(send_sync, None),
    "send_coroutine": Action(None, send_coroutine),
    "send_threads": Action(send_threads, None),
    "send_gather": Action(None, send_gather),
    "send_at_rate": Action(send_at_rate, send_at_rate_asyncio),
    "send_stamped": Action(send_stamped, send_stamped_asyncio),
    "send_stamped_asyncio": Action(None, send_stamped_asyncio),
    "listen": Action(listen, listen_asyncio, reads=True),
    "listen_asyncio": Action(None, listen_asyncio, reads=True),
    "drain_bodies": Action(drain_bodies, drain_bodies_asyncio, reads=True),
    "drain_fields": Action(drain_fields, drain_fields_asyncio, reads=True),
}


def is_blocking(system: str, action: Action) -> bool | None:
    """Returns which client of a system does an action; None if it has none for it."""
    if action.blocking is not None and system in BLOCKING:
        return True
    return False if action.asyncio is not None and system in ASYNCIO else None


def main() -> None:
    """Does what the command line says."""
    system, name, kind, address, messages, topics = sys.argv[1:]
    task = Task(make_orders(kind), int(messages), topic_names(int(topics)))
    action = ACTIONS[name]
    if is_blocking(system, action):
        assert action.blocking is not None
        client = BLOCKING[system](address, action.reads, task.topics)
        begin = _begin()
        latencies_us = action.blocking(client, task)
        report = _report(begin, latencies_us, client)
        client.close()
    else:
        report = asyncio.run(_run_asyncio(action, ASYNCIO[system](address), task))
    print(json.dumps(report), flush=True)


async def _run_asyncio(action: Action, client: AsyncioClient, task: Task) -> dict[str, Any]:
    assert action.asyncio is not None
    await client.open(reads=action.reads)
    begin = await asyncio.to_thread(_begin)
    report = _report(begin, await action.asyncio(client, task), client)
    await client.close()
    return report


def _begin() -> tuple[float, float]:
    print("ready", flush=True)
    sys.stdin.readline()
    return time.monotonic(), _cpu_s()


def _report(
    begin: tuple[float, float], latencies_us: list[float], client: Client | AsyncioClient
) -> dict[str, Any]:
    begin_s, used_s = begin
    return {
        "begin_s": client.first_message_s or begin_s,
        "end_s": time.monotonic(),
        "cpu_s": _cpu_s() - used_s,
        "latencies_us": latencies_us,
    }


def _stamped(order: Order) -> Order:
    stamp = _SENT_AT.pack(time.monotonic_ns())
    return order._replace(body=stamp + order.body[len(stamp) :])


def _on_its_way_us(body: bytes) -> float:
    return _since_us(_SENT_AT.unpack_from(body)[0])


def _since_us(begin_ns: int) -> float:
    return (time.monotonic_ns() - begin_ns) / 1_000


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
