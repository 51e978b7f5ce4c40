"""Answers commands on plain streams, as ZMTP 3 without a key: the ROUTER of the own loop.

The role's loop reads and writes the connections by itself, with no thread and no queue of ZeroMQ's
between: a small request costs one read and one write. Clients see a ROUTER. Connections with keys
belong to ``server.py``.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

from mqmesh.errors import MQMeshError, RemoteProtocolError, SystemBusy
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import peek_opaque
from mqmesh.transport import zmtp
from mqmesh.transport.interface import Handler, OnDisconnect, ServerLimits, Timer
from mqmesh.transport.zmq.idle_detection import PROOF_MS
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.memory_accounting import PeerLoad, room_of_one, worst
from mqmesh.transport.zmq.outbox import (
    BUSY_RETRY_AFTER_MS,
    HEAD_BYTES,
    LEAST_ROOM_BYTES,
    MOST_UNTAKEN_MS,
)
from mqmesh.transport.zmq.served_peer import AnsweredPeer
from mqmesh.transport.zmq.server import FRAMES_PER_TICK, MAX_SURPLUS, SURPLUS_MS, TICK_MS, TURN_MS
from mqmesh.transport.zmq.serving import RequestServing
from mqmesh.transport.zmq.sockets import (
    HANDSHAKE_TIMEOUT_MS,
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
)
from mqmesh.transport.zmq.streams import COPIED_BYTES, Stream, StreamListener

LOOK_MS: Final = 100
"""Shortest time between two searches for overdue handshakes, pings and answers."""
LONGEST_LOOK_MS: Final = HEARTBEAT_INTERVAL_MS + HEARTBEAT_TIMEOUT_MS
"""Longest time between two of them: a wait that begins now is not over before."""
NEVER_MS: Final = sys.maxsize

_KIND: Final = b"ROUTER"
_OPENING: Final = zmtp.opening(_KIND)
_PONG: Final = zmtp.pong(b"")
_TURN_NS: Final = TURN_MS * 1_000_000


class PlainPeer(AnsweredPeer):
    """The peer of one stream, as handlers see it; see ``mqmesh.protocol.request.Peer``.

    Attributes:
        reader: Reader of its frames.
        stream: Its connection.
        is_met: A frame of it was served.
        since_ms: Time of its connection, monotonic clock.
        last_seen_ms: Time at which bytes of it arrived last.
        ttl_ms: Time in which another frame has to follow, from its last ping; 0 if that names
            none, None if it has sent no ping.
        pinged_ms: Time at which this server pinged it last.
        stuck_ms: Time since when it does not take its answers; 0 while it does.
        surplus: There was no place for it when it connected.
        within: True while the frames of a message with too many are read.
        incoming: Bytes that arrived and are not served yet: frames, and the beginning of one.
        on_bytes: Implements ``StreamHandler.on_bytes``.
    """

    __slots__ = (
        "_answers",
        "_note_refusal",
        "incoming",
        "is_met",
        "last_seen_ms",
        "on_bytes",
        "pinged_ms",
        "reader",
        "since_ms",
        "stream",
        "stuck_ms",
        "surplus",
        "ttl_ms",
        "within",
    )

    _answers: "PlainServer"

    def __init__(self, server: "PlainServer", stream: Stream, max_frame_bytes: int) -> None:
        super().__init__()
        self._answers = server
        self._note_refusal = server.note_refusal
        self.on_bytes = partial(server.take, self)
        self.stream = stream
        self.reader = zmtp.FrameReader(_KIND, max_frame_bytes)
        self.is_met = self.surplus = self.within = False
        self.since_ms = self.last_seen_ms = self.pinged_ms = self.stuck_ms = 0
        self.ttl_ms: int | None = None
        self.incoming = 0

    @property
    def address(self) -> str:
        """Implement ``Peer.address``."""
        return "" if self.is_gone else self.stream.peer

    @property
    def held(self) -> int:
        """Bytes of answers that the system does not take now."""
        return self.stream.waiting_bytes if self.stream.is_stuck else 0

    def on_stuck(self) -> None:
        """Implement ``StreamHandler.on_stuck``."""
        self._answers.stuck(self)

    def on_drained(self) -> None:
        """Implement ``StreamHandler.on_drained``."""
        self._answers.drained(self)

    def on_closed(self) -> None:
        """Implement ``StreamHandler.on_closed``."""
        self._answers.lost(self)


class PlainServer(RequestServing):
    """Serves requests of many peers in the loop's thread; the twin of ``CommandServer``.

    Args:
        loop: Event loop of the process.
        handlers: Handler by request code.
        on_disconnect: Called with a peer whose connection broke, once all its frames are served.
        limits: Limits for the peers. The peers that take the most lose their connections when all
            together take more than the budget.

    Attributes:
        tick_ms: 0: it needs no ``tick``.
        dropped_replies: Answers that were dropped because their peer was gone, or did not read.
    """

    def __init__(
        self,
        loop: EventLoop,
        handlers: Mapping[int, Handler],
        on_disconnect: OnDisconnect | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        super().__init__(loop, handlers, on_disconnect)
        self._limits = limits or ServerLimits()
        self._most_waiting = 2 * self._limits.max_pending_bytes
        self._most_room = max(room_of_one(0, self._limits) - HEAD_BYTES, LEAST_ROOM_BYTES)
        self._listener = StreamListener(loop, self._accept)
        self._streams = self._listener.group
        self._peers: dict[PlainPeer, None] = {}
        self._met = 0
        self._surplus = 0
        self._incoming = 0
        self._turn_ns = -1
        self._served = 0
        self._excess_reported = False
        self._timer: Timer | None = None
        self._late_pings: Timer | None = None
        self.tick_ms = TICK_MS
        self.dropped_replies = 0

    @property
    def peer_count(self) -> int:
        """Connections that sent a frame and still exist."""
        return self._met

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that their peers have not taken yet, and of frames not whole yet."""
        return self._streams.stuck_bytes + self._incoming

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint.

        Args:
            endpoint: ``tcp://host:port`` (port ``*`` or 0 takes a free one) or ``ipc://path``.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: The endpoint is in use or not allowed.
        """
        return self._listener.bind(endpoint)

    def review(self) -> None:
        """Do nothing: without keys no client authenticates."""

    def tick(self, now_ms: int) -> None:
        """End the surplus connections that have had the time to read their refusal."""
        for peer in [one for one in self._peers if one.surplus] if self._surplus else []:
            if now_ms >= peer.since_ms + SURPLUS_MS:
                self._end(peer)

    def close(self) -> None:
        """Stops listening and ends all connections; closing twice does no harm."""
        if self._closed:
            return
        self._stop_serving()
        for timer in (self._timer, self._late_pings):
            if timer is not None:
                timer.cancel()
        self._listener.close()
        for peer in self._peers:
            peer.is_gone = True  # handlers may hold the peer, whose connection ends now
            peer.stream.close()
        self._peers.clear()

    # ---- Requests ---------------------------------------------------------------------------

    def take(self, peer: PlainPeer, data: bytes) -> None:
        """Serve the whole frames of a peer, as far as the turn's time goes.

        Args:
            peer: The peer.
            data: Bytes that arrived from it; none in a turn for bytes that arrived before.
        """
        if data:
            peer.reader.feed(data)
        turn_ns = self._loop.turn_ns
        if turn_ns != self._turn_ns:
            self._turn_ns = turn_ns
            self._served = 0
            self.readable_ms = turn_ns // 1_000_000
            self.drained_ms = self.readable_ms
        peer.last_seen_ms = self.readable_ms
        reader = peer.reader
        try:
            while reader.rest:
                if self._served and self._is_turn_over():
                    peer.stream.again()
                    self.drained_ms = None
                    break
                found = reader.take()
                if found is None:
                    break
                self._served += 1
                flags, frame = found
                if flags & ~zmtp.LONG or peer.within or not peer.is_met:
                    self._take_unusual(peer, flags, frame)
                else:
                    self._serve(peer, frame, is_behind=peer.stream.is_stuck)
                if peer.stream.is_closed:
                    return
        except RemoteProtocolError as error:
            self._warn(f"a connection is ended: {error}")
            self._end(peer)
            return
        if peer.stream.has_more:
            self.drained_ms = None
        kept = reader.held + reader.rest
        if kept != peer.incoming:
            self._is_turn_over()  # reading large frames takes time, too
            self._incoming += kept - peer.incoming
            peer.incoming = kept
            self._check_budget()

    def _is_turn_over(self) -> bool:
        if self._streams.shut_ns == self._turn_ns:
            return True
        if (
            self._served < FRAMES_PER_TICK
            and self._loop.clock.monotonic_ns() - self._turn_ns < _TURN_NS
        ):
            return False
        self._streams.shut_ns = self._turn_ns
        if self._late_pings is None:
            self._late_pings = self._loop.call_later(HEARTBEAT_INTERVAL_MS, self._answer_late_pings)
        return True

    def _answer_late_pings(self) -> None:
        """Answer pings that may wait behind requests, to show their peers that the server lives."""
        self._late_pings = None
        for peer in self._peers:
            stream = peer.stream
            if peer.ttl_ms is None or stream.is_stuck:
                continue  # it sends no pings, or has unread answers
            if peer.reader.rest or stream.has_come():
                stream.write(_PONG)

    def _take_unusual(self, peer: PlainPeer, flags: int, frame: memoryview) -> None:
        if flags & zmtp.COMMAND:
            name, data = zmtp.take_command(frame)
            if name == b"PING":
                if self._may_send(peer):
                    peer.stream.write(zmtp.pong(data))
                peer.ttl_ms = zmtp.ping_ttl_ms(data)
                self._look_later(LONGEST_LOOK_MS)
        elif flags & zmtp.MORE:
            peer.within = True
        elif peer.within:
            peer.within = False
            self._note_malformed("a message has more than one frame")
        else:
            self._meet(peer, frame)

    def _meet(self, peer: PlainPeer, frame: memoryview) -> None:
        """Serve the first frame of a peer, if it may stay."""
        error: MQMeshError
        if peer.reader.identity:
            error = RemoteProtocolError("a client may not choose a routing id")
            self._note_malformed(str(error))
        elif peer.surplus and len(self._peers) - self._surplus >= self._limits.max_connections:
            error = self._no_place()
        else:
            self._surplus -= peer.surplus
            peer.surplus = False
            peer.is_met = True
            self._met += 1
            self._look_later(LONGEST_LOOK_MS)
            self._serve(peer, frame, is_behind=peer.stream.is_stuck)
            return
        opaque = peek_opaque(frame)
        if opaque is not None:
            peer.fail(opaque, 0, error)

    # ---- Connections ------------------------------------------------------------------------

    def _accept(self, stream: Stream) -> None:
        peer = PlainPeer(self, stream, self._limits.max_frame_bytes)
        peer.since_ms = self._loop.clock.monotonic_ms()
        stream.start(peer)
        if len(self._peers) >= self._limits.max_connections:
            if self._surplus >= MAX_SURPLUS:
                self.note_refusal(ResponseCode.SYSTEM_BUSY, str(self._no_place()))
                stream.close()
                return
            peer.surplus = True
            self._surplus += 1
        self._peers[peer] = None
        stream.write(_OPENING)
        self._look_later(LONGEST_LOOK_MS)

    def _no_place(self) -> SystemBusy:
        return SystemBusy(
            f"{self._limits.max_connections} connections are served already (max_connections)",
            retry_after_ms=BUSY_RETRY_AFTER_MS,
        )

    def _look_later(self, delay_ms: int) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(delay_ms, self._look)

    def _look(self) -> None:
        """Search for overdue handshakes, pings and answers; again while any are due."""
        self._timer = None
        now_ms = self._loop.clock.monotonic_ms()
        next_ms = NEVER_MS
        for peer in list(self._peers):
            due_ms = self._judge(peer, now_ms)
            if not peer.is_gone:
                next_ms = min(next_ms, due_ms)
        if next_ms != NEVER_MS:
            self._look_later(min(max(next_ms - now_ms, LOOK_MS), LONGEST_LOOK_MS))

    def _judge(self, peer: PlainPeer, now_ms: int) -> int:
        """End a peer's connection if anything is overdue; return the time of the next deadline."""
        if not peer.reader.is_open:
            due_ms = peer.since_ms + HANDSHAKE_TIMEOUT_MS
            if due_ms <= now_ms:
                self._end(peer)
            return due_ms
        due_ms = self._sign_due_ms(peer, now_ms)
        if due_ms <= now_ms:
            # This process may have stood still, or had no time for the peer, while the peer sent
            # bytes.
            if peer.reader.rest or peer.stream.has_come():
                peer.last_seen_ms = now_ms
                return now_ms + LOOK_MS
            self.silent += 1
            remark = f"a client hangs: nothing came from it for {now_ms - peer.last_seen_ms} ms"
            self.note_refusal(ResponseCode.SYSTEM_BUSY, f"{remark}; its connection is ended")
            self._end(peer)
        if peer.stuck_ms and not peer.is_gone:
            due_ms = min(due_ms, peer.stuck_ms + MOST_UNTAKEN_MS)
            if due_ms <= now_ms:
                self._hang_up(peer, "a client does not take its answers")
        return due_ms

    def _sign_due_ms(self, peer: PlainPeer, now_ms: int) -> int:
        """Return the time by which a frame of a peer must arrive; ping one that sends no pings."""
        if peer.ttl_ms:
            return peer.last_seen_ms + peer.ttl_ms + HEARTBEAT_INTERVAL_MS
        if peer.ttl_ms == 0 or not peer.is_met or peer.stuck_ms:
            return NEVER_MS  # a ping would wait behind its answers
        if peer.last_seen_ms >= peer.pinged_ms:
            # A peer that pings has done so by then, unless it stopped before.
            if now_ms < peer.last_seen_ms + PROOF_MS:
                return peer.last_seen_ms + PROOF_MS
            peer.pinged_ms = now_ms
            peer.stream.write(zmtp.PING)
        return peer.pinged_ms + HEARTBEAT_TIMEOUT_MS

    def _end(self, peer: PlainPeer) -> None:
        peer.stream.close()
        self.lost(peer)

    def lost(self, peer: PlainPeer) -> None:
        """Forget a peer whose connection ended."""
        if self._peers.pop(peer, peer) is peer:
            return
        self._surplus -= peer.surplus
        self._incoming -= peer.incoming
        peer.is_gone = True
        if peer.is_met:
            self._met -= 1
            self._report_gone(peer)

    # ---- Answers ----------------------------------------------------------------------------

    def send(self, peer: PlainPeer, *frames: bytes | memoryview) -> None:
        """Sends a message, now or when the peer can take it; drops it if the peer is gone."""
        stream = peer.stream
        if peer.is_gone or (stream.waiting_bytes > self._most_waiting and not self._may_send(peer)):
            self.dropped_replies += 1
            return
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            size = len(frame)
            if size <= 255 and number == last:
                stream.write(zmtp.SHORT_HEADS[size] + frame)  # nearly always
                continue
            head = zmtp.head(size, zmtp.MORE if number < last else 0)
            if size <= COPIED_BYTES:
                stream.write(head + frame)
            else:
                stream.write(head, frame)
        if stream.is_stuck:
            self._check_budget()

    def _may_send(self, peer: PlainPeer) -> bool:
        """Return True if the peer may be sent more; otherwise its connection ends soon."""
        if peer.stream.waiting_bytes <= self._most_waiting:
            return True
        hang_up = partial(self._hang_up, peer, "a client does not take its answers")
        self._loop.call_later(0, hang_up)
        return False

    def stuck(self, peer: PlainPeer) -> None:
        """Note a peer that does not take its answers for now."""
        peer.stuck_ms = self._loop.clock.monotonic_ms()
        self._look_later(LONGEST_LOOK_MS)

    def drained(self, peer: PlainPeer) -> None:
        """Note a peer that took all answers that waited for it."""
        peer.stuck_ms = 0

    def has_room(self, peer: PlainPeer, size: int) -> bool:
        """Return True if a large answer may be held: one a peer, within the budget of all."""
        if not self._streams.stuck_bytes:
            return True
        total, held = self.held_bytes, peer.held
        if not held:
            return total <= self._limits.max_total_pending_bytes
        return held + size <= room_of_one(total, self._limits)

    def room(self, peer: PlainPeer) -> int:
        """Return the bytes that an answer's body may have; 0 or less if there is no room."""
        if not self._streams.stuck_bytes:
            return self._most_room
        total, held = self.held_bytes, peer.held
        room = room_of_one(total, self._limits) - HEAD_BYTES
        if held:
            return room - held
        # One answer may be held for any peer, within the budget of all.
        return max(room, LEAST_ROOM_BYTES) if total <= self._limits.max_total_pending_bytes else 0

    def no_room(self, peer: PlainPeer) -> SystemBusy:
        """Return the error for a peer that reads too slowly, or whose neighbours do."""
        limits = self._limits
        return SystemBusy(
            f"{peer.held} bytes of answers wait for this client, {self.held_bytes} for all "
            f"(max_pending_bytes = {limits.max_pending_bytes}, "
            f"max_total_pending_bytes = {limits.max_total_pending_bytes}); read them first",
            retry_after_ms=BUSY_RETRY_AFTER_MS,
        )

    def _check_budget(self) -> None:
        # Not at once: the sender may be in the middle of its work.
        if not self._excess_reported and self.held_bytes > self._limits.max_total_pending_bytes:
            self._excess_reported = True
            self._loop.call_later(0, self._end_worst)

    def _end_worst(self) -> None:
        self._excess_reported = False
        by_descriptor = {peer.stream.descriptor: peer for peer in self._peers}
        loads = [
            PeerLoad(descriptor, peer.held + peer.incoming, waiting_since_ms=peer.stuck_ms or None)
            for descriptor, peer in by_descriptor.items()
        ]
        for load in worst(loads, self._limits):
            limit = self._limits.max_total_pending_bytes
            self._hang_up(
                by_descriptor[load.descriptor],
                f"all clients together take over {limit} (max_total_pending_bytes)",
            )

    def _hang_up(self, peer: PlainPeer, reason: str) -> None:
        if not peer.is_gone:
            size = peer.held + peer.incoming
            self.hung_up += 1
            remark = f"{reason}; one of {size} bytes lost its connection"
            self.note_refusal(ResponseCode.SYSTEM_BUSY, remark)
            self._end(peer)
