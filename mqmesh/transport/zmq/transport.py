"""The real transport: ZeroMQ, the machine's clocks and threads."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mqmesh.clock import Clock, SystemClock
from mqmesh.errors import ConfigError
from mqmesh.protocol.command import Command
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.interface import (
    ByteStream,
    Channel,
    Handler,
    OnDisconnect,
    ServerLimits,
    StreamGuard,
)
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.busy_poll import BusyPoll
from mqmesh.transport.zmq.channel import BlockingChannel
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.handshakes import check_pair
from mqmesh.transport.zmq.hints import HintPublisher, HintSubscriber
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.plain_channel import PlainChannel
from mqmesh.transport.zmq.plain_client import PlainClient
from mqmesh.transport.zmq.plain_server import PlainServer
from mqmesh.transport.zmq.server import CommandServer
from mqmesh.transport.zmq.streams import StreamListener
from mqmesh.transport.zmq.zap import ZapHandler

if TYPE_CHECKING:
    # Clients have none, and need not load the table of commands that the guard uses.
    from mqmesh.security.guard import Guard

_RANDOM = random.SystemRandom()
_CLOCK = SystemClock()


class ZmqTransport:
    """The twin of ``mqmesh.transport.simulated.transport.SimulatedTransport``.

    Args:
        ring: Keys of the process, and those that servers must prove; None to speak plainly.
        guard: Decides who may connect; None admits every client, or there are no servers. It is
            used from now on, before any server can be made.

    Attributes:
        ring, guard: As given.

    Raises:
        ConfigError: There is a guard, and no keys; or, with a guard, libzmq is too old.
    """

    def __init__(self, ring: KeyRing | None = None, guard: "Guard | None" = None) -> None:
        if guard is not None and ring is None:
            raise ConfigError("a list of who may connect needs keys")
        if ring is not None:
            check_pair(ring.own)
        self.ring = ring
        self.guard = guard
        self.watches_channels = True
        self._context: sockets.Context | None = None
        self._loop: EventLoop | None = None
        self._servers: list[PlainServer] = []
        self._zap = None if guard is None else ZapHandler(self.context, self.loop, guard)

    @property
    def context(self) -> sockets.Context:
        """ZeroMQ's context; made at the first access, because it opens descriptors.

        Raises:
            ConfigError: libzmq is too old.
            TooManyOpenFiles: The process has too few descriptors left.
        """
        if self._context is None:
            self._context = sockets.new_context()
        return self._context

    @property
    def loop(self) -> EventLoop:
        """The one loop; made at the first access."""
        if self._loop is None:
            self._loop = EventLoop()
        return self._loop

    @property
    def clock(self) -> Clock:
        """Clock of the loop."""
        return _CLOCK if self._loop is None else self._loop.clock

    @property
    def random(self) -> random.Random:
        """The system's source of chance."""
        return _RANDOM

    def connect(
        self,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
        by_loop: bool = False,
    ) -> CommandClient | PlainClient:
        """Make a connection to a server."""
        if by_loop and (self.ring is None or self.ring.is_private(endpoint)):
            return PlainClient(
                self.loop, endpoint, on_command=on_command, on_connection=on_connection
            )
        return CommandClient(
            self.context,
            self.loop,
            endpoint,
            on_command=on_command,
            on_connection=on_connection,
            ring=self.ring,
        )

    def serve(
        self,
        handlers: Mapping[int, Handler],
        on_disconnect: OnDisconnect | None = None,
        limits: ServerLimits | None = None,
    ) -> CommandServer | PlainServer:
        """Make a server that is not bound yet.

        Raises:
            ConfigError: There are keys, and no guard: clients with any key would be admitted.
        """
        own, guard = self._protection()
        if own is None:
            server = PlainServer(self.loop, handlers, on_disconnect, limits)
            self._servers.append(server)
            return server
        return CommandServer(
            self.context, self.loop, handlers, on_disconnect, limits, own=own, guard=guard
        )

    def listen(
        self, accept: Callable[[ByteStream], None], guard: StreamGuard | None = None
    ) -> StreamListener:
        """Make a listener for connections without ZeroMQ that is not bound yet."""
        return StreamListener(self.loop, accept if guard is None else guard(self.loop, accept))

    def with_keys(self, ring: KeyRing) -> "ZmqTransport":
        """Return a transport of the same loop whose connections prove other keys.

        Raises:
            ConfigError: The keys do not belong together.
        """
        other = ZmqTransport(ring)
        other._context, other._loop = self.context, self.loop
        return other

    def publish(self) -> HintPublisher:
        """Make a publisher of hints that is not bound yet."""
        own, _ = self._protection()
        return HintPublisher(self.context, self.loop, own)

    def subscribe(
        self,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
    ) -> HintSubscriber:
        """Make a listener to one publisher's hints."""
        return HintSubscriber(
            self.context,
            self.loop,
            endpoint,
            on_hint=on_hint,
            on_connected=on_connected,
            ring=self.ring,
        )

    def channel(self, endpoint: str, *, busy_poll_us: int = 0) -> BlockingChannel | PlainChannel:
        """Make a connection for requests of the caller's own thread."""
        if self.ring is None or self.ring.is_private(endpoint):
            return PlainChannel(endpoint, busy_poll=BusyPoll(busy_poll_us))
        return BlockingChannel(
            self.context, endpoint, busy_poll=BusyPoll(busy_poll_us), ring=self.ring
        )

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        """Calls back once in the loop when a channel may have a response; from any thread."""
        self.loop.watch_once(channel.fileno(), callback)

    def executor(self, name: str) -> ThreadPoolExecutor:
        """Make a helper thread."""
        return ThreadPoolExecutor(1, name)

    def flag(self) -> threading.Event:
        """Make a flag that threads wait for."""
        return threading.Event()

    def condition(self, lock: "threading.Lock | None" = None) -> threading.Condition:
        """Make a condition of a given lock, or of a lock of its own."""
        return threading.Condition(lock)

    def pause(self, duration_s: float) -> None:
        """Lets the calling thread sleep."""
        time.sleep(duration_s)

    def busy_poll(self, for_us: int) -> None:
        """Makes the loop wait awake for so many µs before it sleeps."""
        self.loop.busy_poll = BusyPoll(for_us)

    def run_loop(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Starts the thread that runs the loop."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def close(self, linger_ms: int = sockets.LINGER_MS) -> None:
        """Ends the context; for so long it tries to send the waiting frames of connections.

        Servers that remain are closed: those of a process that could not be started.
        """
        for server in self._servers:
            server.close()
        if self._context is not None:
            self._context.destroy(linger=linger_ms)

    def _protection(self) -> tuple[Credentials | None, "Guard | None"]:
        if self.ring is None:
            return None, None
        if self.guard is None:
            raise ConfigError("a server with keys needs an access list, too")
        return self.ring.own, self.guard
