"""Calls of gRPC on HTTP/2, against h2's client side."""

from __future__ import annotations

import struct

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.grpc import calls
from mqmesh.protocol.grpc.calls import (
    CONNECTION_WINDOW,
    FRAMES_PER_STEP,
    MAX_FRAME_BYTES,
    MAX_RESETS,
    MAX_STREAMS,
    STREAM_WINDOW,
    CallBegun,
    CallEvent,
    CallGivenUp,
    CallMessage,
    CallRequested,
    GrpcCall,
    GrpcConnection,
    GrpcStatus,
    timeout_of,
)

MOST = 1 << 20
HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.Service/Do"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("x-mq-client-id", "me"),
    ("te", "trailers"),
]


class Pair:
    """Client and server, and what the server was told and the client got."""

    def __init__(self, **settings: int) -> None:
        self.now_ms = 0
        self.server = GrpcConnection(MOST, lambda: self.now_ms)
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.client.local_settings.update(settings)
        self.client.initiate_connection()
        self.found: list[CallEvent] = []
        self.got: list[object] = []
        self.exchange()

    def exchange(self, piece: int = 1 << 30) -> None:
        """Passes on what both want to say until nobody says more; in pieces of so many bytes."""
        while data := self.client.data_to_send():
            for start in range(0, len(data), piece):
                self.server.feed(data[start : start + piece])
                while (found := self.server.step()) is not None:
                    self.found += found
            self.answer()
        self.answer()

    def answer(self) -> None:
        if data := self.server.output():
            self.got += self.client.receive_data(data)

    def begin(self, *more: tuple[str, str], end: bool = False) -> int:
        stream = self.client.get_next_available_stream_id()
        self.client.send_headers(stream, [*HEAD, *more], end_stream=end)
        return stream

    def ask(self, message: bytes, *more: tuple[str, str]) -> GrpcCall:
        stream = self.begin(*more)
        self.client.send_data(stream, framed(message), end_stream=True)
        self.exchange()
        return self.call

    @property
    def call(self) -> GrpcCall:
        """The newest call."""
        return next(one.call for one in reversed(self.found) if isinstance(one, CallBegun))

    def of(self, kind: type) -> list:
        return [one for one in self.got if isinstance(one, kind)]

    def body(self) -> bytes:
        return b"".join(one.data for one in self.of(DataReceived))

    def status(self) -> tuple[int, str]:
        """The status of the last call that ended."""
        (last,) = [
            one.headers
            for one in self.got[::-1]
            if isinstance(one, TrailersReceived | ResponseReceived)
            and "grpc-status" in dict(one.headers)
        ][:1]
        found = dict(last)
        return int(found["grpc-status"]), found.get("grpc-message", "")


def framed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


def kinds(found: list[CallEvent]) -> list[type]:
    return [type(one) for one in found]


def test_a_unary_call_is_answered():
    pair = Pair()
    call = pair.ask(b"question")
    assert kinds(pair.found) == [CallBegun, CallMessage, CallRequested]
    assert pair.found[1].message == b"question"
    assert (call.method, call.headers["x-mq-client-id"]) == ("/a.Service/Do", "me")
    pair.server.send(call, b"answer")
    pair.server.finish(call)
    pair.exchange()
    (head,) = pair.of(ResponseReceived)
    assert dict(head.headers)[":status"] == "200"
    assert pair.body() == framed(b"answer")
    assert pair.status() == (0, "")
    assert len(pair.server) == 0
    assert not pair.of(StreamReset)


@pytest.mark.parametrize("piece", [1, 7])
def test_frames_may_come_in_pieces(piece):
    pair = Pair()
    stream = pair.begin()
    pair.client.send_data(stream, framed(b"x" * 1_000), end_stream=True)
    pair.exchange(piece)
    assert kinds(pair.found) == [CallBegun, CallMessage, CallRequested]


def test_messages_of_a_stream_come_one_by_one_however_they_are_cut():
    pair = Pair()
    stream = pair.begin()
    data = framed(b"one") + framed(b"") + framed(b"three")
    for start in range(0, len(data), 4):
        pair.client.send_data(stream, data[start : start + 4])
    pair.exchange()
    got = [one.message for one in pair.found if isinstance(one, CallMessage)]
    assert got == [b"one", b"", b"three"]
    for number in range(3):
        pair.server.send(pair.call, b"%d" % number)
    pair.exchange()
    assert pair.body() == framed(b"0") + framed(b"1") + framed(b"2")
    pair.client.end_stream(stream)
    pair.exchange()
    assert isinstance(pair.found[-1], CallRequested)


def test_an_error_without_a_message_is_one_header_list_with_its_text_encoded():
    pair = Pair()
    call = pair.ask(b"q")
    pair.server.finish(call, GrpcStatus.UNIMPLEMENTED, "größe: 100%\n")
    pair.exchange()
    assert pair.status() == (12, "gr%C3%B6%C3%9Fe: 100%25%0A")
    assert not pair.of(TrailersReceived)


def test_an_early_end_makes_the_client_stop():
    pair = Pair()
    pair.begin()
    pair.exchange()
    pair.server.finish(pair.call, GrpcStatus.UNAVAILABLE, "busy")
    pair.exchange()
    assert pair.status()[0] == 14
    (reset,) = pair.of(StreamReset)
    assert reset.error_code == ErrorCodes.NO_ERROR


def test_a_call_that_is_given_up_gets_nothing_more():
    pair = Pair()
    stream = pair.begin()
    pair.exchange()
    pair.client.reset_stream(stream)
    pair.exchange()
    assert kinds(pair.found) == [CallBegun, CallGivenUp]
    pair.server.send(pair.call, b"late")
    pair.server.finish(pair.call)
    pair.exchange()
    assert not pair.of(DataReceived)
    assert len(pair.server) == 0


def test_answers_wait_for_room_and_go_on_when_there_is_some():
    pair = Pair()
    call = pair.ask(b"q")
    body = bytes(200_000)
    pair.server.send(call, body)
    pair.server.finish(call)
    pair.answer()
    assert len(pair.body()) == 65_535
    assert pair.server.waiting_bytes == len(body) + 5 - 65_535
    for _ in range(10):
        for one in pair.of(DataReceived)[-1:]:
            pair.client.increment_flow_control_window(65_535)
            if not any(isinstance(one, TrailersReceived) for one in pair.got):
                pair.client.increment_flow_control_window(65_535, one.stream_id)
        pair.exchange()
    assert pair.body() == framed(body)
    assert pair.status() == (0, "")
    assert pair.server.waiting_bytes == 0


def test_large_messages_get_the_room_that_they_need():
    pair = Pair()
    stream = pair.begin()
    data = framed(bytes(MOST))
    while data:
        room = min(
            pair.client.local_flow_control_window(stream), pair.client.max_outbound_frame_size
        )
        assert room > 0
        pair.client.send_data(stream, data[:room], end_stream=room >= len(data))
        data = data[room:]
        pair.exchange()
    assert [len(one.message) for one in pair.found if isinstance(one, CallMessage)] == [MOST]
    assert pair.server.held_bytes == 0


def test_only_the_oldest_large_message_grows_when_too_much_is_held(monkeypatch):
    monkeypatch.setattr(calls, "MOST_HELD_BYTES", STREAM_WINDOW)
    pair = Pair()
    streams = [pair.begin() for _ in range(3)]
    left = dict.fromkeys(streams, framed(bytes(MOST)))
    for _ in range(200):
        for stream in reversed(streams):
            if not left[stream]:
                continue
            room = min(
                pair.client.local_flow_control_window(stream), pair.client.max_outbound_frame_size
            )
            if room > 0:
                data, left[stream] = left[stream][:room], left[stream][room:]
                pair.client.send_data(stream, data, end_stream=not left[stream])
                pair.exchange()
        assert pair.server.held_bytes <= MOST + 3 * STREAM_WINDOW
    assert not any(left.values())
    assert kinds(pair.found).count(CallMessage) == 3


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (framed(b"zipped", 1), GrpcStatus.UNIMPLEMENTED),
        (struct.pack(">BI", 0, MOST + 1) + b"x", GrpcStatus.RESOURCE_EXHAUSTED),
    ],
)
def test_messages_that_are_not_taken_end_their_call_only(data, status):
    pair = Pair()
    stream = pair.begin()
    pair.client.send_data(stream, data)
    pair.exchange()
    assert pair.status()[0] == status
    assert isinstance(pair.found[-1], CallGivenUp)
    pair.got.clear()
    call = pair.ask(b"another")
    pair.server.finish(call)
    pair.exchange()
    assert pair.status()[0] == GrpcStatus.OK


def test_a_message_that_is_cut_off_by_the_end_is_refused():
    pair = Pair()
    stream = pair.begin()
    pair.client.send_data(stream, framed(b"whole")[:-1], end_stream=True)
    pair.exchange()
    assert pair.status()[0] == GrpcStatus.INVALID_ARGUMENT
    assert pair.server.held_bytes == 0


def test_other_requests_than_grpc_are_refused():
    pair = Pair()
    stream = pair.client.get_next_available_stream_id()
    head = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "here")]
    pair.client.send_headers(stream, head, end_stream=True)
    pair.exchange()
    assert pair.found == []
    assert dict(pair.of(ResponseReceived)[0].headers)[":status"] == "415"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1S", 1_000),
        ("20m", 20),
        ("1H", 3_600_000),
        ("2H", 0),
        ("999u", 1),
        ("1n", 1),
        ("", 0),
        ("S", 0),
        ("-1S", 0),
        ("123456789S", 0),
        ("5x", 0),
        ("²S", 0),
    ],
)
def test_timeouts_are_read(text, expected):
    assert timeout_of(text) == expected


def test_what_is_no_http2_is_an_error_from_its_first_byte():
    connection = GrpcConnection(MOST, lambda: 0)
    connection.feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(RemoteProtocolError, match="no HTTP/2"):
        connection.step()
    assert connection.step() is None


def test_a_frame_that_is_too_long_is_an_error_before_it_has_come():
    pair = Pair()
    pair.server.feed((MAX_FRAME_BYTES + 1).to_bytes(3) + bytes(6))
    with pytest.raises(RemoteProtocolError, match="a frame of 65537 bytes"):
        pair.server.step()
    assert pair.of(ConnectionTerminated) == []
    pair.answer()
    assert len(pair.of(ConnectionTerminated)) == 1


def test_calls_that_are_taken_back_again_and_again_end_the_connection():
    pair = Pair()
    with pytest.raises(RemoteProtocolError, match="taken back"):
        for _ in range(MAX_RESETS + 1):
            pair.client.reset_stream(pair.begin())
            pair.exchange()
    pair.answer()
    (gone,) = pair.of(ConnectionTerminated)
    assert gone.error_code == ErrorCodes.ENHANCE_YOUR_CALM


def test_calls_may_be_taken_back_second_by_second():
    pair = Pair()
    for _ in range(5 * MAX_RESETS):
        pair.client.reset_stream(pair.begin())
        pair.exchange()
        pair.now_ms += 6
    assert not pair.server.is_over


def test_limits_are_told_to_the_client():
    settings = Pair().client.remote_settings
    assert settings.max_concurrent_streams == MAX_STREAMS
    assert settings.initial_window_size == STREAM_WINDOW
    assert settings[SettingCodes.MAX_HEADER_LIST_SIZE] == 64 * 1024
    assert Pair().client.outbound_flow_control_window == CONNECTION_WINDOW


def test_a_header_list_that_is_too_large_ends_the_connection():
    pair = Pair()
    pair.begin(*[(f"x-{number}", "v" * 1_000) for number in range(70)])
    with pytest.raises((RemoteProtocolError, ProtocolError)):
        pair.exchange()


def test_a_step_reads_some_frames_only():
    pair = Pair()
    for number in range(100):
        pair.client.ping(b"%08d" % number)
    pair.server.feed(pair.client.data_to_send())
    steps = 0
    while pair.server.step() is not None:
        steps += 1
    assert steps == -(-100 // FRAMES_PER_STEP)
    pair.answer()


def test_a_step_ends_with_a_large_list_of_headers():
    pair = Pair()
    for _ in range(3):
        pair.begin(*[(f"x-{number}", "v" * 1_000) for number in range(8)])
    pair.server.feed(pair.client.data_to_send())
    steps = 0
    while pair.server.step() is not None:
        steps += 1
    assert steps == 3
    pair.answer()


def test_calls_that_wait_for_room_are_looked_at_once_in_a_step(monkeypatch):
    pair = Pair()
    stalled = [pair.ask(b"q") for _ in range(5)]
    for call in stalled:
        pair.server.finish(call, GrpcStatus.OK, "", bytes(100_000))
    flushed: list[GrpcCall] = []
    monkeypatch.setattr(GrpcConnection, "_flush", lambda _, call: flushed.append(call))
    for _ in range(FRAMES_PER_STEP):
        pair.client.increment_flow_control_window(1)
    pair.server.feed(pair.client.data_to_send())
    assert pair.server.step() == []
    assert flushed == stalled


def test_an_answer_that_is_not_taken_is_given_up_with_its_call():
    pair = Pair()
    call = pair.ask(b"q")
    pair.server.finish(call, GrpcStatus.OK, "", bytes(100_000))
    pair.found.clear()
    pair.client.reset_stream(call.stream_id)
    pair.exchange()
    assert [one.call for one in pair.found if isinstance(one, CallGivenUp)] == [call]
    assert pair.server.waiting_bytes == 0


def test_calls_end_with_the_connection():
    pair = Pair()
    pair.begin()
    pair.exchange()
    pair.client.close_connection()
    pair.exchange()
    assert isinstance(pair.found[-1], CallGivenUp)
    assert pair.server.is_over
