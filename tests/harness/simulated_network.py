"""A network, name servers and brokers in memory, moved by hand: for tests of clients.

``SimulatedNetwork.install`` puts it in the place of ZeroMQ. Everything then happens in
``run``, in the thread that calls it, millisecond by millisecond of a ``ManualClock``:
no socket, no thread, no waiting, and the same course of events each time.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, RequestTimeout
from mqmesh.protocol.codes import response_error
from mqmesh.protocol.command import Command, Reply
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.interface import Channel, OnDone
from mqmesh.transport.zmq.loop import EventLoop

LATENCY_MS: Final = 1
RECONNECT_MS: Final = 100
CALL_PATIENCE_MS: Final = 60_000

Answer = Callable[[Reply, int], None]
"""Called for each answer that a server gives, and how many ms it takes; there may be none."""


class SimulatedServer:
    """Server that answers at an endpoint; subclasses define the answers.

    Args:
        network: Network of the server.
        endpoint: ``tcp://host:port``.

    Attributes:
        up: True if it listens. Set it by ``start`` and ``crash``.
        requests: Codes of all requests so far.
    """

    def __init__(self, network: "SimulatedNetwork", endpoint: str) -> None:
        self.network = network
        self.endpoint = endpoint
        self.up = True
        self.requests: list[int] = []
        self.connections: list[SimulatedClient] = []
        network.servers[endpoint] = self

    def serve(self, command: Command, answer: Answer) -> None:
        """Handles a request."""
        raise AssertionError(f"nothing is served at {self.endpoint}: {command.code}, {answer}")

    def crash(self) -> None:
        """Ends at once: all connections break."""
        self.up = False
        for connection in self.connections.copy():
            connection.broken()

    def start(self) -> None:
        """Listens again."""
        self.up = True


class SimulatedNetwork:
    """All servers, and the clients' event loops.

    Attributes:
        clock: The one clock of all.
        servers: Servers by endpoint.
        hearers: Callbacks that get hints.
        random: Chance.
    """

    def __init__(self) -> None:
        self.clock = ManualClock(monotonic_ms=1_000_000)
        self.servers: dict[str, SimulatedServer] = {}
        self.hearers: list[SimulatedHints] = []
        self.random: random.Random = random.SystemRandom()
        self._loops: list[EventLoop] = []
        self._threads: list[_ManualThread] = []
        self._turning = threading.RLock()  # a callback may close its client

    def run(self, duration_ms: int = 10) -> None:
        """Lets time pass."""
        end_ms = self.clock.monotonic_ms() + duration_ms
        while True:
            self.turn()
            left_ms = end_ms - self.clock.monotonic_ms()
            if left_ms <= 0:
                return
            waits = [loop._wait_ms() for loop in self._loops if not loop._stopping]
            self.clock.advance(max(min([left_ms, *waits]), 1))

    def turn(self) -> None:
        """Lets every event loop turn once, without time passing."""
        with self._turning:
            for loop in self._loops:
                if not loop._stopping:
                    # Callbacks are to know that they are in the loop's thread.
                    loop._thread = threading.get_ident()
                    loop.tick(0)
                    loop._thread = None
            for thread in self._threads.copy():
                if thread.loop.stopping:
                    thread.join()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs something that waits for the network, in a thread of its own.

        Returns:
            Its result, or the error that it raises.
        """
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(function())
            except MQMeshError as error:
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        end_ms = self.clock.monotonic_ms() + CALL_PATIENCE_MS
        while thread.is_alive():
            assert self.clock.monotonic_ms() < end_ms, "it waits for ever"
            self.run(1)
            thread.join(0.000_2)
            # On a busy machine it may wait for a processor, or for the GIL, while nobody answers
            # late: no time passes then.
            while _wants_to_run(thread):
                thread.join(0.000_2)
        return found[0]

    def close(self) -> None:
        """Releases the event loops of clients that were not closed."""
        for loop in self._loops:
            if not loop._stopping:
                loop.close()

    def transport(self, *, watches: bool = False) -> "SimulatedTransport":
        """Makes a transport with a loop of its own; ``watches`` channels if it is to."""
        return SimulatedTransport(self, watches)

    def new_loop(self) -> EventLoop:
        """Makes a loop that ``turn`` turns."""
        loop = EventLoop(self.clock)
        self._loops.append(loop)
        return loop

    def run_loop(self, loop: EventLoop, target: Callable[[], None]) -> "_ManualThread":
        """Stands for a thread that runs a loop."""
        thread = _ManualThread(self._turning, loop, target)
        self._threads.append(thread)
        return thread


def _wants_to_run(thread: threading.Thread) -> bool:
    """Returns True if a thread is runnable, as the kernel sees it while nobody holds the GIL."""
    try:
        stat = os.open(f"/proc/self/task/{thread.native_id}/stat", os.O_RDONLY)
    except FileNotFoundError:
        return False  # it has ended
    try:
        return os.read(stat, 512).rpartition(b")")[2].split()[0] == b"R"
    except ProcessLookupError:
        return False  # it has ended just now
    finally:
        os.close(stat)


class SimulatedTransport:
    """The twin of ``mqmesh.transport.zmq.transport.ZmqTransport``, as far as clients use it."""

    def __init__(self, network: SimulatedNetwork, watches: bool = False) -> None:
        self._network = network
        self._loop: EventLoop | None = None
        self.clock = network.clock
        self.random = network.random
        self.flag = threading.Event
        self.condition = threading.Condition
        self.pause = time.sleep
        self.ring = None
        self.guard = None
        self.watches_channels = watches

    @property
    def loop(self) -> EventLoop:
        """Turned by the network."""
        if self._loop is None:
            self._loop = self._network.new_loop()
        return self._loop

    def connect(self, endpoint: str, **told: Any) -> "SimulatedClient":
        """Makes a connection."""
        return SimulatedClient(self._network, self.loop, endpoint, **told)

    def subscribe(self, endpoint: str, **told: Any) -> "SimulatedHints":
        """Makes a listener to hints."""
        return SimulatedHints(self._network, self.loop, endpoint, **told)

    def channel(self, endpoint: str, *, busy_poll_us: int = 0) -> "SimulatedChannel":
        """Makes a channel for requests that wait."""
        return SimulatedChannel(self._network, endpoint)

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        """Calls back when the answer to what a channel posted is due."""
        assert isinstance(channel, SimulatedChannel)
        if channel.due_ms is not None:
            delay_ms = max(channel.due_ms - self.clock.monotonic_ms(), 0)

            def plan() -> None:
                self.loop.call_later(delay_ms, callback)

            self.loop.call_soon_threadsafe(plan)

    def run_loop(self, target: Callable[[], None], name: str) -> "_ManualThread":
        """Stands for a thread."""
        return self._network.run_loop(self.loop, target)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


class _Waiting(msgspec.Struct, eq=False):
    command: Command
    on_done: OnDone
    deadline_ms: int
    sent: bool = False


class SimulatedClient:
    """The twin of ``mqmesh.transport.zmq.client.CommandClient``; the same rules hold."""

    def __init__(
        self,
        network: SimulatedNetwork,
        loop: EventLoop,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.connected = False
        self.unreachable = False
        self.oneways: list[int] = []
        self._network = network
        self._loop = loop
        self._on_command = on_command
        self._on_connection = on_connection
        self._waiting: list[_Waiting] = []
        self._closed = False
        loop.call_later(LATENCY_MS, self._connect)

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""
        return len(self._waiting)

    def request(
        self,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes = b"",
        timeout_ms: int = 3_000,
    ) -> None:
        """Sends a request."""
        if self._closed:
            raise ClientClosed("closed")
        command = Command(code, 0, 0, memoryview(header), memoryview(b"".join(parts)))
        waiting = _Waiting(command, on_done, self._loop.clock.monotonic_ms() + timeout_ms)
        self._waiting.append(waiting)
        self._loop.call_later(timeout_ms, lambda: self._expire(waiting))
        if self.connected:
            self._send(waiting)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer."""
        self.oneways.append(code)

    def close(self) -> None:
        """Closes the connection."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        self._fail(self._waiting.copy(), ClientClosed(f"closed: {self.endpoint}"))

    def broken(self) -> None:
        """Handles a crash of the server."""
        self._leave()
        self.connected, self.unreachable = False, True
        error = EndpointUnreachable("broke; whether the request was carried out is unknown")
        self._fail([one for one in self._waiting if one.sent], error)
        if self._on_connection is not None:
            self._on_connection(False)
        self._loop.call_later(RECONNECT_MS, self._connect)

    def tell(self, command: Command) -> None:
        """Sends a command of the server's own."""
        if self._on_command is not None:
            self._on_command(command)

    def _server(self) -> SimulatedServer | None:
        return self._network.servers.get(self.endpoint)

    def _leave(self) -> None:
        server = self._server()
        if server is not None and self in server.connections:
            server.connections.remove(self)

    def _connect(self) -> None:
        if self._closed or self.connected:
            return
        server = self._server()
        if server is None or not server.up:
            self.unreachable = True
            self._loop.call_later(RECONNECT_MS, self._connect)
            return
        self.connected, self.unreachable = True, False
        server.connections.append(self)
        for waiting in self._waiting:
            self._send(waiting)
        if self._on_connection is not None:
            self._on_connection(True)

    def _send(self, waiting: _Waiting) -> None:
        waiting.sent = True
        self._loop.call_later(LATENCY_MS, lambda: self._arrive(waiting))

    def _arrive(self, waiting: _Waiting) -> None:
        server = self._server()
        if self._closed or not self.connected or server is None:
            return
        server.requests.append(waiting.command.code)
        server.serve(
            waiting.command,
            lambda reply, delay_ms: self._later(waiting, reply, delay_ms),
        )

    def _later(self, waiting: _Waiting, reply: Reply, delay_ms: int) -> None:
        self._loop.call_later(LATENCY_MS + delay_ms, lambda: self._take(waiting, reply))

    def _take(self, waiting: _Waiting, reply: Reply) -> None:
        if waiting not in self._waiting or not self.connected:
            return
        self._waiting.remove(waiting)
        waiting.on_done(answer_of(reply))

    def _expire(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            late = RequestTimeout("no answer in time") if waiting.sent else None
            self._fail([waiting], late or EndpointUnreachable("no connection in time"))

    def _fail(self, late: list[_Waiting], error: MQMeshError) -> None:
        for waiting in late:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                waiting.on_done(error)


class SimulatedHints:
    """The twin of ``mqmesh.transport.zmq.hints.HintSubscriber``."""

    def __init__(
        self,
        network: SimulatedNetwork,
        loop: EventLoop,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._network = network
        self._loop = loop
        self._on_hint = on_hint
        network.hearers.append(self)
        if on_connected is not None:
            loop.call_later(LATENCY_MS, on_connected)

    def hear(self, hint: bytes) -> None:
        """Handles a published hint."""
        self._loop.call_later(LATENCY_MS, lambda: self._on_hint(hint))

    def close(self) -> None:
        """Listens no more."""
        if self in self._network.hearers:
            self._network.hearers.remove(self)


class SimulatedChannel:
    """The twin of ``mqmesh.transport.zmq.channel.BlockingChannel``: time jumps while it waits."""

    def __init__(self, network: SimulatedNetwork, endpoint: str) -> None:
        self.endpoint = endpoint
        self.closed = False
        self.due_ms: int | None = None
        self._network = network
        self._cancelled = False
        self._deadline_ms = 0
        self._answer: Command | MQMeshError | None = None

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        """Sends a request and waits for its response."""
        self._check_open()
        if not self.is_connected():
            self._network.clock.advance(timeout_ms)
            raise EndpointUnreachable("no connection in time")
        self.post(code, *parts, header=header, timeout_ms=timeout_ms)
        now_ms = self._network.clock.monotonic_ms()
        due_ms = self._deadline_ms if self.due_ms is None else self.due_ms
        self._network.clock.advance(min(due_ms, self._deadline_ms) - now_ms)
        answer = self.take()
        assert answer is not None
        return answer

    def is_connected(self) -> bool:
        """Returns True while the server is up."""
        self._check_open()
        server = self._network.servers.get(self.endpoint)
        return server is not None and server.up

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Sends a request; ``due_ms`` says when its response is there, None for never."""
        server = self._network.servers[self.endpoint]
        now_ms = self._network.clock.monotonic_ms()
        self._deadline_ms, self.due_ms, self._answer = now_ms + timeout_ms, None, None
        server.requests.append(code)
        command = Command(code, 0, 0, memoryview(header), memoryview(b"".join(parts)))

        def answer(reply: Reply, delay_ms: int) -> None:
            self._answer, self.due_ms = answer_of(reply), now_ms + delay_ms

        server.serve(command, answer)
        if not server.up:
            self._answer = EndpointUnreachable("broke; whether it was carried out is unknown")
            self.due_ms = now_ms
        return False

    def take(self) -> Command | None:
        """Returns the response if it is due."""
        self._check_open()
        now_ms = self._network.clock.monotonic_ms()
        if now_ms >= self._deadline_ms:
            raise RequestTimeout("no answer in time")
        if self.due_ms is None or self.due_ms > now_ms:
            return None
        if isinstance(self._answer, MQMeshError):
            raise self._answer
        return self._answer

    def fileno(self) -> int:
        """Returns that there is no descriptor."""
        return -1

    def cancel(self) -> None:
        """Makes all requests fail."""
        self._cancelled = True

    def _check_open(self) -> None:
        if self.closed or self._cancelled:
            raise ClientClosed("closed")

    def close(self) -> None:
        """Closes the connection."""
        self.closed = True


class _ManualThread:
    """Stands for the engine's thread, whose work ``SimulatedNetwork.run`` does."""

    def __init__(
        self, turning: threading.RLock, loop: EventLoop, target: Callable[[], None]
    ) -> None:
        self.loop = loop
        self._turning = turning
        self._target: Callable[[], None] | None = target

    def join(self, timeout: float | None = None) -> None:
        """Ends the thread: closing has stopped the loop."""
        with self._turning:
            target, self._target = self._target, None
            if target is not None:
                target()

    def is_alive(self) -> bool:
        """Returns False once it was joined."""
        return self._target is not None


def answer_of(reply: Reply) -> Command | MQMeshError:
    """Returns a reply as the caller gets it."""
    command = Command(reply.code, 0, 1, memoryview(reply.header), memoryview(b"".join(reply.body)))
    return command if reply.code == 0 else response_error(command)
