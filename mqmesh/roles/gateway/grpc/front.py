"""The gateway's port for gRPC: its connections."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from mqmesh.clock import Clock
from mqmesh.roles.gateway.grpc.session import CallService, GrpcSession
from mqmesh.roles.gateway.session import Output, SessionLimits
from mqmesh.units import MIB

MOST_HELD_BYTES: Final = 256 * MIB
"""Parts of requests that are not whole, of all connections."""
_log = logging.getLogger(__name__)


class GrpcFront:
    """All connections by gRPC.

    Args:
        admit: Returns the methods that a call may have, by its headers; raises ``NoPermission``.
        limits: Limits of one connection.
        clock: Clock of the loop.
        soon: Calls back in the next turn of the loop.
        on_broken: Called with a sentence when what came is no gRPC.
    """

    def __init__(
        self,
        admit: Callable[[GrpcSession, Mapping[str, str]], CallService],
        limits: SessionLimits,
        clock: Clock,
        soon: Callable[[Callable[[], None]], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._admit = admit
        self._limits = limits
        self._clock = clock
        self._soon = soon
        self._on_broken = on_broken
        self._sessions: dict[GrpcSession, None] = {}

    def accept(self, stream: Output) -> GrpcSession:
        """Serve a connection; return what is to be called with its bytes."""
        session = GrpcSession(
            stream,
            self._admit,
            self._limits,
            self._clock.monotonic_ms,
            self._soon,
            self._ended,
            self._on_broken,
        )
        self._sessions[session] = None
        return session

    def tick(self) -> None:
        """End calls that took too long, silent connections, and those that hold too much.

        To be called twice a second.
        """
        now_ms = self._clock.monotonic_ms()
        for session in list(self._sessions):
            session.tick(now_ms)
        held = sum(session.held_bytes for session in self._sessions)
        while held > MOST_HELD_BYTES:
            worst = max(self._sessions, key=lambda session: session.held_bytes)
            _log.warning(
                "%s has %d bytes of requests that are not whole, and all connections %d (limit "
                "%d); closing it",
                *(worst.peer, worst.held_bytes, held, MOST_HELD_BYTES),
            )
            held -= worst.held_bytes
            worst.close()

    def close(self) -> None:
        """Close all connections."""
        for session in list(self._sessions):
            session.close()

    @property
    def sessions(self) -> Iterable[GrpcSession]:
        """Connections of clients."""
        return list(self._sessions)

    @property
    def connections(self) -> int:
        """Number of the connections."""
        return len(self._sessions)

    def _ended(self, session: GrpcSession) -> None:
        self._sessions.pop(session, None)
