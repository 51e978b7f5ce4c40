"""Peers that break the protocol, or do not read: the server lives, and others notice nothing."""

from __future__ import annotations

import random
import socket
import struct

import psutil
import pytest
import zmq

from mqmesh.errors import RequestTimeout
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    MAX_FURTHER_FRAMES,
    RESPONSE,
    ErrorHeader,
    Reply,
    decode_frame,
    decode_header,
    encode_frame,
)
from mqmesh.transport import server as server_module
from mqmesh.units import KIB, MIB

ECHO, BIG = 1, 2


def echo(request):
    return Reply(bytes(request.command.header), [request.command.body])


@pytest.fixture
def served(wire):
    """A server, its endpoint, and a good client that must go on being served."""
    server, where = wire.server({ECHO: echo})
    good = wire.client(where)
    wire.ask(good, ECHO)
    yield server, where
    assert bytes(wire.ask(good, ECHO, b"still there").header) == b"still there"
    assert good.in_flight == 0


@pytest.fixture
def bare(wire):
    """Bare sockets without any of our limits."""
    context = zmq.Context()
    made = []

    def connect(where, kind=zmq.DEALER, **options):
        one = context.socket(kind)
        one.linger = 0
        for name, value in options.items():
            setattr(one, name, value)
        made.append(one)
        one.connect(where)
        return one

    yield connect
    for one in made:
        one.close()
    context.term()


def answer_of(wire, one):
    wire.until(lambda: one.poll(0))
    command = decode_frame(one.recv())
    assert command.is_response
    return command


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"x",
        b"short of sixteen",
        encode_frame(ECHO, 5)[:15],
        b"\x02" + encode_frame(ECHO, 5)[1:],
        struct.pack("<BBHIQ", 1, 0, ECHO, 1, 5),
        struct.pack("<BBHIQ", 1, 0, ECHO, 2**32 - 1, 5) + b"x" * 100,
    ],
)
def test_a_malformed_frame_is_counted_and_refused_if_it_can_be_answered(wire, served, bare, frame):
    server, where = served
    one = bare(where)
    one.send(frame)
    wire.until(lambda: server.malformed_frames == 1)
    if len(frame) >= 16:
        command = answer_of(wire, one)
        assert command.code == ResponseCode.MESSAGE_ILLEGAL
        assert decode_header(ErrorHeader, command.header).remark
    one.send(encode_frame(ECHO, 9, b"good"))
    command = answer_of(wire, one)
    assert (command.opaque, bytes(command.body)) == (9, b"good")


def test_a_response_to_nothing_is_not_answered(wire, served, bare):
    server, where = served
    one = bare(where)
    before = server.requests
    one.send(encode_frame(ECHO, 5, flags=RESPONSE))
    wire.until(lambda: server.requests == before + 1)
    wire.turn_for(0.05)
    assert not one.poll(0)


def test_a_message_of_several_frames_is_thrown_away_whole(wire, served, bare):
    server, where = served
    one = bare(where)
    one.send_multipart([encode_frame(ECHO, 1), encode_frame(ECHO, 2), b"", b"x"])
    one.send(encode_frame(ECHO, 3))
    assert answer_of(wire, one).opaque == 3
    assert server.malformed_frames == 1
    assert not one.poll(0)


def test_a_client_that_chooses_its_routing_id_is_refused(wire, served, bare):
    server, where = served
    one = bare(where, routing_id=b"admin")
    one.send(encode_frame(ECHO, 4))
    command = answer_of(wire, one)
    assert (command.opaque, command.code) == (4, ResponseCode.MESSAGE_ILLEGAL)
    assert server.peer_count == 1


def test_a_frame_over_the_limit_costs_its_sender_the_connection_only(wire, served, bare):
    server, where = served
    one = bare(where)
    watcher = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    one.send(bytes(MAX_FRAME_BYTES + 1))
    wire.until(lambda: watcher.poll(0))
    assert server.malformed_frames == 0, "not even delivered"
    one.disable_monitor()
    watcher.close()


def test_random_bytes_on_the_port_do_no_harm(wire, served):
    server, where = served
    host, _, port = where.removeprefix("tcp://").partition(":")
    source = random.Random(20)
    greeting = b"\xff" + bytes(8) + b"\x7f"
    for number in range(150):
        # Some look like the beginning of a ZMTP greeting, of version 3 or of an old one.
        head = [b"", greeting, b"\x01\x00", greeting + b"\x03\x00NULL" + bytes(48)][number % 4]
        with socket.create_connection((host, int(port))) as one:
            try:
                one.sendall(head + source.randbytes(source.randrange(1, 2_000)))
                one.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # closed at once, which is as good
            finally:
                wire.loop.tick(1)
    wire.turn_for(0.2)
    assert server.peer_count <= 2 + server.malformed_frames


def test_garbage_in_frames_does_no_harm(wire, served, bare):
    server, where = served
    one = bare(where, sndhwm=10_000, rcvhwm=10_000)
    source = random.Random(21)
    before = server.requests
    for number in range(500):
        frame = bytearray(encode_frame(ECHO, number, source.randbytes(30), header=b"\x93\x01"))
        for _ in range(source.randrange(1, 5)):
            frame[source.randrange(len(frame))] = source.randrange(256)
        one.send(bytes(frame[: source.randrange(len(frame) + 1)]))
    wire.until(lambda: server.requests == before + 500)


def test_malformed_frames_are_logged_at_most_once_a_second(wire, served, bare, caplog):
    server, where = served
    one = bare(where)
    for _ in range(200):
        one.send(b"x")
    wire.until(lambda: server.malformed_frames == 200)
    assert 1 <= caplog.text.count("malformed frame") <= 10


def test_a_client_survives_a_server_that_answers_nonsense(wire, bare):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    told = []
    client = wire.client(f"tcp://127.0.0.1:{port}", on_command=told.append)
    done = []
    client.request(ECHO, done.append, timeout_ms=9_000)
    wire.until(lambda: router.poll(0))
    peer, frame = router.recv_multipart()
    opaque = decode_frame(frame).opaque
    router.send_multipart([peer, b"x"])
    frames = [encode_frame(0, opaque, flags=RESPONSE), *[b"more"] * (MAX_FURTHER_FRAMES + 1)]
    router.send_multipart([peer, *frames])
    router.send_multipart([peer, encode_frame(0, opaque + 7, flags=RESPONSE)])
    router.send_multipart([peer, encode_frame(17, opaque, header=b"\xff\xff", flags=RESPONSE)])
    wire.until(lambda: done)
    assert "ErrorHeader" in str(done[0])
    client.request(ECHO, done.append, timeout_ms=100)
    wire.until(lambda: len(done) == 2)
    assert isinstance(done[1], RequestTimeout)
    assert told == []
    context.destroy(linger=0)


@pytest.mark.parametrize("size", [64 * KIB, 256 * KIB])
def test_a_peer_that_does_not_read_is_given_a_bounded_backlog(wire, bare, monkeypatch, size):
    monkeypatch.setattr(server_module, "BACKLOG_BYTES_PER_PEER", 2 * MIB)
    count = 3_000
    body = bytes(size)
    server, where = wire.server({ECHO: echo, BIG: lambda request: Reply(body=[body])})
    good = wire.client(where)
    lazy = bare(where, rcvhwm=1, rcvbuf=4_096, sndhwm=100_000)
    wire.ask(good, ECHO)
    before = psutil.Process().memory_info().rss
    for opaque in range(count):
        lazy.send(encode_frame(BIG, opaque))
    wire.until(lambda: server.requests > count)
    assert 0 < server._backlog_total <= 4 * MIB
    assert psutil.Process().memory_info().rss - before < 200 * MIB
    wire.ask(good, ECHO)
    served = busy = 0
    while served + busy < count:
        if lazy.poll(1):
            command = decode_frame(lazy.recv())
            served += command.code == ResponseCode.SUCCESS
            busy += command.code == ResponseCode.SYSTEM_BUSY
        wire.loop.tick(0)
    assert served * size > 2 * MIB
    assert busy > 0
    assert server.dropped_replies == server._backlog_total == 0
    lazy.send(encode_frame(BIG, 1))
    assert answer_of(wire, lazy).code == ResponseCode.SUCCESS


def test_answers_beyond_the_backlog_are_dropped_and_counted(wire, bare, monkeypatch):
    monkeypatch.setattr(server_module, "BACKLOG_BYTES_PER_PEER", 2 * MIB)
    held = []
    server, where = wire.server({BIG: held.append})
    lazy = bare(where, rcvhwm=1, rcvbuf=4_096, sndhwm=100_000)
    for opaque in range(200):
        lazy.send(encode_frame(BIG, opaque))
    wire.until(lambda: len(held) == 200)
    for request in held:
        server.reply(request, Reply(body=[bytes(MIB)]))
    assert server.dropped_replies > 0
    assert server._backlog_total <= 4 * MIB


def test_what_waits_for_a_peer_that_goes_is_given_up(wire, bare):
    server, where = wire.server({BIG: lambda request: Reply(body=[bytes(MIB)])})
    lazy = bare(where, rcvhwm=1, rcvbuf=4_096, sndhwm=100_000)
    for opaque in range(120):
        lazy.send(encode_frame(BIG, opaque))
    wire.until(lambda: server._backlog_total > 0)
    lazy.close(linger=0)
    wire.until(lambda: server.peer_count == 0)
    assert server._backlog_total == 0
    assert server._backlog == server._backlog_bytes == server._large == {}


def test_large_answers_flow_to_a_peer_that_reads(wire):
    server, where = wire.server({BIG: lambda request: Reply(body=[bytes(4 * MIB)])})
    client = wire.client(where)
    done = []
    for _ in range(30):
        client.request(BIG, done.append, timeout_ms=9_000)
    wire.until(lambda: len(done) == 30)
    assert {len(answer.body) for answer in done} == {4 * MIB}
    assert server.dropped_replies == 0
