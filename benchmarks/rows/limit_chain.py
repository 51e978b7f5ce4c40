"""The limit of a broker with a slave: bare ZeroMQ programs, producer → broker → slave.

The slave is one more peer of the broker's socket. It gets each frame as the producer sent it,
writes a batch as the broker does, and answers with an empty frame. Where a copy is measured, one
program reads a file and the other one writes it. Run by ``rows.limit``.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from mqmesh.units import MIB
from rows.workload import Report, Stopwatch, Task, say_ready, wait_go

CHUNK_BYTES: Final = MIB
CHUNKS_IN_FLIGHT: Final = 16
"""So much as mqmesh's ``ha.ha_window_bytes``."""
FRAMES_TO_SLAVE: Final = 200
"""The broker waits when so many are not on their way yet, about the same."""

_BATCH: Final = ord("M")
_HELLO: Final = b"S"

Socket = zmq.Socket[bytes]
Append = Callable[[memoryview], bytes]


def serve_chain(socket: Socket, append: Append, *, double_write: bool) -> None:
    """The broker, whose slave comes first.

    Args:
        socket: A ROUTER, bound for clients and slave.
        append: Writes a batch; returns the acknowledgement.
        double_write: Clients are answered when the slave has it.
    """
    slave, _ = socket.recv_multipart()
    socket.send_multipart((slave, _HELLO))
    waiting: deque[tuple[bytes, bytes]] = deque()
    while True:
        peer = socket.recv()
        frame = socket.recv(copy=False)
        if peer == slave:
            if double_write:
                socket.send_multipart(waiting.popleft())
            continue
        data = frame.buffer
        answer = append(data) if data[0] == _BATCH else frame.bytes
        socket.send(slave, zmq.SNDMORE)
        socket.send(frame, copy=False)
        if double_write:
            waiting.append((peer, answer))
        else:
            socket.send_multipart((peer, answer))


def follow(socket: Socket, append: Append) -> None:
    """The slave: until SIGTERM."""
    socket.send(_HELLO)
    socket.recv()
    say_ready()
    while True:
        data = socket.recv(copy=False).buffer
        if data[0] == _BATCH:
            append(data)
        socket.send(b"")


def copy_log(socket: Socket, task: Task) -> Report:
    """Reads a file and sends it, some chunks ahead of what was written.

    The report counts bytes. The other end is told where to connect before anything is made.
    """
    say_ready(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    path = os.path.join(task.folder, "log")
    with open(path, "wb") as file:
        for _ in range(0, task.message_count, CHUNK_BYTES):
            file.write(os.urandom(CHUNK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    socket.recv()
    in_flight = 0
    wait_go()
    watch = Stopwatch()
    for position in range(0, task.message_count, CHUNK_BYTES):
        if in_flight == CHUNKS_IN_FLIGHT:
            socket.recv()
            in_flight -= 1
        socket.send(os.pread(descriptor, CHUNK_BYTES, position), copy=False)
        in_flight += 1
    for _ in range(in_flight):
        socket.recv()
    return watch.report(task.message_count)


def write_log(socket: Socket, task: Task) -> None:
    """The other end of ``copy_log``: until SIGTERM."""
    descriptor = os.open(os.path.join(task.folder, "copy"), os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, task.log_bytes)
    socket.send(_HELLO)
    say_ready()
    position = 0
    while True:
        position += os.pwrite(descriptor, socket.recv(copy=False).buffer, position)
        socket.send(b"")
