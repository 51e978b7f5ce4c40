"""Asks one server: many requests in flight, each with a deadline and one outcome."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    QueueFull,
    RemoteProtocolError,
    RequestTimeout,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, response_error
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    ONEWAY,
    Command,
    decode_frame,
    encode_frame,
)
from mqmesh.transport.interface import OnDone, Timer
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop

MAX_REQUESTS_WAITING: Final = 100_000
"""Requests in flight and not yet sent, together."""
FRAMES_PER_TICK: Final = 256
SWEEP_MS: Final = 20
"""Least time between two searches for passed deadlines; so late may a timeout be told."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_log = logging.getLogger(__name__)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_PROBE: Final = int(RequestCode.PROBE_CLIENT)


class _WaitingRequest(msgspec.Struct):
    on_done: OnDone
    deadline_ms: int
    sent: bool


class CommandClient:
    """One connection to one server, used in the loop's thread.

    Every request ends exactly once: with its successful response, or with an error. While
    there is no connection, requests wait for it until their deadlines; ask ``unreachable``
    first where another server would do.

    Args:
        context: ZeroMQ context of the process.
        loop: Its event loop.
        endpoint: ``tcp://host:port`` or ``ipc://path``.
        on_command: Told of commands that the server sends by itself.
        on_connection: Told when the connection is made (True) and broken (False).

    Attributes:
        connected: The connection stands.
        unreachable: The last attempt to connect failed, or the connection broke.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.connected = False
        self.unreachable = False
        self._loop = loop
        self._on_command = on_command
        self._on_connection = on_connection
        self._waiting: dict[int, _WaitingRequest] = {}
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._next_opaque = 1
        self._wants_write = False
        self._closed = False
        self._socket = sockets.dealer(context)
        self._monitor = sockets.monitor(self._socket)
        loop.add(self._socket, self._on_ready)
        loop.add(self._monitor, self._on_monitor)
        self._sweep: Timer | None = None
        self._sweep_due_ms = 0
        sockets.connect(self._socket, endpoint)

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
        """Sends a request; its outcome comes to ``on_done``, never before this returns.

        Args:
            code: Request code.
            on_done: Called once in the loop's thread, with the response or the error.
            parts: Body, in pieces.
            header: Encoded header.
            timeout_ms: Time for the answer.

        Raises:
            ClientClosed: After ``close``.
            QueueFull: ``MAX_REQUESTS_WAITING`` requests wait already.
            LocalProtocolError: The frame would be too large.
        """
        self._check_room()
        opaque = self._next_opaque
        self._next_opaque += 1
        frame = encode_frame(code, opaque, *parts, header=header)
        deadline_ms = self._loop.clock.monotonic_ms() + timeout_ms
        waiting = self._waiting[opaque] = _WaitingRequest(on_done, deadline_ms, False)
        if self._unsent or not self._try_send(frame):
            self._unsent.append((opaque, frame))
            self._watch_write()
        else:
            waiting.sent = True
        if self._sweep is None or deadline_ms < self._sweep_due_ms - SWEEP_MS:
            self._plan_sweep(deadline_ms)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        """Sends a request that gets no answer; it may be lost.

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``request``.
        """
        self._check_room()
        frame = encode_frame(code, 0, *parts, header=header, flags=ONEWAY)
        if self._unsent or not self._try_send(frame):
            self._unsent.append((0, frame))
            self._watch_write()

    def close(self) -> None:
        """Closes the connection; requests without an outcome end with ``ClientClosed``."""
        if self._closed:
            return
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._loop.remove(self._socket)
        self._loop.remove(self._monitor)
        sockets.close(self._socket, self._monitor)
        self._fail_all(ClientClosed(f"the connection to {self.endpoint} was closed"))

    def _check_room(self) -> None:
        if self._closed:
            raise ClientClosed(f"the connection to {self.endpoint} is closed")
        if len(self._waiting) + len(self._unsent) >= MAX_REQUESTS_WAITING:
            raise QueueFull(
                f"{MAX_REQUESTS_WAITING} requests wait for {self.endpoint}; send more slowly"
            )

    def _try_send(self, frame: bytes) -> bool:
        if not self.connected:
            return False  # ZeroMQ would still take it for a moment, and lose it
        self._loop.touch(self._socket)
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> None:
        while self._unsent:
            opaque, frame = self._unsent[0]
            waiting = self._waiting.get(opaque)
            if waiting is not None or opaque == 0:
                if not self._try_send(frame):
                    break
                if waiting is not None:
                    waiting.sent = True
            self._unsent.popleft()
        self._watch_write()

    def _watch_write(self) -> None:
        # Without a connection it is the monitor that tells when to go on.
        wanted = self.connected and bool(self._unsent)
        if wanted != self._wants_write:
            self._wants_write = wanted
            self._loop.want_write(self._socket, wanted)

    def _on_ready(self) -> None:
        if self._unsent:
            self._flush()
        for _ in range(FRAMES_PER_TICK):
            if self._closed:
                return
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            further: tuple[memoryview, ...] | None = ()
            if frame.more:
                further = sockets.receive_rest(self._socket, MAX_FRAME_BYTES - len(frame.buffer))
            if further is None:
                _log.warning("%s sent more frames than it may; ignored", self.endpoint)
                continue
            try:
                command = decode_frame(frame.buffer, further)
            except RemoteProtocolError as error:
                _log.warning("malformed frame from %s: %s", self.endpoint, error)
                continue
            self._take(command)

    def _take(self, command: Command) -> None:
        if not command.is_response:
            # A probe is answered by ZeroMQ, which took it.
            if self._on_command is not None and command.code != _PROBE:
                self._on_command(command)
            return
        waiting = self._waiting.pop(command.opaque, None)
        if waiting is None:
            return  # its deadline passed before
        waiting.on_done(command if command.code == _SUCCESS else response_error(command))

    def _on_monitor(self) -> None:
        for event, _ in sockets.read_monitor(self._monitor):
            if self._closed:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self.unreachable = False
                sockets.settle(self._socket)
                self._loop.touch(self._socket)
                self._flush()
                self._tell(True)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = False
                self.unreachable = True
                self._watch_write()
                self._fail_sent()
                self._tell(False)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.unreachable = True

    def _tell(self, connected: bool) -> None:
        if self._on_connection is not None and not self._closed:
            self._on_connection(connected)

    def _fail_sent(self) -> None:
        error = EndpointUnreachable(
            f"the connection to {self.endpoint} broke; whether the request was carried out is "
            "unknown"
        )
        self._fail([key for key, waiting in self._waiting.items() if waiting.sent], error)

    def _fail_all(self, error: MQMeshError) -> None:
        self._unsent.clear()
        self._fail(list(self._waiting), error)

    def _fail(self, opaques: list[int], error: MQMeshError) -> None:
        for opaque in opaques:
            waiting = self._waiting.pop(opaque, None)
            if waiting is None:
                continue  # a callback before it closed the client
            try:
                waiting.on_done(error)
            except Exception:
                # The others must have their outcome too.
                _log.exception("a callback for an answer of %s failed", self.endpoint)

    def _plan_sweep(self, due_ms: int) -> None:
        # Planned for the first deadline, and not each few ms, so that an idle client sleeps.
        if self._sweep is not None:
            self._sweep.cancel()
        delay_ms = max(due_ms - self._loop.clock.monotonic_ms(), SWEEP_MS)
        self._sweep_due_ms = self._loop.clock.monotonic_ms() + delay_ms
        self._sweep = self._loop.call_later(delay_ms, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        now_ms = self._loop.clock.monotonic_ms()
        late = [key for key, waiting in self._waiting.items() if waiting.deadline_ms <= now_ms]
        sent = [key for key in late if self._waiting[key].sent]
        unsent = [key for key in late if not self._waiting[key].sent]
        self._fail(
            sent,
            RequestTimeout(
                f"no answer from {self.endpoint} in time; whether the request was carried out is "
                "unknown"
            ),
        )
        self._fail(unsent, EndpointUnreachable(f"no connection to {self.endpoint} in time"))
        if self._waiting and not self._closed:
            self._plan_sweep(min(waiting.deadline_ms for waiting in self._waiting.values()))
