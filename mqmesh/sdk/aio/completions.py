"""Transfer of outcomes from a client loop to an asyncio loop, many at one wake-up."""

import asyncio
from collections import deque
from typing import Any

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.send_result import SendFuture


def check_loop(own: asyncio.AbstractEventLoop | None) -> None:
    """Check that a client is used in the event loop that it was started in.

    Args:
        own: That event loop; None before the start.

    Raises:
        InvalidArgument: The running event loop is another one.
    """
    if own is not None and asyncio.get_running_loop() is not own:
        raise InvalidArgument(
            "a client can be used only in the event loop it was started in; close it, then it may "
            "be started in another one"
        )


class Completions:
    """Setter of asyncio futures from another thread.

    Waking an event loop costs more than a message; outcomes that come together, as those
    of a batch do, share one wake-up.

    Args:
        loop: The event loop that the futures belong to.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = ranked_lock(LockRank.LEAF)
        self._done: deque[asyncio.Future[Any] | PendingBatch] = deque()
        # Of the event loop only: futures that wait for the messages of a batch.
        self._waiting: dict[PendingBatch, list[asyncio.Future[None]]] = {}

    def new_future(self) -> asyncio.Future[None]:
        """Return a future to wait for in the running event loop.

        Raises:
            InvalidArgument: That is another event loop.
        """
        self.check_loop()
        return self._loop.create_future()

    def check_loop(self) -> None:
        """Checks that the running event loop is the one of the futures.

        Raises:
            InvalidArgument: It is another one.
        """
        check_loop(self._loop)

    def wait_for(self, sent: SendFuture) -> asyncio.Future[None]:
        """Return a future that is done soon after a send is; one callback serves all of a batch.

        Called in the event loop that ``check_loop`` wants.
        """
        waiting = self._loop.create_future()
        batch = sent.batch
        others = self._waiting.get(batch)
        if others is None:
            self._waiting[batch] = [waiting]
            sent.add_done_callback(self._on_sent)
        else:
            # Not reported yet: that happens in this event loop, and takes them all out.
            others.append(waiting)
        return waiting

    def add(self, future: asyncio.Future[Any]) -> None:
        """Marks a future as done, soon; from any thread."""
        self._add(future)

    def _on_sent(self, sent: SendFuture) -> None:
        self._add(sent.batch)

    def _add(self, one: asyncio.Future[Any] | PendingBatch) -> None:
        with self._lock:
            self._done.append(one)
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
        for one in done:
            for future in self._waiting.pop(one) if isinstance(one, PendingBatch) else (one,):
                if not future.done():
                    future.set_result(None)
