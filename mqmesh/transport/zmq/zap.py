"""Answers ZeroMQ's queries, in a role's own loop, about who may connect (ZAP, ZeroMQ RFC 27).

ZeroMQ sends a query while a connection is made, before a frame of it is read. There is one socket
for all servers of a context, made with it, so no server can be there before.
"""

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop

if TYPE_CHECKING:
    # Clients have none, and need not load the table of commands that the guard uses.
    from mqmesh.security.guard import Guard

REQUESTS_PER_TURN: Final = 64
MAX_FRAMES: Final = 10
MAX_PART_BYTES: Final = 256
LOG_REFUSED_MS: Final = 1_000
"""Shortest time between two log lines about refused connections."""

ROOT: Final = 0
_VERSION: Final = b"1.0"
_HEAD: Final = 7
"""Frames before the credentials: empty, version, request, domain, address, identity, mechanism."""
_CURVE_KEY_BYTES: Final = 32
_OK: Final = (b"200", b"OK")
# Never 300, by which a connection hangs without any report.
_REFUSED: Final = (b"400", b"not in the access list, or not enabled")
_BROKEN: Final = (b"500", b"a question that is none")

_log = logging.getLogger(__name__)


class ZapHandler:
    """Answers for all servers of one context.

    Args:
        context: Context of the servers.
        loop: Loop in whose thread it answers.
        guard: Decides who may connect, and counts refusals.
    """

    def __init__(self, context: sockets.Context, loop: EventLoop, guard: "Guard") -> None:
        self._guard = guard
        self._loop = loop
        self._socket = sockets.authenticator(context)
        self._log_at_ms = 0
        loop.add(self._socket, self._on_readable)

    def close(self) -> None:
        """Stops answering; servers that still exist admit no client any more."""
        self._loop.remove(self._socket)
        sockets.close(self._socket)

    def _on_readable(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                requester, *frames = self._read()
            except zmq.Again:
                return
            reply, why = answer(frames, self._guard, os.geteuid())
            if why:
                self._note(why)
            if reply:
                self._socket.send_multipart([requester, *reply], zmq.NOBLOCK)

    def _read(self) -> list[bytes]:
        """Read one query; of one that is too long, leave out frames beyond the limits."""
        found = [self._socket.recv(zmq.NOBLOCK)]
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(zmq.NOBLOCK, copy=False).buffer
            if len(found) <= MAX_FRAMES:
                found.append(bytes(frame[: MAX_PART_BYTES + 1]))
        return found

    def _note(self, why: str) -> None:
        self._guard.refused_connections += 1
        now_ms = self._loop.clock.monotonic_ms()
        if now_ms >= self._log_at_ms:
            self._log_at_ms = now_ms + LOG_REFUSED_MS
            count = self._guard.refused_connections
            _log.warning("a connection is refused: %s (%d so far)", why, count)


def answer(frames: Sequence[bytes], guard: "Guard", own_uid: int) -> tuple[list[bytes], str]:
    """Return the answer to ZeroMQ's query about a connection. Pure.

    Args:
        frames: Frames of the query, without the routing id.
        guard: Decides who may connect.
        own_uid: User of this process.

    Returns:
        The answer, empty for a query that cannot be answered, and the reason why the connection
        is refused, "" if it is not.
    """
    if len(frames) < 3 or any(len(frame) > MAX_PART_BYTES for frame in frames[:3]):
        return [], "ZeroMQ asks nothing"
    request = frames[2]
    if not _is_sound(frames):
        return [b"", _VERSION, request, *_BROKEN, b"", b""], "ZeroMQ asks what is no question"
    user_id, why = _user_id(frames, own_uid)
    if not why and guard.principal(user_id) is None:
        why = f"no enabled user has the key {user_id}"
    if why:
        where = frames[4].decode("ascii", "replace")
        return [b"", _VERSION, request, *_REFUSED, b"", b""], f"{why} (from {where!r})"
    return [b"", _VERSION, request, *_OK, user_id.encode(), b""], ""


def _is_sound(frames: Sequence[bytes]) -> bool:
    return (
        _HEAD <= len(frames) <= MAX_FRAMES
        and all(len(frame) <= MAX_PART_BYTES for frame in frames)
        and frames[:2] == [b"", _VERSION]
    )


def _user_id(frames: Sequence[bytes], own_uid: int) -> tuple[str, str]:
    """Return the user id that a connection proves, or the reason why it proves none."""
    domain, address, mechanism = frames[3], frames[4], frames[6]
    if mechanism == b"CURVE" and domain == sockets.NETWORK.encode():
        if len(frames) != _HEAD + 1 or len(frames[_HEAD]) != _CURVE_KEY_BYTES:
            return "", "it has no key"
        return z85.encode(frames[_HEAD]).decode(), ""
    if mechanism == b"PLAIN" and domain == sockets.LOCAL_DOMAIN.encode():
        # ``localhost:uid:gid:pid``, as the system named the other process. A process of this user
        # could read the keys, so the name that it claims is trusted: it must not have more rights
        # than its user has.
        parts = address.split(b":")
        if len(parts) != 4 or parts[0] != b"localhost" or not parts[1].isdigit():
            return "", "whose process it is is not known"
        uid = int(parts[1])
        if uid not in (own_uid, ROOT):
            return "", f"it is a process of user {uid}"
        if len(frames) != _HEAD + 2:
            return "", "it does not say which key it has"
        return frames[_HEAD].decode("ascii", "replace"), ""
    return "", f"it speaks {mechanism.decode('ascii', 'replace')!r}"
