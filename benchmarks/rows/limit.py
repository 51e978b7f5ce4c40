"""The limit: bare ZeroMQ programs that move the same bytes as mqmesh, and do nothing else.

They use the same ``encode_at_once``, ``batch_parts``, ``check_batch`` and ``decode_messages``,
the same write into a preallocated file and the same transport. There are no topics, queues,
offsets, routes, retries, threads or timers, so no broker in pyzmq can be faster.
``docs/benchmarks.md`` lists variants that were tried and are not faster.

Run as ``python -m rows.limit TASK``. Frames to the broker are told apart by their
first byte: a record batch begins with its magic, ``P`` asks for the next MiB, ``E`` is
sent back as it came.
"""

import os
import struct
import time
from collections import deque
from typing import Final

import zmq

from mqmesh.batch.native_encode import encode_at_once
from mqmesh.batch.payload import MAX_RAW_BYTES, encode_payload
from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    batch_parts,
    check_batch,
    decode_messages,
    stamp,
)
from mqmesh.message import Message
from mqmesh.message_checks import Extras
from rows.limit_chain import FRAMES_TO_SLAVE, copy_log, follow, serve_chain, write_log
from rows.workload import (
    TOPIC,
    WARM_UP_SENDS,
    Report,
    SequenceCheck,
    Stopwatch,
    Task,
    age_us,
    hand_in,
    make_bodies,
    read_task,
    say_ready,
    stamp_body,
    wait_go,
)

PULL_BYTES: Final = 1024 * 1024
PULLS_IN_FLIGHT: Final = 2
FRAMES_PER_SYNC: Final = 256
PRODUCER_ID: Final = 7

_PULL: Final = b"P"
_ECHO: Final = ord("E")
_BATCH: Final = ord("M")
_ACK = struct.Struct("<qq")

Socket = zmq.Socket[bytes]


class Log:
    """Batches one behind the other in a preallocated file."""

    def __init__(self, folder: str, size: int) -> None:
        self.descriptor = os.open(os.path.join(folder, "log"), os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.descriptor, 0, size)
        os.fsync(self.descriptor)
        self.position = 0
        self.queue_offset = 0
        self._read_position = 0
        self._unread: deque[int] = deque()

    def append(self, frame: memoryview) -> bytes:
        """Checks, stamps and writes a batch; returns the acknowledgement."""
        header = check_batch(frame)
        position, queue_offset = self.position, self.queue_offset
        broker_part = stamp(
            header,
            commitlog_offset=position,
            base_queue_offset=queue_offset,
            store_timestamp=int(time.time() * 1_000),
            epoch=1,
            store_id=1,
        )
        os.pwritev(self.descriptor, (broker_part, frame[BROKER_PART_SIZE:]), position)
        self.position = position + header.total_size
        self.queue_offset = queue_offset + header.message_count
        self._unread.append(self.position)
        return _ACK.pack(position, queue_offset)

    def read(self) -> bytes:
        """The next whole batches, up to ``PULL_BYTES``; empty when there are none."""
        unread, begin = self._unread, self._read_position
        if not unread:
            return b""
        if self.position - begin <= PULL_BYTES:
            end = self.position
            unread.clear()
        else:
            end = unread.popleft()
            while unread[0] - begin <= PULL_BYTES:
                end = unread.popleft()
        self._read_position = end
        return os.pread(self.descriptor, end - begin, begin)


def serve(task: Task) -> None:
    """The broker: until SIGTERM, which ends it at once, whatever is still to be sent."""
    socket = _socket(zmq.ROUTER)
    socket.bind(task.address)
    log = Log(task.folder, task.log_bytes)
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if task.slave != "none":
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, FRAMES_TO_SLAVE)
        # As mqmesh's, a slave comes by TCP also where clients do not.
        socket.bind("tcp://127.0.0.1:*")
        say_ready(f"{endpoint} {socket.getsockopt_string(zmq.LAST_ENDPOINT)}")
        serve_chain(socket, log.append, double_write=task.slave == "sync")
    say_ready(endpoint)
    if task.sync_flush:
        _serve_synced(socket, log)
    consumer, pulls = b"", 0
    while True:
        peer = socket.recv()
        frame = socket.recv(copy=False).buffer
        kind = frame[0]
        if kind == _BATCH:
            acknowledgement = log.append(frame)
            socket.send(peer, zmq.SNDMORE)
            socket.send(acknowledgement)
        elif kind == _ECHO:
            socket.send(peer, zmq.SNDMORE)
            socket.send(frame)
            continue
        else:
            consumer = peer
            pulls += 1
        while pulls and (data := log.read()):
            pulls -= 1
            socket.send(consumer, zmq.SNDMORE)
            socket.send(data, copy=False)


def _serve_synced(socket: Socket, log: Log) -> None:
    # Group commit: all that has come is written, synced once and acknowledged.
    while True:
        answers = []
        flags = 0
        for _ in range(FRAMES_PER_SYNC):
            try:
                peer = socket.recv(flags)
            except zmq.Again:
                break
            answers.append((peer, log.append(socket.recv(copy=False).buffer)))
            flags = zmq.NOBLOCK
        os.fdatasync(log.descriptor)
        for answer in answers:
            socket.send_multipart(answer)


def produce(task: Task) -> Report:
    """The producer: makes messages, encodes batches, keeps a window of requests in flight."""
    socket = _connect(task)
    bodies = make_bodies(task.batch_messages, task.body_bytes)
    size, window = task.batch_messages, task.window
    in_flight = acknowledged = 0
    wait_go()
    watch = Stopwatch()
    for first_sequence in range(0, task.message_count, size):
        data = _encode([Message(TOPIC, body) for body in bodies], first_sequence)
        while in_flight >= window:
            socket.recv()
            in_flight -= 1
            acknowledged += size
        socket.send(data)
        in_flight += 1
    while in_flight:
        socket.recv()
        in_flight -= 1
        acknowledged += size
    return watch.report(acknowledged)


def drain(task: Task) -> Report:
    """The consumer: asks for a MiB at a time, checks, decodes and counts."""
    socket = _connect(task)
    seen = SequenceCheck()
    wait_go()
    watch = Stopwatch()
    for _ in range(PULLS_IN_FLIGHT):
        socket.send(_PULL)
    while seen.count < task.message_count:
        data = socket.recv(copy=False).buffer
        socket.send(_PULL)
        position, end = 0, len(data)
        while position < end:
            header = check_batch(data, position)
            seen.add_messages(decode_messages(data, header, position=position))
            position += header.total_size
    return watch.report(seen.count, faults=seen.faults(task.message_count))


def echo(task: Task) -> Report:
    """One small message to and fro, one at a time."""
    socket = _connect(task)
    data = b"E" + _encode([Message(TOPIC, make_bodies(1, task.body_bytes)[0])], 0)
    for _ in range(WARM_UP_SENDS):
        socket.send(data)
        socket.recv()
    wait_go()
    latencies_us = []
    watch = Stopwatch()
    for _ in range(task.message_count):
        begin_ns = time.perf_counter_ns()
        socket.send(data)
        answer = socket.recv()
        latencies_us.append((time.perf_counter_ns() - begin_ns) / 1_000)
    faults = [] if answer == data else ["the echo differs"]
    return watch.report(task.message_count, latencies_us=latencies_us, faults=faults)


def produce_paced(task: Task) -> Report:
    """A message at a time, at a steady rate, each with the time it was made at."""
    socket = _connect(task)
    filler = make_bodies(1, task.body_bytes)[0]
    wait_go()
    watch = Stopwatch()
    for sequence in range(task.message_count):
        wait_s = watch.begin_s + sequence / task.rate - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        socket.send(_encode([Message(TOPIC, stamp_body(filler))], sequence))
    for _ in range(task.message_count):
        socket.recv()
    return watch.report(task.message_count)


def drain_paced(task: Task) -> Report:
    """The consumer of ``produce_paced``."""
    socket = _connect(task)
    seen = SequenceCheck()
    latencies_us = []
    for _ in range(PULLS_IN_FLIGHT):
        socket.send(_PULL)
    wait_go()
    watch = Stopwatch()
    while seen.count < task.message_count:
        data = socket.recv(copy=False).buffer
        socket.send(_PULL)
        position, end = 0, len(data)
        while position < end:
            header = check_batch(data, position)
            messages = decode_messages(data, header, position=position)
            latencies_us += [age_us(message.body) for message in messages]
            seen.add_messages(messages)
            position += header.total_size
    faults = seen.faults(task.message_count)
    return watch.report(seen.count, latencies_us=latencies_us, faults=faults)


def _encode(messages: list[Message], first_sequence: int) -> bytes:
    # As mqmesh's producer: the look at the messages is part of it where that is in C.
    payload = encode_at_once(messages, max_body_bytes=MAX_RAW_BYTES, is_one=True)
    parts = batch_parts(
        payload or encode_payload(messages, extras=Extras.NONE),
        topic=TOPIC,
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=first_sequence,
        born_timestamp=int(time.time() * 1_000),
        born_host="localhost:1",
    )
    return b"".join(parts)


def _socket(kind: int) -> Socket:
    socket: Socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _connect(task: Task) -> Socket:
    socket = _socket(zmq.DEALER)
    socket.connect(task.address)
    return socket


PROGRAMS: Final = {
    "produce": produce,
    "drain": drain,
    "echo": echo,
    "produce_paced": produce_paced,
    "drain_paced": drain_paced,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    if task.kind == "broker":
        serve(task)
    elif task.kind == "slave":
        follow(_connect(task), Log(task.folder, task.log_bytes).append)
    elif task.kind == "write_log":
        write_log(_connect(task), task)
    elif task.kind == "copy_log":
        socket = _socket(zmq.DEALER)
        socket.bind(task.address)
        hand_in(copy_log(socket, task))
    else:
        hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()
