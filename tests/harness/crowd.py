"""A process with a crowd of clients: idle ones, and some that ask for much and never read.

Run by ``harness.fuzz``: ``python -m harness.crowd PLACE TOPIC IDLE DEAF``. It
prints a line when all are there, and ends with its standard input.
"""

import os
import socket
import sys
from typing import Final

from harness import zmtp
from harness.fuzz_sender import NICE, connect, shake_hands
from mqmesh.protocol.command import encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import MAX_PULL_BYTES, PullRequest
from mqmesh.roles.descriptors import raise_limit
from mqmesh.transport.zmq import sockets

PULLS: Final = 20
RECEIVE_BUFFER_BYTES: Final = 4_096


def deaf(place: str, topic: str) -> socket.socket:
    """Opens a client that requests all messages again and again, and reads none of them."""
    connection = connect(place)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    header = encode_header(PullRequest("deaf", topic, 0, 0, MAX_PULL_BYTES))
    pulls = [encode_frame(RequestCode.PULL_MESSAGE, n, header=header) for n in range(PULLS)]
    shake_hands(connection)
    connection.sendall(b"".join(map(zmtp.frame, pulls)))
    return connection


def main(place: str, topic: str, idle: int, others: int) -> None:
    """Makes the crowd and stays until nobody needs it."""
    raise_limit(2 * idle + others + 256)
    context = sockets.new_context()
    clients = [sockets.dealer(context) for _ in range(idle)]
    for client in clients:
        sockets.connect(client, place)
        client.send(encode_frame(RequestCode.PING, 1, header=b"\x90"))
    for client in clients:
        client.recv()
    silent = [deaf(place, topic) for _ in range(others)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    for connection in silent:
        connection.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    os.nice(NICE)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
