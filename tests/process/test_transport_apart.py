"""Large pieces of an answer in frames of their own, and who does not take them."""

from __future__ import annotations

import weakref

import pytest
import zmq

from mqmesh.errors import RequestTimeout
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    MAX_FURTHER_FRAMES,
    RESPONSE,
    Reply,
    encode_apart,
    encode_frame,
)
from mqmesh.transport.zmq import outbox as outbox_module
from mqmesh.transport.zmq.connections import hang_up
from mqmesh.transport.zmq.memory_accounting import MARK_BYTES
from mqmesh.units import KIB, MIB

ECHO, BIG = range(1, 3)
LARGE = 256 * KIB


class Block(bytearray):
    """Memory that can be watched."""


@pytest.fixture
def lazy(wire):
    """Makes a peer that asks and never reads."""
    context = zmq.Context()
    made = []

    def connect(where):
        one = context.socket(zmq.DEALER)
        one.linger = 0
        one.rcvhwm, one.rcvbuf, one.sndhwm, one.reconnect_ivl = 1, 4_096, 100_000, -1
        made.append(one)
        one.connect(where)
        return one

    yield connect
    for one in made:
        one.close()
    context.term()


def pieces_of(answer):
    return [bytes(answer.body), *map(bytes, answer.further)]


def test_large_pieces_come_in_frames_of_their_own(wire):
    body = [b"a" * 10, b"b" * LARGE, b"c" * 20, b"d" * 30, b"e" * LARGE, b"f" * LARGE, b"g"]
    _, where = wire.server({BIG: lambda request: Reply(b"head", body, apart=True)})
    answer = wire.ask(wire.client(where), BIG)
    assert bytes(answer.header) == b"head"
    assert pieces_of(answer) == [body[0], body[1], body[2] + body[3], *body[4:]]


def test_small_pieces_come_in_one_frame(wire):
    body = [b"a" * (MARK_BYTES - 1)] * 3
    _, where = wire.server({BIG: lambda request: Reply(b"head", body, apart=True)})
    answer = wire.ask(wire.client(where), BIG)
    assert pieces_of(answer) == [b"".join(body)]


def test_a_view_is_let_go_when_it_has_left(wire):
    block = Block(LARGE)
    there = weakref.ref(block)
    body = [memoryview(block)]
    _, where = wire.server({BIG: lambda request: Reply(b"", [body.pop()], apart=True)})
    del block
    answer = wire.ask(wire.client(where), BIG)
    assert pieces_of(answer) == [b"", bytes(LARGE)]
    wire.until(lambda: there() is None)


def test_there_are_never_more_frames_than_a_client_takes():
    reply = Reply(b"head", [b"x" * 10, b"y" * 3] * 500, apart=True)
    frames, size = encode_apart(7, reply, least_bytes=10)
    assert len(frames) == 1 + MAX_FURTHER_FRAMES
    assert b"".join(frames) == encode_frame(0, 7, *reply.body, header=b"head", flags=RESPONSE)
    assert size == sum(map(len, frames))


@pytest.mark.parametrize("sizes", [[1] * (MAX_FURTHER_FRAMES + 1), [MAX_FRAME_BYTES // 2] * 2])
def test_a_client_throws_away_what_has_too_many_frames_or_bytes(wire, sizes):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = wire.client(f"tcp://127.0.0.1:{port}")
    done = []
    client.request(ECHO, done.append, timeout_ms=9_000)
    wire.until(lambda: router.poll(0))
    peer, _ = router.recv_multipart()
    whole = encode_frame(0, 1, flags=RESPONSE)
    router.send_multipart([peer, whole, *(b"x" * size for size in sizes)])
    router.send_multipart([peer, encode_frame(0, 1, b"good", flags=RESPONSE)])
    wire.until(lambda: done)
    assert not isinstance(done[0], RequestTimeout)
    assert pieces_of(done[0]) == [b"good"]
    context.destroy(linger=0)


@pytest.mark.parametrize("served_by", ["libzmq"])
def test_who_takes_nothing_is_cut_off_in_time_and_lets_go(wire, lazy, monkeypatch):
    monkeypatch.setattr(outbox_module, "UNTAKEN_EVERY_MS", 10)
    monkeypatch.setattr(outbox_module, "MOST_UNTAKEN_MS", 100)
    blocks = []

    def answer(request):
        block = Block(4 * MIB)
        blocks.append(weakref.ref(block))
        return Reply(b"", [memoryview(block)], apart=True)

    server, where = wire.server({BIG: answer})
    peer = lazy(where)
    for opaque in range(10):
        peer.send(encode_frame(BIG, opaque))
    wire.until(lambda: server.hung_up)
    wire.until(lambda: server.peer_count == 0)
    wire.until(lambda: not any(one() for one in blocks))
    assert server._outbox.accounts == {}


@pytest.mark.parametrize("served_by", ["libzmq"])
def test_who_takes_slowly_is_not_cut_off(wire, monkeypatch):
    monkeypatch.setattr(outbox_module, "UNTAKEN_EVERY_MS", 1)
    body = [bytes(4 * MIB)]
    server, where = wire.server({BIG: lambda request: Reply(b"", body, apart=True)})
    client = wire.client(where)
    done = []
    for _ in range(30):
        client.request(BIG, done.append, timeout_ms=9_000)
    wire.until(lambda: len(done) == 30)
    assert {sum(map(len, pieces_of(answer))) for answer in done} == {4 * MIB}
    assert server.hung_up == 0
    wire.until(lambda: server._outbox._untaken is None)


def test_the_end_of_a_connection_that_is_gone_does_no_harm(tmp_path):
    hang_up(1_000_000)
    with open(tmp_path / "file", "w") as file:
        hang_up(file.fileno())
        file.write("still open")
