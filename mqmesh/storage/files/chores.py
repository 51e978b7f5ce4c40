"""The thread for calls that take long and that nobody waits for.

Allocating a segment, saving the queue table, syncing consume queues: calls that
let go of the GIL for milliseconds to seconds. They are done one after another,
in the order they were asked for.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Chores:
    """One helper thread and its list of things to do; the askers bound the list."""

    def __init__(self, name: str) -> None:
        """Starts the thread.

        Args:
            name: Of the thread.
        """
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Has something done.

        Args:
            task: Touches nothing that another thread changes.

        Returns:
            Its outcome, to be polled; an exception of the task is kept there.
        """
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Does what was asked for, then ends the thread."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except Exception as error:
                # The caller gets it from the future.
                future.set_exception(error)
