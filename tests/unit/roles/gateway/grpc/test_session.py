"""One connection of a client by gRPC."""

from __future__ import annotations

import gzip
import struct
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, TrailersReceived
from h2.settings import SettingCodes
from harness.grpc_world import LIMITS, FrontOutput, FrontWorld

from mqmesh.errors import EndpointUnreachable
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.groups import GroupConfig, GroupSummaries, GroupSummary
from mqmesh.protocol.grpc.calls import FRAMES_PER_STEP, GrpcCall, GrpcStatus
from mqmesh.protocol.grpc.codes import BodyEncoding, RefusedCall, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE
from mqmesh.roles.gateway.grpc import front
from mqmesh.roles.gateway.grpc.authorization import sign_date
from mqmesh.roles.gateway.grpc.clients import MAX_BODY_BYTES, MOST_IDS, MOST_RECEIVES
from mqmesh.roles.gateway.grpc.session import (
    MOST_REQUEST_BYTES,
    REQUEST_MS,
    GrpcSession,
    ServedCall,
)
from mqmesh.roles.gateway.users import GatewayUser
from mqmesh.testing.clock import ManualClock

SEND = f"/{SERVICE}/SendMessage"


class Connected:
    """A connection to a front, and what came back."""

    def __init__(self, clock: ManualClock | None = None, world: FrontWorld | None = None) -> None:
        self.world = world or FrontWorld(clock)
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
        begun: bytes | None = None,
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
        if begun is None:
            begun = struct.pack(">BI", 0, len(data)) + data
        self.say(number, begun, end=end)
        return number

    def say(self, number: int, data: bytes, *, end: bool = False) -> None:
        while True:
            piece, data = data[:16_000], data[16_000:]
            self.h2.send_data(number, piece, end_stream=end and not data)
            if not data:
                return

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
    number = one.call("SyncLiteSubscription")
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


def test_only_calls_that_need_it_make_clients():
    one = Connected()
    topic = CLASSES["Resource"](name="t")
    for number in range(50):
        data = CLASSES["QueryRouteRequest"](topic=topic).SerializeToString()
        one.call("QueryRoute", data, client_id=str(number))
    one.exchange()
    assert one.world.service.clients == len(one.session.client_ids) == 0
    one.call("Heartbeat")
    one.exchange()
    assert list(one.session.client_ids) == ["me"]
    one.call("NotifyClientTermination")
    one.exchange()
    assert one.world.service.clients == len(one.session.client_ids) == 0


def test_requests_are_as_long_as_their_method_allows():
    one = Connected()
    one.exchange()
    long = one.call("Heartbeat", bytes(MOST_REQUEST_BYTES + 1), end=False)
    topic = CLASSES["Resource"](name="t")
    address = CLASSES["Address"](host="h", port=1)
    refused = []
    for addresses in [address] * 17, [CLASSES["Address"](host="h" * 256)]:
        endpoints = CLASSES["Endpoints"](scheme=1, addresses=addresses)
        request = CLASSES["QueryRouteRequest"](topic=topic, endpoints=endpoints)
        refused.append(one.call("QueryRoute", request.SerializeToString()))
    one.exchange()
    assert one.statuses[long] == GrpcStatus.RESOURCE_EXHAUSTED
    for number in refused:
        assert one.answer(number, "QueryRouteResponse").status.code == ReplyCode.BAD_REQUEST


def test_bodies_of_one_call_are_decompressed_up_to_a_limit():
    one = Connected()
    message = CLASSES["Message"](
        topic=CLASSES["Resource"](name="t"),
        body=gzip.compress(bytes(MAX_BODY_BYTES)),
        system_properties=CLASSES["SystemProperties"](
            message_id="x", body_encoding=BodyEncoding.GZIP
        ),
    )
    request = CLASSES["SendMessageRequest"](messages=[message] * 100)
    number = one.call("SendMessage", end=False)
    one.h2.reset_stream(number)
    one.exchange()
    call = ServedCall(one.session, GrpcCall(1, "", {}, 0), one.world.service.methods[SEND])
    with pytest.raises(RefusedCall) as caught:
        one.world.service.methods[SEND].on_message(call, request)
    assert caught.value.code is ReplyCode.MESSAGE_BODY_TOO_LARGE
    assert one.world.held_bytes == 0


def test_a_stream_whose_answers_are_not_taken_ends():
    one = Connected()
    one.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    one.exchange()
    settings = CLASSES["Settings"](
        publishing=CLASSES["Publishing"](), user_agent=CLASSES["UA"](hostname="h" * 60_000)
    )
    data = CLASSES["TelemetryCommand"](settings=settings).SerializeToString()
    number = one.call("Telemetry", data, end=False)
    for _ in range(30):
        one.exchange()
        if number in one.statuses:
            break
        one.say(number, struct.pack(">BI", 0, len(data)) + data)
    assert one.statuses == {number: GrpcStatus.RESOURCE_EXHAUSTED}
    assert not one.session.is_full
    assert one.world.service.clients == 1


def test_settings_are_those_of_a_broker_group_that_answers():
    one = Connected()
    one.world.served["broker-b"] = "c"
    config = GroupConfig("g", delivery="fifo")
    header = encode_header(GroupSummaries([GroupSummary(config, is_configured=True)]))
    settings = CLASSES["Settings"](
        subscription=CLASSES["Subscription"](group=CLASSES["Resource"](name="g"))
    )
    data = CLASSES["TelemetryCommand"](settings=settings).SerializeToString()
    down = one.call("Telemetry", data, end=False)
    for _ in range(3):
        one.exchange()
    assert one.statuses == {down: GrpcStatus.UNAVAILABLE}
    assert down not in one.bodies
    one.world.answers["broker-b"] = Command(0, 0, 0, memoryview(header), memoryview(b""))
    number = one.call("Telemetry", data, end=False)
    for _ in range(3):
        one.exchange()
    assert one.answer(number, "TelemetryCommand").settings.subscription.fifo


@pytest.mark.parametrize("name", ["ReceiveMessage", "PullMessage"])
def test_receives_of_one_client_are_bounded_also_those_it_gave_up(name):
    one = Connected()
    waiting: list[Any] = []
    one.world.ask = lambda *arguments: waiting.append(arguments[-1])
    one.world.request = lambda broker, code, done, **_: waiting.append(done)
    request = CLASSES[f"{name}Request"](
        group=CLASSES["Resource"](name="g"),
        message_queue=CLASSES["MessageQueue"](
            topic=CLASSES["Resource"](name="t"), broker=CLASSES["Broker"](name="broker-a")
        ),
        **({"auto_renew": True} if name == "ReceiveMessage" else {}),
    )
    data = request.SerializeToString()

    def receive(client_id: str = "me") -> int:
        number = one.call(name, data, client_id=client_id)
        one.exchange()
        return number

    numbers = [receive() for _ in range(MOST_RECEIVES)]
    for number in numbers:
        one.h2.reset_stream(number)
    refused, other = receive(), receive("other")
    answer = one.answer(refused, f"{name}Response")
    assert answer.status.code == ReplyCode.TOO_MANY_REQUESTS
    assert other not in one.bodies
    while waiting:
        waiting.pop()(EndpointUnreachable("nobody"))
    one.exchange()
    assert receive() not in one.bodies


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0\x09part"], ids=["none", "part"])
def test_requests_that_are_not_whole_end(data):
    one = Connected()
    one.world.clock.advance(1)
    number = one.call("Heartbeat", end=False, begun=data)
    one.exchange()
    one.world.clock.advance(REQUEST_MS)
    one.session.tick(one.world.clock.monotonic_ms())
    one.read()
    assert one.statuses == {number: GrpcStatus.DEADLINE_EXCEEDED}
    assert one.session.held_bytes == 0


def test_the_connection_that_holds_most_is_closed_when_all_hold_too_much(monkeypatch):
    monkeypatch.setattr(front, "MOST_HELD_BYTES", 150)
    world = FrontWorld()
    small, large = Connected(world=world), Connected(world=world)
    for one, size in (small, 60), (large, 100):
        one.call("Heartbeat", end=False, begun=bytes(4) + b"\xff" + bytes(size - 5))
        one.exchange()
    world.front.tick()
    assert (small.output.is_closed, large.output.is_closed) == (False, True)


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
