"""Peers of servers: the common part of both kinds, and the peer of a server with keys."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from mqmesh.errors import LocalProtocolError, SystemBusy
from mqmesh.protocol.command import (
    ONEWAY,
    RESPONSE,
    Principal,
    Reply,
    encode_apart,
    encode_frame,
)
from mqmesh.transport.error_frames import NoteRefusal, error_frame
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.memory_accounting import MARK_BYTES, PeerMemory, PeerState
from mqmesh.transport.zmq.outbox import PeerOutbox


class AnswerSender(Protocol):
    """Sender of answers, which counts the bytes that wait for each peer of a server."""

    def send(self, peer: Any, *frames: bytes | memoryview) -> None:
        """Sends a message, now or when the peer can take it; drops it if the peer is gone."""

    def has_room(self, peer: Any, size: int) -> bool:
        """Return True if a large answer may be held: one a peer, within the budget of all."""

    def room(self, peer: Any) -> int:
        """Return the bytes that an answer's body may have; 0 or less if there is no room."""

    def no_room(self, peer: Any) -> SystemBusy:
        """Return the error for a peer that reads too slowly, or whose neighbours do."""


class AnsweredPeer(PeerState, ABC):
    """Common part of the peers of both kinds of servers: the way in which they are answered.

    See ``mqmesh.protocol.request.Peer``.
    """

    __slots__ = ()

    _answers: AnswerSender
    _note_refusal: NoteRefusal

    @property
    @abstractmethod
    def address(self) -> str:
        """Implement ``Peer.address``."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Bytes of its answers that wait."""

    def reply(self, opaque: int, flags: int, reply: Reply) -> None:
        """Implement ``Peer.reply``."""
        if flags & ONEWAY:
            return
        try:
            if reply.apart:
                frames, size = encode_apart(opaque, reply, least_bytes=MARK_BYTES)
            else:
                frame = encode_frame(
                    reply.code, opaque, *reply.body, header=reply.header, flags=RESPONSE
                )
                frames, size = [frame], len(frame)
        except LocalProtocolError as error:
            self.fail(opaque, flags, error)
            return
        if size >= MARK_BYTES and not self.is_gone and not self._answers.has_room(self, size):
            self.refused = size
            self.fail(opaque, flags, self._answers.no_room(self))
            return
        self._answers.send(self, *frames)

    def fail(self, opaque: int, flags: int, error: Exception) -> None:
        """Implement ``Peer.fail``."""
        frame = error_frame(opaque, flags, error, self._note_refusal)
        if frame is not None:
            self._answers.send(self, frame)

    def notify(self, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Implement ``Peer.notify``."""
        self._answers.send(self, encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

    def check_room(self) -> None:
        """Check that the peer may have a further answer.

        Raises:
            SystemBusy: The peer does not take the answers that it has.
        """
        if not self._answers.has_room(self, self.refused):
            raise self._answers.no_room(self)
        self.refused = 0

    def room(self) -> int:
        """Implement ``Peer.room``."""
        if self.is_gone:
            return 1
        room = self._answers.room(self)
        if room <= 0 or (room < self.refused and self.held):
            raise self._answers.no_room(self)
        self.refused = 0
        return room


class ServedPeer(PeerMemory, AnsweredPeer):
    """The peer of one connection, as handlers see it; see ``mqmesh.protocol.request.Peer``.

    Args:
        routing_id: Routing id of the connection.
        since_ms: Time of its first frame, monotonic clock.
        principal: User that it proves.
        outbox: Sender of frames to peers.
        living: Descriptor of each connection that stands, by routing id.
        note_refusal: Counts and logs a refusal.
    """

    __slots__ = ("_answers", "_living", "_note_refusal")

    def __init__(
        self,
        routing_id: bytes,
        since_ms: int,
        principal: Principal,
        outbox: PeerOutbox,
        living: Mapping[bytes, int],
        note_refusal: NoteRefusal,
    ) -> None:
        super().__init__(since_ms, principal, routing_id)
        self._answers = outbox
        self._living = living
        self._note_refusal = note_refusal

    @property
    def address(self) -> str:
        """Implement ``Peer.address``."""
        descriptor = self._living.get(self.id)
        return "" if descriptor is None else sockets.peer_address(descriptor)
