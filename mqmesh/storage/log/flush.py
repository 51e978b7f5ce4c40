"""The flush thread: makes the commit log durable, and reports how far it is durable.

``os.fdatasync`` releases the GIL, so the event loop goes on meanwhile. Bytes that the loop writes
during one sync are covered by the next: group commit.
A failed sync is final. The system has thrown the pages away, and a second call might report
success; so the thread ends, and the store stops.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from mqmesh.storage.interface import Wake

log = logging.getLogger(__name__)

Sync = Callable[[int], None]
"""Makes a descriptor's data durable; tests put a failing function in the place of the system's."""

SYSTEM_SYNC: Final[Sync] = os.fdatasync


class Flusher:
    """One thread that syncs when requested, or at most an interval after a write.

    Attributes:
        durable_offset: Commit-log offset before which every byte is on disk. Only the thread
            writes it.
        error: Reason why the thread has ended, None while it works.
        flushes: Number of rounds of syncs.
    """

    def __init__(
        self,
        *,
        durable_offset: int,
        at_once: bool,
        interval_ms: int,
        wake: Wake,
        sync: Sync,
        note: Callable[[int], None] = lambda offset: None,
    ) -> None:
        """Starts the thread.

        Args:
            durable_offset: Commit-log offset before which every byte is on disk already.
            at_once: Sync after every write, instead of after the interval.
            interval_ms: Longest wait between a write and its sync.
            wake: Called on the thread after every round and after a failure.
            sync: Makes a descriptor's data durable: ``SYSTEM_SYNC``.
            note: Called with ``durable_offset`` on the thread after every round; must not raise.
        """
        self.durable_offset = durable_offset
        self.error: OSError | None = None
        self.flushes = 0
        self._at_once = at_once
        self._interval = interval_ms / 1000
        self._wake = wake
        self._sync = sync
        self._note = note
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        # Guarded by the condition:
        self._end = durable_offset
        self._fds: list[int] = []
        self._idle = False
        self._urgent = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mqmesh-flush", daemon=True)
        self._thread.start()

    def written(self, end: int, fds: list[int], *, urgent: bool = False) -> None:
        """Sets the end of the bytes that are written.

        Args:
            end: Commit-log offset behind the last written byte.
            fds: Descriptors with bytes that are not yet durable; open until they are.
            urgent: True to sync without waiting for the interval.
        """
        with self._lock:  # the condition's own, without two calls for each write
            self._end = end
            self._fds = fds
            if urgent:
                self._urgent = True
            if urgent or self._idle:
                self._condition.notify()

    def close(self) -> None:
        """Syncs the rest, then ends the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            end, fds = work
            try:
                for fd in fds:
                    self._sync(fd)
            except OSError as error:
                log.critical("a sync of the commit log failed, the store stops: %s", error)
                self.error = error
                self._wake()
                return
            self.durable_offset = end
            self.flushes += 1
            self._note(end)
            self._wake()

    def _next(self) -> tuple[int, list[int]] | None:
        """Waits until there is something to sync; None when the thread must end."""
        with self._condition:
            while self._end == self.durable_offset:
                if self._closing:
                    return None
                self._idle = True
                self._condition.wait()
                self._idle = False
            if not self._at_once:
                self._condition.wait_for(self._must_flush, self._interval)
            self._urgent = False
            return self._end, self._fds

    def _must_flush(self) -> bool:
        return self._urgent or self._closing
