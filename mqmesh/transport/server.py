"""Answers commands on a ROUTER socket, and knows when a peer is gone."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import zmq

from mqmesh.errors import (
    LocalProtocolError,
    MQMeshError,
    RemoteProtocolError,
    SystemBusy,
    UnsupportedCommand,
)
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import (
    MAX_REMARK_CHARACTERS,
    ONEWAY,
    RESPONSE,
    ErrorHeader,
    Reply,
    Request,
    decode_frame,
    encode_apart,
    encode_frame,
    encode_header,
    peek_opaque,
)
from mqmesh.refusals import Refusals
from mqmesh.transport import sockets
from mqmesh.transport.loop import EventLoop, Timer
from mqmesh.transport.peers import PeerTable, is_automatic
from mqmesh.units import KIB, MIB

FRAMES_PER_TICK: Final = 256
"""Requests served in one turn, so that timers and other sockets get theirs."""
TURN_MS: Final = 5
"""No request is begun later in a turn: some take milliseconds, such as pulls with a filter."""
BACKLOG_BYTES_PER_PEER: Final = 64 * MIB
"""Answers that wait for a peer that reads slowly; with more, its requests are refused with
SYSTEM_BUSY, and with twice as much, answers are dropped and counted."""
BACKLOG_BYTES: Final = 1024 * MIB
"""The same for all peers together."""
BACKLOG_RETRY_MS: Final = 10
BUSY_RETRY_AFTER_MS: Final = 100
LARGE_FRAME_BYTES: Final = 128 * KIB
"""From this size on, a frame is handed to ZeroMQ without a copy, which is no slower and tells
when it has left."""
LARGE_BYTES_PER_PEER: Final = 64 * MIB
"""Large frames within ZeroMQ for one peer; more wait in the backlog. ZeroMQ itself counts
frames only, so without it a peer that does not read could take ``HIGH_WATER_MARK`` of them."""
MOST_UNTAKEN_MS: Final = 60_000
"""A peer that does not take a large frame in this time is cut off: the frame may be a view of a
file that is removed, and its room on the disk comes back only when the frame has left."""
UNTAKEN_EVERY_MS: Final = 5_000
MAX_PEERS: Final = 65_536
"""Connections that are served; requests of more are refused with SYSTEM_BUSY."""
LOG_REFUSALS_MS: Final = 1_000
"""While requests are refused, the log gets so often a line for each code."""
LOG_MALFORMED_MS: Final = 1_000
"""Malformed frames are logged no more often, so that they cannot fill the disk."""

_ANSWERS: Final = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.CONSUMER_GROUP_NOT_EXIST,
        ResponseCode.CLIENT_NOT_ONLINE,
    }
)
"""That something is not there is an answer rather than a refusal."""

# As plain numbers: an operation on enumerations takes longer than the call it is for.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_IN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_NOBLOCK_SNDMORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

Handler = Callable[[Request], Reply | None]

_CODES: Final = frozenset(map(int, ResponseCode))
_log = logging.getLogger(__name__)


class CommandServer:
    """Serves requests of many peers in the loop's thread.

    A handler returns its answer, or None if it will call ``reply`` later. What it raises
    becomes an error response: an ``MQMeshError`` by the table in ``protocol.codes``, anything
    else, being a bug, SYSTEM_ERROR and a traceback in the log.

    Args:
        context: ZeroMQ context of the process.
        loop: Its event loop.
        handlers: Handler by request code.
        on_disconnect: Told the routing id of a peer whose connection broke. Requests of that
            peer that were on their way are served still, and it is told again after each.

    Attributes:
        malformed_frames: Frames that were no requests.
        dropped_replies: Answers that nobody was there for any more, or had no room.
        requests: Requests taken.
        refusals: What was refused, by code.
        cut_off: Peers whose connection was ended since they did not take what they asked for.
        readable_ms: When there was something to take last, by the monotonic clock.
        drained_ms: When nothing was left then; None if frames were.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        handlers: Mapping[int, Handler],
        on_disconnect: Callable[[bytes], None] | None = None,
    ) -> None:
        self._loop = loop
        self._handlers = handlers
        self._on_disconnect = on_disconnect
        self._socket = sockets.router(context)
        self._monitor = sockets.monitor(self._socket)
        self._peers = PeerTable()
        self._living = self._peers.living
        self._backlog: dict[bytes, deque[bytes]] = {}
        self._backlog_bytes: dict[bytes, int] = {}
        self._backlog_total = 0
        self._large: dict[bytes, _LargeFrames] = {}
        self._retry: Timer | None = None
        self._untaken: Timer | None = None
        self._log_malformed_at_ms = 0
        self._closed = False
        self.malformed_frames = 0
        self.dropped_replies = 0
        self.requests = 0
        self.refusals = Refusals()
        self._refusals_timer: Timer | None = None
        self.cut_off = 0
        self.readable_ms = 0
        self.drained_ms: int | None = None
        loop.add(self._socket, self._on_readable)
        loop.add(self._monitor, self._on_monitor)

    @property
    def peer_count(self) -> int:
        """Connections that sent something and are still there."""
        return len(self._living)

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint.

        Args:
            endpoint: ``tcp://host:port`` (port ``*`` or 0 takes a free one) or ``ipc://path``.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: It is taken or may not be used.
        """
        return sockets.bind(self._socket, endpoint)

    def reply(self, request: Request, reply: Reply) -> None:
        """Answers a request; nothing is sent for a oneway one."""
        command = request.command
        if command.flags & ONEWAY:
            return
        try:
            if reply.apart and self._try_send_apart(request.peer, command.opaque, reply):
                return
            frame = encode_frame(
                reply.code, command.opaque, *reply.body, header=reply.header, flags=RESPONSE
            )
        except LocalProtocolError as error:
            self.fail(request, error)
            return
        self._send(request.peer, frame)

    def fail(self, request: Request, error: Exception) -> None:
        """Answers a request with an error."""
        self._fail(request.peer, request.command.opaque, request.command.flags, error)

    def notify(self, peer: bytes, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Sends a peer a oneway command of the server's own; ``parts`` is the body in pieces."""
        self._send(peer, encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

    def note_refusal(self, code: int, remark: str) -> None:
        """Counts and logs a refusal; for those that an answer's body tells, this is to be called.

        Args:
            code: Response code.
            remark: What the client is told.
        """
        name = ResponseCode(code).name if code in _CODES else str(code)
        self.refusals.note(name, remark)
        if self._refusals_timer is None and not self._closed:
            self._refusals_timer = self._loop.call_later(0, self._log_refusals)

    def close(self) -> None:
        """Stops listening; closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        if self._refusals_timer is not None:
            self._refusals_timer.cancel()
            self._log_refusals()
        for timer in (self._retry, self._untaken):
            if timer is not None:
                timer.cancel()
        self._loop.remove(self._socket)
        self._loop.remove(self._monitor)
        sockets.close(self._socket, self._monitor)

    def _on_readable(self) -> None:
        socket = self._socket
        now_ms = self._loop.clock.monotonic_ms
        self.readable_ms = now_ms()
        self.drained_ms = None
        for number in range(FRAMES_PER_TICK):
            # One frame is the usual case of a quiet server, and asking costs half as much as
            # trying in vain.
            if number == 1 and not int(socket.get(_EVENTS)) & _IN:
                self.drained_ms = now_ms()
                return
            if number and now_ms() - self.readable_ms >= TURN_MS:
                return
            try:
                peer = socket.recv(_NOBLOCK)
            except zmq.Again:
                self.drained_ms = now_ms()
                return
            # Not copied: bodies are large, and the frame tells which connection it came by.
            frame = socket.recv(_NOBLOCK, copy=False)
            if peer not in self._living:
                self._take_from_stranger(peer, frame)
            else:
                self._take(peer, frame)

    def _take(self, peer: bytes, frame: zmq.Frame) -> None:
        if frame.more:
            sockets.skip_rest(self._socket)
            self._refuse(peer, None, "a message has more than one frame")
        else:
            self._serve(peer, frame.buffer)

    def _take_from_stranger(self, peer: bytes, frame: zmq.Frame) -> None:
        if not is_automatic(peer):
            sockets.skip_rest(self._socket)
            self._refuse(peer, peek_opaque(frame.buffer), "a client may not choose a routing id")
            return
        self._on_monitor()  # news of connections come before their frames; see PeerTable
        if len(self._living) >= MAX_PEERS:
            sockets.skip_rest(self._socket)
            error = SystemBusy(f"{MAX_PEERS} connections are served already")
            self._fail(peer, peek_opaque(frame.buffer) or 0, 0, error)
            return
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            # ZMTP 1 and 2 take nearly any bytes for a message; only later ones know a source.
            sockets.skip_rest(self._socket)
            self._refuse(peer, None, "a peer speaks no ZMTP 3")
            return
        gone = self._peers.meet(peer, descriptor)
        if gone is not None and gone != peer:
            self._bury(gone)
        self._take(peer, frame)
        if gone == peer:
            self._bury(peer)

    def _serve(self, peer: bytes, frame: memoryview) -> None:
        self.requests += 1
        try:
            command = decode_frame(frame)
        except RemoteProtocolError as error:
            self._refuse(peer, peek_opaque(frame), str(error))
            return
        handler = self._handlers.get(command.code)
        request = Request(peer, command)
        try:
            if command.flags & RESPONSE:
                raise RemoteProtocolError("a response to nothing that was asked")
            if handler is None:
                raise UnsupportedCommand(f"request code {command.code} is not served here")
            if self._backlog:
                self._check_backlog(peer)
            reply = handler(request)
        except MQMeshError as error:
            self._fail(peer, command.opaque, command.flags, error)
        except Exception as error:
            _log.exception("request code %d failed", command.code)
            self._fail(peer, command.opaque, command.flags, error)
        else:
            if reply is not None:
                self.reply(request, reply)

    def _check_backlog(self, peer: bytes) -> None:
        size = self._backlog_bytes.get(peer, 0)
        if size > BACKLOG_BYTES_PER_PEER:
            raise SystemBusy(
                f"{size} bytes of answers wait for this client; read them first",
                retry_after_ms=BUSY_RETRY_AFTER_MS,
            )
        if size and self._backlog_total > BACKLOG_BYTES:
            raise SystemBusy(
                f"{self._backlog_total} bytes of answers wait for slow clients",
                retry_after_ms=BUSY_RETRY_AFTER_MS,
            )

    def _refuse(self, peer: bytes, opaque: int | None, remark: str) -> None:
        self.malformed_frames += 1
        now_ms = self._loop.clock.monotonic_ms()
        if now_ms >= self._log_malformed_at_ms:
            self._log_malformed_at_ms = now_ms + LOG_MALFORMED_MS
            _log.warning("malformed frame: %s (%d so far)", remark, self.malformed_frames)
        if opaque is not None:
            self._fail(peer, opaque, 0, RemoteProtocolError(remark))

    def _fail(self, peer: bytes, opaque: int, flags: int, error: Exception) -> None:
        if isinstance(error, MQMeshError):
            remark = str(error)
        else:
            # The text of a bug may hold anything; it belongs into our log only.
            remark = f"internal error ({type(error).__name__}); see the server's log"
        remark = remark[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode()
        code = vars(error).get("code") or code_of(error)
        if code not in _ANSWERS:
            self.note_refusal(code, remark)
        if flags & (ONEWAY | RESPONSE):
            return
        header = ErrorHeader(remark, getattr(error, "retry_after_ms", 0))
        frame = encode_frame(code, opaque, header=encode_header(header), flags=RESPONSE)
        self._send(peer, frame)

    def _log_refusals(self) -> None:
        lines = self.refusals.take_lines()
        for line in lines:
            _log.warning("%s", line)
        self._refusals_timer = None
        if lines and not self._closed:
            self._refusals_timer = self._loop.call_later(LOG_REFUSALS_MS, self._log_refusals)

    def _send(self, peer: bytes, frame: bytes) -> None:
        if peer in self._backlog or not self._try_send(peer, frame):
            self._keep(peer, frame)

    def _try_send(self, peer: bytes, frame: bytes) -> bool:
        try:
            if len(frame) >= LARGE_FRAME_BYTES and peer in self._living:
                return self._try_send_large(peer, frame)
            self._loop.touch(self._socket)
            self._socket.send(peer, _NOBLOCK_SNDMORE)
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped_replies += 1  # the peer is gone: its request has a deadline of its own
        return True

    def _try_send_large(self, peer: bytes, frame: bytes) -> bool:
        inside = self._large_of(peer)
        if not inside.has_room(len(frame)):
            return False
        self._loop.touch(self._socket)
        self._socket.send(peer, _NOBLOCK_SNDMORE)
        self._send_large(inside, frame, _NOBLOCK)
        return True

    def _try_send_apart(self, peer: bytes, opaque: int, reply: Reply) -> bool:
        """Sends large pieces of an answer as they are; False if it must be sent as one frame."""
        large = [piece for piece in reply.body if len(piece) >= LARGE_FRAME_BYTES]
        if not large or peer in self._backlog or peer not in self._living:
            return False
        frames, size = encode_apart(opaque, reply, least_bytes=LARGE_FRAME_BYTES)
        inside = self._large_of(peer)
        if not inside.has_room(size):
            return False
        self._loop.touch(self._socket)
        try:
            self._socket.send(peer, _NOBLOCK_SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped_replies += 1
            return True
        # Whoever has room for the first frame has it for all of a message.
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            flags = _NOBLOCK if number == last else _NOBLOCK_SNDMORE
            if len(frame) >= LARGE_FRAME_BYTES:
                self._send_large(inside, frame, flags)
            else:
                self._socket.send(frame, flags)
        return True

    def _large_of(self, peer: bytes) -> "_LargeFrames":
        inside = self._large.get(peer)
        if inside is None:
            inside = self._large[peer] = _LargeFrames()
        return inside

    def _send_large(self, inside: "_LargeFrames", frame: bytes | memoryview, flags: int) -> None:
        tracker = self._socket.send(frame, flags, copy=False, track=True)
        inside.add(tracker, len(frame), self._loop.clock.monotonic_ms())
        if self._untaken is None:
            self._untaken = self._loop.call_later(UNTAKEN_EVERY_MS, self._look_for_untaken)

    def _look_for_untaken(self) -> None:
        """Cuts off who leaves a large frame untaken for too long."""
        self._untaken = None
        self._on_monitor()  # who is gone must not be taken for who has its descriptor now
        now_ms = self._loop.clock.monotonic_ms()
        waiting = False
        for peer, inside in list(self._large.items()):
            since_ms = inside.waiting_since_ms()
            if since_ms is None:
                continue
            waiting = True
            if now_ms - since_ms >= MOST_UNTAKEN_MS and peer in self._living:
                _log.warning(
                    "a client took nothing for %d s and is cut off", MOST_UNTAKEN_MS // 1000
                )
                self.cut_off += 1
                sockets.cut(self._living[peer])
        if waiting and not self._closed:
            self._untaken = self._loop.call_later(UNTAKEN_EVERY_MS, self._look_for_untaken)

    def _keep(self, peer: bytes, frame: bytes) -> None:
        size = self._backlog_bytes.get(peer, 0) + len(frame)
        total = self._backlog_total + len(frame)
        if size > 2 * BACKLOG_BYTES_PER_PEER or total > 2 * BACKLOG_BYTES:
            self.dropped_replies += 1
            return
        self._backlog_bytes[peer] = size
        self._backlog_total = total
        self._backlog.setdefault(peer, deque()).append(frame)
        if self._retry is None:
            self._retry = self._loop.call_later(BACKLOG_RETRY_MS, self._flush_backlog)

    def _flush_backlog(self) -> None:
        self._retry = None
        for peer in list(self._backlog):
            waiting = self._backlog[peer]
            while waiting and self._try_send(peer, waiting[0]):
                size = len(waiting.popleft())
                self._backlog_bytes[peer] -= size
                self._backlog_total -= size
            if not waiting:
                del self._backlog[peer], self._backlog_bytes[peer]
        if self._backlog:
            self._retry = self._loop.call_later(BACKLOG_RETRY_MS, self._flush_backlog)

    def _on_monitor(self) -> None:
        for event, descriptor in sockets.read_monitor(self._monitor):
            gone = None
            if event == zmq.EVENT_ACCEPTED:
                gone = self._peers.accept(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._peers.disconnect(descriptor)
            if gone is not None:
                self._bury(gone)

    def _bury(self, peer: bytes) -> None:
        self._backlog.pop(peer, None)
        self._backlog_total -= self._backlog_bytes.pop(peer, 0)
        self._large.pop(peer, None)
        if self._on_disconnect is None:
            return
        try:
            self._on_disconnect(peer)
        except Exception:
            # The next peer's end must be told all the same.
            _log.exception("a callback for the end of a connection failed")


class _LargeFrames:
    """Large frames of one peer that ZeroMQ has not sent yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[zmq.MessageTracker, int, int]] = deque()
        self._size = 0

    def has_room(self, size: int) -> bool:
        """True when a frame of ``size`` bytes may be added; one always may."""
        self._forget_taken()
        return not self._waiting or self._size + size <= LARGE_BYTES_PER_PEER

    def waiting_since_ms(self) -> int | None:
        """When the oldest of them was sent, by the monotonic clock; None if there is none."""
        self._forget_taken()
        return self._waiting[0][2] if self._waiting else None

    def _forget_taken(self) -> None:
        while self._waiting and self._waiting[0][0].done:
            self._size -= self._waiting.popleft()[1]

    def add(self, tracker: zmq.MessageTracker, size: int, now_ms: int) -> None:
        """Counts a frame until its tracker says that it has left."""
        self._waiting.append((tracker, size, now_ms))
        self._size += size
