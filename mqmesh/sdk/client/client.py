"""The engine below every producer and consumer: one thread, with routes and connections."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from mqmesh.errors import (
    AuthenticationFailed,
    ClientClosed,
    MQMeshError,
    NoRoute,
    RequestTimeout,
    TopicNotFound,
    TransportError,
    UnsupportedCommand,
)
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.membership import HeartbeatRequest, HeartbeatResponse, UnregisterClientRequest
from mqmesh.protocol.route import TopicRoute
from mqmesh.sdk.client.broker_connections import BrokerConnections
from mqmesh.sdk.client.forks import call_in_forks
from mqmesh.sdk.client.heartbeats import Heartbeats
from mqmesh.sdk.client.master_requests import MasterRequests
from mqmesh.sdk.client.options import ClientOptions, client_transport, new_client_id
from mqmesh.sdk.client.replica_connections import ReplicaConnections
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.sdk.client.route_finder import OnRoute, RouteFinder
from mqmesh.transport.interface import Connection, LoopThread, Transport

CLOSE_TIMEOUT_S: Final = 1.5
REPLACE_TIMEOUT_S: Final = 10.0
"""Longest wait of a client that is started again for the end of its former client loop."""
SLICE_S: Final = 0.1
"""Time slice in which a call from another thread waits; then it checks for a closed client."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ClientEngine:
    """Routes, connections and heartbeats of one client, in one thread of its own.

    Methods are for the client loop, where all callbacks come, unless they say
    otherwise. An engine belongs to the process that made it: in a forked child it is closed.

    Args:
        options: Settings.
        heartbeat: Makes the heartbeat that brokers get; called in the client loop.
        on_routes: Called with the topics whose routes changed.
        on_command: Called with commands that a broker sends by itself, with the broker's name.
        on_broker: Called when the connection to a broker was made or broke.
        on_heartbeat: Called with a broker's answer to a heartbeat, or why it refused it.
        stand_ins: Use a follower where the master is gone and no other one is elected.
        on_end: Called last in the client loop, after ``close`` or when the thread dies;
            no callback comes after it.
        transport: The world, with a loop of this client alone; ZeroMQ by default.

    Attributes:
        namespace: Of the client; "" for none.
        routes: Cache of routes.
        finder: Asks for them.
        brokers: The connections to them.
        replicas: The connections to followers that are read from.
        heartbeats: Heartbeats to brokers, and their answers.
        request: Asks a broker group's master; see ``MasterRequests.request``.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        heartbeat: Callable[[], HeartbeatRequest],
        on_routes: Callable[[set[str]], None] | None = None,
        on_command: Callable[[str, Command], None] | None = None,
        on_broker: Callable[[str, bool], None] | None = None,
        on_heartbeat: Callable[[str, HeartbeatResponse | MQMeshError], None] | None = None,
        stand_ins: bool = False,
        on_end: Callable[[], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        addresses = options.namesrv_addresses()
        self.options = options
        self._was_given_transport = transport is not None
        self.namespace = options.namespace or ""
        self.transport = client_transport(transport, options.credentials, namespace=self.namespace)
        self.client_id = new_client_id(options, self.transport.random)
        self.routes = RouteCache()
        self.loop = self.transport.loop
        self._on_routes = on_routes
        self._on_command = on_command
        self._on_broker = on_broker
        self._on_end = on_end
        self._closed = False
        self._thread: LoopThread | None = None
        self.brokers = BrokerConnections(
            self.transport,
            self.routes,
            use_ipc=options.use_ipc,
            stand_ins=stand_ins,
            closed=lambda: self._closed,
            on_command=self._take_command,
            on_up=self._broker_came,
            on_down=self._broker_went,
        )
        self.replicas = ReplicaConnections(self.transport, self.routes, use_ipc=options.use_ipc)
        self.finder = RouteFinder(
            self.transport,
            addresses,
            options,
            self.routes,
            on_changed=self._routes_changed,
            lost=self.brokers.unreachable,
            closed=lambda: self._closed,
        )
        self.heartbeats = Heartbeats(
            self.loop,
            self.brokers,
            timeout_ms=options.heartbeat_broker_interval_ms,
            make=heartbeat,
            on_answer=on_heartbeat,
            closed=lambda: self._closed,
        )
        self.request = MasterRequests(
            self.loop, self.routes, self.brokers, lambda: self._closed
        ).request
        call_in_forks(self._forked)

    # ---- Life; from any thread -------------------------------------------------------

    def start(self) -> None:
        """Starts the client loop; from any thread, once.

        Raises:
            TooManyOpenFiles: The process has too few descriptors left.
        """
        self.finder.start()
        self.loop.call_every(self.options.heartbeat_broker_interval_ms, self._beat)
        self._thread = self.transport.run_loop(self._run, f"mqmesh-{self.client_id}")

    def close(self) -> None:
        """Leaves all groups, closes all connections and ends the thread; from any thread.

        Takes no longer than about two seconds, also while brokers are down.
        """
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is None:
            self._release()
            return
        self.loop.stop()
        if not self.loop.in_loop_thread:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                _log.error("the client's thread did not end within %s s", CLOSE_TIMEOUT_S)

    def check_replaceable(self, what: str) -> None:
        """Check that another engine may take the place of this one, which is closed.

        Args:
            what: The client, for the error.

        Raises:
            ClientClosed: It was given a transport, which is closed with it; or its thread has not
                ended within ``REPLACE_TIMEOUT_S``, or is the one that calls.
        """
        if self._was_given_transport:
            raise ClientClosed(
                f"the {what} is closed, and so is the transport that it was given; make a new one"
            )
        if self._thread is not None and not self.loop.in_loop_thread:
            self._thread.join(REPLACE_TIMEOUT_S)
        if self._thread is not None and self._thread.is_alive():
            raise ClientClosed(f"the {what} is still being closed; start it again later")

    @property
    def started(self) -> bool:
        """True once ``start`` has begun the client loop; from any thread."""
        return self._thread is not None

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the client loop died; from any thread."""
        return self._closed

    def _forked(self) -> None:
        """Note that this process is a fork: thread and sockets stayed with the parent."""
        self._closed = True
        self.loop.disown()

    def post(self, callback: Callable[[], None]) -> None:
        """Calls back in the client loop, soon; from any thread.

        Raises:
            ClientClosed: The client is closed.
        """
        self._check_open()
        self.loop.call_soon_threadsafe(callback)

    def call(
        self, function: Callable[[Callable[[_T | MQMeshError], None]], None], timeout_ms: int
    ) -> _T:
        """Runs something in the client loop and waits for its outcome; from other threads.

        Args:
            function: Gets a callback, which it must call once, now or later.
            timeout_ms: Longest wait.

        Raises:
            RequestTimeout: The callback was not called in time.
            ClientClosed: The client was closed meanwhile.
            MQMeshError: Error that the callback was called with.
        """
        assert not self.loop.in_loop_thread, "it would wait for itself"
        done = self.transport.flag()
        clock = self.loop.clock
        outcome: list[_T | MQMeshError] = []

        def finish(value: _T | MQMeshError) -> None:
            outcome.append(value)
            done.set()

        self.post(lambda: function(finish))
        deadline_ms = clock.monotonic_ms() + timeout_ms
        while not done.wait(min(max(deadline_ms - clock.monotonic_ms(), 0) / 1_000, SLICE_S)):
            self._check_open()
            if clock.monotonic_ms() >= deadline_ms:
                raise RequestTimeout(f"no outcome within {timeout_ms} ms")
        value = outcome[0]
        if isinstance(value, MQMeshError):
            raise value
        return value

    def wait_route(self, topic: str, timeout_ms: int, *, fresh: bool = False) -> TopicRoute:
        """Return the route of a topic, requested if it is not known; from other threads.

        Args:
            topic: Topic.
            timeout_ms: Longest wait.
            fresh: Ask also if it is known.

        Raises:
            NoRoute: No name server knows the topic, or none answered.
            AuthenticationFailed: The name servers do not trust the client, or the other way round.
        """
        route = None if fresh else self.routes.route(topic)
        if route is not None:
            return route

        def ask(done: OnRoute) -> None:
            self.finder.find(topic, done)

        try:
            return self.call(ask, timeout_ms)
        except AuthenticationFailed:
            raise  # the topic has nothing to do with it
        except UnsupportedCommand as error:
            text = f"{self.options.namesrv_addr} is no name server: {error}"
            raise NoRoute(text) from error
        except TopicNotFound as error:
            raise NoRoute(f"{error} (asked: {self.options.namesrv_addr})") from error
        except TransportError as error:
            raise NoRoute(
                f"no route for topic {topic!r} from {self.options.namesrv_addr}: {error}"
            ) from error

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        """Calls once in the client loop, not before ``delay_ms``."""
        self.loop.call_later(delay_ms, callback)

    # ---- Helpers ---------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the client is closed")

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException:
            _log.critical("the thread of client %s died", self.client_id, exc_info=True)
        finally:
            self._closed = True
            self._release()

    def _release(self) -> None:
        steps = (
            self._leave,
            self.finder.close,
            self._on_end,
            self.loop.close,
            self.transport.close,
        )
        for step in steps:
            try:
                if step is not None:
                    step()
            except Exception:
                # The other steps must be taken too.
                _log.exception("client %s could not close cleanly", self.client_id)

    def _leave(self) -> None:
        self.replicas.close()
        self.brokers.leave(encode_header(UnregisterClientRequest(self.client_id)))

    def _beat(self) -> None:
        self.brokers.tidy()
        self.replicas.tidy()
        self.heartbeats.send_all()

    def _take_command(self, broker_name: str, command: Command) -> None:
        if self._on_command is not None:
            self._on_command(broker_name, command)

    def _routes_changed(self, topics: set[str]) -> None:
        self.brokers.follow_routes()
        if self._on_routes is not None:
            self._on_routes(topics)

    def _broker_came(self, broker_name: str, connection: Connection) -> None:
        self.heartbeats.send(broker_name, connection)
        if self._on_broker is not None:
            self._on_broker(broker_name, True)

    def _broker_went(self, broker_name: str) -> None:
        self.finder.refresh(self.routes.topics_of(broker_name))
        if self._on_broker is not None:
            self._on_broker(broker_name, False)
