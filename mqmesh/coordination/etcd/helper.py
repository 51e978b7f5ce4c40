"""The helper thread that queries etcd, and hands the outcomes to the loop."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from mqmesh.coordination.interface import CoordinatorUnavailable, OnDone, OutcomeUnknown
from mqmesh.errors import MQMeshError
from mqmesh.transport.interface import Timer, Transport

MAX_CALLS: Final = 256
"""Limit of the calls that wait or are made."""
MAX_SLACK_MS: Final = 100
"""Longest time before the timeout at which the thread gives up, to report an error of its own."""

_T = TypeVar("_T")


class Helper:
    """Queue of calls in one thread, made one by one; each has an outcome in time.

    Args:
        transport: Transport whose loop runs the callbacks; it has threads.
        timeout_ms: Time for each call, from its request on.
        interrupt: Ends the thread's wait.
        end: Called last, in the thread.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_ms: int,
        interrupt: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._loop = transport.loop
        self._clock = transport.clock
        self._timeout_ms = timeout_ms
        self._interrupt = interrupt
        self._end = end
        self._thread = transport.executor("etcd")
        self._open: dict[Future[Any], tuple[Timer, bool]] = {}
        self._closed = False

    def ask(
        self,
        job: Callable[[int], _T],
        on_done: OnDone[_T],
        *,
        changes: bool = False,
        outlives: bool = False,
    ) -> None:
        """Queues a call.

        Args:
            job: Called with its deadline, monotonic clock; raises ``MQMeshError``.
            on_done: Called with the outcome in the loop, never before this returns.
            changes: Its outcome is unknown when its time is over and it had begun.
            outlives: The call is made after ``close``, too, if there is time.
        """
        if self._closed:
            return
        if len(self._open) >= MAX_CALLS:
            busy = CoordinatorUnavailable(f"{MAX_CALLS} calls wait for etcd already")
            self._loop.call_later(0, partial(self._finish, on_done, busy))
            return
        slack_ms = min(self._timeout_ms // 10, MAX_SLACK_MS)
        deadline_ms = self._clock.monotonic_ms() + self._timeout_ms - slack_ms
        future: Future[_T] = self._thread.submit(job, deadline_ms)
        late = partial(self._late, future, on_done, changes=changes)
        self._open[future] = (self._loop.call_later(self._timeout_ms, late), outlives)
        done = partial(self._done, future, on_done)
        future.add_done_callback(lambda future: self._pass_on(done))

    def close(self) -> None:
        """Ends all callbacks; calls that do not outlive this are not begun."""
        if self._closed:
            return
        self._closed = True
        for future, (timer, outlives) in self._open.items():
            timer.cancel()
            if not outlives:
                future.cancel()
        self._open.clear()
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _pass_on(self, done: Callable[[], None]) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(done)

    def _done(self, future: "Future[_T]", on_done: OnDone[_T]) -> None:
        if self._closed or future not in self._open:
            return  # its time was over before
        timer, _ = self._open.pop(future)
        timer.cancel()
        error = future.exception()
        if error is None:
            on_done(future.result())
        elif isinstance(error, MQMeshError):
            on_done(error)
        else:
            raise error

    def _late(self, future: "Future[_T]", on_done: OnDone[_T], *, changes: bool) -> None:
        if self._closed or future.done():
            return  # its outcome is on its way
        del self._open[future]
        was_begun = not future.cancel()
        if was_begun:
            self._interrupt()  # a member sends it a byte now and then
        reason = f"no answer of etcd within {self._timeout_ms} ms"
        if changes and was_begun:
            on_done(OutcomeUnknown(f"whether the change was made is unknown: {reason}"))
        else:
            on_done(CoordinatorUnavailable(reason))

    def _finish(self, on_done: OnDone[_T], outcome: _T | MQMeshError) -> None:
        if not self._closed:
            on_done(outcome)
