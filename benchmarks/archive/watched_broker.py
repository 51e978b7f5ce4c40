"""A broker that notes when its loop is held up: ``python watched_broker.py FILE broker --set …``.

It is the broker of ``mqmesh broker``; only a timer is added to its event loop, which looks at the
clock each millisecond. When a look comes a millisecond too late or more, something has held the
loop up: work in its own thread, another thread with the interpreter's lock, or the kernel, which
gave the processor to other processes. The kernel counts the latter (``schedstat``), so it can be
told apart. A line each: when (s, monotonic clock), how late (ms), waiting for a processor (ms).
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

from mqmesh.cli.entry import main
from mqmesh.transport.zmq.loop import EventLoop

EVERY_MS: Final = 1
NOTED_MS: Final = 1.0


class Watch:
    """Looks at the clock, and notes when it could not.

    Args:
        path: Gets the lines.
    """

    def __init__(self, path: Path) -> None:
        self._notes = path.open("a", encoding="ascii", buffering=1)
        self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._looked_s, self._queued_ms = time.monotonic(), self._queued()

    def look(self) -> None:
        """Called each ``EVERY_MS``, or later."""
        now_s, queued_ms = time.monotonic(), self._queued()
        late_ms = (now_s - self._looked_s) * 1_000 - EVERY_MS
        if late_ms >= NOTED_MS:
            self._notes.write(f"{now_s:.6f} {late_ms:.3f} {queued_ms - self._queued_ms:.3f}\n")
        self._looked_s, self._queued_ms = now_s, queued_ms

    def _queued(self) -> float:
        return int(os.pread(self._schedule, 80, 0).split()[1]) / 1e6


def run_watched(path: Path) -> None:
    """Has every event loop that is run in this process watched."""
    run = EventLoop.run

    def watched(loop: EventLoop) -> None:
        loop.call_every(EVERY_MS, Watch(path).look)
        run(loop)

    EventLoop.run = watched


if __name__ == "__main__":
    run_watched(Path(sys.argv.pop(1)))
    sys.exit(main())
