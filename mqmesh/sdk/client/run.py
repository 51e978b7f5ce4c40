"""Runner of consumers until the process gets a signal to end."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, Final, Protocol

from mqmesh.errors import ClientClosed, InvalidArgument
from mqmesh.sdk.client.interrupt import SIGNALS, Interrupt

LOOK_S: Final = 1.0
"""Interval of checks whether the program has closed the clients meanwhile."""


class Runnable(Protocol):
    """A consumer, or a producer that answers check-backs."""

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the client loop died."""

    def start(self) -> None:
        """Connects."""

    def close(self) -> None:
        """Ends the work, and closes."""


class AsyncRunnable(Protocol):
    """The same for asyncio."""

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the client loop died."""

    async def start(self) -> None:
        """Connects."""

    async def close(self) -> None:
        """Ends the work, and closes."""


def run(*clients: Runnable) -> None:
    """Starts clients, waits for SIGINT or SIGTERM, and closes them in order.

    Consumers end the calls that run, within ``close_timeout_ms``, and commit. A second Ctrl-C
    ends the process at once. It also returns when the program has closed all the clients.

    Args:
        clients: Push consumers, and producers; they are closed in the opposite order.

    Raises:
        InvalidArgument: There is no client, or this is not the main thread, where alone signals
            can be handled; use ``with`` elsewhere.
        MQMeshError: As for ``start``.
    """
    _check(clients)
    with Interrupt() as interrupt, ExitStack() as stack:
        for client in clients:
            stack.callback(client.close)
            with _unless_closed_meanwhile(client):
                client.start()
        while not interrupt.wait(LOOK_S) and not all(client.closed for client in clients):
            pass


async def run_async(*clients: AsyncRunnable) -> None:
    """Run clients in this event loop, as ``mqmesh.run``; also until the task is cancelled."""
    _check(clients)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def note() -> None:
        stopping.set()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends the process

    for number in SIGNALS:
        loop.add_signal_handler(number, note)
    try:
        async with AsyncExitStack() as stack:
            for client in clients:
                stack.push_async_callback(client.close)
                with _unless_closed_meanwhile(client):
                    await client.start()
            while not stopping.is_set() and not all(client.closed for client in clients):
                try:
                    async with asyncio.timeout(LOOK_S):
                        await stopping.wait()
                except TimeoutError:
                    continue
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def _unless_closed_meanwhile(client: Runnable | AsyncRunnable) -> Iterator[None]:
    """Suppress the error of a client closed while it starts: it ends as one closed later."""
    was_closed = client.closed
    try:
        yield
    except ClientClosed:
        if was_closed or not client.closed:
            raise


def _check(clients: tuple[Any, ...]) -> None:
    if not clients:
        raise InvalidArgument("there is no client to run")
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgument(
            "run() handles signals, which only the main thread can; use 'with' in this one"
        )
