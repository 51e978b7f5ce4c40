"""The gateway's front for gRPC without brokers and sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mqmesh.errors import EndpointUnreachable, NoPermission
from mqmesh.protocol.route import BrokerAddress, BrokerData, QueueData, TopicRoute
from mqmesh.roles.gateway.consuming import PullCache
from mqmesh.roles.gateway.grpc.authorization import find_caller
from mqmesh.roles.gateway.grpc.front import GrpcFront
from mqmesh.roles.gateway.grpc.handles import Handles
from mqmesh.roles.gateway.grpc.service import GrpcService
from mqmesh.roles.gateway.grpc.session import GrpcSession
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.session import SessionLimits
from mqmesh.roles.gateway.users import GatewayUser
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.interface import Timer

LIMITS = SessionLimits(1 << 20, 100, 1 << 20, 120_000)


class FrontWorld:
    """A front for gRPC whose brokers do not answer."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.soon: deque[Callable[[], None]] = deque()
        self.broken = self.held_bytes = 0
        address = BrokerAddress("127.0.0.1:1")
        group = BrokerData("c", "broker-a", {0: address})
        self._route = TopicRoute("t", [QueueData("broker-a", 2, 2, 6)], [group])
        self.loop = self.routes = self
        self.served = {"broker-a": "c"}
        self.groups = lambda: self.served
        self.producer_id = 5
        handles = Handles()
        handles.secret = bytes(32)
        self.service = GrpcService(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            PullCache(1 << 20, self.clock.monotonic_ms),
            self,  # type: ignore[arg-type]
            handles=handles,
            key=bytes(16),
            clock=self.clock,
            address=Address("127.0.0.1", 8_081),
            max_clients=1_000,
            max_receipts=1_000,
        )
        self.answers: dict[str, object] = {}
        self.users: dict[str, GatewayUser] = {}
        self.front = GrpcFront(self._admit, LIMITS, self.clock, self.post, self._note)

    def _admit(self, session: GrpcSession, headers: Mapping[str, str]) -> GrpcService:
        if self.users and find_caller(headers, self.users) is None:
            raise NoPermission("the call is not signed")
        return self.service

    def _note(self, text: str) -> None:
        self.broken += 1

    # The interface of the upstream, its loop and its sends, for the parts under test.

    def post(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_every(self, interval_ms: int, callback: Callable[[], None]) -> Timer:
        return Timer(callback, interval_ms)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def ask(self, broker: str, code: int, header: bytes, done: Callable[[object], None]) -> None:
        self.post(lambda: done(self.answers.get(broker, EndpointUnreachable("nobody"))))

    def request(self, broker: str, code: int, done: Callable[[object], None], **_: object) -> None:
        self.post(lambda: done(EndpointUnreachable("nobody")))

    def find_route(self, topic: str, done: Callable[[object], None]) -> None:
        done(self._route)

    def send(self, queue: object, messages: object, done: Any, half_group: str = "") -> None:
        self.post(lambda: done(EndpointUnreachable("nobody")))

    def hold(self, size: int) -> None:
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held_bytes -= size

    def end(self, *arguments: Any) -> None:
        self.post(lambda: arguments[-1](EndpointUnreachable("nobody")))

    def address(self, broker: str) -> bool:
        return True

    def run(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()


class FrontOutput:
    """A connection that takes all at once.

    Attributes:
        data: Bytes that were written.
        is_paused: Nothing is read of it.
    """

    def __init__(self) -> None:
        self.peer, self.waiting_bytes, self.data = "client", 0, b""
        self.is_closed = self.is_paused = False

    def write(self, *parts: bytes | memoryview) -> None:
        self.data += b"".join(parts)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True
