"""A token bucket that may run into debt. Pure.

A request is served while the bucket is not empty, even if it takes more pieces than are left; the
next one waits until the debt is paid. So no request is ever too large, and over time the rate is
never exceeded.
"""

from typing import Final

_MS: Final = 1_000


class TokenBucket:
    """Token bucket: limits a rate.

    Args:
        rate: Pieces a second, from 1; a second's worth is there at first, and at most.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._left = float(rate)
        self._at_ms = 0

    def wait_ms(self, now_ms: int) -> int:
        """Return the ms until a piece may be taken by the monotonic clock, 0 if one may now."""
        self._left = min(self.rate, self._left + (now_ms - self._at_ms) * self.rate / _MS)
        self._at_ms = now_ms
        return 0 if self._left > 0 else int(-self._left * _MS / self.rate) + 1

    def take(self, pieces: int) -> None:
        """Takes so many pieces, even if that leaves a debt."""
        self._left -= pieces
