"""Choice of the replica of a broker group that a queue is read from. Pure.

The master says when another replica is the better one. After any error of that replica pulls go to
the master again, and for a while its advice is ignored.
"""

from typing import Final, Protocol

from mqmesh.clock import Clock
from mqmesh.transport.interface import OnDone

MASTER_ID: Final = 0
ADVICE_MS: Final = 30_000
"""Time after which a pull goes to the master again, which may have other advice by then."""


class ReplicaNetwork(Protocol):
    """Network of a pull loop that reads from followers.

    Attributes:
        clock: Source of time.
    """

    clock: Clock

    def request(
        self,
        broker_name: str,
        broker_id: int,
        code: int,
        on_done: OnDone,
        *,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Asks a follower; the outcome, bad or good, goes to ``on_done``."""


class ReplicaChoice:
    """The choice for one queue.

    Args:
        clock: Source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replica = MASTER_ID
        self._until_ms = 0
        self._deaf_until_ms = 0

    def replica(self) -> int:
        """Return the broker id of the replica that the next pull goes to; 0 for the master."""
        if self._replica != MASTER_ID and self._clock.monotonic_ms() >= self._until_ms:
            self._replica = MASTER_ID
        return self._replica

    def advised(self, broker_id: int) -> None:
        """Note the replica that the master's answer advises to read from."""
        if broker_id == MASTER_ID:
            return  # nearly always
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._deaf_until_ms:
            self._replica, self._until_ms = broker_id, now_ms + ADVICE_MS

    def disappointed(self) -> None:
        """Note that the replica did not serve a pull."""
        self._replica = MASTER_ID
        self._deaf_until_ms = self._clock.monotonic_ms() + ADVICE_MS

    def return_to_master(self) -> None:
        """Return to the master, which has to see that the queue goes on elsewhere."""
        self._replica = MASTER_ID
