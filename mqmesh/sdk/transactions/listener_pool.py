"""Threads that call users' code, of which some may never come back."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.failure_text import error_to_log
from mqmesh.transport.interface import Loop

GROW_MS: Final = 20
"""Time without a beginning, although something waits, after which a thread is started."""

_log = logging.getLogger(__name__)


class ListenerPool:
    """Pool that runs tasks in a few threads; it starts more when those that it has hang.

    Threads are daemons: a task that hangs does not keep a program from ending.

    Args:
        name: Of the threads.
        most: Most threads.
        loop: Looks after them while something waits; one that idles is not woken.
    """

    def __init__(self, name: str, most: int, loop: Loop) -> None:
        self._name = name
        self._most = most
        self._loop = loop
        self._tasks: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._begun = 0
        self._begun_before = -1
        self._watched = False
        self._closed = False
        self._logged_ms = 0

    @property
    def waiting(self) -> int:
        """Tasks that no thread has begun."""
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> None:
        """Runs something soon, in some thread; from any thread. Nothing happens after ``close``."""
        with self._ready:
            if self._closed:
                return
            self._tasks.append(task)
            if self._idle:
                self._ready.notify()
            elif not self._threads:
                self._start()
            if not self._watched:
                self._loop.call_soon_threadsafe(self._watch)
                self._watched = True

    def _watch(self) -> None:
        self._loop.call_later(GROW_MS, self._look)

    def _look(self) -> None:
        # Starts another thread if the others do not come to waiting tasks.
        with self._ready:
            self._watched = bool(self._tasks)
            if not self._watched:
                return
            self._watch()
            stuck = not self._idle and self._begun == self._begun_before
            self._begun_before = self._begun
            if not stuck:
                return
            if self._threads < self._most:
                self._start()
                return
            now_ms = self._loop.clock.monotonic_ms()
            if now_ms - self._logged_ms > 10_000:
                self._logged_ms = now_ms
                _log.error(
                    "all %d threads %s are busy or hang, %d tasks wait",
                    self._threads,
                    self._name,
                    len(self._tasks),
                )

    def close(self) -> None:
        """Ends the threads as they come back; waiting tasks are dropped."""
        with self._ready:
            self._closed = True
            self._tasks.clear()
            self._ready.notify_all()

    def _start(self) -> None:
        self._threads += 1
        name = f"{self._name}-{self._threads}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        tasks = self._tasks
        while True:
            try:
                task = tasks.popleft()
            except IndexError:
                if not self._wait():
                    return
                continue
            self._begun += 1
            try:
                task()
            except BaseException:
                # After any error, SystemExit too, the other tasks must run.
                _log.error("a task of %s failed", self._name, exc_info=error_to_log())

    def _wait(self) -> bool:
        with self._ready:
            self._idle += 1
            while not self._tasks and not self._closed:
                self._ready.wait()
            self._idle -= 1
            return not self._closed
