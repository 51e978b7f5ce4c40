"""Makes every ZeroMQ socket of mqmesh, with its limits set before bind or connect.

There is no other way to make a socket, so no socket is without heartbeats, a handshake timeout, a
frame limit and bounded water marks.
"""

import itertools
import os
import socket as system_socket
import struct
from typing import Any, Final

import zmq

from mqmesh.errors import ConfigError, TooManyOpenFiles
from mqmesh.protocol.command import MAX_FRAME_BYTES, MAX_FURTHER_FRAMES
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.process_memory import keep_freed_blocks
from mqmesh.transport.zmq.descriptors import check_descriptors, descriptors_for

NETWORK: Final = "network"
"""ZAP domain of connections with CURVE."""
LOCAL_DOMAIN: Final = "local"
"""ZAP domain of Unix sockets, where the system names the user of the other process."""

LINGER_MS: Final = 200
"""Time for which a closing socket tries to send waiting frames; correctness never depends on it."""
CLIENT_LINGER_MS: Final = 1_000
"""The same for a client's socket. Its last message is often that it leaves, and a server that does
not get it counts the client as alive for two minutes: a machine that stands still for a moment must
not lose it, and a peer that hangs must not delay a Ctrl-C for over two seconds."""
HEARTBEAT_INTERVAL_MS: Final = 400
HEARTBEAT_TIMEOUT_MS: Final = 1_200
"""Time for the answer to a ping. A peer may stop right after it answered one, so its silence is
detected after the interval and the timeout together: in under 2 s."""
KEEPALIVE_S: Final = 15
"""Interval of the system's probes on a silent connection, which ends after the fourth."""
HANDSHAKE_TIMEOUT_MS: Final = 5_000
CONNECT_TIMEOUT_MS: Final = 3_000
"""Time for one attempt to connect. Without it the kernel's own repeats, ever further apart, decide
how long after a cut of the network a connection comes back."""
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 1_000
HIGH_WATER_MARK: Final = 1_000
"""Frames that a socket queues for one peer, each way, except those that a server has not read."""
SERVER_RECEIVE_HIGH_WATER_MARK: Final = 16
"""Frames of one peer that a server queues: they may be large. It is not smaller because each half
of it that was read costs a message to ZeroMQ's I/O thread."""
CLIENT_RECEIVE_HIGH_WATER_MARK: Final = 200_000
"""Answers that a client has not read: twice as many as it may have requests under way."""
MONITOR_HIGH_WATER_MARK: Final = 200_000
"""Events that a monitor queues. ZeroMQ's I/O thread stops when it is full, hence so many."""

KEPT_BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Largest freed block that is kept. Larger ones would leave holes that nothing else fills."""
MOST_KEPT_BYTES: Final = 32 * 1024 * 1024
"""Limit of all kept blocks together."""
LOCAL_SEND_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""Send buffer of ``ipc://`` connections, as far as the system allows (``net.core.wmem_max``).
Linux takes twice as much, so that two answers of a MiB never wait for their reader."""
CONTEXT_DESCRIPTORS: Final = 20
"""Descriptors that must be left for a new context, which opens some 6 by itself, 3 for each
socket and one for each connection. If its threads find none to wait with, libzmq 4.3 aborts."""
MINIMUM_LIBZMQ: Final = (4, 3, 3)
"""Older versions have remotely exploitable errors (CVE-2019-6250, CVE-2020-15166, …)."""

_IN: Final = int(zmq.POLLIN)
_EVENTS: Final = int(zmq.EVENTS)
_EVENT = struct.Struct("=HI")
_BEGINNINGS: Final = frozenset({int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_CONNECTED)})
_monitor_numbers = itertools.count(1)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Any]


def new_context() -> Context:
    """Make a ZeroMQ context with one I/O thread.

    Raises:
        ConfigError: libzmq is older than ``MINIMUM_LIBZMQ``.
        TooManyOpenFiles: The process has too few descriptors left.
    """
    if zmq.zmq_version_info() < MINIMUM_LIBZMQ:
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} is too old; mqmesh needs "
            f"{'.'.join(map(str, MINIMUM_LIBZMQ))} or later"
        )
    # Frames of some 100 kB come and go. glibc gives such blocks back to the system as soon as
    # they are freed and then pays a page fault for every 4 KiB of the next one: a quarter of a
    # producer's time.
    keep_freed_blocks(KEPT_BLOCK_BYTES, MOST_KEPT_BYTES)
    check_descriptors(CONTEXT_DESCRIPTORS, "a ZeroMQ context")
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4_096)
    return context


def router(context: Context, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> Socket:
    """Make a socket that answers many peers; bind it."""
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.RCVHWM, SERVER_RECEIVE_HIGH_WATER_MARK)
    # A server sends no pings. Clients do, and each ping announces the next one; hangs that this
    # does not show are found by ``idle_detection.py``. libzmq 4.3.5 aborts the process when it is
    # to send a ping on a connection that broke while more than the high-water mark of its frames
    # were not read yet; and it reads no answer to a ping from a peer whose frames wait.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    # For peers that send no pings either.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    # So that any frame can be tracked, be it small.
    socket.copy_threshold = 0
    # Without it a reply to a peer that is gone, or whose queue is full, would vanish silently.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def dealer(context: Context) -> Socket:
    """Make a socket for requests to one server; connect it."""
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.LINGER, CLIENT_LINGER_MS)
    # Requests wait in mqmesh's own bounded queue, never behind a missing connection.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    # Answers are as many as requests, which are bounded; see ``router`` for what a full queue does.
    socket.setsockopt(zmq.RCVHWM, CLIENT_RECEIVE_HIGH_WATER_MARK)
    return socket


def publisher(context: Context) -> Socket:
    """Make a socket for hints that may be lost; bind it."""
    return _socket(context, zmq.PUB)


def subscriber(context: Context) -> Socket:
    """Make a socket that gets every hint of the publishers it connects to."""
    socket = _socket(context, zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def _socket(context: Context, kind: int) -> Socket:
    with descriptors_for("a ZeroMQ socket"):
        socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.BACKLOG, 1_024)
    return socket


def authenticator(context: Context) -> Socket:
    """Return the socket by which ZeroMQ queries who may connect to the servers of a context.

    Raises:
        zmq.ZMQError: The context has one already.
    """
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://zeromq.zap.01")
    return socket


def monitor(socket: Socket, *, with_refusals: bool = False) -> Socket:
    """Return the socket on which ``socket`` reports connections made and broken.

    Args:
        socket: Socket to watch.
        with_refusals: Also report failed handshakes. Not for servers: any peer can cause those.

    Raises:
        TooManyOpenFiles: The process has no descriptor left; ``socket`` is closed then.
    """
    endpoint = f"inproc://monitor-{next(_monitor_numbers)}"
    events = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_CONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_CONNECT_RETRIED
    )
    if with_refusals:
        events |= (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
    try:
        with descriptors_for("a ZeroMQ socket"):
            socket.monitor(endpoint, events)
            watcher: Socket = socket.context.socket(zmq.PAIR)
    except TooManyOpenFiles:
        socket.close()
        raise
    watcher.setsockopt(zmq.LINGER, 0)
    watcher.setsockopt(zmq.RCVHWM, MONITOR_HIGH_WATER_MARK)
    watcher.connect(endpoint)
    return watcher


def bind(socket: Socket, endpoint: str, own: Credentials | None = None) -> str:
    """Makes a socket listen.

    Args:
        socket: A router or publisher.
        endpoint: ``tcp://host:port`` (port ``*`` or 0 takes a free one) or ``ipc://path``.
        own: Keys to prove; then the guard decides about each client. None admits every client.

    Returns:
        The endpoint with the real port.

    Raises:
        OSError: The endpoint is in use or not allowed.
    """
    _allow_ipv6(socket, endpoint)
    if own is not None:
        _protect(socket, endpoint, own)
    try:
        socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot listen on {endpoint}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _protect(socket: Socket, endpoint: str, own: Credentials) -> None:
    """Sets the authentication. ZeroMQ takes these options at bind, so each endpoint has its own.

    On a Unix socket nothing is encrypted: the system proves the user of the other process, and the
    process names its key (as its name in PLAIN).
    ``ZAP_ENFORCE_DOMAIN`` refuses every client if no authenticator answers; without it a server
    without an authenticator admits every client.
    """
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if endpoint.startswith("ipc://"):
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, LOCAL_DOMAIN)
        return
    socket.setsockopt_string(zmq.ZAP_DOMAIN, NETWORK)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public_key)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret_key)
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def connect(socket: Socket, endpoint: str, ring: KeyRing | None = None) -> None:
    """Makes a socket connect to an endpoint, ``tcp://host:port`` or ``ipc://path``.

    Args:
        socket: A dealer or subscriber.
        endpoint: Endpoint of the server.
        ring: Keys of this process, and the one that the server must prove; None to speak plainly.
    """
    _allow_ipv6(socket, endpoint)
    if ring is None or ring.is_private(endpoint):
        pass
    elif endpoint.startswith("ipc://"):
        socket.setsockopt_string(zmq.PLAIN_USERNAME, ring.own.public_key)
        socket.setsockopt_string(zmq.PLAIN_PASSWORD, "-")  # there is none; it may not be empty
    else:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, ring.server_key(endpoint))
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, ring.own.public_key)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, ring.own.secret_key)
    socket.connect(endpoint)


def _allow_ipv6(socket: Socket, endpoint: str) -> None:
    # Not for all: names that have addresses of both kinds would be looked up as IPv6 first.
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)


def settle(socket: Socket) -> None:
    """Makes a socket take notice of connections that broke or were made till now.

    A monitor reports a break a moment before the socket itself detects it; frames sent in
    between are lost, and no further event reports that. After a break, therefore, nothing is
    sent before the next connection is made and the socket was settled.
    """
    socket.getsockopt(zmq.EVENTS)


def receive_rest(socket: Socket, room: int) -> tuple[memoryview, ...] | None:
    """Return the frames of a message behind the one just read, as views.

    Args:
        socket: Socket of the message.
        room: Limit of their size together, in bytes.

    Returns:
        None if there are too many, or they are too long: then they were thrown away.
    """
    further: list[memoryview] = []
    while socket.getsockopt(zmq.RCVMORE):
        view = socket.recv(zmq.NOBLOCK, copy=False).buffer
        room -= len(view)
        if room < 0 or len(further) == MAX_FURTHER_FRAMES:
            skip_rest(socket)
            return None
        further.append(view)
    return tuple(further)


def skip_rest(socket: Socket) -> None:
    """Throws away the frames of a message behind the one just read."""
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK, copy=False)


def read_monitor(watcher: Socket) -> list[tuple[int, int]]:
    """Takes all waiting events off a monitor.

    Returns:
        Event and value; the value of an accept and a disconnect is the connection's descriptor.
    """
    found: list[tuple[int, int]] = []
    # A look at the events costs a third of a read in vain.
    while int(watcher.get(_EVENTS)) & _IN:
        event, value = _EVENT.unpack(watcher.recv_multipart(zmq.NOBLOCK)[0])
        if event in _BEGINNINGS:
            _widen(value)
        found.append((event, value))
    return found


def _widen(descriptor: int) -> None:
    """Lets a new local connection hold a few large frames on their way.

    Linux gives it 208 KiB, and wakes a writer that found it full only when three quarters of that
    were read. Larger frames are sent in pieces then, each with a switch of threads to and fro.
    ZeroMQ sets its own ``SNDBUF`` for TCP only, where the buffer grows by itself.
    """
    connection = _duplicate(descriptor)
    if connection is None:
        return
    with connection:
        if connection.family == system_socket.AF_UNIX:
            connection.setsockopt(
                system_socket.SOL_SOCKET, system_socket.SO_SNDBUF, LOCAL_SEND_BUFFER_BYTES
            )


def peer_address(descriptor: int) -> str:
    """Return the other end of a connection: ``host:port``, ``unix``, or "" if it is gone."""
    connection = _duplicate(descriptor)
    if connection is None:
        return ""
    with connection:
        if connection.family == system_socket.AF_UNIX:
            return "unix"
        try:
            host, port = connection.getpeername()[:2]
        except OSError:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _duplicate(descriptor: int) -> system_socket.socket | None:
    """Make a second owner of a connection, since closing the first would be the end of ZeroMQ."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None  # it is gone already
    try:
        return system_socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)  # the descriptor belongs to a file by now
        return None


def close(socket: Socket, watcher: Socket | None = None) -> None:
    """Closes a socket and its monitor."""
    if watcher is not None:
        socket.monitor(None, 0)
        watcher.close(0)
    socket.close()
