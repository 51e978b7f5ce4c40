"""A replica's session at the coordinator: begun, renewed, given up; the record is changed by it."""

import logging
from collections.abc import Callable
from functools import partial

from mqmesh.coordination.interface import (
    Coordinator,
    CoordinatorUnavailable,
    GroupState,
    OnDone,
    Presence,
    SessionId,
    SessionLost,
)
from mqmesh.errors import MQMeshError
from mqmesh.metrics import LATENCY_BOUNDS_MS, Distribution, Histogram
from mqmesh.roles.broker.ha.lead.lease import SessionLease
from mqmesh.roles.broker.ha.member.process import World

_log = logging.getLogger(__name__)


class ReplicaSession:
    """One replica's session, and the lease that it gives.

    Args:
        coordinator: Knows it.
        ttl_ms: It lives for so long if it is not renewed (lease_ttl_ms).
        presence: Returns the presence of the replica now.
        on_begun: Called when there is a new one.
        world: Time.

    Attributes:
        session_id: None without one.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ttl_ms: int,
        presence: Callable[[], Presence],
        on_begun: Callable[[], None],
        world: World,
    ) -> None:
        self._coordinator = coordinator
        self._presence = presence
        self._on_begun = on_begun
        self._loop, self._clock = world.loop, world.clock
        self._lease = SessionLease(ttl_ms)
        self._must_begin = False
        self._closed = False
        self._renewals = Histogram(LATENCY_BOUNDS_MS)
        self.session_id: SessionId | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the coordinator knows the session, by what is known here."""
        return self.session_id is not None

    @property
    def ttl_ms(self) -> int:
        """Lifetime in ms of a session that is not renewed."""
        return self._lease.ttl_ms

    @property
    def renewals(self) -> Distribution:
        """Distribution of the times that the coordinator took to answer renewals."""
        return self._renewals.read()

    @property
    def left_ms(self) -> int:
        """Number of ms for which the lease holds yet; below 0 if it is over."""
        return self._lease.deadline_ms - self._clock.boot_ms()

    def holds(self) -> bool:
        """Return whether nobody takes this replica for gone, with time to spare."""
        return self._lease.holds(self._clock.boot_ms())

    def renew(self) -> None:
        """Begins it, or renews it, when it is time to; to be called again and again."""
        if self._closed or not self._lease.must_ask(self._clock.boot_ms()):
            return
        if self.session_id is None or self._must_begin:
            ttl_ms = self._lease.ttl_ms
            self._lease.on_beginning()
            self._coordinator.begin_session(ttl_ms, self._presence(), self._on_session)
        else:
            self._coordinator.keep_alive(self.session_id, self._presence(), self._on_renewed)

    def _on_session(self, outcome: SessionId | MQMeshError) -> None:
        if isinstance(outcome, MQMeshError):
            self._lease.on_not_begun(self._clock.boot_ms())
            return
        if self._closed:
            self._coordinator.end_session(outcome)
            return
        self.session_id, self._must_begin = outcome, False
        self._lease.on_begun()
        self._on_begun()

    def _on_renewed(self, outcome: int | MQMeshError) -> None:
        if isinstance(outcome, SessionLost):
            _log.warning("the session of this replica has ended: %s", outcome)
            self.session_id = None
            self._lease.on_lost()
        elif isinstance(outcome, MQMeshError) or self.session_id is None:
            self._lease.on_not_renewed()
        else:
            requested_ms = self._lease.requested_ms
            if requested_ms is not None:
                self._renewals.observe(self._clock.boot_ms() - requested_ms)
            self._lease.on_renewed(outcome)

    def renew_soon(self) -> None:
        """Renew the session with the next look, since the presence of the replica has changed."""
        self._lease.renew_ms = 0

    def change_ttl(self, ttl_ms: int) -> None:
        """Another setting is in force; if it differs, another session is begun."""
        if ttl_ms != self._lease.ttl_ms:
            self._lease.change_ttl(ttl_ms)
            self._must_begin = self.session_id is not None

    def change_record(
        self, group: str, version: int, state: GroupState, on_done: OnDone[int]
    ) -> None:
        """Changes the group's record with the session of now.

        Args:
            group: Broker group.
            version: That the change is made on.
            state: The next one.
            on_done: Called with the outcome; ``CoordinatorUnavailable`` if there is no session.
        """
        if self.session_id is None:
            error = CoordinatorUnavailable("this replica has no session at the coordinator")
            self._loop.call_later(0, partial(on_done, error))
            return
        self._coordinator.change(group, version, state, self.session_id, on_done)

    def give_up(self, away_ms: int) -> None:
        """Ends it; none is asked for that long."""
        self._lease.give_up(self._clock.boot_ms() + away_ms)
        self._end()

    def leave(self) -> None:
        """Ends it for good."""
        self._closed = True
        self._end()

    def close(self) -> None:
        """Asks for nothing any more; it lives on for as long as its lease."""
        self._closed = True

    def _end(self) -> None:
        if self.session_id is not None:
            self._coordinator.end_session(self.session_id)
            self.session_id = None
