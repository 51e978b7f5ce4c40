"""What every role's server has: its command server with PING, its timers, figures, and an end."""

import os
from collections.abc import Callable, Mapping
from typing import Final

from mqmesh.clock import Clock
from mqmesh.protocol.admin import FigureValue, RoleInfo
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request, reply_with
from mqmesh.protocol.commands import ServedBy
from mqmesh.roles.dispatch import Dispatch, Handler
from mqmesh.transport.interface import Server, ServerLimits, Timer, Transport
from mqmesh.transport.process_memory import anonymous_bytes, resident_bytes
from mqmesh.version import VERSION

LOOK_AFTER_MS: Final = 250
"""Connections and the memory that they take are looked after so often."""


class RoleShell:
    """The shell of a role's server.

    Args:
        role: Which one.
        word: Its name in PING: ``broker``, ``namesrv``, …
        name: Of the instance.
        transport: Of the process.
        clock: Source of time, the transport's by default.

    Attributes:
        state: ``starting``, ``recovering``, ``running``, ``stopping``.
        server: Command server, None unless it is open.
        dispatch: Serves the role's commands.
    """

    def __init__(
        self,
        role: ServedBy,
        word: str,
        name: str,
        transport: Transport,
        clock: Clock | None = None,
    ) -> None:
        self._word = word
        self._name = name
        self._transport = transport
        self._loop = transport.loop
        self._clock = clock or transport.clock
        self._timers: list[Timer] = []
        self._started_ms: int | None = None
        self.state = "starting"
        self.server: Server | None = None
        self.dispatch = Dispatch(role, self._clock.monotonic_ns)
        self.dispatch.open({RequestCode.PING: self._ping})

    @property
    def uptime_ms(self) -> int:
        """Since it was ready, 0 before."""
        return 0 if self._started_ms is None else self._clock.monotonic_ms() - self._started_ms

    def open(
        self,
        handlers: Mapping[RequestCode, Handler] | None = None,
        on_disconnect: Callable[[bytes], None] | None = None,
        limits: ServerLimits | None = None,
    ) -> Server:
        """Makes the command server, which is to be bound.

        Args:
            handlers: Of the role's commands; what has none is refused.
            on_disconnect: Told the routing id of a peer whose connection broke.
            limits: What peers may take.
        """
        self.dispatch.refuse(f"{self._word} {self._name} is {self.state}")
        self.dispatch.open(handlers or {})
        self.server = self._transport.serve(self.dispatch.handlers, on_disconnect, limits)
        return self.server

    def every(self, interval_ms: int, callback: Callable[[], None]) -> None:
        """Calls back each ``interval_ms`` until the role stops."""
        self._timers.append(self._loop.call_every(interval_ms, callback))

    def look_after_peers(self) -> None:
        """Has the command server look after its connections, from now on."""
        self.every(LOOK_AFTER_MS, self._look)

    def ready(self) -> None:
        """The role serves."""
        self._started_ms = self._clock.monotonic_ms()
        self.state = "running"

    def stopping(self) -> None:
        """The role serves nothing but PING any more, and nothing more happens by timers."""
        self.state = "stopping"
        self.dispatch.refuse(f"{self._word} {self._name} is stopping")
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def close(self) -> None:
        """Closes the command server; closing twice does no harm."""
        self.stopping()
        if self.server is not None:
            self.server.close()
            self.server = None

    def reply(self, request: Request, reply: Reply) -> None:
        """Answers a request; once it is closed nobody is there."""
        if self.server is not None:
            self.server.reply(request, reply)

    def fail(self, request: Request, error: Exception) -> None:
        """Answers a request with an error."""
        if self.server is not None:
            self.server.fail(request, error)

    def figures(self) -> dict[str, FigureValue]:
        """Of the process, its connections and its commands."""
        server = self.server
        assert server is not None
        return {
            "state": self.state,
            "uptime_ms": self.uptime_ms,
            "pid": os.getpid(),
            "rss_bytes": resident_bytes(),
            "private_bytes": anonymous_bytes(),
            "connections": server.peer_count,
            "requests_total": server.requests,
            "malformed_frames_total": server.malformed_frames,
            "dropped_replies_total": server.dropped_replies,
            "pending_bytes": server.held_bytes,
            "ended_connections_total": server.hung_up,
            "silent_connections_total": server.silent,
            "refusals_total": sum(server.refusals.counts.values()),
            **{f"refused_{k.lower()}_total": n for k, n in server.refusals.counts.items()},
            "callback_failures_total": self._loop.callback_failures,
            **self.dispatch.figures(),
        }

    def _ping(self, request: Request, header: None) -> Reply:
        info = RoleInfo(self._word, self._name, VERSION, os.getpid(), self.state, self.uptime_ms)
        return reply_with(info)

    def _look(self) -> None:
        if self.server is not None:
            self.server.tick(self._clock.monotonic_ms())
