"""The transport of one simulated loop."""

import copy
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial

from mqmesh.protocol.command import Command
from mqmesh.security.guard import Guard
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.interface import (
    ByteStream,
    Channel,
    Handler,
    OnDisconnect,
    ServerLimits,
    StreamGuard,
)
from mqmesh.transport.simulated.client import (
    SimulatedChannel,
    SimulatedClient,
    SimulatedHintPublisher,
    SimulatedHintSubscriber,
)
from mqmesh.transport.simulated.loop import SimulatedLoop
from mqmesh.transport.simulated.network import Network
from mqmesh.transport.simulated.node import (
    LONGEST_WAIT_MS,
    SimulatedCondition,
    SimulatedEvent,
    SimulatedExecutor,
    SimulatedNode,
)
from mqmesh.transport.simulated.server import SimulatedServer
from mqmesh.transport.simulated.streams import SimulatedStreamListener


class SimulatedTransport:
    """The twin of ``mqmesh.transport.zmq.transport.ZmqTransport``.

    Args:
        network: The simulated network.
        node: The process; it may have several transports, each with a loop of its own.
        ring: Keys of the process, and those that servers must prove; None to speak plainly.
        guard: Decides who may connect; None admits every client, or there are no servers.
    """

    def __init__(
        self,
        network: Network,
        node: SimulatedNode,
        ring: KeyRing | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.node = node
        self.loop = SimulatedLoop(node)
        self.clock = node.clock
        self._network = network
        self.ring = ring
        self.guard = guard
        self.watches_channels = True

    @property
    def random(self) -> random.Random:
        """The node's source of chance, from the seed."""
        return self.node.random

    def connect(
        self,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
        by_loop: bool = False,
    ) -> SimulatedClient:
        """Make a connection to a server."""
        return SimulatedClient(
            self._network,
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
    ) -> SimulatedServer:
        """Make a server that is not bound yet; its limits are not reached."""
        return SimulatedServer(
            self._network, self.loop, handlers, on_disconnect, own=self._own(), guard=self.guard
        )

    def listen(
        self, accept: Callable[[ByteStream], None], guard: StreamGuard | None = None
    ) -> SimulatedStreamListener:
        """Make a listener for connections without ZeroMQ that is not bound yet."""
        take = accept if guard is None else guard(self.loop, accept)
        return SimulatedStreamListener(self._network, self.loop, take)

    def with_keys(self, ring: KeyRing) -> "SimulatedTransport":
        """Return a transport of the same loop whose connections prove other keys."""
        other = copy.copy(self)
        other.ring, other.guard = ring, None
        return other

    def publish(self) -> SimulatedHintPublisher:
        """Make a publisher of hints that is not bound yet."""
        return SimulatedHintPublisher(self._network, self.node, self._own(), self.guard)

    def subscribe(
        self,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
    ) -> SimulatedHintSubscriber:
        """Make a listener to one publisher's hints."""
        return SimulatedHintSubscriber(
            self._network,
            self.loop,
            endpoint,
            on_hint=on_hint,
            on_connected=on_connected,
            ring=self.ring,
        )

    def channel(self, endpoint: str, *, busy_poll_us: int = 0) -> SimulatedChannel:
        """Make a connection for requests that wait."""
        return SimulatedChannel(self._network, self.node, endpoint, self.ring)

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        """Calls back once in the loop when a channel may have a response."""
        assert isinstance(channel, SimulatedChannel)
        channel.watch(partial(self.loop.deliver, callback))

    def executor(self, name: str) -> SimulatedExecutor:
        """Make a helper thread."""
        return SimulatedExecutor(self.node)

    def flag(self) -> SimulatedEvent:
        """Make a flag that threads wait for."""
        return SimulatedEvent(self.node)

    def condition(self, lock: "threading.Lock | None" = None) -> SimulatedCondition:
        """Make a condition variable."""
        return SimulatedCondition(self.node, lock)

    def pause(self, duration_s: float) -> None:
        """Lets the simulation run meanwhile."""
        self.node.wait_until(lambda: False, int(duration_s * 1_000))

    def busy_poll(self, for_us: int) -> None:
        """Do nothing: waits cost nothing here."""

    def run_loop(self, target: Callable[[], None], name: str) -> "SimulatedThread":
        """Makes the simulation turn the loop."""
        return SimulatedThread(self.loop, target)

    def close(self) -> None:
        """Do nothing: the connections share nothing."""

    def _own(self) -> Credentials | None:
        return None if self.ring is None else self.ring.own


class SimulatedThread:
    """The twin of the thread that runs a loop: its clean-up is done when the loop stops."""

    def __init__(self, loop: SimulatedLoop, target: Callable[[], None]) -> None:
        self._loop = loop
        self._target = target
        self._ended = False
        loop.on_stop(self._end)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end, ``timeout`` seconds at most."""
        timeout_ms = LONGEST_WAIT_MS if timeout is None else int(timeout * 1_000)
        self._loop.node.wait_until(lambda: self._ended, timeout_ms)

    def is_alive(self) -> bool:
        """Return False once it ended."""
        return not self._ended

    def _end(self) -> None:
        self._target()
        self._ended = True
