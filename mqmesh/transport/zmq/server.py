"""Answers commands on a ROUTER socket, and reports the end of each peer."""

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import zmq

from mqmesh.errors import (
    MQMeshError,
    RemoteProtocolError,
    SystemBusy,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import (
    ANYBODY,
    ONEWAY,
    Principal,
    encode_frame,
    peek_opaque,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.security.keys import Credentials
from mqmesh.transport.error_frames import error_frame
from mqmesh.transport.interface import Handler, OnDisconnect, ServerLimits, Timer
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.connections import hang_up
from mqmesh.transport.zmq.idle_detection import LOOK_MS, PROOF_MS, IdleDetection
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.memory_accounting import PeerLoad, PeerMemory
from mqmesh.transport.zmq.memory_eviction import MemoryEviction
from mqmesh.transport.zmq.outbox import BUSY_RETRY_AFTER_MS, PeerOutbox
from mqmesh.transport.zmq.peers import PeerTable, is_automatic
from mqmesh.transport.zmq.served_peer import ServedPeer
from mqmesh.transport.zmq.serving import RequestServing
from mqmesh.transport.zmq.sockets import HEARTBEAT_TIMEOUT_MS

if TYPE_CHECKING:
    # Clients have none, and need not load the table of commands that the guard uses.
    from mqmesh.security.guard import Guard

IPC: Final = "ipc://"
FRAMES_PER_TICK: Final = 256
"""Requests served in one turn, so that timers and other sockets get their time."""
TURN_MS: Final = 5
"""Time in a turn after which no request is begun: some take milliseconds, as filtered pulls do."""
SURPLUS_MS: Final = 1_000
"""Time for which a connection beyond ``max_connections`` stays, to get the reason of refusal."""
MAX_SURPLUS: Final = 64
"""Such connections at a time; more are ended at once."""
MAX_HUNG_UP: Final = 4_096
"""Peers whose connections the server has ended, and whose frames ZeroMQ may still have."""
TICK_MS: Final = 250

# As plain numbers: an operation on enumerations takes longer than the call that it is for.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_IN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_NS_PER_MS: Final = 1_000_000

_PROBE: Final = encode_frame(RequestCode.PROBE_CLIENT, 0, flags=ONEWAY)

_USER_ID: Final = "User-Id"
"""Property with the user id of ZAP's answer for a connection; ZeroMQ sets it on each frame."""


class CommandServer(RequestServing):
    """Serves requests of many peers in the loop's thread, by a socket of ZeroMQ.

    Args:
        context: ZeroMQ context of the process.
        loop: Event loop of the process.
        handlers: Handler by request code.
        on_disconnect: Called with a peer whose connection broke. Requests that were on their way
            are served still, each as of a new peer, with which it is called after each.
        limits: Limits for the peers. The peer that takes the most loses its connection when all
            together take more than the budget.
        own: Keys that it proves; None to speak plainly, with every client.
        guard: Decides who may connect; given together with ``own``.

    Attributes:
        tick_ms: Interval at which ``tick`` is to be called; 0 for never.
    """

    def __init__(
        self,
        context: sockets.Context,
        loop: EventLoop,
        handlers: Mapping[int, Handler],
        on_disconnect: OnDisconnect | None = None,
        limits: ServerLimits | None = None,
        *,
        own: Credentials | None = None,
        guard: "Guard | None" = None,
    ) -> None:
        super().__init__(loop, handlers, on_disconnect)
        self._own = own
        self._guard = guard
        self._limits = limits or ServerLimits()
        self._socket = sockets.router(context, max_frame_bytes=self._limits.max_frame_bytes)
        self._monitor = sockets.monitor(self._socket)
        self._peers = PeerTable()
        self._accounts: dict[bytes, ServedPeer] = {}
        self._outbox = PeerOutbox(
            self._socket,
            loop,
            self._limits,
            self._accounts,
            on_excess=self._on_excess,
            on_deaf=self._on_deaf,
        )
        self._relief = MemoryEviction(
            self._peers,
            self._outbox,
            self._limits,
            queued_frames=sockets.SERVER_RECEIVE_HIGH_WATER_MARK,
            now_ms=loop.clock.monotonic_ms(),
        )
        self._silence = IdleDetection(
            self._peers, self._accounts, lambda peer: self._outbox.probe(peer, _PROBE)
        )
        self._silence_timer: Timer | None = None
        self._surplus: dict[int, int] = {}
        self._hung_up: dict[bytes, None] = {}
        self._socket_files: dict[str, int] = {}
        self.tick_ms = TICK_MS
        loop.add(self._socket, self._on_readable)
        loop.add(self._monitor, self._on_monitor)

    @property
    def peer_count(self) -> int:
        """Connections that sent a frame and still exist."""
        return len(self._accounts)

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that their peers have not taken yet, and of frames not read yet."""
        return self._outbox.held + self._relief.incoming

    @property
    def dropped_replies(self) -> int:
        """Answers that were dropped because their peer was gone, or did not read."""
        return self._outbox.dropped

    def bind(self, endpoint: str) -> str:
        """Listens on an endpoint.

        Args:
            endpoint: ``tcp://host:port`` (port ``*`` or 0 takes a free one) or ``ipc://path``.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: The endpoint is in use or not allowed.
        """
        bound = sockets.bind(self._socket, endpoint, self._own)
        if endpoint.startswith(IPC):
            path = endpoint.removeprefix(IPC)
            self._socket_files[path] = os.stat(path).st_ino
        return bound

    def close(self) -> None:
        """Stops listening; closing twice does no harm."""
        if self._closed:
            return
        self._stop_serving()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        for peer in self._accounts.values():
            peer.is_gone = True  # handlers may hold the peer, whose connection ends now
        self._outbox.close()
        self._loop.remove(self._socket)
        self._loop.remove(self._monitor)
        self._remove_socket_files()
        sockets.close(self._socket, self._monitor)

    def _remove_socket_files(self) -> None:
        """Removes the socket files that ZeroMQ leaves, except those of a next listener."""
        for path, number in self._socket_files.items():
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == number:
                    os.unlink(path)
        self._socket_files.clear()

    def review(self) -> None:
        """End the connections of peers that may not connect any more: the access list changed."""
        if self._guard is None:
            return
        for peer, account in list(self._accounts.items()):
            known = account.principal
            now = self._guard.principal(known.key)
            descriptor = self._peers.living.get(peer)
            if now is not None:
                account.principal = now
            elif descriptor is not None:
                remark = f"user {known.name!r} may not connect any more"
                self._dismiss(descriptor, peer, ResponseCode.NO_PERMISSION, remark)

    def tick(self, now_ms: int) -> None:
        """Maintains connections and memory; to be called some times a second.

        Args:
            now_ms: Monotonic clock.
        """
        for descriptor, due_ms in list(self._surplus.items()):
            if due_ms <= now_ms:
                del self._surplus[descriptor]
                hang_up(descriptor)
        self._end_all(self._relief.tick(now_ms))

    def _on_readable(self) -> None:
        socket = self._socket
        now_ns = self._loop.clock.monotonic_ns  # the interpreter's own function, a call less
        self.readable_ms = now_ns() // _NS_PER_MS
        self.drained_ms = None
        if self.readable_ms >= self._relief.look_ms:
            self._end_all(self._relief.tick(self.readable_ms))
        for number in range(FRAMES_PER_TICK):
            # One frame is the usual case of a quiet server, and a look at the events costs half as
            # much as a read in vain.
            if number == 1 and not int(socket.get(_EVENTS)) & _IN:
                self.drained_ms = now_ns() // _NS_PER_MS
                return
            if number and now_ns() // _NS_PER_MS - self.readable_ms >= TURN_MS:
                return
            try:
                peer = socket.recv(_NOBLOCK)
            except zmq.Again:
                self.drained_ms = now_ns() // _NS_PER_MS
                return
            # Not copied: bodies are large, and the frame names the connection by which it arrived.
            frame = socket.recv(_NOBLOCK, copy=False)
            account = self._accounts.get(peer)
            if account is None:
                self._take_from_unknown(peer, frame)
            else:
                self._take(account, frame)

    def _take(self, peer: ServedPeer, frame: zmq.Frame) -> None:
        buffer = frame.buffer
        peer.take(len(buffer))
        peer.last_seen_ms = self.readable_ms
        if not peer.watched:
            self._watch(peer)
        if frame.more:
            sockets.skip_rest(self._socket)
            self._note_malformed("a message has more than one frame")
        else:
            self._serve(peer, buffer, is_behind=peer.held > 0)

    def _watch(self, peer: ServedPeer) -> None:
        self._silence.watch(peer.id, peer)
        if self._silence_timer is None:
            self._silence_timer = self._loop.call_later(PROOF_MS, self._look_for_silent)

    def _look_for_silent(self) -> None:
        """Ends the connections of clients that hang; their earlier frames are still served."""
        self._silence_timer = None
        now_ms = self._loop.clock.monotonic_ms()
        self._on_monitor()
        for _, descriptor in self._silence.look(now_ms):
            self.silent += 1
            remark = f"a client hangs: nothing came from it for {HEARTBEAT_TIMEOUT_MS} ms"
            self.note_refusal(ResponseCode.SYSTEM_BUSY, f"{remark}; its connection is ended")
            hang_up(descriptor)
        due_ms = self._silence.due_ms
        if due_ms is not None and not self._closed:
            # At most ``PROOF_MS``: a peer that is watched from now on has to be checked by then.
            delay_ms = min(max(due_ms - now_ms, LOOK_MS), PROOF_MS)
            self._silence_timer = self._loop.call_later(delay_ms, self._look_for_silent)

    def _take_from_unknown(self, peer: bytes, frame: zmq.Frame) -> None:
        if peer in self._hung_up:
            sockets.skip_rest(self._socket)
            return
        if not is_automatic(peer):
            sockets.skip_rest(self._socket)
            remark = "a client may not choose a routing id"
            self._note_malformed(remark)
            opaque = peek_opaque(frame.buffer)
            if opaque is not None:
                self._fail_unknown(peer, opaque, RemoteProtocolError(remark))
            return
        self._on_monitor()  # events of connections come before their frames; see PeerTable
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            # ZMTP 1 and 2 take nearly any bytes for a message; only later versions name a source.
            sockets.skip_rest(self._socket)
            self._note_malformed("a peer speaks no ZMTP 3")
            return
        principal = ANYBODY if self._guard is None else self._principal(self._guard, frame)
        if principal is None:
            sockets.skip_rest(self._socket)
            self.note_refusal(
                ResponseCode.NO_PERMISSION, "a connection without the key of a user; closed"
            )
            hang_up(descriptor)
            return
        try:
            self._check_place(descriptor, principal)
        except SystemBusy as error:
            sockets.skip_rest(self._socket)
            self._fail_unknown(peer, peek_opaque(frame.buffer) or 0, error)
            return
        gone = self._peers.meet(peer, descriptor)
        if gone is not None and gone != peer:
            self._bury(gone)
        served = self._accounts[peer] = ServedPeer(
            peer,
            self._loop.clock.monotonic_ms(),
            principal,
            self._outbox,
            self._peers.living,
            self.note_refusal,
        )
        self._take(served, frame)
        if gone == peer:
            self._bury(peer)

    @staticmethod
    def _principal(guard: "Guard", frame: zmq.Frame) -> Principal | None:
        """Return a frame's principal; None if it may not connect, or not since its handshake."""
        try:
            user_id = frame.get(_USER_ID)
        except zmq.ZMQError:
            return None  # the guard never saw this connection
        return guard.principal(str(user_id))

    def _check_place(self, descriptor: int, principal: Principal) -> None:
        """Check that a connection may stay at its first frame; else it ends soon.

        Raises:
            SystemBusy: The connection is one too many, here or for its user.
        """
        guard, name = self._guard, principal.name
        if guard is not None and name in guard.quotas.connections:
            others = sum(one.principal.name == name for one in self._accounts.values())
            try:
                guard.quotas.check_connection(name, others)
            except SystemBusy:
                due_ms = self._loop.clock.monotonic_ms() + SURPLUS_MS
                self._surplus.setdefault(descriptor, due_ms)
                raise
        if descriptor in self._surplus:
            if len(self._peers) - len(self._surplus) >= self._limits.max_connections:
                raise self._no_place()
            del self._surplus[descriptor]

    def _no_place(self) -> SystemBusy:
        return SystemBusy(
            f"{self._limits.max_connections} connections are served already (max_connections)",
            retry_after_ms=BUSY_RETRY_AFTER_MS,
        )

    def _fail_unknown(self, peer: bytes, opaque: int, error: MQMeshError) -> None:
        """Refuses the frame of a peer that is not served."""
        frame = error_frame(opaque, 0, error, self.note_refusal)
        assert frame is not None
        self._outbox.send_to_unknown(peer, frame)

    def _on_monitor(self) -> None:
        for event, descriptor in sockets.read_monitor(self._monitor):
            gone = None
            if event == zmq.EVENT_ACCEPTED:
                gone = self._peers.accept(descriptor)
                self._relief.connected(descriptor, self._loop.clock.monotonic_ms())
                self._surplus.pop(descriptor, None)
                if len(self._peers) > self._limits.max_connections:
                    self._on_surplus(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._peers.disconnect(descriptor)
                self._surplus.pop(descriptor, None)
            if gone is not None:
                self._bury(gone)

    def _on_surplus(self, descriptor: int) -> None:
        if len(self._surplus) < MAX_SURPLUS:
            self._surplus[descriptor] = self._loop.clock.monotonic_ms() + SURPLUS_MS
        else:
            self.note_refusal(ResponseCode.SYSTEM_BUSY, str(self._no_place()))
            hang_up(descriptor)

    def _on_excess(self) -> None:
        if not self._closed:
            self._end_all(self._relief.measure(self._loop.clock.monotonic_ms()))

    def _on_deaf(self, peer: PeerMemory) -> None:
        descriptor = self._peers.living.get(peer.id)
        if descriptor is not None and not peer.is_gone:
            self._end(
                PeerLoad(descriptor, peer.held, peer.id), "a client does not take its answers"
            )

    def _end_all(self, loads: list[PeerLoad]) -> None:
        for load in loads:
            limit = self._limits.max_total_pending_bytes
            self._end(load, f"all clients together take over {limit} (max_total_pending_bytes)")

    def _end(self, load: PeerLoad, reason: str) -> None:
        """Ends a connection; its unread frames are thrown away."""
        self._on_monitor()
        if (load.descriptor, load.peer) not in self._peers.connections():
            return  # it is gone, and its descriptor may have a new owner by now
        remark = f"{reason}; one of {load.size} bytes lost its connection"
        self._dismiss(load.descriptor, load.peer, ResponseCode.SYSTEM_BUSY, remark)

    def _dismiss(self, descriptor: int, peer: bytes | None, code: int, remark: str) -> None:
        self.hung_up += 1
        self.note_refusal(code, remark)
        self._peers.disconnect(descriptor)
        hang_up(descriptor)
        self._surplus.pop(descriptor, None)
        if peer is not None:
            self._hung_up[peer] = None
            if len(self._hung_up) > MAX_HUNG_UP:
                del self._hung_up[next(iter(self._hung_up))]
            self._bury(peer)

    def _bury(self, peer: bytes) -> None:
        served = self._accounts.pop(peer, None)
        if served is None:
            return
        served.is_gone = True
        self._relief.peer_left(served, self._loop.clock.monotonic_ms())
        self._outbox.forget(served)
        self._report_gone(served)
