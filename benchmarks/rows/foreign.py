"""The programs of a benchmark that speak to a gateway as RocketMQ's clients do, without one's code.

Run as ``python -m rows.foreign TASK``. A task's address is the port of a broker group, or of gRPC.
"""

import itertools
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, StreamEnded, StreamReset

from mqmesh.protocol.grpc.codes import ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand, RemotingReader, encode_frame
from mqmesh.units import MIB
from rows.workload import (
    GROUP,
    TOPIC,
    WARM_UP_SENDS,
    Report,
    Stopwatch,
    Task,
    hand_in,
    make_bodies,
    read_task,
    wait_go,
)

CONNECT_S: Final = 20.0
READ_BYTES: Final = 256 * 1_024
PULLED: Final = 32
"""Messages that RocketMQ's clients ask for at once."""
_BODIES: Final = 64
_LENGTH: Final = struct.Struct(">BI")


class WrongAnswer(Exception):
    """An answer that a client would take for an error."""


def connect(address: str) -> socket.socket:
    """Connect to the gateway, which listens once it has found the broker group."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            line = socket.create_connection((host, int(port)), CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line


class RemotingLine:
    """A connection by remoting."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address)
        self._reader = RemotingReader(64 * MIB)
        self._numbers = itertools.count(1)

    def post(self, code: int, fields: dict[str, str], body: bytes = b"") -> None:
        """Send a request."""
        command = RemotingCommand(code, next(self._numbers), 0, fields, body, is_json=False)
        self._socket.sendall(b"".join(encode_frame(command)))

    def answers(self) -> Iterator[RemotingCommand]:
        """Wait for bytes; yield the answers that are whole now."""
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise WrongAnswer("the gateway has closed the connection")
        yield from self._reader.feed(data)


class GrpcLine:
    """A connection by gRPC."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address)
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.initiate_connection()
        self._parts: dict[int, bytes] = {}

    def post(self, method: str, request: bytes) -> None:
        """Begin a call that has one request."""
        number = self._h2.get_next_available_stream_id()
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"/{SERVICE}/{method}".encode()),
            (b":authority", b"gateway"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"x-mq-client-id", b"bench"),
            (b"x-mq-language", b"PYTHON"),
            (b"x-mq-protocol", b"GRPC_V2"),
        ]
        self._h2.send_headers(number, headers)
        self._h2.send_data(number, _LENGTH.pack(0, len(request)) + request, end_stream=True)
        self._socket.sendall(self._h2.data_to_send())

    def answers(self) -> Iterator[bytes]:
        """Wait for bytes; yield the answers of calls that are over now."""
        for event in self._h2.receive_data(self._socket.recv(READ_BYTES)):
            if isinstance(event, DataReceived):
                number = event.stream_id
                self._parts[number] = self._parts.get(number, b"") + event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, number)
            elif isinstance(event, StreamEnded):
                yield self._parts.pop(event.stream_id, b"")[_LENGTH.size :]
            elif isinstance(event, StreamReset | ConnectionTerminated):
                raise WrongAnswer(f"a call ended so: {event}")
        if data := self._h2.data_to_send():
            self._socket.sendall(data)


def send_remoting(task: Task) -> Report:
    """Single sends by remoting, ``task.window`` of them in flight."""
    line = RemotingLine(task.address)
    bodies = make_bodies(_BODIES, task.body_bytes)

    def post(number: int) -> None:
        fields = {
            "a": "bench",
            "b": TOPIC,
            "c": "TBW102",
            "d": "4",
            "e": str(number % task.queue_count),
            "f": "0",
            "g": "0",
            "h": "0",
            "i": f"UNIQ_KEY\1{number:032X}\2WAIT\1true\2",
            "j": "0",
            "k": "false",
            "m": "false",
        }
        line.post(RemotingCode.SEND_MESSAGE_V2, fields, bodies[number % _BODIES])

    def take() -> int:
        done = 0
        for answer in line.answers():
            if answer.code != RemotingStatus.SUCCESS:
                raise WrongAnswer(f"a send: {answer.remark}")
            done += 1
        return done

    return _sends(task, post, take)


def send_grpc(task: Task) -> Report:
    """Single sends by gRPC, ``task.window`` of them in flight."""
    line = GrpcLine(task.address)
    bodies = make_bodies(_BODIES, task.body_bytes)
    topic, kinds = CLASSES["Resource"](name=TOPIC), CLASSES["SendMessageResponse"]

    def post(number: int) -> None:
        system = CLASSES["SystemProperties"](
            message_id=f"01{number:032X}",
            message_type=1,
            body_encoding=1,
            born_host="bench",
            born_timestamp=CLASSES["Timestamp"](seconds=1_700_000_000),
        )
        message = CLASSES["Message"](
            topic=topic, system_properties=system, body=bodies[number % _BODIES]
        )
        request = CLASSES["SendMessageRequest"](messages=[message])
        line.post("SendMessage", request.SerializeToString())

    def take() -> int:
        done = 0
        for answer in line.answers():
            status = kinds.FromString(answer).status
            if status.code != ReplyCode.OK:
                raise WrongAnswer(f"a send: {status}")
            done += 1
        return done

    return _sends(task, post, take)


def _sends(task: Task, post: Callable[[int], None], take: Callable[[], int]) -> Report:
    """Send all messages of a task.

    Args:
        task: Says how many.
        post: Sends the message of a number.
        take: Waits, and returns how many were answered.
    """
    begun = 0

    def send(count: int) -> list[float]:
        nonlocal begun
        latencies_us, open_count, end = list[float](), 0, begun + count
        while begun < end or open_count:
            began_ns = time.monotonic_ns()
            while begun < end and open_count < task.window:
                post(begun)
                begun += 1
                open_count += 1
            open_count -= take()
            latencies_us.append((time.monotonic_ns() - began_ns) / 1_000)
        return latencies_us

    send(WARM_UP_SENDS)
    wait_go()
    watch = Stopwatch()
    latencies_us = send(task.message_count)
    return watch.report(task.message_count, latencies_us=latencies_us if task.window == 1 else ())


def pull_remoting(task: Task) -> Report:
    """Pulls by remoting of all that there is, one in flight a queue, as a consumer's are."""
    line = RemotingLine(task.address)
    wait_go()
    watch = Stopwatch()
    offsets = dict.fromkeys(range(task.queue_count), 0)
    waiting: dict[int, int] = {}
    numbers = itertools.count(1)

    def post(queue: int) -> None:
        waiting[next(numbers)] = queue
        fields = {
            "consumerGroup": GROUP,
            "topic": TOPIC,
            "queueId": str(queue),
            "queueOffset": str(offsets[queue]),
            "maxMsgNums": str(PULLED),
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
        }
        line.post(RemotingCode.PULL_MESSAGE, fields)

    for queue in offsets:
        post(queue)
    count = 0
    while waiting:
        for answer in line.answers():
            queue = waiting.pop(answer.opaque)
            if answer.code != RemotingStatus.SUCCESS:
                raise WrongAnswer(f"a pull at {offsets}: {answer.code} {answer.remark}")
            after = int(answer.fields["nextBeginOffset"])
            count += after - offsets[queue]
            offsets[queue] = after
            if after < int(answer.fields["maxOffset"]):
                post(queue)
    faults = [] if count == task.message_count else [f"{count} of {task.message_count} messages"]
    return watch.report(count, faults=faults)


PROGRAMS: Final = {
    "send_remoting_foreign": send_remoting,
    "send_grpc_foreign": send_grpc,
    "pull_remoting_foreign": pull_remoting,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    try:
        report = PROGRAMS[task.kind](task)
    except WrongAnswer as error:
        sys.exit(str(error))
    hand_in(report)


if __name__ == "__main__":
    main()
