"""Requests that wait: one outcome each, whatever becomes of the connection."""

import heapq

import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    EndpointUnreachable,
    QueueFull,
    RequestTimeout,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import (
    ONEWAY,
    RESPONSE,
    ErrorHeader,
    decode_frame,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.testing.clock import ManualClock
from mqmesh.transport import requests
from mqmesh.transport.interface import Timer
from mqmesh.transport.requests import SWEEP_MS, RequestTable

ASK = 7


class Loop:
    """Timers that a test lets run."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.callback_failures = 0
        self.timers = []

    def call_later(self, delay_ms, callback):
        timer = Timer(callback, 0)
        heapq.heappush(self.timers, (self.clock.monotonic_ms() + delay_ms, len(self.timers), timer))
        return timer

    def run(self, duration_ms) -> None:
        end_ms = self.clock.monotonic_ms() + duration_ms
        while self.timers and self.timers[0][0] <= end_ms:
            due_ms, _, timer = heapq.heappop(self.timers)
            if not timer.cancelled:
                self.clock.advance(due_ms - self.clock.monotonic_ms())
                timer.callback()
        self.clock.advance(end_ms - self.clock.monotonic_ms())


class Scene:
    """A table, a connection that a test makes and breaks, and all that was told."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.up = True
        self.sent = []
        self.told = []
        self.commands = []
        self.table = RequestTable(self.loop, "tcp://x:1", self.try_send, self.commands.append)

    def try_send(self, frame) -> bool:
        if self.up:
            self.sent.append(decode_frame(memoryview(frame)))
        return self.up

    def ask(self, name="a", timeout_ms=1_000) -> None:
        self.table.request(
            ASK, lambda outcome: self.told.append((name, outcome)), (), b"", timeout_ms
        )

    def answer(self, opaque, code=ResponseCode.SUCCESS, header=b"") -> None:
        frame = encode_frame(code, opaque, header=header, flags=RESPONSE)
        self.table.take(decode_frame(memoryview(frame)))

    def outcomes(self):
        return [(name, type(outcome)) for name, outcome in self.told]


@pytest.fixture
def scene():
    return Scene()


def test_a_request_ends_with_its_response_and_once(scene):
    scene.ask("a")
    scene.ask("b")
    first, second = (command.opaque for command in scene.sent)
    scene.answer(second)
    scene.answer(second)
    assert [name for name, _ in scene.told] == ["b"]
    scene.answer(first)
    assert [name for name, _ in scene.told] == ["b", "a"]
    assert len(scene.table) == 0
    scene.loop.run(5_000)
    assert len(scene.told) == 2


def test_a_refusal_is_an_error(scene):
    scene.ask()
    header = encode_header(ErrorHeader("not now"))
    scene.answer(1, ResponseCode.SERVICE_NOT_AVAILABLE, header)
    assert scene.outcomes() == [("a", BrokerNotAvailable)]


def test_what_cannot_be_sent_waits_and_goes_in_order(scene):
    scene.up = False
    scene.ask("a")
    scene.table.oneway(ASK, (b"b",), b"")
    scene.ask("c")
    assert scene.table.has_unsent
    scene.up = True
    scene.table.oneway(ASK, (b"d",), b"")  # not before what waits
    assert scene.sent == []
    scene.table.flush()
    assert [bytes(one.body) for one in scene.sent] == [b"", b"b", b"", b"d"]
    assert [bool(one.flags & ONEWAY) for one in scene.sent] == [False, True, False, True]
    assert not scene.table.has_unsent


def test_a_break_fails_what_was_sent_and_nothing_else(scene):
    scene.ask("sent")
    scene.up = False
    scene.ask("waits")
    scene.table.broke()
    assert scene.outcomes() == [("sent", EndpointUnreachable)]
    scene.up = True
    scene.table.flush()
    scene.answer(scene.sent[-1].opaque)
    assert [name for name, _ in scene.told] == ["sent", "waits"]


def test_deadlines_pass_one_by_one_and_say_what_is_known(scene):
    scene.ask("later", timeout_ms=3_000)
    scene.ask("sent", timeout_ms=500)
    scene.up = False
    scene.ask("unsent", timeout_ms=900)
    scene.loop.run(499)
    assert scene.told == []
    scene.loop.run(1)
    assert scene.outcomes() == [("sent", RequestTimeout)]
    scene.loop.run(400)
    assert scene.outcomes()[1:] == [("unsent", EndpointUnreachable)]
    scene.up = True
    scene.table.flush()
    assert len(scene.sent) == 2  # what is over is not sent any more
    scene.loop.run(2_100)
    assert scene.outcomes()[2:] == [("later", RequestTimeout)]
    assert all(timer.cancelled for _, _, timer in scene.loop.timers)


def test_one_search_serves_deadlines_that_are_close(scene):
    for timeout_ms in range(1_000, 1_000 - SWEEP_MS, -1):
        scene.ask(timeout_ms=timeout_ms)
    assert len(scene.loop.timers) == 1
    scene.ask(timeout_ms=1_000 - 2 * SWEEP_MS)
    assert [timer.cancelled for _, _, timer in scene.loop.timers].count(False) == 1


def test_closing_ends_everything_also_from_within_a_callback(scene):
    def close(outcome) -> None:
        scene.told.append(("closer", outcome))
        scene.table.close()

    scene.table.request(ASK, close, (), b"", 1_000)
    scene.ask("a")
    scene.up = False
    scene.ask("unsent")
    scene.table.broke()
    assert scene.outcomes() == [
        ("closer", EndpointUnreachable),
        ("a", ClientClosed),
        ("unsent", ClientClosed),
    ]
    with pytest.raises(ClientClosed):
        scene.ask()
    with pytest.raises(ClientClosed):
        scene.table.oneway(ASK, (), b"")


def test_a_callback_that_fails_keeps_nobody_from_its_outcome(scene, caplog):
    def fail(outcome) -> None:
        raise ValueError("planned")

    scene.table.request(ASK, fail, (), b"", 1_000)
    scene.ask("a")
    scene.table.broke()
    assert scene.outcomes() == [("a", EndpointUnreachable)]
    assert scene.loop.callback_failures == 1
    assert "a callback for an answer of tcp://x:1 failed" in caplog.text


def test_so_many_wait_and_no_more(scene, monkeypatch):
    monkeypatch.setattr(requests, "MAX_REQUESTS_WAITING", 3)
    scene.up = False
    scene.ask()
    scene.table.oneway(ASK, (), b"")
    with pytest.raises(QueueFull, match="3 requests wait for tcp://x:1"):
        scene.ask()


def test_what_a_server_says_by_itself_is_told_but_for_probes(scene):
    for code in (RequestCode.PROBE_CLIENT, RequestCode.NOTIFY_SCHEDULE):
        scene.table.take(decode_frame(memoryview(encode_frame(code, 0, flags=ONEWAY))))
    assert [command.code for command in scene.commands] == [RequestCode.NOTIFY_SCHEDULE]
