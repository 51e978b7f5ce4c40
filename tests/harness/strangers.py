"""A process with a crowd of strangers, which have no key that a server knows.

Run by ``harness.fuzz``: ``python -m harness.strangers PLACE SERVER_KEY TOPIC COUNT``. Of three one
breaks the handshake, one stops in its middle, and one has an unknown key and sends to a topic. It
prints a line when all are there, lets new ones come for old ones, and ends with its standard input.
"""

import collections
import contextlib
import os
import select
import socket
import sys
from typing import Final

import zmq

from harness import zmtp
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.fuzz_sender import NICE, connect
from harness.hostile_frames import HostileFrames
from harness.keys import credentials
from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.protocol.command import encode_frame
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import encode_send
from mqmesh.roles.descriptors import raise_limit
from mqmesh.security.keys import KeyRing
from mqmesh.transport.zmq import sockets

PAUSE_S: Final = 0.01
"""From one stranger that is replaced to the next one."""


def breaking(place: str, frames: HostileFrames) -> socket.socket:
    """Opens a connection that breaks the handshake."""
    one = connect(place)
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        one.sendall(frames.handshake_by(b"CURVE"))
    return one


def stopping(place: str) -> socket.socket:
    """Opens a connection that begins the handshake, and does not go on."""
    one = connect(place)
    one.sendall(zmtp.greeting(mechanism=b"CURVE"))
    return one


def unknown(context: sockets.Context, place: str, server_key: str, frame: bytes) -> sockets.Socket:
    """Opens a connection with an unknown key that sends."""
    one: sockets.Socket = context.socket(zmq.DEALER)
    one.setsockopt(zmq.LINGER, 0)
    sockets.connect(one, place, KeyRing(credentials("thief"), server_key))
    one.send(frame)
    return one


def main(place: str, server_key: str, topic: str, count: int) -> None:
    """Makes the crowd and stays until nobody needs it."""
    raise_limit(4 * count + 256)
    batch = encode_batch(
        [Message(topic, b"x")],
        topic=topic,
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=1,
    )
    header = encode_send(3_000, 1, PRODUCER_KEY)
    frame = encode_frame(RequestCode.SEND_MESSAGE, 1, batch, header=header)
    context, frames = sockets.new_context(), HostileFrames(1)
    here: collections.deque[socket.socket | sockets.Socket] = collections.deque()

    def come(number: int) -> None:
        if number % 3 == 0:
            here.append(breaking(place, frames))
        elif number % 3 == 1:
            here.append(stopping(place))
        else:
            here.append(unknown(context, place, server_key, frame))

    for number in range(count):
        come(number)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        here.popleft().close()
        come(count)
        count += 1
    context.destroy(linger=0)


if __name__ == "__main__":
    os.nice(NICE)
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
