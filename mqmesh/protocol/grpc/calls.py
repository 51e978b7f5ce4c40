"""Calls of gRPC on one connection of HTTP/2, as the server has them: bytes in, events out. Pure.

A message stands in DATA frames behind a head of 5 bytes, ``>BI``: a flag, which is 0 as no message
is compressed, and the message's length. An answer ends with a header list, which has the status.
"""

import contextlib
import enum
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from mqmesh.errors import RemoteProtocolError
from mqmesh.units import KIB, MIB

MAX_STREAMS: Final = 1_000
MAX_HEADER_BYTES: Final = 64 * KIB
MAX_FRAME_BYTES: Final = 64 * KIB
"""Longest frame that may come."""
MAX_RESETS: Final = 200
"""Calls that a client may cancel in a second: each costs the server work without a result."""
STREAM_WINDOW: Final = 256 * KIB
CONNECTION_WINDOW: Final = 4 * MIB
MOST_HELD_BYTES: Final = 16 * MIB
"""Parts of messages that are not whole. Beyond, only the oldest of them may grow."""
FRAMES_PER_STEP: Final = 32
"""Frames that are read without a look at the clock."""
STEP_BYTES: Final = 256 * KIB
LARGE_HEADERS: Final = 4 * KIB
"""A frame of headers that is longer is the last one of its step: it may unpack to many."""
MOST_TIMEOUT_MS: Final = 3_600_000

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD: Final = 9
_HEADER_FRAMES: Final = (1, 9)  # HEADERS, CONTINUATION
_MESSAGE_HEAD: Final = 5
_UNITS_MS: Final = {"H": 3_600_000, "M": 60_000, "S": 1_000, "m": 1, "u": 1e-3, "n": 1e-6}
_PRINTABLE: Final = "".join(chr(one) for one in range(0x20, 0x7F) if chr(one) != "%")
_MOST_TEXT: Final = 1_024
_HEADERS: Final[dict[bytes | str, str]] = {
    name.encode(): name
    for name in (
        *(":method", ":path", "content-type", "grpc-timeout", "x-mq-client-id", "x-mq-language"),
        *("x-mq-client-version", "x-mq-namespace", "x-mq-date-time", "authorization"),
    )
}
"""Headers that are looked at."""
_RESPONSE_HEAD: Final = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity"),
)


class GrpcStatus(enum.IntEnum):
    """Statuses of calls; gRPC's numbers."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GrpcCall:
    """One call, while it runs.

    Attributes:
        stream_id: Number of its stream.
        method: Path of its request: ``/service/method``.
        headers: Those of its request that say something here.
        timeout_ms: So long its client waits; 0 for ever.
        is_over: Its status was sent, or the client gave it up.
        has_request: The client sends nothing more.
        max_message_bytes: Longest message that may come.
        partial_ms: When the message that is not whole began, monotonic clock; 0 for none.
    """

    __slots__ = (
        "_buffer",
        "_ending",
        "_has_head",
        "_out",
        "_owed",
        "has_request",
        "headers",
        "is_over",
        "max_message_bytes",
        "method",
        "partial_ms",
        "stream_id",
        "timeout_ms",
    )

    def __init__(
        self, stream_id: int, method: str, headers: dict[str, str], max_message_bytes: int
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.partial_ms = 0
        self.stream_id = stream_id
        self.method = method
        self.headers = headers
        self.timeout_ms = timeout_of(headers.get("grpc-timeout", ""))
        self.is_over = self.has_request = False
        self._buffer = bytearray()
        self._out = memoryview(b"")
        self._owed = 0
        self._has_head = False
        self._ending: list[tuple[bytes, bytes]] = []

    @property
    def waiting_bytes(self) -> int:
        """Bytes of answers for which its client has given no room."""
        return len(self._out)


class CallBegun(msgspec.Struct, frozen=True):
    """A call was begun."""

    call: GrpcCall


class CallMessage(msgspec.Struct, frozen=True):
    """A message of a call has come whole."""

    call: GrpcCall
    message: bytes


class CallRequested(msgspec.Struct, frozen=True):
    """A call's client sends no more messages."""

    call: GrpcCall


class CallGivenUp(msgspec.Struct, frozen=True):
    """A call's client does not wait for it any more, or will not take its answer."""

    call: GrpcCall


CallEvent = CallBegun | CallMessage | CallRequested | CallGivenUp


class GrpcConnection:
    """A connection, from its first byte on.

    Args:
        max_message_bytes: Longest message that may come.
        now_ms: Monotonic clock.

    Attributes:
        held_bytes: Parts of messages that are not whole.
        waiting_bytes: Bytes of answers for which clients have given no room.
        is_over: The connection has ended; only the bytes of ``output`` are still to be sent.
    """

    def __init__(self, max_message_bytes: int, now_ms: Callable[[], int]) -> None:
        self._max_message_bytes = max_message_bytes
        self._now_ms = now_ms
        self._input = bytearray()
        self._calls: dict[int, GrpcCall] = {}
        # Calls with a part of a message, oldest first; those that have room to wait for.
        self._partial: dict[int, GrpcCall] = {}
        self._blocked: dict[int, GrpcCall] = {}
        self._owed = 0
        self._resets = self._resets_s = 0
        self._is_begun = self._is_short = self._has_room = False
        self.held_bytes = self.waiting_bytes = 0
        self.is_over = False
        self._h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                # It takes a sixth of a call's time; this module checks the headers that it reads.
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
            )
        )
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
            },
        )
        self._h2.max_inbound_frame_size = MAX_FRAME_BYTES
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)

    def __len__(self) -> int:
        """Return the number of calls that run."""
        return len(self._calls)

    # ---- What comes ----------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take bytes that came; ``step`` reads them."""
        self._input += data

    def step(self) -> list[CallEvent] | None:
        """Read some of the frames that are whole.

        Returns:
            Events of these frames; None when no whole frame is left.

        Raises:
            RemoteProtocolError: The bytes are no HTTP/2. The connection is over; ``output`` has the
                frame that reports this to the client.
        """
        if self.is_over:
            return None
        try:
            end = self._cut()
            if not end:
                return None
            data = bytes(self._input[:end])
            del self._input[:end]
            events = self._h2.receive_data(data)
            found = [one for event in events for one in self._take(event)]
            if self._has_room:
                self._has_room = False
                for blocked in list(self._blocked.values()):
                    self._flush(blocked)
            return found
        except ProtocolError as error:
            self.is_over = True
            raise RemoteProtocolError(f"{type(error).__name__}: {error}"[:200]) from error
        except RemoteProtocolError:
            self.close()
            raise

    def _cut(self) -> int:
        """Return the end of the frames that are read next."""
        data, size = self._input, len(self._input)
        if not self._is_begun:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise RemoteProtocolError(f"no HTTP/2, but {bytes(data[:16])!r}")
            if size < len(PREFACE):
                return 0
            self._is_begun = True
            return len(PREFACE)
        end = frames = 0
        while frames < FRAMES_PER_STEP and end < STEP_BYTES and size - end >= _FRAME_HEAD:
            length = int.from_bytes(data[end : end + 3])
            if length > MAX_FRAME_BYTES:
                raise RemoteProtocolError(f"a frame of {length} bytes (limit {MAX_FRAME_BYTES})")
            if size - end < _FRAME_HEAD + length:
                break
            is_large = length > LARGE_HEADERS and data[end + 3] in _HEADER_FRAMES
            end += _FRAME_HEAD + length
            frames += 1
            if is_large:
                break
        return end

    def _take(self, event: Event) -> Iterator[CallEvent]:
        if isinstance(event, RequestReceived):
            yield from self._begin(event)
        elif isinstance(event, DataReceived):
            yield from self._take_data(event)
        elif isinstance(event, StreamEnded):
            call = self._calls.get(event.stream_id)
            if call is not None and not call.is_over:
                call.has_request = True
                if call._buffer:
                    self.finish(call, GrpcStatus.INVALID_ARGUMENT, "a message that is cut off")
                    yield CallGivenUp(call)
                else:
                    yield CallRequested(call)
        elif isinstance(event, StreamReset):
            self._note_reset()
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.is_over = True
                yield CallGivenUp(call)
                self._forget(call)
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._has_room = True
        elif isinstance(event, ConnectionTerminated):
            # h2 sends nothing any more then, nor do clients wait.
            self.is_over = True
            for one in list(self._calls.values()):
                if not one.is_over:
                    one.is_over = True
                    yield CallGivenUp(one)

    def _begin(self, event: RequestReceived) -> Iterator[CallEvent]:
        found = {_HEADERS[name]: _text(value) for name, value in event.headers if name in _HEADERS}
        kind, stream_id = found.get("content-type", ""), event.stream_id
        call = GrpcCall(stream_id, found.pop(":path", ""), found, self._max_message_bytes)
        self._calls[stream_id] = call
        call.has_request = event.stream_ended is not None
        if found.get(":method") != "POST" or not kind.startswith("application/grpc"):
            call.is_over = True
            call._ending = [(b":status", b"415")]
            call._has_head = True
            self._flush(call)
            return
        yield CallBegun(call)

    def _take_data(self, event: DataReceived) -> Iterator[CallEvent]:
        size = event.flow_controlled_length
        self._owed += size
        if self._owed >= CONNECTION_WINDOW // 2:
            self._h2.increment_flow_control_window(self._owed)
            self._owed = 0
        call = self._calls.get(event.stream_id)
        if call is None or call.is_over:
            return
        call.has_request = event.stream_ended is not None
        call._owed += size
        before = len(call._buffer)
        if not before:
            call.partial_ms = self._now_ms()
        call._buffer += event.data
        try:
            yield from self._messages(call)
        except RemoteProtocolError as error:
            status = GrpcStatus.RESOURCE_EXHAUSTED
            if call._buffer[0]:
                status = GrpcStatus.UNIMPLEMENTED
            self.held_bytes -= before
            call._buffer.clear()
            self._partial.pop(call.stream_id, None)
            self.finish(call, status, str(error))
            yield CallGivenUp(call)
            return
        self.held_bytes += len(call._buffer) - before
        if call._buffer:
            self._partial.setdefault(call.stream_id, call)
        else:
            call.partial_ms = 0
        if not (call.has_request or call.is_over):
            self._give_room(call)
        if not call._buffer and self._partial.pop(call.stream_id, None) is not None:
            self._give_others_room()

    def _messages(self, call: GrpcCall) -> Iterator[CallEvent]:
        data = call._buffer
        while len(data) >= _MESSAGE_HEAD:
            length = int.from_bytes(data[1:_MESSAGE_HEAD])
            if data[0]:
                raise RemoteProtocolError("messages must not be compressed by gRPC")
            if length > call.max_message_bytes:
                raise RemoteProtocolError(
                    f"a message of {length} bytes (limit {call.max_message_bytes})"
                )
            end = _MESSAGE_HEAD + length
            if len(data) < end:
                return
            message = bytes(data[_MESSAGE_HEAD:end])
            del data[:end]
            call.partial_ms = self._now_ms()
            yield CallMessage(call, message)
            if call.is_over:
                data.clear()

    def _give_room(self, call: GrpcCall) -> None:
        """Let a client send more of a call's messages."""
        if call._owed < STREAM_WINDOW // 2:
            return
        is_oldest = next(iter(self._partial), call.stream_id) == call.stream_id
        if self.held_bytes <= MOST_HELD_BYTES or is_oldest:
            with contextlib.suppress(ProtocolError):  # given up by a frame that was read already
                self._h2.increment_flow_control_window(call._owed, call.stream_id)
            call._owed = 0
        else:
            self._is_short = True

    def _give_others_room(self) -> None:
        """Let those go on that waited for one that is whole now, or gone."""
        if self._is_short:
            self._is_short = False
            for one in list(self._partial.values()):
                if not one.has_request:
                    self._give_room(one)

    def _note_reset(self) -> None:
        second = self._now_ms() // 1_000
        if second != self._resets_s:
            self._resets, self._resets_s = 0, second
        self._resets += 1
        if self._resets > MAX_RESETS:
            self.close(ErrorCodes.ENHANCE_YOUR_CALM)
            raise RemoteProtocolError(f"more than {MAX_RESETS} calls were taken back in a second")

    # ---- What goes -----------------------------------------------------------------------

    def send(self, call: GrpcCall, *messages: bytes) -> None:
        """Send messages of a call; nothing once it is over."""
        if not (call.is_over or self.is_over):
            self._put(call, messages)
            self._flush(call)

    def finish(
        self,
        call: GrpcCall,
        status: GrpcStatus = GrpcStatus.OK,
        text: str = "",
        *messages: bytes,
    ) -> None:
        """End a call when its earlier messages have left; without effect once the call is over.

        Args:
            call: The call.
            status: Its status.
            text: Sentence for people.
            messages: Its last messages.
        """
        if call.is_over or self.is_over:
            return
        self._put(call, messages)
        call.is_over = True
        call._ending = list(_trailers(status, text))
        self._flush(call)

    def cut(self, call: GrpcCall, status: GrpcStatus, text: str) -> None:
        """End a call without messages that wait for room; without effect once it is over."""
        if not (call.is_over or self.is_over):
            self._drop_output(call)
            self.finish(call, status, text)

    def close(self, error: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """End the connection by GOAWAY; closing twice does no harm."""
        if not self.is_over:
            self.is_over = True
            self._h2.close_connection(error)

    def output(self) -> bytes:
        """Return the bytes that are to be sent now."""
        return self._h2.data_to_send()

    def _put(self, call: GrpcCall, messages: Sequence[bytes]) -> None:
        """Add messages to the output of a call; those added together take one frame, not many."""
        if not messages:
            return
        parts: list[bytes | memoryview] = [call._out]
        for one in messages:
            parts += (b"\0" + len(one).to_bytes(4), one)
            self.waiting_bytes += _MESSAGE_HEAD + len(one)
        call._out = memoryview(b"".join(parts))

    def _flush(self, call: GrpcCall) -> None:
        """Send as much as a client has room for."""
        try:
            self._flush_open(call)
        except ProtocolError:
            # Its client gave it up by a frame that was read already; the event for that comes.
            self._blocked.pop(call.stream_id, None)

    def _flush_open(self, call: GrpcCall) -> None:
        stream_id = call.stream_id
        if not call._has_head and call._out:
            call._has_head = True
            self._h2.send_headers(stream_id, _RESPONSE_HEAD)
        while call._out:
            room = min(
                self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size
            )
            if room <= 0:
                self._blocked[stream_id] = call
                return
            piece = call._out[:room]
            self._h2.send_data(stream_id, bytes(piece))
            self.waiting_bytes -= len(piece)
            call._out = call._out[room:]
        self._blocked.pop(stream_id, None)
        if call._ending:
            head = () if call._has_head else _RESPONSE_HEAD
            self._h2.send_headers(stream_id, [*head, *call._ending], end_stream=True)
            if not call.has_request:
                # So that its client sends nothing more.
                self._h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)
            self._forget(call)

    def _forget(self, call: GrpcCall) -> None:
        self._calls.pop(call.stream_id, None)
        self._blocked.pop(call.stream_id, None)
        self.held_bytes -= len(call._buffer)
        if self._partial.pop(call.stream_id, None) is not None and not self.is_over:
            self._give_others_room()
        call._buffer.clear()
        self._drop_output(call)

    def _drop_output(self, call: GrpcCall) -> None:
        self.waiting_bytes -= len(call._out)
        call._out = memoryview(b"")


def timeout_of(text: str) -> int:
    """Return a ``grpc-timeout`` in ms, at least 1.

    0 stands for none, one that cannot be read, and more than ``MOST_TIMEOUT_MS``: some clients have
    streams for decades.
    """
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdecimal() and len(number) <= 8 and unit in _UNITS_MS):
        return 0
    found = max(int(int(number) * _UNITS_MS[unit]), 1)
    return found if found <= MOST_TIMEOUT_MS else 0


def _trailers(status: GrpcStatus, message: str) -> Iterator[tuple[bytes, bytes]]:
    yield b"grpc-status", b"%d" % status
    if message:
        yield b"grpc-message", urllib.parse.quote(message[:_MOST_TEXT], _PRINTABLE).encode()


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
