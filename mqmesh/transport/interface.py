"""Interfaces that roles and clients need: a loop with clocks and timers, peers, threads.

Code that needs sockets, time or threads is given a ``Transport`` and makes none of them itself.
``mqmesh.transport.zmq.transport`` is the real one, ``mqmesh.transport.simulated`` its twin: there
all of a cluster's processes live in one thread, on one clock, from one seed.

Methods and attributes mean the same as those of the real classes, which have more details.
"""

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import MAX_FRAME_BYTES, Command, Reply
from mqmesh.protocol.request import Peer, Request
from mqmesh.refusals import Refusals
from mqmesh.security.keys import KeyRing
from mqmesh.units import GIB, MIB

if TYPE_CHECKING:
    # Clients have none, and need not load the table of commands that it knows.
    from mqmesh.security.guard import Guard

TRY_AGAIN_MS: Final = 5_000
"""Pause after ``AuthenticationFailed`` before the connection is tried again: the access list may
have changed, and ZeroMQ does not try by itself."""

Handler = Callable[[Request], Reply | None]
OnDisconnect = Callable[[Peer], None]
OnDone = Callable[[Command | MQMeshError], None]


class ServerLimits(msgspec.Struct, frozen=True):
    """Limits for the peers of a server.

    Attributes:
        max_connections: Connections at a time.
        max_pending_bytes: Bytes that wait for one peer, or from one peer.
        max_total_pending_bytes: The same for all peers together.
        max_frame_bytes: Longest frame that a peer may send; ZeroMQ ends its connection otherwise.
    """

    max_connections: int = 10_000
    max_pending_bytes: int = 128 * MIB
    max_total_pending_bytes: int = 1 * GIB
    max_frame_bytes: int = MAX_FRAME_BYTES


class Timer:
    """A call planned for later; ``cancel`` it if it is not wanted any more."""

    __slots__ = ("callback", "cancelled", "interval_ms")

    def __init__(self, callback: Callable[[], None], interval_ms: int) -> None:
        self.callback = callback
        self.interval_ms = interval_ms
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the call; calling twice does no harm."""
        self.cancelled = True


class Loop(Protocol):
    """Interface of ``mqmesh.transport.zmq.loop.EventLoop``."""

    callback_failures: int
    longest_turn_ns: int

    @property
    def clock(self) -> Clock:
        """Clock of the timers."""

    def at_tick_end(self, callback: Callable[[], None]) -> None:
        """Calls back at the end of each turn."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls once, not before ``delay_ms``."""

    def call_every(self, interval_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls each ``interval_ms``."""

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Calls in the loop's thread, soon; from any thread."""

    def wake(self) -> None:
        """Ends the loop's wait; from any thread."""

    def has_news(self) -> bool:
        """Return True when a turn would find work; from any thread."""

    def stop(self) -> None:
        """Makes ``run`` return after the current turn; from any thread."""

    def fail(self, error: Exception) -> None:
        """Makes ``run`` end with an error."""

    def disown(self) -> None:
        """Stop for good in a forked process; no turn is taken."""

    @property
    def stopping(self) -> bool:
        """True once ``stop`` was called."""

    @property
    def in_loop_thread(self) -> bool:
        """True in callbacks, and in whatever they call."""

    def run(self) -> None:
        """Serves until ``stop``."""

    def tick(self, wait_ms: int) -> None:
        """Take one turn."""

    def close(self) -> None:
        """Releases the resources of the loop."""


class Connection(Protocol):
    """A client's connection to a server; see ``mqmesh.transport.zmq.client.CommandClient``."""

    endpoint: str
    connected: bool
    unreachable: bool

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""

    def request(
        self,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes = b"",
        timeout_ms: int = 3_000,
    ) -> None:
        """Sends a request; its outcome comes to ``on_done``, never before this returns."""

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer."""

    def close(self) -> None:
        """Closes the connection."""


class Server(Protocol):
    """Interface of ``mqmesh.transport.zmq.server.CommandServer``."""

    tick_ms: int
    malformed_frames: int
    hung_up: int
    silent: int
    requests: int
    refusals: Refusals
    readable_ms: int
    drained_ms: int | None

    @property
    def peer_count(self) -> int:
        """Connections that sent a frame and still exist."""

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that their peers have not taken yet."""

    @property
    def dropped_replies(self) -> int:
        """Answers that were dropped because their peer was gone."""

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port."""

    def note_refusal(self, code: int, remark: str) -> None:
        """Counts and logs a refusal."""

    def review(self) -> None:
        """End the connections of peers that may not connect any more: the access list changed."""

    def tick(self, now_ms: int) -> None:
        """Maintains connections; to be called some times a second."""

    def close(self) -> None:
        """Stops listening."""


class StreamHandler(Protocol):
    """The owner of a stream: a protocol on it. Called in the loop's thread."""

    def on_bytes(self, data: bytes) -> None:
        """Take bytes that arrived; none in the turn after ``again``."""

    def on_stuck(self) -> None:
        """Note that the system takes no more of the written bytes for now."""

    def on_drained(self) -> None:
        """Note that all written bytes have left, after some of them had to wait."""

    def on_closed(self) -> None:
        """Note the end of the connection; no call follows. Not called after ``close``."""


class ByteStream(Protocol):
    """Interface of ``mqmesh.transport.zmq.streams.Stream``: a connection without ZeroMQ."""

    @property
    def peer(self) -> str:
        """Other end: ``host:port``, or ``unix``."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were written and that the system has not taken yet."""

    @property
    def is_closed(self) -> bool:
        """True if no more bytes are written or arrive."""

    def start(self, handler: StreamHandler) -> None:
        """Give arriving bytes to this handler, from the next turn on."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Write bytes, now or when the system takes them; never blocks."""

    def pause(self) -> None:
        """Read nothing until ``resume``."""

    def resume(self) -> None:
        """Read again."""

    def close(self) -> None:
        """End the connection; written bytes that the system takes at once are still sent."""


StreamGuard = Callable[[Loop, Callable[[ByteStream], None]], Callable[[ByteStream], None]]
"""Maker of an acceptor of connections, of a loop and of the acceptor of admitted streams."""


class ByteStreamListener(Protocol):
    """Interface of ``mqmesh.transport.zmq.streams.StreamListener``."""

    def bind(self, endpoint: str, *, shares_port: bool = False) -> str:
        """Listens on an endpoint; returns it with the real port.

        Args:
            endpoint: Endpoint of the listener.
            shares_port: Other processes of this user may listen there, too, if they also share it;
                each connection comes to one of them.
        """

    def close(self) -> None:
        """Stops listening; the owners of connections close them."""


class Publisher(Protocol):
    """Interface of ``mqmesh.transport.zmq.hints.HintPublisher``."""

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint; returns it with the real port."""

    def publish(self, hint: bytes) -> None:
        """Sends a hint to all subscribers connected now."""

    def review(self) -> None:
        """End all connections, so that listeners prove themselves: the access list changed."""

    def close(self) -> None:
        """Stops listening."""


class Subscriber(Protocol):
    """Interface of ``mqmesh.transport.zmq.hints.HintSubscriber``."""

    endpoint: str

    def close(self) -> None:
        """Closes the connection."""


class Channel(Protocol):
    """Interface of ``mqmesh.transport.zmq.channel.BlockingChannel``."""

    endpoint: str

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        """Sends a request and waits for its response."""

    def is_connected(self) -> bool:
        """Return True when ``post`` need not wait for a connection."""

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        """Sends a request; returns True when its response is there already."""

    def take(self) -> Command | None:
        """Return the response to the posted request, if it has arrived."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``take`` may find a response; -1 for none."""

    def cancel(self) -> None:
        """Makes requests fail soon; from any thread."""

    def close(self) -> None:
        """Closes the connection."""


class Flag(Protocol):
    """Flag that a thread waits for; ``threading.Event`` implements it."""

    def is_set(self) -> bool:
        """Return True after ``set``."""

    def set(self) -> None:
        """Ends all waits."""

    def clear(self) -> None:
        """Resets the flag."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the flag is set, ``timeout`` seconds at most."""


class Condition(AbstractContextManager[bool, None], Protocol):
    """A lock, and a way to wait for a change under it; ``threading.Condition`` has it."""

    def notify(self, n: int = 1) -> None:
        """Wakes the waiting thread."""

    def notify_all(self) -> None:
        """Wakes all waiting threads."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notification, ``timeout`` seconds at most."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until the predicate is true, ``timeout`` seconds at most."""


class LoopThread(Protocol):
    """The thread that runs a client's loop; ``threading.Thread`` has it."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end, ``timeout`` seconds at most."""

    def is_alive(self) -> bool:
        """Return False once it ended."""


class Transport(Protocol):
    """The environment of one loop.

    Every connection made here is served in the thread of its loop.

    Attributes:
        ring: Keys of this process and those of servers; None without encryption.
        guard: Decides who may connect to servers of this transport; None admits every client.
        watches_channels: True if ``watch`` is supported.
    """

    ring: KeyRing | None
    guard: "Guard | None"
    watches_channels: bool

    @property
    def loop(self) -> Loop:
        """The one loop; made at the first access."""

    @property
    def clock(self) -> Clock:
        """Clock of the loop."""

    @property
    def random(self) -> random.Random:
        """Source of chance: for ids, keys of producers, and even distribution.

        Keys prove identity, so the output of the real one must be unpredictable.
        """

    def connect(
        self,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
        by_loop: bool = False,
    ) -> Connection:
        """Make a connection to a server.

        Args:
            endpoint: ``tcp://host:port`` or ``ipc://path``.
            on_command: Called with commands that the server sends without a request.
            on_connection: Called when the connection is made (True) and broken (False).
            by_loop: Without keys the loop itself speaks, which is quicker; the server ends the
                connection when the loop stands still for 3 s. For roles.
        """

    def serve(
        self,
        handlers: Mapping[int, Handler],
        on_disconnect: OnDisconnect | None = None,
        limits: ServerLimits | None = None,
    ) -> Server:
        """Make a server that is not bound yet."""

    def listen(
        self, accept: Callable[[ByteStream], None], guard: StreamGuard | None = None
    ) -> ByteStreamListener:
        """Make a listener for connections without ZeroMQ that is not bound yet.

        Args:
            accept: Called with each new connection, which it starts or closes.
            guard: Acceptor in front of ``accept``, such as ``TlsGate.guard``.
        """

    def with_keys(self, ring: KeyRing) -> "Transport":
        """Return a transport of the same loop whose connections prove other keys; for no servers.

        It needs no closing.
        """

    def publish(self) -> Publisher:
        """Make a publisher of hints that is not bound yet."""

    def subscribe(
        self,
        endpoint: str,
        *,
        on_hint: Callable[[bytes], None],
        on_connected: Callable[[], None] | None = None,
    ) -> Subscriber:
        """Make a listener to one publisher's hints."""

    def channel(self, endpoint: str, *, busy_poll_us: int = 0) -> Channel:
        """Make a connection for requests of the caller's own thread."""

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        """Calls back once in the loop when a channel may have a response; from any thread."""

    def executor(self, name: str) -> Executor:
        """Make a helper thread, for calls that take long."""

    def flag(self) -> Flag:
        """Make a flag that threads wait for."""

    def condition(self, lock: "threading.Lock | None" = None) -> Condition:
        """Make a condition of a given lock, or of a lock of its own."""

    def pause(self, duration_s: float) -> None:
        """Lets the calling thread sleep."""

    def busy_poll(self, for_us: int) -> None:
        """Makes the loop wait awake for so many µs before it sleeps."""

    def run_loop(self, target: Callable[[], None], name: str) -> LoopThread:
        """Starts the thread that runs the loop.

        Args:
            target: Function that calls ``loop.run``, and cleans up behind it.
            name: Name of the thread.
        """

    def close(self) -> None:
        """Releases the shared resources of all connections; they are closed before."""
