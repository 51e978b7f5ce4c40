"""The gateway's port for gRPC: its connections."""

from collections.abc import Callable, Iterable, Mapping

from mqmesh.clock import Clock
from mqmesh.roles.gateway.grpc.session import CallService, GrpcSession
from mqmesh.roles.gateway.session import Output, SessionLimits


class GrpcFront:
    """All connections by gRPC.

    Args:
        admit: Returns the methods that a call may have, by its headers; raises ``NoPermission``.
        limits: Of one connection.
        clock: Of the loop.
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
        """End calls that took too long, and silent connections; to be called twice a second."""
        now_ms = self._clock.monotonic_ms()
        for session in list(self._sessions):
            session.tick(now_ms)

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
