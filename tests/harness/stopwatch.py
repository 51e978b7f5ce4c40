"""Seconds that something took, without those in which the machine was busy with others."""

import time
from typing import Final

_MOST_SHARE: Final = 0.8
"""Most of a span that counts as the machine's: a bound is at most five times as wide."""


class Stopwatch:
    """Runs from the moment it is made.

    The kernel counts how long a runnable task waited for a processor, and any task for a disk
    (pressure stall information, Linux 4.20). A bound of two seconds is one of two seconds on a
    quiet machine; beside busy programs what was lost to them does not count. Where the kernel
    does not report this, all counts.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stalled = _stalled_s()

    @property
    def seconds(self) -> float:
        """Seconds since it was made, as long as the machine was ready."""
        took = time.monotonic() - self._began
        return took - min(_stalled_s() - self._stalled, took * _MOST_SHARE)


def _stalled_s() -> float:
    return sum(_total_us(f"/proc/pressure/{kind}") for kind in ("cpu", "io")) / 1e6


def _total_us(path: str) -> int:
    """Returns the last number of the line `some avg10=… avg60=… avg300=… total=…`."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.readline().rpartition("=")[2])
    except (OSError, ValueError):
        return 0  # an older kernel, or PSI is off
