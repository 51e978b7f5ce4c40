"""Plain streams in a loop: connections by TCP and Unix sockets, without ZeroMQ."""

import contextlib
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from mqmesh.transport.descriptors import NONE_LEFT
from mqmesh.transport.interface import StreamHandler
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.sockets import KEEPALIVE_S, LOCAL_SEND_BUFFER_BYTES
from mqmesh.units import KIB, MIB

IPC: Final = "ipc://"
TCP: Final = "tcp://"
BACKLOG: Final = 1_024
ACCEPTED_PER_TURN: Final = 64
ACCEPT_AGAIN_MS: Final = 500
"""Time for which no connection is accepted after descriptors or memory ran out."""
_SHORT: Final = NONE_LEFT | {errno.ENOBUFS, errno.ENOMEM}
LEAST_READ_BYTES: Final = 64 * KIB
MOST_READ_BYTES: Final = 1 * MIB
"""Bytes that are read of one stream in a turn; the size grows from the least while reads fill."""
WRITE_AT_ONCE_BYTES: Final = 256 * KIB
"""Size from which on written bytes are sent at once; fewer wait for the end of the turn."""
COPIED_BYTES: Final = 16 * KIB
"""Limit below which pieces are joined: a piece costs the system more than its copy."""
MOST_PIECES: Final = 1_024
"""Pieces of one ``sendmsg``; ``IOV_MAX`` of Linux."""

Address = str | tuple[Any, ...]
"""Address of a socket: a path, or host and port."""

_log = logging.getLogger(__name__)


class StreamGroup:
    """Streams that share the time of a turn.

    Attributes:
        shut_ns: Turn of the loop, its ``turn_ns``, in which none of them is read any more.
        stuck_bytes: Bytes that wait in the stuck streams.
    """

    __slots__ = ("shut_ns", "stuck_bytes")

    def __init__(self) -> None:
        self.shut_ns = -1
        self.stuck_bytes = 0


class Stream:
    """One connection, in the loop's thread.

    Args:
        loop: Loop of the stream.
        connection: A connected socket; the stream owns it from now on.
        group: Streams that it belongs to; decides when it is not read.

    Attributes:
        peer: Other end: ``host:port``, or ``unix``.
        waiting_bytes: Bytes that were written and that the system has not taken yet.
        is_stuck: The system takes no more of them for now.
        is_closed: True when no more bytes are written or arrive.
        has_more: The last read did not take all bytes that had arrived.
    """

    __slots__ = (
        "_called_again",
        "_connection",
        "_deaf",
        "_group",
        "_handler",
        "_loop",
        "_out",
        "_paused",
        "_read_bytes",
        "_watched",
        "descriptor",
        "has_more",
        "is_closed",
        "is_stuck",
        "peer",
        "waiting_bytes",
    )

    def __init__(self, loop: EventLoop, connection: socket.socket, group: StreamGroup) -> None:
        connection.setblocking(False)
        self.peer = prepare(connection)
        self.waiting_bytes = 0
        self.is_closed = self.is_stuck = self.has_more = False
        self.descriptor = connection.fileno()
        self._loop = loop
        self._connection = connection
        self._handler: StreamHandler
        self._out: deque[bytes | memoryview] = deque()
        self._group = group
        self._deaf = self._paused = self._watched = self._called_again = False
        self._read_bytes = LEAST_READ_BYTES

    def start(self, handler: StreamHandler) -> None:
        """Give arriving bytes to this handler, from the next turn on."""
        self._handler = handler
        self._watch()

    def write(self, *parts: bytes | memoryview) -> None:
        """Write bytes, now or when the system takes them; never blocks.

        Args:
            parts: Bytes, which are kept until they have left, and may not change.
        """
        if self.is_closed or self._deaf:
            return
        if not self.waiting_bytes and not self.is_stuck:
            self._loop.before_wait.append(self.flush)
        self._out.extend(parts)
        size = sum(map(len, parts))
        self.waiting_bytes += size
        if self.is_stuck:
            self._group.stuck_bytes += size
        elif self.waiting_bytes >= WRITE_AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand over written bytes to the system, as many as it takes."""
        out = self._out
        try:
            while out:
                if len(out) == 1:
                    sent = self._connection.send(out[0])
                else:
                    sent = self._connection.sendmsg(
                        out if len(out) <= MOST_PIECES else list(out)[:MOST_PIECES]
                    )
                self.waiting_bytes -= sent
                if self.is_stuck:
                    self._group.stuck_bytes -= sent
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = memoryview(out[0])[sent:]
        except BlockingIOError:
            self._set_stuck(True)
        except OSError:
            # The other side does not read any more, or the system has no memory. Bytes that it has
            # sent are still read, and then the end.
            self._deaf = True
            self._drop_output()
            self._shut_down()
        else:
            if self.is_stuck:
                self._set_stuck(False)

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if self.is_closed:
            return
        if self._watched:
            self._loop.want_read(self.descriptor, True)
        else:
            self._watch()

    def close(self) -> None:
        """End the connection; written bytes that the system takes at once are still sent."""
        if self.is_closed:
            return
        if self._out and not self.is_stuck:
            with contextlib.suppress(OSError):
                self._connection.sendmsg(list(self._out)[:MOST_PIECES])
        self._end()

    def again(self) -> None:
        """Make the loop call the handler in the next turn, before any further read."""
        if not self._called_again:
            self._called_again = True
            self._loop.again(self.descriptor)

    def _on_ready(self) -> None:
        if self.is_stuck:
            self.flush()
        if self.is_closed:
            return
        if self._called_again:
            self._called_again = False
            self._handler.on_bytes(b"")
            return
        if self._group.shut_ns == self._loop.turn_ns:
            return
        if self._paused:
            # Not merely ignored: otherwise the loop would not sleep.
            self._rest()
            return
        try:
            data = self._connection.recv(self._read_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._lost()
            return
        if not data:
            self._lost()
            return
        self.has_more = len(data) == self._read_bytes
        if self.has_more and self._read_bytes < MOST_READ_BYTES:
            self._read_bytes *= 4
        self._handler.on_bytes(data)

    def has_come(self) -> bool:
        """Return True if the next read will find something: bytes, or the end."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _watch(self) -> None:
        self._loop.add(self.descriptor, self._on_ready)
        self._watched = True
        if self.is_stuck:
            self._loop.want_write(self.descriptor, True)

    def _rest(self) -> None:
        """Stop reading; waiting bytes are still sent."""
        if not self.is_stuck:
            self._unwatch()
            return
        if not self._watched:
            self._watch()
        self._loop.want_read(self.descriptor, False)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove(self.descriptor)

    def _set_stuck(self, stuck: bool) -> None:
        if stuck != self.is_stuck:
            self.is_stuck = stuck
            if self._watched:
                self._loop.want_write(self.descriptor, stuck)
            elif stuck and self._paused:
                self._rest()
            if stuck:
                self._group.stuck_bytes += self.waiting_bytes
                self._handler.on_stuck()
            elif not self.is_closed:
                self._handler.on_drained()

    def _lost(self) -> None:
        self._end()
        self._handler.on_closed()

    def _end(self) -> None:
        self.is_closed = True
        self._unwatch()
        self._shut_down()  # also where a forked child holds it
        self._connection.close()
        self._drop_output()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _drop_output(self) -> None:
        self._out.clear()
        if self.is_stuck:
            self._group.stuck_bytes -= self.waiting_bytes
        self.waiting_bytes = 0
        self._set_stuck(False)


class StreamListener:
    """Listens at endpoints, and hands out new connections.

    Args:
        loop: Loop of the listener.
        accept: Called with each new stream, which it starts or closes.

    Attributes:
        group: All streams that it hands out.
    """

    def __init__(self, loop: EventLoop, accept: Callable[[Stream], None]) -> None:
        self._loop = loop
        self._accept = accept
        self.group = StreamGroup()
        self._listening: dict[int, socket.socket] = {}
        self._files: dict[str, int] = {}
        self._closed = False

    def bind(self, endpoint: str, *, shares_port: bool = False) -> str:
        """Listens on an endpoint, ``tcp://host:port`` (port ``*`` or 0: a free one) or ``ipc://path``.

        Args:
            endpoint: Endpoint of the listener.
            shares_port: As for ``ByteStreamListener``.

        Returns:
            The endpoint with the real port.

        Raises:
            OSError: The endpoint is in use or not allowed.
        """
        try:
            listening, bound = self._listen(endpoint, shares_port=shares_port)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {endpoint}: {error}") from error
        self._listening[listening.fileno()] = listening
        self._watch(listening)
        return bound

    def close(self) -> None:
        """Stops listening; the owners of connections close them."""
        self._closed = True
        for descriptor, listening in self._listening.items():
            with contextlib.suppress(KeyError):
                self._loop.remove(descriptor)
            listening.close()
        self._listening.clear()
        for path, number in self._files.items():
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == number:  # otherwise the next listener there has its own
                    os.unlink(path)
        self._files.clear()

    def _listen(self, endpoint: str, *, shares_port: bool) -> tuple[socket.socket, str]:
        family, address = resolve(endpoint, to_listen=True)
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            if isinstance(address, str):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address)  # left by a process that was killed
                listening.bind(address)
                self._files[address] = os.stat(address).st_ino
            else:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if shares_port:
                    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        if isinstance(address, str):
            return listening, endpoint
        return listening, TCP + _text(listening.getsockname())

    def _watch(self, listening: socket.socket) -> None:
        listening.setblocking(False)

        def take() -> None:
            for _ in range(ACCEPTED_PER_TURN):
                try:
                    connection, _ = listening.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in _SHORT:
                        self._rest(listening, error)
                        return
                    continue  # the connection ended before it was accepted
                try:
                    self._accept(Stream(self._loop, connection, self.group))
                except OSError:
                    connection.close()

        self._loop.add(listening.fileno(), take)

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        _log.error("no connection can be taken: %s; trying again in %d ms", error, ACCEPT_AGAIN_MS)
        self._loop.remove(listening.fileno())

        def again() -> None:
            if not self._closed:
                self._watch(listening)

        self._loop.call_later(ACCEPT_AGAIN_MS, again)


def resolve(endpoint: str, *, to_listen: bool = False) -> tuple[int, Address]:
    """Return family and address of an endpoint, ``tcp://host:port`` or ``ipc://path``.

    Raises:
        OSError: The name is unknown, or the text is no such endpoint.
    """
    if endpoint.startswith(IPC):
        return socket.AF_UNIX, endpoint.removeprefix(IPC)
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    if not endpoint.startswith(TCP) or not host:
        raise OSError(errno.EINVAL, "neither tcp://host:port nor ipc://path")
    # Not for all: names that have addresses of both kinds would be looked up as IPv6 first.
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    if to_listen and port == "*":
        port = "0"
    host = host.strip("[]")
    found = socket.getaddrinfo(
        None if to_listen and host == "*" else host,
        port,
        family,
        socket.SOCK_STREAM,
        flags=socket.AI_PASSIVE if to_listen else 0,
    )
    return found[0][0], found[0][4]


def look_up(endpoint: str) -> "Future[tuple[int, Address]]":
    """Begin ``resolve``: a thread looks the name up, since that may take the system long."""
    found: Future[tuple[int, Address]] = Future()

    def run() -> None:
        try:
            found.set_result(resolve(endpoint))
        except Exception as error:
            found.set_exception(error)

    host = endpoint.removeprefix(TCP).rpartition(":")[0]
    if endpoint.startswith(IPC) or host.startswith("[") or host.replace(".", "").isdigit():
        run()
    else:
        try:
            threading.Thread(target=run, name="mqmesh-look-up", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads for this user
            found.set_exception(OSError(errno.EAGAIN, f"{host} cannot be looked up: {error}"))
    return found


def prepare(connection: socket.socket) -> str:
    """Set the options of a new connection; return its other end.

    Raises:
        OSError: The connection is gone.
    """
    if connection.family == socket.AF_UNIX:
        # Linux gives 208 KiB: larger frames would be sent in pieces, each with a switch of
        # processes.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_SEND_BUFFER_BYTES)
        return "unix"
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return _text(connection.getpeername())


def _text(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
