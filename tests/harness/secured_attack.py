"""Hostile frames for a server that lets nobody in without a key: before and after the handshake."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Final

import msgspec
import zmq

from harness.fuzz_sender import HELD_CONNECTIONS, PATIENCE_S, Attack, connect
from harness.hostile_frames import HostileFrames
from mqmesh.protocol.command import encode_frame
from mqmesh.protocol.commands import RequestCode
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.zmq import sockets

POLL_MS: Final = 20


class Keys(msgspec.Struct, frozen=True):
    """Keys that an attacker needs to get in.

    Attributes:
        users: Users to connect as, one after the other.
        servers: Public key of the server at each place that takes requests.
    """

    users: list[Credentials]
    servers: dict[str, str]


class SecuredAttack(Attack):
    """Frames for one place: broken handshakes of strangers, and commands of a user with a key.

    Args:
        place: Destination. One that takes no requests gets broken handshakes only.
        frames: Source of the frames.
        context: For connections with keys.
        keys: Keys of the user.
    """

    def __init__(
        self, place: str, frames: HostileFrames, context: sockets.Context, keys: Keys
    ) -> None:
        super().__init__(place, frames)
        self._context = context
        self._rings = itertools.cycle(
            KeyRing(one, keys.servers[place]) for one in keys.users if place in keys.servers
        )
        self._takes_requests = place in keys.servers
        self._mechanism = b"PLAIN" if place.startswith("ipc://") else b"CURVE"
        self._socket: sockets.Socket | None = None
        self._monitor: sockets.Socket | None = None

    def _send_commands(self, count: int) -> None:
        if not self._takes_requests:
            for _ in range(count):
                self._break_protocol()
            return
        if self._socket is None:
            self._open()
        for _ in range(count):
            kind, command = self._frames.command()
            self._kinds[kind] += 1
            self._send(self._frames.parts(command))
        self._syncs += 1
        self._send([encode_frame(RequestCode.PING, self._syncs, header=b"\x90")])
        self._read_until(self._syncs)

    def _open(self) -> None:
        self._socket = sockets.dealer(self._context)
        self._monitor = sockets.monitor(self._socket, with_refusals=True)
        self.found.connections += 1
        sockets.connect(self._socket, self.found.place, next(self._rings))

    def _send(self, parts: list[bytes]) -> None:
        assert self._socket is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            self._wait()
        raise TimeoutError

    def _receive(self) -> list[tuple[int, bytes]]:
        assert self._socket is not None
        self._wait()
        found: list[tuple[int, bytes]] = []
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            found += [(0, frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK)]
        return found

    def _wait(self) -> None:
        """Waits for an event; the end of a connection by the server is one."""
        assert self._socket is not None
        assert self._monitor is not None
        self._socket.poll(POLL_MS)
        events = {event for event, _ in sockets.read_monitor(self._monitor)}
        if zmq.EVENT_DISCONNECTED in events:
            raise ConnectionResetError("the server ended the connection")
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in events:
            raise ConnectionResetError("the server accepts no key")

    def _break_protocol(self) -> None:
        self.found.connections += 1
        self._kinds["broken handshake"] += 1
        one = connect(self.found.place)
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            one.sendall(self._frames.handshake_by(self._mechanism))
        self._held.append(one)
        if len(self._held) > HELD_CONNECTIONS:
            self._held.popleft().close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.setsockopt(zmq.LINGER, 0)
            sockets.close(self._socket, self._monitor)
            self._socket = None
