"""A clock that stands still until a test moves it."""

from mqmesh.units import TimestampMs


class ManualClock:
    """The twin of ``mqmesh.clock.SystemClock`` for tests.

    Args:
        monotonic_ms: Start of the monotonic clock.
        wall_ms: Start of the wall clock, ms since 1970-01-01 UTC.
    """

    def __init__(self, monotonic_ms: int = 1_000, wall_ms: int = 1_600_000_000_000) -> None:
        self._monotonic_ms = monotonic_ms
        self._wall_ms = wall_ms

    def monotonic_ms(self) -> int:
        """Returns milliseconds of the monotonic clock."""
        return self._monotonic_ms

    def monotonic_ns(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return self._monotonic_ms * 1_000_000

    def boot_ms(self) -> int:
        """Returns milliseconds of the boot clock."""
        return self._monotonic_ms

    def wall_ms(self) -> TimestampMs:
        """Returns milliseconds of the wall clock."""
        return TimestampMs(self._wall_ms)

    def wall_ns(self) -> int:
        """Return nanoseconds of the wall clock."""
        return self._wall_ms * 1_000_000

    def advance(self, duration_ms: int) -> None:
        """Lets time pass on both clocks.

        Args:
            duration_ms: Duration, from 0 on.
        """
        assert duration_ms >= 0, "time does not go back; see jump_wall"
        self._monotonic_ms += duration_ms
        self._wall_ms += duration_ms

    def jump_wall(self, difference_ms: int) -> None:
        """Steps the wall clock alone, as an administrator may, forward or back."""
        self._wall_ms += difference_ms
