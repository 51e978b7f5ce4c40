"""Transfer of outcomes from a client loop to an asyncio loop, many at one wake-up."""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final

from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.send_result import SendFuture, SendResult, make_result
from mqmesh.transport.interface import Channel

MAX_CHANNELS_READ: Final = 64
"""Channels whose descriptors are kept; beyond it they are forgotten and made anew."""


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


class AwaitedSend(asyncio.Future[SendResult], Coroutine[Any, Any, SendResult]):
    """Outcome of a send, to be awaited: a future that is also a coroutine.

    ``asyncio.gather`` makes a task of each coroutine, which costs three times as much as a send;
    a future it takes as it is. As a coroutine it may be given to ``create_task``, too.
    """

    __slots__ = ()

    def send(self, value: object) -> Any:
        """Wait as a coroutine does: yields the future until it is done."""
        if self.done():
            raise StopIteration(self.result())
        self._asyncio_future_blocking = True
        return self

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        """Raise an error where it is awaited, as a coroutine does."""
        raise kind

    def close(self) -> None:
        """Do nothing: the message is sent."""


class AnswerReader:
    """Reader of answers in an event loop, which spares them the way through the client loop.

    Args:
        loop: The event loop; all methods are for its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._descriptors: dict[Channel, int] = {}

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        """Calls back once when a channel may have a response; see ``Transport.watch``."""
        descriptor = self._descriptors.get(channel)
        if descriptor is None:
            if len(self._descriptors) >= MAX_CHANNELS_READ:
                self.close()
            # Its own, because the channel may be closed before the event loop forgets it.
            descriptor = self._descriptors[channel] = os.dup(channel.fileno())
        self._loop.add_reader(descriptor, self._take, descriptor, callback)

    def _take(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._loop.remove_reader(descriptor)
        callback()

    def close(self) -> None:
        """Watch nothing any more."""
        for descriptor in self._descriptors.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()


class Completions:
    """Setter of asyncio futures from another thread.

    Waking an event loop costs more than a message; outcomes that come together, as those
    of a batch do, share one wake-up.

    Args:
        loop: The event loop that the futures belong to.

    Attributes:
        loop: The same.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = ranked_lock(LockRank.LEAF)
        self._done: deque[asyncio.Future[Any] | PendingBatch] = deque()
        # Of the event loop only: futures that wait for messages of a batch, and their positions.
        self._waiting: dict[PendingBatch, list[tuple[AwaitedSend, int]]] = {}

    def new_future(self) -> asyncio.Future[None]:
        """Return a future to wait for in the running event loop.

        Raises:
            InvalidArgument: That is another event loop.
        """
        self.check_loop()
        return self.loop.create_future()

    def check_loop(self) -> None:
        """Checks that the running event loop is the one of the futures.

        Raises:
            InvalidArgument: It is another one.
        """
        check_loop(self.loop)

    def wait_for(self, sent: SendFuture) -> AwaitedSend:
        """Return the outcome of a send, to be awaited; one callback serves all of a batch.

        Called in the event loop that ``check_loop`` wants.
        """
        waiting = AwaitedSend(loop=self.loop)
        batch = sent.batch
        others = self._waiting.get(batch)
        if others is None:
            self._waiting[batch] = [(waiting, sent.index)]
            sent.add_done_callback(self._on_sent)
        else:
            # Not reported yet: that happens in this event loop, and takes them all out.
            others.append((waiting, sent.index))
        return waiting

    def failed(self, error: MQMeshError) -> AwaitedSend:
        """Return the outcome of a send that could not even begin."""
        waiting = AwaitedSend(loop=self.loop)
        waiting.set_exception(error)
        return waiting

    def add(self, future: asyncio.Future[Any]) -> None:
        """Marks a future as done, soon; from any thread."""
        self._add(future)

    def _on_sent(self, sent: SendFuture) -> None:
        if self._reads_here():
            self._end(sent.batch, self._waiting.pop(sent.batch))
        else:
            self._add(sent.batch)

    def _reads_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _add(self, one: asyncio.Future[Any] | PendingBatch) -> None:
        with self._lock:
            self._done.append(one)
            if len(self._done) > 1:
                return
        try:
            self.loop.call_soon_threadsafe(self._flush)
        except RuntimeError:
            # The event loop was closed: no task waits any more.
            with self._lock:
                self._done.clear()

    def _flush(self) -> None:
        with self._lock:
            done, self._done = self._done, deque()
        for one in done:
            if isinstance(one, PendingBatch):
                self._end(one, self._waiting.pop(one))
            elif not one.done():
                one.set_result(None)

    def _end(self, batch: PendingBatch, waiting: list[tuple[AwaitedSend, int]]) -> None:
        for future, index in waiting:
            if future.done():
                continue  # its sender was cancelled
            if batch.error is None:
                future.set_result(make_result(batch, index))
            else:
                future.set_exception(batch.error.with_traceback(None))
