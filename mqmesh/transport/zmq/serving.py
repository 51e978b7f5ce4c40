"""Requests of the peers of a server: handed to their handlers, refused, counted. No socket here."""

import logging
from collections.abc import Mapping
from typing import Final

from mqmesh.errors import MQMeshError, RemoteProtocolError, UnsupportedCommand
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import RESPONSE, decode_frame, peek_opaque
from mqmesh.protocol.request import Peer, Request
from mqmesh.refusals import Refusals
from mqmesh.transport.interface import Handler, OnDisconnect, Timer
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.served_peer import AnsweredPeer

LOG_REFUSALS_MS: Final = 1_000
"""Interval at which refused requests are logged, one line for each code."""
LOG_MALFORMED_MS: Final = 1_000
"""Shortest time between two log lines about malformed frames, so that they do not fill the disk."""

_CODES: Final = frozenset(map(int, ResponseCode))
_log = logging.getLogger(__name__)


class RequestServing:
    """Common part of the servers of both kinds of connections.

    A handler returns its answer, or None if it will call ``reply`` later. An error that it raises
    becomes an error response: an ``MQMeshError`` by the table in ``protocol.codes``; any other
    error is a bug, and gives SYSTEM_ERROR and a traceback in the log.

    Args:
        loop: Event loop.
        handlers: Handler by request code.
        on_disconnect: Called with a peer whose connection broke.

    Attributes:
        malformed_frames: Frames that were no requests.
        hung_up: Connections that were ended because of the memory that they took.
        silent: Connections that were ended because their clients hang.
        requests: Requests taken.
        refusals: Number of refusals, by code.
        readable_ms: Time at which frames were last available, by the monotonic clock.
        drained_ms: Time at which no frame was left then; None if frames were left.
    """

    def __init__(
        self,
        loop: EventLoop,
        handlers: Mapping[int, Handler],
        on_disconnect: OnDisconnect | None,
    ) -> None:
        self._loop = loop
        self._handlers = handlers
        self._on_disconnect = on_disconnect
        self._closed = False
        self._log_malformed_at_ms = 0
        self._refusals_timer: Timer | None = None
        self.malformed_frames = 0
        self.hung_up = 0
        self.silent = 0
        self.requests = 0
        self.refusals = Refusals()
        self.readable_ms = 0
        self.drained_ms: int | None = None

    def note_refusal(self, code: int, remark: str) -> None:
        """Counts and logs a refusal; handlers that refuse in an answer's body call it themselves.

        Args:
            code: Response code.
            remark: Text that the client gets.
        """
        name = ResponseCode(code).name if code in _CODES else str(code)
        self.refusals.note(name, remark)
        if self._refusals_timer is None and not self._closed:
            self._refusals_timer = self._loop.call_later(0, self._log_refusals)

    def _stop_serving(self) -> None:
        self._closed = True
        if self._refusals_timer is not None:
            self._refusals_timer.cancel()
            self._log_refusals()

    def _serve(self, peer: AnsweredPeer, frame: memoryview, *, is_behind: bool) -> None:
        self.requests += 1
        try:
            command = decode_frame(frame)
        except RemoteProtocolError as error:
            self._note_malformed(str(error))
            opaque = peek_opaque(frame)
            if opaque is not None:
                peer.fail(opaque, 0, error)
            return
        handler = self._handlers.get(command.code)
        try:
            if command.flags & RESPONSE:
                raise RemoteProtocolError("a response to nothing that was asked")
            if handler is None:
                raise UnsupportedCommand(_not_served(command.code))
            if is_behind:
                peer.check_room()
            reply = handler(Request(peer, command))
        except MQMeshError as error:
            peer.fail(command.opaque, command.flags, error)
        except Exception as error:
            _log.exception("request code %d failed", command.code)
            peer.fail(command.opaque, command.flags, error)
        else:
            if reply is not None:
                peer.reply(command.opaque, command.flags, reply)

    def _report_gone(self, peer: Peer) -> None:
        if self._on_disconnect is None:
            return
        try:
            self._on_disconnect(peer)
        except Exception:
            # The next peer's end must be reported in spite of the error.
            _log.exception("a callback for the end of a connection failed")

    def _note_malformed(self, remark: str) -> None:
        self.malformed_frames += 1
        self._warn(f"malformed frame: {remark} ({self.malformed_frames} so far)")

    def _warn(self, text: str) -> None:
        now_ms = self._loop.clock.monotonic_ms()
        if now_ms >= self._log_malformed_at_ms:
            self._log_malformed_at_ms = now_ms + LOG_MALFORMED_MS
            _log.warning("%s", text)

    def _log_refusals(self) -> None:
        lines = self.refusals.take_lines()
        for line in lines:
            _log.warning("%s", line)
        self._refusals_timer = None
        if lines and not self._closed:
            self._refusals_timer = self._loop.call_later(LOG_REFUSALS_MS, self._log_refusals)


def _not_served(code: int) -> str:
    # Clients load this module, too, and need no table of commands.
    from mqmesh.protocol.commands import not_served

    return not_served(code)
