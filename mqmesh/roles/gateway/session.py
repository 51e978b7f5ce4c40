"""One connection of a RocketMQ client: its frames, the requests in flight, and their answers."""

import abc
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from mqmesh.errors import (
    BrokerError,
    MQMeshError,
    RemoteProtocolError,
    SystemBusy,
    UnsupportedCommand,
)
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.remoting.codes import REFUSED, RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import (
    ONEWAY,
    RESPONSE,
    RemotingCommand,
    RemotingReader,
    encode_frame,
)

_log = logging.getLogger(__name__)

_STATUS: Final[dict[int, RemotingStatus]] = {
    ResponseCode.SYSTEM_BUSY: RemotingStatus.SYSTEM_BUSY,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: RemotingStatus.REQUEST_CODE_NOT_SUPPORTED,
    ResponseCode.MESSAGE_ILLEGAL: RemotingStatus.MESSAGE_ILLEGAL,
    ResponseCode.SERVICE_NOT_AVAILABLE: RemotingStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.DISK_FULL: RemotingStatus.SERVICE_NOT_AVAILABLE,
    ResponseCode.NO_PERMISSION: RemotingStatus.NO_PERMISSION,
    ResponseCode.TOPIC_NOT_EXIST: RemotingStatus.TOPIC_NOT_EXIST,
    ResponseCode.QUERY_NOT_FOUND: RemotingStatus.QUERY_NOT_FOUND,
    ResponseCode.CONSUMER_GROUP_NOT_EXIST: RemotingStatus.SUBSCRIPTION_GROUP_NOT_EXIST,
    ResponseCode.CLIENT_NOT_ONLINE: RemotingStatus.CONSUMER_NOT_ONLINE,
    RemotingStatus.CONSUME_MSG_TIMEOUT: RemotingStatus.CONSUME_MSG_TIMEOUT,
}
"""Status that a client of RocketMQ gets for a refusal; SYSTEM_ERROR for all others, after which it
tries again if that may help."""

_SENDS: Final = (
    *(RemotingCode.SEND_MESSAGE, RemotingCode.SEND_MESSAGE_V2, RemotingCode.SEND_BATCH_MESSAGE),
    *(RemotingCode.SEND_REPLY_MESSAGE, RemotingCode.SEND_REPLY_MESSAGE_V2),
)


class Output(Protocol):
    """The part of a connection that a session writes to; ``ByteStream`` is one."""

    @property
    def peer(self) -> str:
        """The client: ``host:port``."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were written and that the system has not taken yet."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Write bytes, now or when the system takes them; never blocks."""

    def pause(self) -> None:
        """Read nothing until ``resume``."""

    def resume(self) -> None:
        """Read again."""

    def close(self) -> None:
        """End the connection."""


class SessionLimits(msgspec.Struct, frozen=True):
    """Limits of one connection.

    Attributes:
        max_frame_bytes: Longest frame that may come.
        max_requests_in_flight: Requests without an answer; nothing more is read then.
        max_output_bytes: Answers that the client has not taken; nothing more is read then.
        idle_timeout_ms: A connection that is silent for so long is closed.
    """

    max_frame_bytes: int
    max_requests_in_flight: int
    max_output_bytes: int
    idle_timeout_ms: int


MOST_QUESTIONS: Final = 1_000
"""Questions to one client without an answer."""
MOST_PARKED: Final = 65_536
"""Pulls of one connection that wait for messages apart from the limit of requests in flight."""


OnClientAnswer = Callable[[RemotingCommand | None], None]


class Handler(Protocol):
    """Handler of a request, which answers it by ``session.answer`` or ``session.fail``, now or
    later."""

    def __call__(self, session: "RemotingSession", request: RemotingCommand) -> None:
        """Handle a request.

        Raises:
            MQMeshError: Reason why the request is refused.
        """


Admit = Callable[["RemotingSession", RemotingCommand], Mapping[int, Handler]]


class ClientConnection(abc.ABC):
    """Common part of connections: when they are read, and when they end.

    Args:
        stream: The connection.
        limits: Limits of the session.
        now_ms: Monotonic clock.

    Attributes:
        peer: Address of the client.
        is_closed: Nothing is answered any more.
        last_seen_ms: Time of its last bytes, monotonic clock.
        access_key: User that signed its first request, "" for none; None before that.
    """

    def __init__(self, stream: Output, limits: SessionLimits, now_ms: Callable[[], int]) -> None:
        self._stream = stream
        self._limits = limits
        self._now_ms = now_ms
        self._is_paused = self._is_working = False
        self.peer = stream.peer
        self.is_closed = False
        self.last_seen_ms = now_ms()
        self.access_key: str | None = None

    def on_drained(self) -> None:
        """Read again."""
        self._work()

    def on_closed(self) -> None:
        """Note the end of the connection."""
        self._finish()

    def close(self) -> None:
        """End the connection; closing twice does no harm."""
        if not self.is_closed:
            self._stream.close()
            self._finish()

    def end_if_idle(self, now_ms: int) -> None:
        """End the connection if nothing came for too long."""
        if now_ms - self.last_seen_ms > self._limits.idle_timeout_ms:
            _log.info("%s was silent for %d ms; closing", self.peer, now_ms - self.last_seen_ms)
            self.close()

    def _read_unless(self, is_full: bool) -> None:
        """Read on, or not while there is too much to do."""
        if is_full != self._is_paused and not self.is_closed:
            self._is_paused = is_full
            if is_full:
                self._stream.pause()
            else:
                self._stream.resume()

    @abc.abstractmethod
    def _work(self) -> None:
        """Serve what has come, as long as the limits allow."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Note the end, once."""


class RemotingSession(ClientConnection):
    """A connection, from its acceptance to its end.

    Args:
        stream: The connection.
        broker_name: Broker group whose port it came to; "" for that of the name server.
        admit: Returns the handlers, by request code, that a request may have; raises
            ``NoPermission`` for none.
        limits: Limits of the session.
        now_ms: Monotonic clock.
        on_end: Called when it is over.
        on_broken: Called with a sentence when what came is no remoting.

    Attributes:
        broker_name: See above.
        client_id: The client, once it has sent a heartbeat.
    """

    def __init__(
        self,
        stream: Output,
        broker_name: str,
        admit: Admit,
        limits: SessionLimits,
        now_ms: Callable[[], int],
        on_end: Callable[["RemotingSession"], None],
        on_broken: Callable[[str], None],
    ) -> None:
        super().__init__(stream, limits, now_ms)
        self._admit = admit
        self._on_end = on_end
        self._on_broken = on_broken
        self._reader = RemotingReader(limits.max_frame_bytes)
        self._todo: deque[RemotingCommand] = deque()
        self._waiting = 0
        self._parked = 0
        self._next_opaque = 0
        self._questions: dict[int, OnClientAnswer] = {}
        self.broker_name = broker_name
        self.client_id = ""

    # ---- Of the stream -------------------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        """Serve the requests that are whole now."""
        self.last_seen_ms = self._now_ms()
        try:
            self._todo.extend(self._reader.feed(data))
        except RemoteProtocolError as error:
            self._on_broken(f"{self.peer} speaks no remoting: {error}; its connection is closed")
            self.close()
            return
        self._work()

    def on_stuck(self) -> None:
        """Do nothing: ``answer`` looks at what waits."""

    # ---- Of the handlers -----------------------------------------------------------------

    def answer(
        self,
        request: RemotingCommand,
        code: int = RemotingStatus.SUCCESS,
        fields: dict[str, str] | None = None,
        *,
        body: bytes = b"",
        remark: str = "",
    ) -> None:
        """Answer a request; nothing is sent to a one-way one, or once the client is gone."""
        if not self.is_closed and not request.is_oneway:
            self._send(request.answer(code, fields, body=body, remark=remark))
        self.drop(request)

    def drop(self, request: RemotingCommand) -> None:
        """Leave a request without an answer: its client gives it up, and tries again later."""
        if request.is_parked:
            self._parked -= 1
        else:
            self._waiting -= 1
        self._work()

    def park(self, request: RemotingCommand) -> None:
        """Note that a request waits for a message: it keeps no other from being read."""
        if self._parked < MOST_PARKED and not request.is_parked:
            request.is_parked = True
            self._parked += 1
            self._waiting -= 1

    def fail(
        self, request: RemotingCommand, error: Exception, code: RemotingStatus | None = None
    ) -> None:
        """Answer a request with an error, whose kind says the code unless one is given."""
        if code is None:
            code = _status_of(request, error)
        remark = str(error)
        if code is RemotingStatus.SYSTEM_BUSY:
            remark = f"[OVERLOAD]{remark}"  # RocketMQ's clients look for it
        self.answer(request, code, remark=remark)

    def notify(self, code: int, fields: dict[str, str], body: bytes = b"") -> None:
        """Send a one-way command to the client."""
        if not self.is_closed:
            self._next_opaque += 1
            self._send(RemotingCommand(code, self._next_opaque, ONEWAY, fields, body))

    def ask(
        self, code: int, fields: dict[str, str], body: bytes, on_answer: OnClientAnswer
    ) -> Callable[[], None]:
        """Send a command to the client, which answers.

        Args:
            code: Request code.
            fields: Fields of the header.
            body: Body of the request.
            on_answer: Called with the answer; with None when the connection ends before, or when
                no client waits for the answer any more.

        Returns:
            Function that ends the wait.

        Raises:
            SystemBusy: Too many questions are under way.
        """
        if len(self._questions) >= MOST_QUESTIONS:
            raise SystemBusy(f"{MOST_QUESTIONS} questions to client {self.client_id} are under way")
        self._next_opaque += 1
        opaque = self._next_opaque
        self._questions[opaque] = on_answer
        self._send(RemotingCommand(code, opaque, 0, fields, body))
        return lambda: self._answered(opaque, None)

    def _work(self) -> None:
        if self._is_working:
            return  # an answer that is given at once
        self._is_working = True
        try:
            self._look_at_limits()
            while self._todo and not (self._is_paused or self.is_closed):
                command = self._todo.popleft()
                if command.flag & RESPONSE:
                    self._answered(command.opaque, command)
                else:
                    self._serve(command)
                self._look_at_limits()
        finally:
            self._is_working = False

    def _serve(self, command: RemotingCommand) -> None:
        self._waiting += 1
        try:
            handler = self._admit(self, command).get(command.code)
            if handler is None:
                why = REFUSED.get(command.code, "mqmesh has no such command")
                raise UnsupportedCommand(
                    f"request code {command.code} is not served by mqmesh's gateway: {why}"
                )
            handler(self, command)
        except MQMeshError as error:
            self.fail(command, error)
        except Exception as error:
            _log.exception("request %s failed", name_of(command.code))
            self.fail(command, error)

    def _answered(self, opaque: int, answer: RemotingCommand | None) -> None:
        on_answer = self._questions.pop(opaque, None)
        if on_answer is not None:
            on_answer(answer)

    def _send(self, command: RemotingCommand) -> None:
        head, body = encode_frame(command)
        if body:
            self._stream.write(head, body)
        else:
            self._stream.write(head)

    def _look_at_limits(self) -> None:
        limits = self._limits
        self._read_unless(
            self._waiting >= limits.max_requests_in_flight
            or self._stream.waiting_bytes >= limits.max_output_bytes
        )

    def _finish(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_end(self)
            for opaque in list(self._questions):
                self._answered(opaque, None)


def _status_of(request: RemotingCommand, error: Exception) -> RemotingStatus:
    found: int = code_of(error)
    if found == ResponseCode.SYSTEM_ERROR and isinstance(error, BrokerError):
        found = error.code
    code = _STATUS.get(found, RemotingStatus.SYSTEM_ERROR)
    if code is not RemotingStatus.MESSAGE_ILLEGAL or request.code in _SENDS:
        return code  # clients try a send again that failed with SYSTEM_ERROR
    is_broken = isinstance(error, RemoteProtocolError)
    return RemotingStatus.SYSTEM_ERROR if is_broken else RemotingStatus.INVALID_PARAMETER


def name_of(code: int) -> str:
    """Return the name of a request code, for people."""
    try:
        return RemotingCode(code).name
    except ValueError:
        return str(code)


def text_field(request: RemotingCommand, name: str) -> str:
    """Return a field of a request.

    Raises:
        RemoteProtocolError: It has none.
    """
    value = request.fields.get(name)
    if value is None:
        raise RemoteProtocolError(f"{name_of(request.code)} without the field {name!r}")
    return value


def number_field(request: RemotingCommand, name: str, default: int | None = None) -> int:
    """Return a field of a request, as a number.

    Raises:
        RemoteProtocolError: It has none, and there is no default; or it is no number of 64 bits.
    """
    value = request.fields.get(name)
    if value is None:
        if default is not None:
            return default
        raise RemoteProtocolError(f"{name_of(request.code)} without the field {name!r}")
    try:
        number = int(value) if len(value) <= 20 else 2**64
    except ValueError:
        number = 2**64
    if not -(2**63) <= number < 2**63:
        raise RemoteProtocolError(f"the field {name!r} is no number: {value!r:.50}")
    return number
