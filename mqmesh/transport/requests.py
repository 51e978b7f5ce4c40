"""Requests of one connection: each with a deadline and one outcome. No socket is used here."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    MQMeshError,
    QueueFull,
    RequestTimeout,
    TransportError,
)
from mqmesh.protocol.codes import ResponseCode, response_error
from mqmesh.protocol.command import ONEWAY, Command, encode_frame
from mqmesh.protocol.commands import RequestCode
from mqmesh.transport.descriptors import shortage
from mqmesh.transport.interface import Loop, OnDone, Timer

MAX_REQUESTS_WAITING: Final = 100_000
"""Requests in flight and not yet sent, together."""
SWEEP_MS: Final = 20
"""Shortest time between two searches for passed deadlines; a timeout may be reported so late."""

_log = logging.getLogger(__name__)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_PROBE: Final = int(RequestCode.PROBE_CLIENT)


class _WaitingRequest(msgspec.Struct):
    on_done: OnDone
    deadline_ms: int
    sent: bool


class RequestTable:
    """The requests of one connection that wait for their outcome, or to be sent.

    Args:
        loop: Loop of the client.
        endpoint: Endpoint of the server.
        try_send: Sends a frame, or returns False when that is not possible now.
        on_command: Called with commands that the server sends without a request.
    """

    def __init__(
        self,
        loop: Loop,
        endpoint: str,
        try_send: Callable[[bytes], bool],
        on_command: Callable[[Command], None] | None,
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._try_send = try_send
        self._on_command = on_command
        self._waiting: dict[int, _WaitingRequest] = {}
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._next_opaque = 1
        self._closed = False
        self._sweep: Timer | None = None
        self._sweep_due_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_unsent(self) -> bool:
        """True if frames wait to be sent by ``flush``."""
        return bool(self._unsent)

    def request(
        self,
        code: int,
        on_done: OnDone,
        parts: tuple[bytes | memoryview, ...],
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Sends a request, or keeps it until it can be sent.

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
        else:
            waiting.sent = True
        if self._sweep is None or deadline_ms < self._sweep_due_ms - SWEEP_MS:
            self._plan_sweep(deadline_ms)

    def oneway(self, code: int, parts: tuple[bytes | memoryview, ...], header: bytes) -> None:
        """Sends a request that gets no answer, or keeps it; it may be lost.

        Raises:
            ClientClosed, QueueFull, LocalProtocolError: As ``request``.
        """
        self._check_room()
        frame = encode_frame(code, 0, *parts, header=header, flags=ONEWAY)
        if self._unsent or not self._try_send(frame):
            self._unsent.append((0, frame))

    def flush(self) -> None:
        """Sends waiting frames, as many as possible."""
        while self._unsent:
            opaque, frame = self._unsent[0]
            waiting = self._waiting.get(opaque)
            if waiting is not None or opaque == 0:
                if not self._try_send(frame):
                    return
                if waiting is not None:
                    waiting.sent = True
            self._unsent.popleft()

    def take(self, command: Command) -> None:
        """Ends the request of a response; passes on commands that the server sends by itself."""
        if not command.is_response:
            # A probe is answered by the transport, which took it.
            if self._on_command is not None and command.code != _PROBE:
                self._on_command(command)
            return
        waiting = self._waiting.pop(command.opaque, None)
        if waiting is not None:  # else its deadline passed before
            waiting.on_done(command if command.code == _SUCCESS else response_error(command))

    def broke(self) -> None:
        """Fail the requests that the broken connection had sent; others wait for the next one."""
        sent = [key for key, waiting in self._waiting.items() if waiting.sent]
        self._fail(sent, broken(self._endpoint))

    def refuse(self, error: MQMeshError) -> None:
        """End all requests with this error: there will be no connection."""
        self._unsent.clear()
        self._fail(list(self._waiting), error)

    def close(self) -> None:
        """Requests without an outcome end with ``ClientClosed``."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._unsent.clear()
        error = ClientClosed(f"the connection to {self._endpoint} was closed")
        self._fail(list(self._waiting), error)

    def _check_room(self) -> None:
        if self._closed:
            raise ClientClosed(f"the connection to {self._endpoint} is closed")
        if len(self._waiting) + len(self._unsent) >= MAX_REQUESTS_WAITING:
            raise QueueFull(
                f"{MAX_REQUESTS_WAITING} requests wait for {self._endpoint}; send more slowly"
            )

    def _fail(self, opaques: list[int], error: MQMeshError) -> None:
        for opaque in opaques:
            waiting = self._waiting.pop(opaque, None)
            if waiting is None:
                continue  # an earlier callback closed the client
            try:
                waiting.on_done(error)
            except Exception:
                # The other requests must have their outcome, too.
                self._loop.callback_failures += 1
                _log.exception("a callback for an answer of %s failed", self._endpoint)

    def _plan_sweep(self, due_ms: int) -> None:
        # Planned for the first deadline, and not each few ms, so that an idle client sleeps.
        if self._sweep is not None:
            self._sweep.cancel()
        now_ms = self._loop.clock.monotonic_ms()
        delay_ms = max(due_ms - now_ms, SWEEP_MS)
        self._sweep_due_ms = now_ms + delay_ms
        self._sweep = self._loop.call_later(delay_ms, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        now_ms = self._loop.clock.monotonic_ms()
        late = [key for key, waiting in self._waiting.items() if waiting.deadline_ms <= now_ms]
        sent = [key for key in late if self._waiting[key].sent]
        unsent = [key for key in late if not self._waiting[key].sent]
        self._fail(sent, too_late(self._endpoint))
        self._fail(unsent, no_connection(self._endpoint))
        if self._waiting and not self._closed:
            self._plan_sweep(min(waiting.deadline_ms for waiting in self._waiting.values()))


def no_connection(server: str, reason: str = "") -> TransportError:
    """Returns the error of a request that waited for a connection in vain.

    Args:
        server: Endpoint of the server, or another name of it.
        reason: Reason for the missing connection, if it is known.

    Returns:
        TooManyOpenFiles if this process has no descriptor for a connection, else
        EndpointUnreachable.
    """
    text = f"no connection to {server} in time{': ' if reason else ''}{reason}"
    error = EndpointUnreachable(text)
    error.is_known = bool(reason)
    return shortage(f"a connection to {server}") or error


def broken(endpoint: str) -> EndpointUnreachable:
    """Return the error for a request that was sent by a connection that broke."""
    return EndpointUnreachable(
        f"the connection to {endpoint} broke; whether the request was carried out is unknown"
    )


def too_late(endpoint: str) -> RequestTimeout:
    """Return the error for a request that was sent and not answered in time."""
    return RequestTimeout(
        f"no answer from {endpoint} in time; whether the request was carried out is unknown"
    )
