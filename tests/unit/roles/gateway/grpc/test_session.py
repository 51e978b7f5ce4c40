"""One connection of a client by gRPC."""

from __future__ import annotations

import struct
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, TrailersReceived
from harness.grpc_world import LIMITS, FrontOutput, FrontWorld

from mqmesh.protocol.grpc.calls import FRAMES_PER_STEP, GrpcStatus
from mqmesh.protocol.grpc.codes import ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE
from mqmesh.roles.gateway.grpc.authorization import sign_date
from mqmesh.roles.gateway.grpc.clients import MOST_IDS
from mqmesh.roles.gateway.grpc.session import GrpcSession
from mqmesh.roles.gateway.users import GatewayUser
from mqmesh.testing.clock import ManualClock


class Connected:
    """A connection to a front, and what came back."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.world = FrontWorld(clock)
        self.output = FrontOutput()
        self.session: GrpcSession = self.world.front.accept(self.output)
        self.h2 = H2Connection(
            H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        )
        self.h2.initiate_connection()
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}

    def answer(self, number: int, name: str = "HeartbeatResponse") -> Any:
        """The one answer to a call."""
        return CLASSES[name].FromString(self.bodies[number][5:])

    def call(
        self,
        name: str,
        data: bytes = b"",
        timeout: str = "",
        *more: tuple[str, str],
        end: bool = True,
        client_id: str = "me",
    ) -> int:
        number = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":path", f"/{SERVICE}/{name}"),
            ("content-type", "application/grpc"),
            ("x-mq-client-id", client_id),
            *([("grpc-timeout", timeout)] if timeout else []),
            *more,
        ]
        self.h2.send_headers(number, headers)
        self.h2.send_data(number, struct.pack(">BI", 0, len(data)) + data, end_stream=end)
        return number

    def exchange(self) -> None:
        self.session.on_bytes(self.h2.data_to_send())
        self.world.run()
        self.read()

    def read(self) -> None:
        data, self.output.data = self.output.data, b""
        for event in self.h2.receive_data(data):
            if isinstance(event, DataReceived):
                self.h2.increment_flow_control_window(event.flow_controlled_length)
                number = event.stream_id
                self.bodies[number] = self.bodies.get(number, b"") + event.data
            elif isinstance(event, ResponseReceived | TrailersReceived):
                headers = {str(name): str(value) for name, value in event.headers}
                if "grpc-status" in headers:
                    self.statuses[event.stream_id or 0] = int(headers["grpc-status"])


def test_a_method_that_is_not_served_says_so():
    one = Connected()
    number = one.call("PullMessage")
    one.exchange()
    assert one.statuses[number] == GrpcStatus.UNIMPLEMENTED


def test_rubbish_in_place_of_a_request_ends_the_call_only():
    one = Connected()
    bad, good = one.call("Heartbeat", b"\x0a\xff"), one.call("Heartbeat")
    one.exchange()
    assert one.statuses == {bad: GrpcStatus.INVALID_ARGUMENT, good: GrpcStatus.OK}
    assert one.answer(good).status.code == ReplyCode.OK


def test_a_call_ends_at_its_deadline():
    one = Connected()
    number = one.call("Telemetry", timeout="2S", end=False)
    one.exchange()
    one.session.tick(one.world.clock.monotonic_ms())
    one.read()
    assert one.statuses == {}
    one.world.clock.advance(2_000)
    one.session.tick(one.world.clock.monotonic_ms())
    one.read()
    assert one.statuses == {number: GrpcStatus.DEADLINE_EXCEEDED}


def test_calls_beyond_the_limit_are_refused():
    one = Connected()
    numbers = [one.call("Telemetry", end=False) for _ in range(LIMITS.max_requests_in_flight + 1)]
    one.exchange()
    one.session.on_drained()
    one.read()
    assert one.statuses == {numbers[-1]: GrpcStatus.UNAVAILABLE}


class SlowClock(ManualClock):
    """A clock at which each look takes as long, so that each step does."""

    def monotonic_ms(self) -> int:
        self.advance(2)
        return super().monotonic_ms()


def test_a_connection_speaks_for_so_many_clients():
    one = Connected()
    numbers = []
    for number in range(MOST_IDS + 1):
        numbers.append(one.call("Heartbeat", client_id=str(number)))
        if number % 20 == 0:
            one.exchange()
    one.exchange()
    known = one.call("Heartbeat", client_id="0")
    one.exchange()
    assert one.answer(numbers[-1]).status.code == ReplyCode.TOO_MANY_REQUESTS
    assert one.answer(numbers[-2]).status.code == one.answer(known).status.code == ReplyCode.OK


def test_many_frames_of_one_client_are_read_turn_by_turn():
    one = Connected(SlowClock())
    one.exchange()
    for _ in range(10 * FRAMES_PER_STEP):
        one.h2.ping(bytes(8))
    turns = 0
    one.session.on_bytes(one.h2.data_to_send())
    while one.world.soon:
        assert one.output.is_paused
        one.world.run()
        turns += 1
    assert not one.output.is_paused
    assert turns >= 4
    one.read()


def test_other_protocols_end_their_connection_with_a_note():
    one = Connected()
    one.session.on_bytes(b"GET / HTTP/1.1\r\n\r\n")
    assert one.output.is_closed
    assert one.world.broken == 1
    assert one.world.front.connections == 0


def test_a_silent_connection_is_closed():
    one = Connected()
    one.exchange()
    one.world.clock.advance(LIMITS.idle_timeout_ms + 1)
    one.session.tick(one.world.clock.monotonic_ms())
    assert one.output.is_closed


def test_calls_are_signed_as_rocketmqs_clients_do_it():
    # Of TLSHelper.sign, rocketmq-client-java 5.0.8.
    expected = "978FEC52A10DC5F924BD2DBEBCE321A4BD56984C"
    assert sign_date("20260101T000000Z", "a secret one") == expected


def test_with_users_a_call_must_be_signed_by_one():
    one = Connected()
    user = GatewayUser(access_key="me", secret_key="a secret one", credentials="x")
    one.world.users = {"me": user}
    date = ("x-mq-date-time", "20260101T000000Z")
    good = one.call("Heartbeat", b"", "", date, ("authorization", _signed("me", date[1])))
    bare = one.call("Heartbeat")
    wrong = one.call("Heartbeat", b"", "", date, ("authorization", _signed("you", date[1])))
    bad = one.call("Heartbeat", b"", "", date, ("authorization", _signed("me", "another")))
    odd = one.call("Heartbeat", b"", "", date, ("authorization", "Basic x"))
    nobody = one.call("Heartbeat", b"", "", date, ("authorization", _signed("", date[1])))
    one.exchange()
    assert one.statuses.pop(good) == GrpcStatus.OK
    assert one.statuses == dict.fromkeys(
        (bare, wrong, bad, odd, nobody), GrpcStatus.PERMISSION_DENIED
    )


def _signed(access_key: str, date: str) -> str:
    return (
        f"MQv2-HMAC-SHA1 Credential={access_key}, SignedHeaders=x-mq-date-time, "
        f"Signature={sign_date(date, 'a secret one')}"
    )
