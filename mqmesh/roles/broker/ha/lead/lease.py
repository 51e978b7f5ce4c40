"""Until when a replica is sure that nobody takes it for gone: its session's lease. Pure.

Renewals come from the broker's own loop, so that a broker that hangs loses its lease. A lease
counts from the time of the request for its renewal, by a clock that goes on while the machine
sleeps (``Clock.boot_ms``).

With copies that confirm the lease decides nothing: no follower confirms for an old leader.
Without them (``none``) it bounds what may be lost, so that a leader without it answers nothing.
"""

from typing import Final

import msgspec

RENEWALS: Final = 4
"""Renewals that are asked for within the lease."""
ISOLATED_MS: Final = 300
"""A leader stops so long before its lease may be over elsewhere."""
RETRY_MS: Final = 500
"""After the coordinator could not be asked for a session."""


class SessionLease(msgspec.Struct):
    """One replica's lease; all times are of the clock since boot.

    Attributes:
        ttl_ms: It ends so long after the last renewal (lease_ttl_ms).
        deadline_ms: When it ends, by what is known; 0 before there was one.
        renew_ms: When it is renewed next, or asked for.
        requested_ms: When it was asked for, while the answer is on its way.
    """

    ttl_ms: int
    deadline_ms: int = 0
    renew_ms: int = 0
    requested_ms: int | None = None

    def must_ask(self, now_ms: int) -> bool:
        """Return whether to ask for a session, or its renewal, now; one at a time."""
        if self.requested_ms is not None or now_ms < self.renew_ms:
            return False
        self.requested_ms = now_ms
        self.renew_ms = now_ms + self.ttl_ms // RENEWALS
        return True

    def change_ttl(self, ttl_ms: int) -> None:
        """Sessions last for another time from now on; the next one is to be begun at once."""
        self.ttl_ms, self.renew_ms = ttl_ms, 0

    def on_beginning(self) -> None:
        """A session is asked for in place of another: the shorter time counts from now on."""
        assert self.requested_ms is not None, "a session that nobody asked for"
        self.deadline_ms = min(self.deadline_ms, self.requested_ms + self.ttl_ms)

    def on_begun(self) -> None:
        """A session has begun, at the earliest when it was asked for."""
        assert self.requested_ms is not None, "a session that nobody asked for"
        self.on_renewed(self.requested_ms + self.ttl_ms)

    def on_renewed(self, deadline_ms: int) -> None:
        """Extend the lease to a deadline; an earlier one changes nothing."""
        self.requested_ms = None
        self.deadline_ms = max(self.deadline_ms, deadline_ms)

    def on_not_begun(self, now_ms: int) -> None:
        """Ask for a session again after a while, since there is none."""
        self.requested_ms, self.renew_ms = None, now_ms + RETRY_MS

    def on_not_renewed(self) -> None:
        """The coordinator could not be asked: the lease holds for as long as it did."""
        self.requested_ms = None

    def on_lost(self) -> None:
        """The session has ended: others may know it already."""
        self.requested_ms, self.renew_ms, self.deadline_ms = None, 0, 0

    def give_up(self, until_ms: int) -> None:
        """End the lease on purpose, and ask for none until then."""
        self.deadline_ms, self.renew_ms = 0, until_ms

    def holds(self, now_ms: int) -> bool:
        """Return whether nobody takes this replica for gone, with time to spare."""
        return now_ms < self.deadline_ms - ISOLATED_MS
