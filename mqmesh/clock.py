"""Clocks: where time comes from.

Three clocks, because they answer different questions: the monotonic one measures
waits, leases and deadlines and never jumps; the wall clock labels messages and
may be stepped by an administrator. The boot clock is the monotonic one of machines that
sleep: it goes on meanwhile, so it measures what others grant for a time.
"""

import time
from typing import Protocol

from mqmesh.units import TimestampMs


class Clock(Protocol):
    """A source of time. The twin for tests is ``mqmesh.testing.clock.ManualClock``."""

    def monotonic_ms(self) -> int:
        """Milliseconds from an arbitrary origin; never goes back."""

    def monotonic_ns(self) -> int:
        """Return the same in nanoseconds."""

    def boot_ms(self) -> int:
        """Milliseconds from an arbitrary origin; the machine's sleep counts, too."""

    def wall_ms(self) -> TimestampMs:
        """Milliseconds since 1970-01-01 UTC; may jump."""

    def wall_ns(self) -> int:
        """Return the same in nanoseconds."""


class SystemClock:
    """The machine's own clocks."""

    # The interpreter's own functions: code that reads the clock per message saves a call.
    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def monotonic_ms(self) -> int:
        """Milliseconds of the system's monotonic clock."""
        return time.monotonic_ns() // 1_000_000

    def boot_ms(self) -> int:
        """Milliseconds since the machine's start."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def wall_ms(self) -> TimestampMs:
        """Milliseconds of the system's wall clock."""
        return TimestampMs(time.time_ns() // 1_000_000)
