"""The engine below every producer and consumer: one thread, routes, connections, heartbeats."""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    NoRoute,
    RemoteProtocolError,
    RequestTimeout,
    TopicNotFound,
    TransportError,
)
from mqmesh.host import host_id
from mqmesh.message import RETRY_PREFIX, MessageQueue
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.membership import HeartbeatRequest, HeartbeatResponse, UnregisterClientRequest
from mqmesh.protocol.route import BrokerAddress, GetRouteRequest, RouteHint, TopicRoute
from mqmesh.sdk.client.forks import tell_of_forks
from mqmesh.sdk.client.namesrv_link import NamesrvLink
from mqmesh.sdk.client.options import ClientOptions, client_transport, new_client_id
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection, LoopThread, OnDone, Transport

CLOSE_TIMEOUT_S: Final = 1.5
HEARTBEAT_RETRY_MS: Final = 300
LOST_MASTER_MS: Final = 500
"""While a group's master cannot be reached routes are asked for so often."""
CONNECT_PATIENCE_MS: Final = 1_000
"""A broker that cannot be connected to for so long is taken for unreachable."""
SLICE_S: Final = 0.1
"""How long a call from another thread waits before it looks whether the client was closed."""

OnRoute = Callable[[TopicRoute | MQMeshError], None]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class ClientEngine:
    """Routes, connections and heartbeats of one client, in one thread of its own.

    Methods are for the client loop, where all callbacks come, unless they say
    otherwise. An engine belongs to the process that made it: in a forked child it is closed.

    Args:
        options: Settings.
        heartbeat: Makes the heartbeat that brokers get; called in the client loop.
        on_routes: Told the topics whose routes changed.
        on_command: Told of commands that a broker sends by itself, with the broker's name.
        on_broker: Told when the connection to a broker was made or broke.
        on_heartbeat: Told what a broker answered to a heartbeat.
        on_end: Called last in the client loop, after ``close`` or when the thread dies;
            no callback comes after it.
        transport: The world, with a loop that nobody else uses; ZeroMQ by default.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        heartbeat: Callable[[], HeartbeatRequest],
        on_routes: Callable[[set[str]], None] | None = None,
        on_command: Callable[[str, Command], None] | None = None,
        on_broker: Callable[[str, bool], None] | None = None,
        on_heartbeat: Callable[[str, HeartbeatResponse], None] | None = None,
        on_end: Callable[[], None] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._addresses = options.namesrv_addresses()
        self.options = options
        self.transport = client_transport(transport)
        self.client_id = new_client_id(options, self.transport.random)
        self.routes = RouteCache()
        self.loop = self.transport.loop
        self._heartbeat = heartbeat
        self._on_routes = on_routes
        self._on_command = on_command
        self._on_broker = on_broker
        self._on_heartbeat = on_heartbeat
        self._on_end = on_end
        self._brokers: dict[str, Connection] = {}
        self._places: dict[str, BrokerAddress] = {}
        self._connecting_ms: dict[str, int] = {}
        self._warnings: dict[str, list[str]] = {}
        self._topics: set[str] = set()
        self._missing_planned = False
        self._ask_again: set[str] = set()
        self._asking: dict[str, list[OnRoute]] = {}
        self._host_id = host_id()
        self._link: NamesrvLink | None = None
        self._closed = False
        self._thread: LoopThread | None = None
        tell_of_forks(self)

    # ---- Life; from any thread -------------------------------------------------------

    def start(self) -> None:
        """Starts the client loop; from any thread, once."""
        self._link = NamesrvLink(
            self.transport,
            self._addresses,
            timeout_ms=self.options.namesrv_timeout_ms,
            on_hint=self._take_hint,
            on_connected=lambda: self.refresh(self._topics),
        )
        self.loop.call_every(
            self.options.poll_name_server_interval_ms, lambda: self.refresh(self._topics)
        )
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

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the client loop died; from any thread."""
        return self._closed

    def on_fork(self) -> None:
        """This process is a fork: thread and sockets stayed with the parent."""
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
            timeout_ms: How long to wait.

        Raises:
            RequestTimeout: The callback was not called in time.
            ClientClosed: The client was closed meanwhile.
            MQMeshError: What the callback was called with.
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
        """The route of a topic, asked for if it is not known; from other threads.

        Args:
            topic: Topic.
            timeout_ms: How long to wait.
            fresh: Ask also if it is known.

        Raises:
            NoRoute: No name server knows the topic, or none answered.
        """
        route = None if fresh else self.routes.route(topic)
        if route is not None:
            return route

        def ask(done: OnRoute) -> None:
            self.find_route(topic, done)

        try:
            return self.call(ask, timeout_ms)
        except (TopicNotFound, TransportError) as error:
            raise NoRoute(
                f"no route for topic {topic!r} from {self.options.namesrv_addr}: {error}"
            ) from error

    def live_endpoint(self, broker_name: str) -> str | None:
        """Where a broker's master is reached right now, or None; from any thread."""
        client = self._brokers.get(broker_name)
        return client.endpoint if client is not None and client.connected else None

    # ---- Routes ----------------------------------------------------------------------

    def find_route(self, topic: str, on_done: OnRoute, *, anew: bool = False) -> None:
        """Asks for a topic's route and keeps it fresh from now on.

        Args:
            topic: Topic.
            on_done: Told the route, or ``TopicNotFound``, or why no name server answered.
            anew: It has changed just now: an answer that is on its way may be of before.
        """
        header = encode_header(GetRouteRequest(topic))
        self._topics.add(topic)
        asking = self._asking.get(topic)
        if asking is not None:
            asking.append(on_done)
            if anew:
                self._ask_again.add(topic)
            return
        assert self._link is not None
        self._asking[topic] = [on_done]
        self._link.request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            header,
            lambda answer: self._take_route(topic, answer),
        )

    def refresh(self, topics: Iterable[str]) -> None:
        """Asks for routes again."""
        for topic in list(topics):
            self.find_route(topic, _ignore, anew=True)

    def forget_topic(self, topic: str) -> None:
        """Stops refreshing a topic."""
        self._topics.discard(topic)

    # ---- Brokers ---------------------------------------------------------------------

    def broker(self, broker_name: str) -> Connection:
        """The connection to a broker group's master, made if there is none.

        Raises:
            NoRoute: The group, or its master, is not known.
            EndpointUnreachable: No connection can even be tried.
            ClientClosed: The client is closed.
        """
        self._check_open()
        address = self.routes.address(broker_name)
        if address is None:
            raise NoRoute(f"no address is known of the master of broker group {broker_name!r}")
        client = self._brokers.get(broker_name)
        if client is None or client.unreachable or self._places[broker_name] != address:
            endpoint = self._best_endpoint(address)
            if client is None or client.endpoint != endpoint:
                client = self._connect(broker_name, endpoint)
            self._places[broker_name] = address
        return client

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        """Calls once in the client loop, not before ``delay_ms``."""
        self.loop.call_later(delay_ms, callback)

    def request(
        self,
        broker_name: str,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Asks a broker group's master.

        Every outcome, bad or good, goes to ``on_done``, and never before this returns; only
        when the client is closed it may be that none comes any more.
        """

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, ClientClosed) and not self._closed:
                answer = EndpointUnreachable(
                    f"broker {broker_name} has moved; whether the request was carried out is "
                    "unknown"
                )
            on_done(answer)

        failure: MQMeshError
        try:
            client = self.broker(broker_name)
            client.request(code, done, *parts, header=header, timeout_ms=timeout_ms)
            return
        except MQMeshError as error:
            failure = error
        except Exception as error:
            # Whoever asks counts on an outcome.
            _log.exception("broker %s could not be asked", broker_name)
            failure = EndpointUnreachable(f"broker {broker_name} could not be asked: {error}")
        self.loop.call_later(0, lambda: on_done(failure))

    def is_connected(self, broker_name: str) -> bool:
        """True while the connection to a broker stands."""
        client = self._brokers.get(broker_name)
        return client is not None and client.connected

    def is_unreachable(self, broker_name: str) -> bool:
        """True when the connection to a broker broke or could not be made."""
        client = self._brokers.get(broker_name)
        return client is not None and client.unreachable

    def may_come(self, broker_name: str) -> bool:
        """False when waiting for a connection to a broker promises little: try another one."""
        client = self._brokers.get(broker_name)
        if client is None:
            return self.routes.address(broker_name) is not None
        if client.connected:
            return True
        waited_ms = self.loop.clock.monotonic_ms() - self._connecting_ms[broker_name]
        # A machine that is off does not even refuse.
        return not client.unreachable and waited_ms < CONNECT_PATIENCE_MS

    def has_queue(self, queue: MessageQueue) -> bool:
        """True when the routes say that a queue may be written to."""
        return queue in self.routes.publish_queues(queue.topic)

    def heartbeat_now(self) -> None:
        """Sends a heartbeat to every connected broker, unless the client is closed."""
        if self._closed:
            return  # the answer to a last commit may ask for one while connections are closed
        for name, client in list(self._brokers.items()):
            if client.connected:
                self._send_heartbeat(name, client)

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
        steps = [self._leave, self._close_link, self._on_end, self.loop.close, self._end_context]
        for step in steps:
            try:
                if step is not None:
                    step()
            except Exception:
                # The other steps must be taken too.
                _log.exception("client %s could not close cleanly", self.client_id)

    def _leave(self) -> None:
        header = encode_header(UnregisterClientRequest(self.client_id))
        for client in self._brokers.values():
            if client.connected:
                try:
                    client.oneway(RequestCode.UNREGISTER_CLIENT, header=header)
                except MQMeshError as error:
                    _log.warning("could not take leave of %s: %s", client.endpoint, error)
            client.close()

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _end_context(self) -> None:
        self.transport.close()

    def _connect(self, broker_name: str, endpoint: str) -> Connection:
        try:
            client = self.transport.connect(
                endpoint,
                on_command=lambda command: self._take_command(broker_name, command),
                on_connection=lambda up: self._connection(broker_name, up),
            )
        except Exception as error:
            # No more descriptors, or an address that ZeroMQ does not take.
            raise EndpointUnreachable(f"cannot connect to {endpoint}: {error}") from error
        self._connecting_ms[broker_name] = self.loop.clock.monotonic_ms()
        old = self._brokers.get(broker_name)
        self._brokers[broker_name] = client
        if old is not None:
            # The broker came back elsewhere. The new connection stands in the table already,
            # because what waited for the old place may be sent again while it closes.
            _log.info("broker %s moved from %s to %s", broker_name, old.endpoint, endpoint)
            old.close()
        return client

    def _take_hint(self, hint: RouteHint) -> None:
        missing = [
            topic
            for topic in self._topics
            if self.routes.route(topic) is None
            and (topic in hint.topics or not hint.topics or not _comes_late(topic))
        ]
        self.refresh({*self.routes.concerned(hint), *missing} & self._topics)

    def _refresh_missing(self) -> None:
        self._missing_planned = False
        self._look_for_missing(again=True)

    def _look_for_missing(self, *, again: bool = False) -> None:
        """Asks for missing routes now and then. Idle clients sleep: only while one is missing."""
        missing = {
            topic
            for topic in self._topics
            if self.routes.route(topic) is None and not _comes_late(topic)
        }
        # A group without its master elects another one, or waits for it: hints tell of that, and
        # may be lost.
        lost = {
            topic
            for name, client in self._brokers.items()
            if client.unreachable
            for topic in self._topics
            if name in self.routes.brokers_of(topic)
        }
        if again:
            self.refresh(missing | lost)
        if (missing or lost) and not (self._missing_planned or self._closed):
            interval_ms = self.options.missing_route_interval_ms
            delay_ms = min(LOST_MASTER_MS, interval_ms) if lost else interval_ms
            self._missing_planned = True
            self.loop.call_later(delay_ms, self._refresh_missing)

    def _take_route(self, topic: str, answer: Command | MQMeshError) -> None:
        asking = self._asking.pop(topic, [])
        outcome: TopicRoute | MQMeshError
        if self._closed:
            # It came with the last turn; whoever took it would try to connect.
            answer = ClientClosed("the client is closed")
        if isinstance(answer, MQMeshError):
            outcome = answer
        else:
            try:
                outcome = decode_header(TopicRoute, answer.header)
            except RemoteProtocolError as error:
                outcome = error
        if isinstance(outcome, TopicRoute) and self.routes.update(outcome):
            self._drop_moved()
            if self._on_routes is not None:
                self._on_routes({topic})
        for on_done in asking:
            on_done(outcome)
        if topic in self._ask_again:
            self._ask_again.discard(topic)
            if topic in self._topics and not self._closed:
                self.find_route(topic, _ignore)
        self._look_for_missing()

    def _beat(self) -> None:
        for name, client in list(self._brokers.items()):
            address = self.routes.address(name)
            if client.in_flight or address is None:
                continue
            if not client.connected and not self.routes.is_used(name):
                del self._brokers[name]
                client.close()
            elif client.connected and self._best_endpoint(address) != client.endpoint:
                self._connect(name, self._best_endpoint(address))  # its Unix socket is there again
        self.heartbeat_now()

    def _best_endpoint(self, address: BrokerAddress) -> str:
        return choose_endpoint(address, self._host_id if self.options.use_ipc else None)

    def _drop_moved(self) -> None:
        for name in list(self._brokers):
            if self.routes.address(name) is not None:
                self.broker(name)

    def _take_command(self, broker_name: str, command: Command) -> None:
        if self._on_command is not None:
            self._on_command(broker_name, command)

    def _connection(self, broker_name: str, up: bool) -> None:
        client = self._brokers.get(broker_name)
        if client is None or self._closed:
            return
        if up:
            self._send_heartbeat(broker_name, client)
        else:
            _log.info("the connection to broker %s (%s) broke", broker_name, client.endpoint)
            self.refresh(self._topics)
        if self._on_broker is not None:
            self._on_broker(broker_name, up)

    def _send_heartbeat(self, broker_name: str, client: Connection) -> None:
        def done(answer: Command | MQMeshError) -> None:
            if self._closed:
                return
            if not isinstance(answer, MQMeshError):
                self._take_heartbeat(broker_name, client, answer)
            elif answer.retriable:
                # Until it is accepted, a broker that just came back does not know us.
                _log.info("heartbeat to broker %s: %s", broker_name, answer)
                self.loop.call_later(HEARTBEAT_RETRY_MS, again)
            else:
                self._warn_once(broker_name, [f"the heartbeat was refused: {answer}"])

        def again() -> None:
            if self._brokers.get(broker_name) is client and client.connected and not self._closed:
                self._send_heartbeat(broker_name, client)

        client.request(
            RequestCode.HEART_BEAT,
            done,
            header=encode_header(self._heartbeat()),
            timeout_ms=self.options.heartbeat_broker_interval_ms,
        )

    def _take_heartbeat(self, broker_name: str, client: Connection, answer: Command) -> None:
        try:
            told = decode_header(HeartbeatResponse, answer.header)
        except RemoteProtocolError as error:
            _log.warning("heartbeat to broker %s: %s", broker_name, error)
            return
        self._warn_once(broker_name, told.warnings)
        if self._on_heartbeat is not None and self._brokers.get(broker_name) is client:
            self._on_heartbeat(broker_name, told)

    def _warn_once(self, broker_name: str, warnings: list[str]) -> None:
        # Every heartbeat to every broker brings them, as long as they hold.
        told = {text for texts in self._warnings.values() for text in texts}
        self._warnings[broker_name] = warnings
        for text in warnings:
            if text not in told:
                _log.warning("broker %s: %s", broker_name, text)


def choose_endpoint(address: BrokerAddress, own_host_id: str | None) -> str:
    """The endpoint to reach a broker by.

    Args:
        address: What the broker announced.
        own_host_id: This machine, or None to avoid Unix sockets.

    Returns:
        Its Unix socket if it is on this machine and may be written to, else its TCP endpoint.
    """
    if address.ipc and address.host_id == own_host_id and os.access(address.ipc, os.W_OK):
        return f"ipc://{address.ipc}"
    return endpoint_of(address.tcp)


def _comes_late(topic: str) -> bool:
    """True for topics that may never come: nobody asks for them each second, or at each hint."""
    return topic.startswith(RETRY_PREFIX)


def _ignore(_outcome: TopicRoute | MQMeshError) -> None:
    """For those who do not ask but want the cache refreshed."""
