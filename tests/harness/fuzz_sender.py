"""A process that sends hostile frames to servers, and counts what they answer.

Run by ``harness.fuzz``: ``python -m harness.fuzz_sender SEED FRAMES PLACE…``. Standard input has
``Keys`` as JSON, or nothing. It prints what it found as one line of JSON.
"""

import collections
import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from harness import zmtp
from harness.hostile_frames import OPAQUE_BIT, HostileFrames
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import PREFIX_SIZE, RESPONSE, encode_frame
from mqmesh.protocol.commands import RequestCode

BATCH: Final = 128
"""Frames before it is waited until the server has read them."""
CONNECTION_SHARE: Final = 0.05
"""Share of the frames that are connections which break ZMTP."""
PATIENCE_S: Final = 30.0
NICE: Final = 5
"""Niceness: the sender gets what the cluster leaves of the processors."""
HELD_CONNECTIONS: Final = 40
"""Half handshakes that stay open for a while."""
LIFE: Final = 50
"""Batches of a connection; then the next one begins, and half of the answers are not read."""

_NO_LINGER: Final = struct.pack("ii", 1, 0)
_PREFIX = struct.Struct("<BBHIQ")


class Found(msgspec.Struct):
    """Result of the frames of one place.

    Attributes:
        place: Destination of the frames.
        frames: Number of frames.
        kinds: Number of frames by kind.
        answers: Number of answers by the names of their codes.
        connections: Connections that were made.
        ended: Connections that the server ended.
        fault: Promise that the server broke; empty if none.
    """

    place: str
    frames: int = 0
    kinds: dict[str, int] = {}
    answers: dict[str, int] = {}
    connections: int = 0
    ended: int = 0
    fault: str = ""


def connect(place: str) -> socket.socket:
    """Connects to ``tcp://host:port`` or ``ipc://path``; closing the connection resets it."""
    kind, _, address = place.partition("://")
    if kind == "ipc":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE_S)
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_S)
    # So that thousands of them leave no ports that have to wait.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    return connection


def shake_hands(connection: socket.socket) -> tuple[zmtp.FrameReader, bytes]:
    """Says what ZeroMQ says first, and waits for the other side's part.

    Nothing else may be sent before: ZeroMQ would end the connection.

    Returns:
        The reader of all that comes behind it, and the other side's READY.
    """
    connection.sendall(zmtp.greeting() + zmtp.ready())
    reader = zmtp.FrameReader()
    while True:
        data = connection.recv(1 << 12)
        if not data:
            raise ConnectionResetError("the server ended the connection")
        for flags, body in reader.feed(data):
            if flags & zmtp.COMMAND:
                return reader, body


class Attack:
    """The frames for one place.

    Args:
        place: Destination of the frames.
        frames: Source of the frames.
    """

    def __init__(self, place: str, frames: HostileFrames) -> None:
        self.found = Found(place, kinds={}, answers={})
        self._frames = frames
        self._kinds: collections.Counter[str] = collections.Counter()
        self._answers: collections.Counter[str] = collections.Counter()
        self._held: collections.deque[socket.socket] = collections.deque()
        self._connection: socket.socket | None = None
        self._reader = zmtp.FrameReader()
        self._publishes = False
        self._shaken = False
        self._syncs = 0
        self._batches = 0

    def send_batch(self, count: int) -> None:
        """Sends frames and waits until the server has come to their end."""
        broken = round(count * CONNECTION_SHARE)
        for _ in range(broken):
            self._break_protocol()
        try:
            self._send_commands(count - broken)
        except (ConnectionError, BrokenPipeError):
            self.found.ended += 1
            self._close()
        except TimeoutError:
            self.found.fault = f"no answer to PING within {PATIENCE_S:.0f} s"
            self._close()
        self.found.frames += count
        self._batches += 1
        if self._batches % LIFE == 0:
            self._close()

    def finish(self) -> Found:
        """Closes everything; what was found."""
        self._close()
        while self._held:
            self._held.popleft().close()
        self.found.kinds, self.found.answers = dict(self._kinds), dict(self._answers)
        return self.found

    def _send_commands(self, count: int) -> None:
        if self._connection is None:
            self._open()
        assert self._connection is not None
        wire = []
        for _ in range(count):
            kind, command = self._frames.command()
            self._kinds[kind] += 1
            wire.append(self._frames.on_wire(command))
        self._syncs += 1
        wire.append(zmtp.frame(encode_frame(RequestCode.PING, self._syncs, header=b"\x90")))
        self._connection.sendall(b"".join(wire))
        if not self._publishes:
            self._read_until(self._syncs)

    def _open(self) -> None:
        self._connection = connect(self.found.place)
        self.found.connections += 1
        self._reader, ready = shake_hands(self._connection)
        self._publishes = b"PUB" in ready

    def _receive(self) -> list[tuple[int, bytes]]:
        assert self._connection is not None
        data = self._connection.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the server ended the connection")
        return self._reader.feed(data)

    def _read_until(self, opaque: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for flags, body in self._receive():
                if flags & zmtp.COMMAND or len(body) < PREFIX_SIZE:
                    continue
                _, kind, code, _, answered = _PREFIX.unpack_from(body)
                if not kind & RESPONSE:
                    continue
                if answered == opaque:
                    return
                if answered & OPAQUE_BIT:
                    self._answers[_name(code)] += 1
        raise TimeoutError

    def _break_protocol(self) -> None:
        self.found.connections += 1
        one = connect(self.found.place)
        self._shaken = not self._shaken
        kind = "broken ZMTP" if self._shaken else "broken handshake"
        self._kinds[kind] += 1
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            if self._shaken:
                shake_hands(one)
                one.sendall(self._frames.after_handshake())
            else:
                one.sendall(self._frames.handshake())
        self._held.append(one)
        if len(self._held) > HELD_CONNECTIONS:
            self._held.popleft().close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _name(code: int) -> str:
    try:
        return ResponseCode(code).name
    except ValueError:
        return str(code)


def run(count: int, attacks: Sequence[Attack]) -> list[Found]:
    """Sends hostile frames to each place in turn, until as many were sent to all together."""
    sent = 0
    while sent < count and not any(attack.found.fault for attack in attacks):
        for attack in attacks:
            batch = min(BATCH, count - sent)
            if batch:
                attack.send_batch(batch)
                sent += batch
    return [attack.finish() for attack in attacks]


def main(seed: int, count: int, places: Sequence[str]) -> None:
    """Runs the program; keys come by standard input, if the places want some."""
    os.nice(NICE)
    frames, told = HostileFrames(seed), sys.stdin.buffer.read()
    if told:
        from harness.secured_attack import Keys, SecuredAttack
        from mqmesh.transport.zmq.sockets import new_context

        keys, context = msgspec.json.decode(told, type=Keys), new_context()
        attacks: list[Attack] = [SecuredAttack(one, frames, context, keys) for one in places]
    else:
        attacks = [Attack(one, frames) for one in places]
    sys.stdout.buffer.write(msgspec.json.encode(run(count, attacks)) + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
