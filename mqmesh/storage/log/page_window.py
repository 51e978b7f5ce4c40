"""Pages ahead of the end of the log, brought in before they are written.

A store into a page that is not in memory waits for the kernel, and holds the interpreter's lock
meanwhile. So a thread brings pages in, a window ahead of the end. The window doubles, up to its
limit, whenever the log has caught up with it. It is given back when nothing was stored for a while.
Without a ready page a write is a call instead; both ways may be mixed freely.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Final

from mqmesh.batch.payload import Buffer
from mqmesh.storage.log.mapped_file import MappedFile
from mqmesh.units import KIB

log = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 256 * KIB
"""First size of the window."""
STEP_BYTES: Final = 256 * KIB
"""Bytes brought in by one call: it takes a fraction of a millisecond, or some milliseconds on hosts
that hand out memory slowly."""


class _Stretch:
    """A window over one file.

    Attributes:
        mapped: The file.
        ready: File position up to which pages are in memory. Only the thread writes it.
        target: File position up to which pages are wanted.
    """

    __slots__ = ("mapped", "ready", "target")

    def __init__(self, mapped: MappedFile, start: int) -> None:
        self.mapped = mapped
        self.ready = start
        self.target = start


class PageWindow:
    """The window, and the thread that moves it; there is no thread before it is needed.

    Attributes:
        size: Size of the window, in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        """Begins without a file.

        Args:
            most_bytes: Limit of the window's size; 0 for no window at all.
        """
        self._most = most_bytes
        self.size = min(SMALLEST_BYTES, most_bytes)
        self._stretch: _Stretch | None = None
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._work: _Stretch | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def store(
        self, mapped: MappedFile, position: int, pieces: Sequence[Buffer], end: int, stop: int
    ) -> bool:
        """Puts buffers into a file if that needs no wait, and then does as ``follow``.

        Args:
            mapped: The file that is written.
            position: Position of the first byte, in the file.
            pieces: The buffers, one behind the other.
            end: Position behind the last byte.
            stop: Position up to which the file has room for more.

        Returns:
            False if their pages were not ready; then nothing was written.
        """
        stretch = self._stretch
        if stretch is None or stretch.mapped is not mapped or end > stretch.ready:
            return False
        mapped.store(position, pieces)
        if stretch.target - end <= self.size // 2 and stretch.target < stop:
            self.follow(mapped, end, stop)
        return True

    def follow(self, mapped: MappedFile, position: int, stop: int) -> None:
        """Brings pages in behind the written bytes, in the thread, if less than half are ready.

        Args:
            mapped: The file that is written.
            position: End of the written bytes, in the file.
            stop: Position up to which the file has room for more; nothing behind it is touched.
        """
        size = self.size
        if not size:
            return
        stretch = self._stretch
        if stretch is None or stretch.mapped is not mapped:
            stretch = self._stretch = _Stretch(mapped, position)
        elif stretch.target - position > size // 2 or stretch.target >= stop:
            return
        elif stretch.ready <= position < stretch.target:
            # The log has caught up with the thread while it worked: it must begin sooner.
            self.size = size = min(2 * size, self._most)
        if stretch.ready < position:
            stretch.ready = position
        stretch.target = min(position + size, stop)
        self._bring_in(stretch)

    def give_back(self) -> None:
        """Releases the pages, since nothing is written for now."""
        stretch, self._stretch = self._stretch, None
        self.size = min(SMALLEST_BYTES, self._most)
        if stretch is None:
            return
        with self._condition:
            self._work = None
        stretch.target = stretch.ready
        stretch.mapped.give_back(0, stretch.mapped.size)

    def close(self) -> None:
        """Ends the thread and forgets the file."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
        self._stretch = self._work = None

    def _bring_in(self, stretch: _Stretch) -> None:
        with self._condition:
            self._work = stretch
            self._condition.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mqmesh-pages", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (stretch := self._next()) is not None:
            if not self._fill(stretch):
                log.info("pages of the log cannot be brought in ahead, it is written by calls")
                self._most = self.size = 0
                stretch.ready = 0

    def _next(self) -> _Stretch | None:
        with self._condition:
            while self._work is None and not self._closing:
                self._condition.wait()
            work, self._work = self._work, None
            return None if self._closing else work

    def _fill(self, stretch: _Stretch) -> bool:
        while stretch.ready < stretch.target and not self._closing:
            position = stretch.ready
            stop = min(position + STEP_BYTES, stretch.target)
            if not stretch.mapped.bring_in(position, stop):
                return False
            stretch.ready = stop
        return True
