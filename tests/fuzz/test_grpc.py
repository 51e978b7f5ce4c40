"""Bytes of anybody at the gateway's port for gRPC: calls or the end of a connection, no exception.

``python -m fuzz.test_grpc FRAMES`` in ``tests`` sends as many as wanted.
"""

from __future__ import annotations

import logging
import random
import struct
import sys
import time

from h2.config import H2Configuration
from h2.connection import H2Connection
from harness.grpc_world import FrontOutput, FrontWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.protocol.grpc.calls import PREFACE
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE

METHODS = [
    "QueryRoute",
    "Heartbeat",
    "SendMessage",
    "QueryAssignment",
    "ReceiveMessage",
    "AckMessage",
    "ForwardMessageToDeadLetterQueue",
    "EndTransaction",
    "NotifyClientTermination",
    "ChangeInvisibleDuration",
    "RecallMessage",
    "Telemetry",
]


class Errors(logging.Handler):
    """Makes errors of what is logged as one: exceptions that no code handles are."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(self.format(record))


logging.getLogger("mqmesh.roles.gateway.grpc").addHandler(Errors(logging.ERROR))


def conversation(source: random.Random) -> list[bytes]:
    """Returns frames that a client might send, the first with its preface."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for _ in range(source.randrange(1, 8)):
        name = source.choice(METHODS)
        stream = client.get_next_available_stream_id()
        headers = [
            (":method", source.choice(["POST"] * 9 + ["GET"])),
            (":scheme", "http"),
            (":path", f"/{SERVICE}/{name}"),
            (":authority", "here"),
            ("content-type", "application/grpc"),
            ("x-mq-client-id", source.choice(["a", "b", ""])),
            ("grpc-timeout", source.choice(["1S", "x", "50m"])),
        ]
        client.send_headers(stream, headers)
        data = request_of(name, source)
        head = struct.pack(">BI", source.choice([0] * 9 + [1]), len(data))
        client.send_data(stream, head + data, end_stream=source.random() < 0.8)
        if source.random() < 0.1:
            client.reset_stream(stream)
        if source.random() < 0.1:
            client.ping(bytes(8))
    data = client.data_to_send()
    frames, at = [], len(PREFACE)
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3])
        frames.append(data[at:end])
        at = end
    return [PREFACE, *frames]


def request_of(name: str, source: random.Random) -> bytes:
    """Returns a request, good or not."""
    kind = CLASSES["TelemetryCommand" if name == "Telemetry" else f"{name}Request"]()
    fields = kind.DESCRIPTOR.fields_by_name
    for field in ("topic", "group"):
        if field in fields:
            getattr(kind, field).name = source.choice(["t", "g", "", "é", "a b"])
    if name == "SendMessage":
        one = kind.messages.add(body=source.randbytes(source.choice([0, 1, 300])))
        one.topic.name = source.choice(["t", "t", "", "x y"])
        one.system_properties.message_id = source.choice(["1", ""])
        one.system_properties.message_type = source.randrange(7)
        one.system_properties.body_encoding = source.randrange(3)
        one.system_properties.delivery_timestamp.seconds = source.choice([0, 5, -(2**62), 2**62])
    elif name == "ReceiveMessage":
        kind.message_queue.topic.name, kind.message_queue.broker.name = "t", "broker-a"
        kind.invisible_duration.seconds = source.choice([0, 10, -5, 2**60])
        kind.long_polling_timeout.seconds = source.choice([0, 5, -5, 2**60])
        kind.batch_size = source.choice([0, 1, -1, 2**31 - 1])
        kind.filter_expression.type = source.randrange(4)
        kind.filter_expression.expression = source.choice(["", "a > 1", "((", "*"])
    elif name == "Telemetry":
        kind.settings.subscription.group.name = source.choice(["g", "", "a b"])
        kind.settings.subscription.subscriptions.add().topic.name = source.choice(["t", ""])
    elif name == "AckMessage":
        kind.entries.add(receipt_handle=source.choice(["", "x", "é", "A" * 100]))
    data: bytes = kind.SerializeToString()
    return damaged(data, source) if source.random() < 0.2 else data


def damaged(data: bytes, source: random.Random) -> bytes:
    """Returns bytes with some that are others, too many or missing."""
    found = bytearray(data)
    for _ in range(source.randrange(1, 4)):
        if not found:
            break
        at = source.randrange(len(found))
        match source.randrange(3):
            case 0:
                found[at] = source.randrange(256)
            case 1:
                del found[at]
            case 2:
                found.insert(at, source.randrange(256))
    return bytes(found)


def any_frame(source: random.Random) -> bytes:
    """Returns a frame of some type with some content."""
    data = source.randbytes(source.choice([0, 1, 4, 5, 6, 8, 40, 300]))
    size = len(data) if source.random() < 0.97 else source.randrange(2**24)
    kind, flags = source.randrange(12), source.choice([0, 1, 4, 5, 8, 0x20, source.randrange(256)])
    stream = source.choice([0, 1, 1, 3, 5, 2, 2**31 - 1])
    return size.to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + data


def hostile(source: random.Random) -> list[bytes]:
    """Returns a conversation with damage."""
    frames = conversation(source)
    for _ in range(source.randrange(0, 6)):
        at = source.randrange(len(frames))
        match source.randrange(5):
            case 0:
                frames[at] = damaged(frames[at], source)
            case 1:
                frames.insert(at + 1, any_frame(source))
            case 2:
                frames.insert(at + 1, frames[source.randrange(len(frames))])
            case 3:
                del frames[at]
                frames = frames or [b"x"]
            case 4:
                frames[at] = frames[at][: source.randrange(len(frames[at]) + 1)]
    return frames


def serve(world: FrontWorld, frames: list[bytes], source: random.Random) -> None:
    """Sends frames by a connection, and ends it."""
    output = FrontOutput()
    session = world.front.accept(output)
    for frame in frames:
        if session.is_closed:
            break
        cut = source.randrange(len(frame) + 1) if source.random() < 0.2 else len(frame)
        session.on_bytes(frame[:cut])
        if cut < len(frame) and not session.is_closed:
            session.on_bytes(frame[cut:])
        world.run()
        world.clock.advance(source.choice([0, 1, 100]))
        session.tick(world.clock.monotonic_ms())
    if not session.is_closed:
        session.on_closed()
    assert len(output.data) < 1 << 20
    for _ in range(5):
        world.run()
    assert world.front.connections == 0
    assert world.service.clients == 0


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_a_conversation_with_damage_is_served_or_ended(seed):
    source, world = random.Random(seed), FrontWorld()
    serve(world, hostile(source), source)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_served_or_end_their_connection(data, is_begun):
    source, world = random.Random(len(data)), FrontWorld()
    frames = conversation(source) if is_begun else []
    serve(world, [*frames, data], source)


def main(wanted: int, seed: int) -> None:
    """Sends hostile frames, and prints how that went."""
    source, world, sent, connections = random.Random(seed), FrontWorld(), 0, 0
    begun, slowest = time.process_time(), 0.0
    while sent < wanted:
        frames = hostile(source)
        sent += len(frames)
        connections += 1
        before = time.process_time()
        serve(world, frames, source)
        slowest = max(slowest, time.process_time() - before)
    taken = time.process_time() - begun
    print(
        f"{sent} frames by {connections} connections in {taken:.0f} s of processor time, "
        f"{world.broken} broken, slowest connection {slowest * 1_000:.1f} ms"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
