"""Detection of work that delayed other threads, by the time that they waited for a processor."""

import os
import time
from pathlib import Path
from typing import Final

CROWDED: Final = 0.2
"""Part of the time spent waiting for a processor, from which on the machine is crowded."""

_PRESSURE: Final = Path("/proc/pressure/cpu")


class CpuPressure:
    """Measures one piece of work, from now on.

    Linux counts the time in which any task of the machine waits for a processor
    (Documentation/accounting/psi.rst). On other systems only the waits of this process can be
    measured: its work took longer than its own computing time.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._computed_s = time.process_time()
        self._waited_us = waited_us()

    def end(self) -> tuple[int, bool]:
        """Return the time that the work took, in ms, rounded up, and if the machine is crowded."""
        took_s = time.perf_counter() - self._began_s
        waited_s = took_s - (time.process_time() - self._computed_s)
        now_us = waited_us()
        if now_us is not None and self._waited_us is not None:
            waited_s = max(waited_s, (now_us - self._waited_us) / 1e6)
        return int(took_s * 1_000) + 1, waited_s > CROWDED * took_s


def waited_us() -> int | None:
    """Return the time that tasks have waited since the system's start; None if not counted."""
    try:
        # Read without a text file: this function runs several hundred times a second.
        descriptor = os.open(_PRESSURE, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 4_096).decode()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    _, _, total = text.partition("\n")[0].partition("total=")
    return int(total) if total.isdecimal() else None
