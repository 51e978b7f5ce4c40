"""The thread for calls that take long and that no caller waits for.

Allocating a segment, saving the queue table, syncing consume queues: calls that release the GIL
for milliseconds to seconds. They are done one after another, in the order of their requests.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Chores:
    """One helper thread and its list of tasks; the callers bound the list."""

    def __init__(self, name: str) -> None:
        """Starts the thread.

        Args:
            name: Name of the thread.
        """
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> "Future[T]":
        """Queues a task for the thread.

        Args:
            task: Function that uses nothing that another thread changes.

        Returns:
            Outcome of the task, to be polled; it keeps an exception of the task.
        """
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Does all requested tasks, then ends the thread."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except Exception as error:
                # The caller gets the error from the future.
                future.set_exception(error)
