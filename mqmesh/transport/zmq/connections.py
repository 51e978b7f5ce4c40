"""The system's measures of a ZeroMQ connection, and ending the connection. Linux.

ZeroMQ neither reports how many bytes of a peer it holds nor offers a way to close one connection.
Both are possible with the connection's descriptor, which its monitor names. The descriptor stays
ZeroMQ's: it is never closed here. It may have a new owner by the time it is used, which does no
harm: a measure is off by one connection, or one too many is ended, and its client comes again.
"""

import fcntl
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

_INFO_BYTES = 136
_SILENT = struct.Struct("=I")
_SILENT_AT = 52
"""Position of ``tcpi_last_data_recv`` in ``struct tcp_info`` of linux/tcp.h."""
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
"""Position of ``tcpi_bytes_received`` there."""
_INT = struct.Struct("=i")


class Received(msgspec.Struct, frozen=True):
    """Data that arrived by a connection.

    Attributes:
        taken_bytes: Bytes that ZeroMQ has read so far; None for a local connection, of which
            Linux does not count them.
        waiting_bytes: Bytes that ZeroMQ has not read yet: none of this process's memory.
        silent_ms: Time since the last bytes arrived; None for a local connection.
    """

    taken_bytes: int | None
    waiting_bytes: int
    silent_ms: int | None = None


def measure(descriptor: int) -> Received | None:
    """Measure the data that arrived by a connection so far; None if it is gone."""
    try:
        with _borrowed(descriptor) as connection:
            waiting: int = _INT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            except OSError:
                return Received(None, waiting)
    except OSError:
        return None
    if len(info) < _INFO_BYTES:
        return Received(None, waiting)  # Linux before 4.1
    received: int = _RECEIVED.unpack_from(info, _RECEIVED_AT)[0]
    silent_ms: int = _SILENT.unpack_from(info, _SILENT_AT)[0]
    return Received(received - waiting, waiting, silent_ms)


def not_taken(descriptor: int) -> int | None:
    """Return the bytes that a local connection's other side has not read; None if unknown.

    For TCP the number says nothing of the other side's process, since its system takes the bytes.
    """
    try:
        found: int = _INT.unpack(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return None
    return found


def hang_up(descriptor: int) -> None:
    """Ends a connection: both sides read its end, and ZeroMQ frees its memory for it."""
    try:
        with _borrowed(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    # With a given family, Python does not query the descriptor; its real family does not matter.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
