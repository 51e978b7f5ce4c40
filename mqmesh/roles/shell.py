"""The shell of every role's server: its command server with PING, timers, metrics, and an end."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import UnsupportedCommand
from mqmesh.metrics import (
    MAX_LABEL_SETS,
    Measured,
    MetricBoard,
    MetricReading,
    counter,
    gauge,
    text,
)
from mqmesh.namespaces import is_within
from mqmesh.protocol.admin import RoleInfo, RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.command import Principal, Reply
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.request import Request
from mqmesh.roles import dispatch as dispatching
from mqmesh.roles.access_keeper import LOOK_MS, AccessKeeper
from mqmesh.roles.audit_log import AUDIT_FILE, AuditLog
from mqmesh.roles.dispatch import Dispatch, Handler
from mqmesh.roles.listings import Listings
from mqmesh.security import guard as guarding
from mqmesh.security import quotas
from mqmesh.transport.interface import OnDisconnect, Server, ServerLimits, Timer, Transport
from mqmesh.transport.process_memory import anonymous_bytes, resident_bytes
from mqmesh.version import VERSION

_O = TypeVar("_O")

_ACCESS_COMMANDS: Final = (RequestCode.GET_ACCESS_LIST, RequestCode.UPDATE_ACCESS_LIST)


def _no_access_list(request: Request, header: object) -> Reply:
    raise UnsupportedCommand("security is off here (security.enable), so there is no access list")


class _Reading:
    """Metrics of a client that reads them in pages, and its progress."""

    def __init__(self, pages: Iterator[tuple[list[MetricReading], bool]]) -> None:
        self.pages = pages
        self.place = 0


HOLD_UP_MS: Final = 30_000
"""Least time for which the longest turn of the event loop is reported."""
_NS_PER_MS: Final = 1e6


class RoleShell:
    """The shell of a role's server.

    Args:
        role: Role of the server.
        word: Name of the role in PING: ``broker``, ``namesrv``, …
        name: Name of the instance.
        transport: Transport of the process.
        clock: Source of time, the transport's by default.
        max_label_sets: Sets of labels of one metric; further ones are added up in one.

    Attributes:
        state: ``starting``, ``recovering``, ``running``, ``stopping``.
        server: Command server, None unless it is open.
        dispatch: Serves the role's commands.
        access: Keeps its access list; None where security is off.
        on_access_change: Called, if it is set, when another access list is in force.
    """

    def __init__(
        self,
        role: ServedBy,
        word: str,
        name: str,
        transport: Transport,
        clock: Clock | None = None,
        max_label_sets: int = MAX_LABEL_SETS,
    ) -> None:
        self._word = word
        self._name = name
        self._transport = transport
        self._loop = transport.loop
        self._clock = clock or transport.clock
        self._timers: list[Timer] = []
        self._started_ms: int | None = None
        self._longest_before_ns = self._forget_ms = 0
        self.state = "starting"
        self.server: Server | None = None
        guard = transport.guard
        self.dispatch = Dispatch(role, self._clock.monotonic_ns, guard)
        self.dispatch.keep({RequestCode.PING: self._ping})
        self.access = None if guard is None else AccessKeeper(guard)
        self._audit_log: AuditLog | None = None
        if guard is not None and guard.audited and guard.path is not None:
            path = guard.path.with_name(AUDIT_FILE)
            self._audit_log = AuditLog(path, f"{word} {name}", self._clock)
            self.dispatch.audit = self._audit_log.note
        self.on_access_change: Callable[[], None] | None = None
        self._board = MetricBoard(max_label_sets)
        self._readings = Listings[_Reading]()
        self.expose(_PROCESS_METRICS, lambda: self)
        self.expose(dispatching.METRICS, lambda: self.dispatch.counts)
        if guard is not None:
            self.expose(guarding.METRICS, lambda: guard)
            self.expose(quotas.METRICS, lambda: guard.quotas)

    @property
    def uptime_ms(self) -> int:
        """Time since the role was ready, ms; 0 before."""
        return 0 if self._started_ms is None else self._clock.monotonic_ms() - self._started_ms

    def look_at_turns(self) -> float:
        """Return the longest turn of the event loop, ms.

        It is of the last 30 to 60 s, or since the last call if that is longer ago: so two
        readers do not hide it from each other.
        """
        longest_ns, now_ms = self._loop.longest_turn_ns, self._clock.monotonic_ms()
        turn_ns = max(longest_ns, self._longest_before_ns)
        if now_ms >= self._forget_ms:
            self._forget_ms = now_ms + HOLD_UP_MS
            self._longest_before_ns, self._loop.longest_turn_ns = longest_ns, 0
        return turn_ns / _NS_PER_MS

    @property
    def callback_failures(self) -> int:
        """Bugs that the event loop survived."""
        return self._loop.callback_failures

    def open(
        self,
        handlers: Mapping[RequestCode, Handler] | None = None,
        on_disconnect: OnDisconnect | None = None,
        limits: ServerLimits | None = None,
    ) -> Server:
        """Makes the command server, which is to be bound.

        Args:
            handlers: Handlers of the role's commands; a command without one is refused.
            on_disconnect: Called with a peer whose connection broke.
            limits: Limits on peers.
        """
        self.dispatch.refuse(f"{self._word} {self._name} is {self.state}")
        self.dispatch.open({RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info})
        self.dispatch.open(handlers or {})
        if self.access is None:
            self.dispatch.keep(dict.fromkeys(_ACCESS_COMMANDS, _no_access_list))
        else:
            self.dispatch.keep(self.access.handlers)
            self.every(LOOK_MS, self._review)
        self.server = self._transport.serve(self.dispatch.handlers, on_disconnect, limits)
        self.expose(_CONNECTION_METRICS, self._opened)
        return self.server

    def expose(self, declared: Iterable[Measured[_O]], look: Callable[[], _O]) -> None:
        """Adds metrics to those that the role reports.

        Args:
            declared: Metrics.
            look: Called once for each answer; the metrics are read from its result.
        """
        self._board.add(declared, look)

    def every(self, interval_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls back each ``interval_ms`` until the role stops, or the timer is cancelled."""
        timer = self._loop.call_every(interval_ms, callback)
        self._timers.append(timer)
        return timer

    def look_after_peers(self) -> None:
        """Makes the command server maintain its connections, from now on."""
        tick_ms = self._opened().tick_ms
        if tick_ms:
            self.every(tick_ms, self._look)

    def ready(self) -> None:
        """Marks the role as serving."""
        self._started_ms = self._clock.monotonic_ms()
        self.state = "running"

    def stopping(self) -> None:
        """Begins the stop: the role serves nothing but PING now, and its timers end."""
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
        if self._audit_log is not None:
            self._audit_log.close()

    def _ping(self, request: Request, header: None) -> RoleInfo:
        info = RoleInfo(self._word, self._name, VERSION, os.getpid(), self.state, self.uptime_ms)
        return info

    def runtime_info(self, request: Request, header: RuntimeInfoRequest) -> RuntimeInfo:
        """Answers GET_BROKER_RUNTIME_INFO with a page."""
        user = request.peer.principal.name
        listing, listed = header.listing, self._readings.take(user, header.listing)
        if listed is None or listed.place != header.place:
            listing, listed = 0, _Reading(self._board.pages())
        metrics, more = next(listed.pages)
        listed.place += 1
        if request.peer.principal.namespace:
            metrics = [_of_user(request.peer.principal, one) for one in metrics]
        if not more:
            return RuntimeInfo(metrics, listing)
        listing = self._readings.keep(user, listing, listed)
        return RuntimeInfo(metrics, listing, listed.place)

    def _review(self) -> None:
        assert self.access is not None
        if self.access.take_changes():
            self._opened().review()
            if self.on_access_change is not None:
                self.on_access_change()

    def _opened(self) -> Server:
        assert self.server is not None
        return self.server

    def _look(self) -> None:
        if self.server is not None:
            self.server.tick(self._clock.monotonic_ms())


def _of_user(principal: Principal, reading: MetricReading) -> MetricReading:
    """Return a metric without the samples outside of the namespace of a user."""

    def is_own(label: str, value: str) -> bool:
        if label in ("topic", "consumer_group"):
            return is_within(principal.namespace, value)
        own = {"namespace": principal.namespace, "user": principal.name}
        return own.get(label, value) == value

    labels = reading.metric.labels
    samples = [one for one in reading.samples if all(map(is_own, labels, one.labels))]
    return msgspec.structs.replace(reading, samples=samples)


def _cpu_ms() -> int:
    took = os.times()
    return round((took.user + took.system) * 1_000)


_PROCESS_METRICS: Final[tuple[Measured[RoleShell], ...]] = (
    text("state", "starting, recovering, running, stopping", lambda shell: shell.state),
    gauge("uptime_ms", "since it was ready", lambda shell: shell.uptime_ms),
    gauge("pid", "process id", lambda shell: os.getpid()),
    counter("cpu_ms_total", "processor time of all threads", lambda shell: _cpu_ms()),
    gauge("rss_bytes", "resident memory, with programs and log", lambda shell: resident_bytes()),
    gauge("private_bytes", "resident memory of its own", lambda shell: anonymous_bytes()),
    gauge(
        "loop_hold_up_ms",
        "the longest turn of the event loop in the last 30 to 60 s, or since the last reading",
        lambda shell: shell.look_at_turns(),
    ),
    counter(
        "callback_failures_total",
        "bugs that the event loop survived",
        lambda shell: shell.callback_failures,
    ),
)

_CONNECTION_METRICS: Final[tuple[Measured[Server], ...]] = (
    gauge("connections", "peers that are connected", lambda server: server.peer_count),
    counter("requests_total", "requests that came", lambda server: server.requests),
    counter(
        "malformed_frames_total",
        "frames that break the protocol",
        lambda server: server.malformed_frames,
    ),
    counter(
        "dropped_replies_total",
        "answers whose peer was gone or did not read",
        lambda server: server.dropped_replies,
    ),
    gauge(
        "pending_bytes",
        "answers that peers have not taken yet, and frames not read at the last look",
        lambda server: server.held_bytes,
    ),
    counter(
        "ended_connections_total",
        "connections ended because they took too much",
        lambda server: server.hung_up,
    ),
    counter(
        "silent_connections_total",
        "connections ended because their peers hang",
        lambda server: server.silent,
    ),
    counter(
        "refusals_total",
        "requests and batches that were refused",
        lambda server: {(name.lower(),): n for name, n in server.refusals.counts.items()},
        labels=("response_code",),
    ),
)
