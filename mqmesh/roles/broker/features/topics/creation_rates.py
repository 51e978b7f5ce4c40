"""How many topics each client makes in a minute by messages to unknown ones. Pure.

Where users have names, all connections of one are one client. A bucket for each: full at
first, one piece for each topic, and filled again over a minute.
"""

from typing import Final

from mqmesh.errors import SystemBusy

MINUTE_MS: Final = 60_000
MAX_CLIENTS: Final = 65_536
"""Clients whose buckets are kept; of more, the one that made none for longest is forgotten."""


class CreationRates:
    """The buckets.

    Args:
        per_minute: Topics of one client (``auto_topics_per_minute``).
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._spent: dict[bytes, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._spent)

    def check(self, peer: bytes, now_ms: int) -> None:
        """Refuses a client that made too many; asked only before a topic is made.

        Args:
            peer: Its connection, or its user's name.
            now_ms: Monotonic clock.

        Raises:
            SystemBusy: It has to wait.
        """
        spent = self._left_of(peer, now_ms)
        if spent + 1 > self._per_minute:
            raise SystemBusy(
                f"this client made {self._per_minute} topics by messages to unknown ones, more "
                "than a minute's (auto_topics_per_minute); create them beforehand, or wait",
                retry_after_ms=int((spent + 1 - self._per_minute) * MINUTE_MS / self._per_minute)
                + 1,
            )

    def note(self, peer: bytes, now_ms: int) -> None:
        """A client made a topic."""
        spent = self._left_of(peer, now_ms)
        self._spent.pop(peer, None)
        self._spent[peer] = (spent + 1, now_ms)
        if len(self._spent) > MAX_CLIENTS:
            del self._spent[next(iter(self._spent))]

    def _left_of(self, peer: bytes, now_ms: int) -> float:
        """What counts still of what a client has spent."""
        spent, at_ms = self._spent.get(peer, (0.0, now_ms))
        return max(0.0, spent - (now_ms - at_ms) * self._per_minute / MINUTE_MS)
