"""Hands outcomes from a client's thread to an asyncio loop, many at one wake-up."""

import asyncio
import threading
from collections import deque
from typing import Any

from mqmesh.errors import InvalidArgument


class Completions:
    """Sets asyncio futures from another thread.

    Waking an event loop costs more than a message; outcomes that come together, as those
    of a batch do, share one wake-up.

    Args:
        loop: The event loop that the futures belong to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._done: deque[asyncio.Future[Any]] = deque()

    def new_future(self) -> asyncio.Future[None]:
        """A future to wait for in the running event loop.

        Raises:
            InvalidArgument: That is another event loop.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument("a client can be used only in the event loop it was started in")
        return self._loop.create_future()

    def add(self, future: asyncio.Future[Any]) -> None:
        """Marks a future as done, soon; from any thread."""
        with self._lock:
            self._done.append(future)
            if len(self._done) > 1:
                return
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:
            # The event loop was closed: nobody waits any more.
            with self._lock:
                self._done.clear()

    def _flush(self) -> None:
        with self._lock:
            done, self._done = self._done, deque()
        for future in done:
            if not future.done():
                future.set_result(None)
