"""Latency fault tolerance: which broker to avoid for a while. Pure.

Source: semantics, chapter 5.
"""

from typing import Final

LATENCY_MS: Final = (50, 100, 550, 1_000, 2_000, 3_000, 15_000)
NOT_AVAILABLE_MS: Final = (0, 0, 30_000, 60_000, 120_000, 180_000, 600_000)
ISOLATION_MS: Final = 30_000
"""How long an exception keeps a broker away."""


def not_available_ms(latency_ms: int) -> int:
    """How long a broker that took so long for a send should be avoided, in ms."""
    for limit_ms, duration_ms in zip(reversed(LATENCY_MS), reversed(NOT_AVAILABLE_MS), strict=True):
        if latency_ms >= limit_ms:
            return duration_ms
    return 0


class FaultTable:
    """Until when each broker is to be avoided."""

    def __init__(self) -> None:
        self._until_ms: dict[str, int] = {}

    def on_sent(self, broker_name: str, latency_ms: int, now_ms: int) -> None:
        """Takes note of an answered send."""
        duration_ms = not_available_ms(latency_ms)
        if duration_ms:
            self._until_ms[broker_name] = now_ms + duration_ms
        else:
            self._until_ms.pop(broker_name, None)

    def on_failed(self, broker_name: str, now_ms: int) -> None:
        """Takes note of a send that failed."""
        self._until_ms[broker_name] = now_ms + ISOLATION_MS

    def is_available(self, broker_name: str, now_ms: int) -> bool:
        """False while the broker is to be avoided."""
        return self._until_ms.get(broker_name, 0) <= now_ms
