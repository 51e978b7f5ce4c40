"""Plain streams: output that gathers and waits, reading that pauses, and ends."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from mqmesh.transport.zmq import streams
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.streams import Stream, StreamGroup, StreamListener
from mqmesh.units import MIB


class Handler:
    """Notes everything."""

    def __init__(self) -> None:
        self.data, self.events = b"", []

    def on_bytes(self, data):
        self.data += data
        if not data:
            self.events.append("again")

    def on_stuck(self):
        self.events.append("stuck")

    def on_drained(self):
        self.events.append("drained")

    def on_closed(self):
        self.events.append("closed")


@pytest.fixture
def loop():
    loop = EventLoop()
    yield loop
    loop.close()
    assert loop.callback_failures == 0


@pytest.fixture
def group():
    return StreamGroup()


@pytest.fixture
def pair(loop, group):
    """A stream with its handler, and the other end."""
    one, other = socket.socketpair()
    other.setblocking(False)
    stream, handler = Stream(loop, one, group), Handler()
    stream.start(handler)
    yield stream, handler, other
    stream.close()
    other.close()


def test_what_is_written_in_a_turn_leaves_together_at_its_end(loop, pair):
    stream, _, other = pair
    stream.write(b"one", memoryview(b"two"))
    stream.write(b"three")
    assert stream.waiting_bytes == 11
    with pytest.raises(BlockingIOError):
        other.recv(100)
    loop.tick(0)
    assert other.recv(100) == b"onetwothree"
    assert stream.waiting_bytes == 0


def test_much_output_leaves_at_once_and_the_rest_when_the_reader_reads(loop, pair, group):
    stream, handler, other = pair
    pieces = [bytes([number]) * MIB for number in range(20)]
    for piece in pieces:
        stream.write(piece)
    assert handler.events == ["stuck"]
    assert 0 < group.stuck_bytes == stream.waiting_bytes < 20 * MIB
    got = bytearray()
    while len(got) < 20 * MIB:
        loop.tick(0)
        assert group.stuck_bytes == stream.waiting_bytes
        got += other.recv(MIB)
    assert got == b"".join(pieces)
    loop.tick(0)
    assert handler.events == ["stuck", "drained"]
    assert (stream.is_stuck, stream.waiting_bytes) == (False, 0)


def test_very_many_pieces_go_in_several_calls(loop, pair, monkeypatch):
    monkeypatch.setattr(streams, "MOST_PIECES", 3)
    stream, _, other = pair
    stream.write(*[b"%d," % number for number in range(10)])
    loop.tick(0)
    assert other.recv(1_000) == b"0,1,2,3,4,5,6,7,8,9,"


def test_reads_grow_and_are_one_a_turn(loop, pair):
    stream, handler, other = pair
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
    sent = other.send(bytes(2 * MIB))
    sizes = []
    while sum(sizes) < sent:
        before = len(handler.data)
        loop.tick(0)
        sizes.append(len(handler.data) - before)
    assert sizes[0] == streams.LEAST_READ_BYTES
    assert sizes == sorted(sizes[:-1]) + sizes[-1:]
    assert max(sizes) <= streams.MOST_READ_BYTES
    assert not stream.has_more


def test_a_paused_stream_reads_nothing_and_costs_no_turns(loop, pair):
    stream, handler, other = pair
    stream.pause()
    other.send(b"x")
    loop.tick(0)
    assert not loop.has_news()
    assert handler.data == b""
    stream.resume()
    loop.tick(0)
    assert handler.data == b"x"
    stream.pause()
    stream.resume()
    other.send(b"y")
    loop.tick(0)
    assert handler.data == b"xy"


@pytest.mark.parametrize("pause_first", [True, False])
def test_a_paused_stream_goes_on_to_write_what_waits(loop, pair, pause_first):
    stream, handler, other = pair
    data = os.urandom(8 * MIB)
    if pause_first:
        stream.pause()
        other.send(b"x")
        loop.tick(0)  # now it is not watched
    stream.write(data)
    stream.pause()
    other.send(b"y")
    got, late = b"", 0
    while len(got) < len(data):
        loop.tick(0)
        try:
            got += other.recv(1 * MIB)
        except BlockingIOError:
            late += 1
            assert late < 1_000, "nothing comes any more"
    loop.tick(0)
    assert got == data
    assert handler.data == b""
    assert "drained" in handler.events
    stream.resume()
    loop.tick(0)
    loop.tick(0)
    assert handler.data == (b"xy" if pause_first else b"y")


def test_a_handler_that_has_more_to_do_is_called_in_the_next_turn_before_a_read(loop, pair):
    stream, handler, other = pair
    stream.again()
    stream.again()
    other.send(b"x")
    loop.tick(10_000)
    assert (handler.events, handler.data) == (["again"], b"")
    loop.tick(0)
    assert (handler.events, handler.data) == (["again"], b"x")


def test_what_was_sent_before_the_end_is_read_though_nobody_takes_the_answer(loop, pair):
    stream, handler, other = pair
    stream.pause()
    other.send(b"last word")
    other.close()
    stream.write(b"answer")
    loop.tick(0)
    stream.write(b"another")
    assert stream.waiting_bytes == 0
    stream.resume()
    loop.tick(0)
    loop.tick(0)
    assert (handler.data, handler.events) == (b"last word", ["closed"])
    assert stream.is_closed


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.EPIPE])
def test_a_stream_that_cannot_be_written_ends_behind_what_came(
    loop, pair, group, monkeypatch, number
):
    stream, handler, other = pair
    stream.write(bytes(30 * MIB))
    assert group.stuck_bytes == stream.waiting_bytes > 0
    other.send(b"last word")

    def send(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "send", send)
        stream.flush()
    assert (stream.waiting_bytes, group.stuck_bytes) == (0, 0)
    loop.tick(0)
    loop.tick(0)
    assert (handler.data, handler.events) == (b"last word", ["stuck", "drained", "closed"])
    assert stream.is_closed


def test_the_bytes_of_a_stuck_stream_that_is_closed_count_no_more(pair, group):
    stream, _, _ = pair
    stream.write(bytes(30 * MIB))
    stream.write(b"more")
    assert group.stuck_bytes == stream.waiting_bytes > 0
    stream.close()
    assert group.stuck_bytes == 0


def test_a_stream_that_is_closed_says_its_last_word_and_calls_nobody(loop, pair):
    stream, handler, other = pair
    stream.write(b"bye")
    stream.close()
    stream.close()
    stream.write(b"too late")
    stream.resume()
    loop.tick(0)
    assert other.recv(100) == b"bye"
    assert other.recv(100) == b""
    assert handler.events == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS])
def test_a_listener_without_descriptors_or_memory_waits_and_goes_on(
    loop, short_tmp_path, monkeypatch, caplog, number
):
    monkeypatch.setattr(streams, "ACCEPT_AGAIN_MS", 100)
    taken = []
    listener = StreamListener(loop, taken.append)
    listener.bind(f"ipc://{short_tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as one:
        with monkeypatch.context() as patch:

            def accept(_):
                raise OSError(number, os.strerror(number))

            patch.setattr(socket.socket, "accept", accept)
            one.connect(f"{short_tmp_path}/s")
            loop.tick(0)
            assert not loop.has_news()
        while not taken:
            loop.tick(10)
    assert "no connection can be taken" in caplog.text
    taken[0].close()
    listener.close()
