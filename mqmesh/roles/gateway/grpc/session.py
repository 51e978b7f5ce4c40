"""One connection of a client by gRPC: its calls, and their answers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from mqmesh.errors import MQMeshError, NoPermission, RemoteProtocolError
from mqmesh.protocol.grpc.calls import (
    CallBegun,
    CallEvent,
    CallGivenUp,
    CallMessage,
    GrpcCall,
    GrpcConnection,
    GrpcStatus,
)
from mqmesh.protocol.grpc.codes import ReplyCode, reply_code
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE, GrpcMessage
from mqmesh.roles.gateway.session import ClientConnection, Output, SessionLimits
from mqmesh.units import KIB, MIB

CLIENT_ID: Final = "x-mq-client-id"
MOST_ID_CHARACTERS: Final = 255
WORK_MS: Final = 3
"""Frames of one connection are read for so long in a turn of the loop; others come then."""
MOST_REQUEST_BYTES: Final = 64 * KIB
"""Longest request of a method that has no limit of its own."""
MOST_UNREAD_BYTES: Final = 1 * MIB
"""Answers of one stream that wait for room; one that has more ends."""
REQUEST_MS: Final = 30_000
"""A request that is not whole after so long is refused."""

_log = logging.getLogger(__name__)


class GrpcMethod(msgspec.Struct, frozen=True):
    """A method that is served.

    Attributes:
        request: Name of the class of its requests.
        response: Name of the class of its answers.
        on_message: Takes a request, and answers it by the call, now or later; raises
            ``MQMeshError`` to refuse it.
        is_stream: Its client sends several messages; for others the first one is the request.
        max_request_bytes: Longest request; 0 for that of the connection.
        check: Looks at the bytes of a request first; raises ``ValueError`` to refuse them.
    """

    request: str
    response: str
    on_message: Callable[["ServedCall", GrpcMessage], None]
    is_stream: bool = False
    max_request_bytes: int = MOST_REQUEST_BYTES
    check: Callable[[bytes], None] | None = None


class CallService(Protocol):
    """Methods that one user's clients call; ``GrpcService`` is one."""

    @property
    def methods(self) -> Mapping[str, GrpcMethod]:
        """Methods by path, ``/service/name``."""

    def meet(self, call: "ServedCall") -> None:
        """Note a call before it is served; raises ``MQMeshError`` to refuse it."""

    def session_ended(self, session: "GrpcSession") -> None:
        """Note the end of a connection."""


class ServedCall:
    """A call that a handler answers.

    Attributes:
        session: Its connection.
        client_id: Its client.
        headers: Headers of its request.
        deadline_ms: Its client waits until then, monotonic clock; 0 for ever.
        on_over: Called when the client gives it up, or it took too long; not behind ``finish``.
        is_over: Nothing is answered any more.
    """

    __slots__ = (
        "_begun_ms",
        "_call",
        "_has_message",
        "_method",
        "client_id",
        "deadline_ms",
        "headers",
        "is_over",
        "on_over",
        "session",
    )

    def __init__(self, session: "GrpcSession", call: GrpcCall, method: GrpcMethod) -> None:
        self._call = call
        self._method = method
        self._has_message = False
        if method.max_request_bytes:
            call.max_message_bytes = min(call.max_message_bytes, method.max_request_bytes)
        self._begun_ms = session.last_seen_ms
        self.session = session
        self.headers = call.headers
        self.client_id = call.headers.get(CLIENT_ID, "")
        self.deadline_ms = session.last_seen_ms + call.timeout_ms if call.timeout_ms else 0
        self.on_over: Callable[[], None] | None = None
        self.is_over = False

    def answer(self, **fields: object) -> None:
        """Send the only answer; its status is OK if none is given."""
        fields.setdefault("status", OK)
        self.answer_all([fields])

    def answer_all(
        self,
        answers: Sequence[Mapping[str, object]],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Send all answers of a call that has several, and end it.

        Args:
            answers: Their fields.
            on_lost: Called if the client will not take all of them.
        """
        if not self.is_over:
            messages = [self._encode(one) for one in answers]
            self.is_over = True
            self.session.finish(self._call, GrpcStatus.OK, "", *messages, on_lost=on_lost)

    def fail(self, error: BaseException) -> None:
        """Send an error as the only answer."""
        self.answer(status=status_of(error))

    def send(self, **fields: object) -> None:
        """Send an answer of a call that goes on; nothing once it is over.

        A call whose client does not take its answers ends.
        """
        if self.is_over:
            return
        waiting = self._call.waiting_bytes
        if waiting >= MOST_UNREAD_BYTES or (waiting and self.session.is_full):
            self.session.cut(
                self._call,
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"{waiting} bytes of this call wait for its client (limit {MOST_UNREAD_BYTES})",
            )
            self.give_up()
        else:
            self.session.send(self._call, self._encode(fields))

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the call; once it is over nothing happens."""
        if not self.is_over:
            self.is_over = True
            self.session.finish(self._call, status, text)

    def take(self, data: bytes) -> None:
        """Serve a message of the client."""
        method = self._method
        if self.is_over or (self._has_message and not method.is_stream):
            return
        self._has_message = True
        if len(data) > self._call.max_message_bytes:  # it came whole with the call's begin
            text = f"a request of {len(data)} bytes (limit {self._call.max_message_bytes})"
            self.finish(GrpcStatus.RESOURCE_EXHAUSTED, text)
            self.give_up()
            return
        try:
            if method.check is not None:
                method.check(data)
            request = CLASSES[method.request].FromString(data)
        except Exception as error:  # the library's errors depend on its version
            self.finish(GrpcStatus.INVALID_ARGUMENT, f"no {method.request}: {error}")
            return
        try:
            method.on_message(self, request)
        except MQMeshError as error:
            self.fail(error)
            self.give_up()
        except Exception as error:
            _log.exception("%s failed", method.request)
            self.fail(error)
            self.give_up()

    def _encode(self, fields: Mapping[str, object]) -> bytes:
        found: bytes = CLASSES[self._method.response](**fields).SerializeToString()
        return found

    def is_overdue(self, now_ms: int) -> bool:
        """Return True if a request is not whole, and began too long ago."""
        began_ms = self._call.partial_ms
        if not (began_ms or self._has_message or self._method.is_stream):
            began_ms = self._begun_ms
        return 0 < began_ms <= now_ms - REQUEST_MS

    def requested(self) -> None:
        """Note that the client sends nothing more."""
        if self._method.is_stream:
            self.finish()
            self.give_up()
        elif not self._has_message:
            self.finish(GrpcStatus.INVALID_ARGUMENT, "a call without a request")

    def give_up(self) -> None:
        """Note that no client waits for the call any more."""
        self.is_over = True
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over()


class GrpcSession(ClientConnection):
    """A connection, from its acceptance to its end.

    Args:
        stream: The connection.
        admit: Returns the methods that a call may have, by its headers; raises ``NoPermission``.
        limits: Limits of the session.
        now_ms: Monotonic clock.
        soon: Calls back in the next turn of the loop.
        on_end: Called when it is over.
        on_broken: Called with a sentence when what came is no HTTP/2.

    Attributes:
        client_ids: Clients that calls came of.
        service: Methods of that user.
    """

    def __init__(
        self,
        stream: Output,
        admit: Callable[["GrpcSession", Mapping[str, str]], CallService],
        limits: SessionLimits,
        now_ms: Callable[[], int],
        soon: Callable[[Callable[[], None]], None],
        on_end: Callable[["GrpcSession"], None],
        on_broken: Callable[[str], None],
    ) -> None:
        super().__init__(stream, limits, now_ms)
        self._admit = admit
        self._soon = soon
        self._on_end = on_end
        self._on_broken = on_broken
        self._connection = GrpcConnection(limits.max_frame_bytes, now_ms)
        self._calls: dict[GrpcCall, ServedCall] = {}
        # Calls with their last answer, which waits for room, and what to do if it is lost.
        self._untaken: dict[GrpcCall, Callable[[], None]] = {}
        self._goes_on = False
        self.client_ids: dict[str, None] = {}
        self.service: CallService | None = None

    @property
    def is_full(self) -> bool:
        """True when the client takes no answers, so that it gets no further ones."""
        return self._connection.waiting_bytes >= self._limits.max_output_bytes

    @property
    def held_bytes(self) -> int:
        """Parts of requests that are not whole."""
        return self._connection.held_bytes

    # ---- Of the stream -------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        """Serve the calls that are whole now."""
        self.last_seen_ms = self._now_ms()
        self._connection.feed(data)
        self._work()

    def on_stuck(self) -> None:
        """Do nothing: ``_work`` looks at what waits."""

    # ---- Of calls ------------------------------------------------------------------------

    def send(self, call: GrpcCall, message: bytes) -> None:
        """Send a message of a call."""
        self._connection.send(call, message)
        self._write()

    def finish(
        self,
        call: GrpcCall,
        status: GrpcStatus,
        text: str,
        *messages: bytes,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """End a call with its last messages; ``on_lost`` is called if they are not taken."""
        self._calls.pop(call, None)
        self._connection.finish(call, status, text, *messages)
        if on_lost is not None and call.waiting_bytes:
            self._untaken[call] = on_lost
        self._write()

    def cut(self, call: GrpcCall, status: GrpcStatus, text: str) -> None:
        """End a call without what waits for room."""
        self._calls.pop(call, None)
        self._connection.cut(call, status, text)
        self._write()

    def close(self) -> None:
        """End the connection; closing twice does no harm."""
        if not self.is_closed:
            self._connection.close()
            self._write()
        super().close()

    def tick(self, now_ms: int) -> None:
        """End calls that took too long, and the connection if nothing came for too long."""
        for served in list(self._calls.values()):
            if 0 < served.deadline_ms <= now_ms and not served.is_over:
                served.finish(GrpcStatus.DEADLINE_EXCEEDED, "the gateway took too long")
                served.give_up()
            elif served.is_overdue(now_ms):
                text = f"a request that is not whole after {REQUEST_MS} ms"
                served.finish(GrpcStatus.DEADLINE_EXCEEDED, text)
                served.give_up()
        self.end_if_idle(now_ms)

    def _work(self) -> None:
        if self._is_working or self.is_closed:
            return
        self._is_working = True
        until_ms = self._now_ms() + WORK_MS
        self._goes_on = False
        try:
            while not self._is_stuck():
                if self._now_ms() > until_ms:
                    self._goes_on = True
                    self._soon(self._work)
                    break
                events = self._connection.step()
                if events is None:
                    break
                for event in events:
                    self._serve(event)
        except RemoteProtocolError as error:
            self._on_broken(f"{self.peer} speaks no gRPC: {error}; its connection is closed")
            self._is_working = False
            self.close()
            return
        self._is_working = False
        for call in [one for one in self._untaken if not one.waiting_bytes]:
            del self._untaken[call]
        self._write()
        if self._connection.is_over:
            self.close()
        else:
            self._read_unless(self._goes_on or self._is_stuck())

    def _serve(self, event: CallEvent) -> None:
        if isinstance(event, CallBegun):
            self._begin(event.call)
            return
        served = self._calls.get(event.call)
        if served is None:
            if isinstance(event, CallGivenUp) and event.call in self._untaken:
                self._untaken.pop(event.call)()
            return
        if isinstance(event, CallMessage):
            served.take(event.message)
        elif isinstance(event, CallGivenUp):
            del self._calls[event.call]
            served.give_up()
        else:
            served.requested()

    def _begin(self, call: GrpcCall) -> None:
        try:
            service = self.service = self._admit(self, call.headers)
        except NoPermission as error:
            self._connection.finish(call, GrpcStatus.PERMISSION_DENIED, str(error))
            return
        method = service.methods.get(call.method)
        if method is None:
            name = call.method[:100]
            self._connection.finish(
                call, GrpcStatus.UNIMPLEMENTED, f"{name} is not served by mqmesh's gateway"
            )
            return
        if len(self._calls) >= self._limits.max_requests_in_flight or self.is_full:
            self._connection.finish(
                call,
                GrpcStatus.UNAVAILABLE,
                f"{len(self._calls)} calls run (limit {self._limits.max_requests_in_flight}, "
                f"max_requests_in_flight), {self._connection.waiting_bytes} bytes wait (limit "
                f"{self._limits.max_output_bytes}, max_output_bytes)",
            )
            return
        served = self._calls[call] = ServedCall(self, call, method)
        try:
            service.meet(served)
        except MQMeshError as error:
            served.fail(error)

    def _write(self) -> None:
        if not self._is_working and not self.is_closed and (data := self._connection.output()):
            self._stream.write(data)

    def _is_stuck(self) -> bool:
        return self._stream.waiting_bytes >= self._limits.max_output_bytes

    def _finish(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for served in list(self._calls.values()):
            served.give_up()
        self._calls.clear()
        for on_lost in self._untaken.values():
            on_lost()
        self._untaken.clear()
        if self.service is not None:
            self.service.session_ended(self)
        self._on_end(self)


OK: Final = CLASSES["Status"](code=ReplyCode.OK.value, message="OK")


def status_of(error: BaseException) -> GrpcMessage:
    """Return an error as a status of an answer."""
    return CLASSES["Status"](code=reply_code(error).value, message=str(error)[:1_000])


def path_of(name: str) -> str:
    """Return the path of a method of RocketMQ's service."""
    return f"/{SERVICE}/{name}"
