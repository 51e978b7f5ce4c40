"""A peer of a command server: what is held for it, and the way back to it."""

from collections.abc import Mapping

from mqmesh.errors import LocalProtocolError
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
from mqmesh.transport.zmq.memory_accounting import MARK_BYTES, PeerMemory
from mqmesh.transport.zmq.outbox import Outbox


class ServedPeer(PeerMemory):
    """The peer of one connection, as handlers see it; see ``mqmesh.protocol.request.Peer``.

    Args:
        routing_id: Of the connection.
        since_ms: When its first frame came, monotonic clock.
        principal: User that it proves.
        outbox: Sends to peers.
        living: Descriptor of each connection that stands, by routing id.
        note_refusal: Counts and logs a refusal.
    """

    __slots__ = ("_living", "_note_refusal", "_outbox")

    def __init__(
        self,
        routing_id: bytes,
        since_ms: int,
        principal: Principal,
        outbox: Outbox,
        living: Mapping[bytes, int],
        note_refusal: NoteRefusal,
    ) -> None:
        super().__init__(since_ms, principal, routing_id)
        self._outbox = outbox
        self._living = living
        self._note_refusal = note_refusal

    @property
    def address(self) -> str:
        """Implement ``Peer.address``."""
        descriptor = self._living.get(self.id)
        return "" if descriptor is None else sockets.peer_address(descriptor)

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
        if size >= MARK_BYTES and not self.is_gone and not self._outbox.has_room(self, size):
            self.refused = size
            self.fail(opaque, flags, self._outbox.no_room(self))
            return
        self._outbox.send(self, *frames)

    def fail(self, opaque: int, flags: int, error: Exception) -> None:
        """Implement ``Peer.fail``."""
        frame = error_frame(opaque, flags, error, self._note_refusal)
        if frame is not None:
            self._outbox.send(self, frame)

    def notify(self, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Implement ``Peer.notify``."""
        self._outbox.send(self, encode_frame(code, 0, *parts, header=header, flags=ONEWAY))

    def check_room(self) -> None:
        """Implement ``BoundedPeer.check_room``."""
        if not self._outbox.has_room(self, self.refused):
            raise self._outbox.no_room(self)
        self.refused = 0

    def room(self) -> int:
        """Implement ``Peer.room``."""
        if self.is_gone:
            return 1
        room = self._outbox.room(self)
        if room <= 0 or (self.held and room < self.refused):
            raise self._outbox.no_room(self)
        self.refused = 0
        return room
