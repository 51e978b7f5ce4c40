"""Fixtures of the tests with real sockets and processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.security.guard import Guard
from mqmesh.security.keys import KeyRing
from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq.channel import BlockingChannel
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.transport.zmq.plain_channel import PlainChannel
from mqmesh.transport.zmq.plain_client import PlainClient
from mqmesh.transport.zmq.server import CommandServer
from mqmesh.transport.zmq.transport import ZmqTransport

PATIENCE_S = 40.0


class Wire:
    """A context and one event loop, turned by hand: servers and clients in one thread.

    Everything a test makes with it is closed at its end.

    Args:
        ring, guard: Of the transport.
        by_libzmq: Servers without keys are libzmq's, as those with keys are.
        by_loop: Clients are those of roles: the loop itself speaks for them.
    """

    def __init__(
        self,
        ring: KeyRing | None = None,
        guard: Guard | None = None,
        *,
        by_libzmq: bool = False,
        by_loop: bool = False,
    ) -> None:
        self._by_libzmq = by_libzmq
        self._by_loop = by_loop
        self.transport = ZmqTransport(ring, guard)
        self.context, self.loop = self.transport.context, self.transport.loop
        self._closers: list[Callable[[], None]] = []

    def closing(self, thing):
        """Close this with the test."""
        self._closers.append(thing.close)
        return thing

    def client(self, endpoint: str, **options) -> CommandClient | PlainClient:
        """Connect a client; with a ``ring`` of its own one of libzmq."""
        if "ring" in options:
            return self.closing(CommandClient(self.context, self.loop, endpoint, **options))
        return self.closing(self.transport.connect(endpoint, by_loop=self._by_loop, **options))

    def server(self, handlers, on_disconnect=None, endpoint="tcp://127.0.0.1:0", **limits):
        """Bind a server; returns it and its endpoint."""
        asked = handlers, on_disconnect, ServerLimits(**limits)
        if self._by_libzmq:
            server = self.closing(CommandServer(self.context, self.loop, *asked))
        else:
            server = self.closing(self.transport.serve(*asked))
        return server, server.bind(endpoint)

    def until(self, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> float:
        """Turn the loop until something is so; fail when it does not become so in time.

        Returns:
            How many seconds it took.
        """
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + patience_s, "waited in vain"
            self.loop.tick(20)
        return time.monotonic() - began

    def turn_for(self, duration_s: float) -> None:
        """Turn the loop for a while, to see that something does not happen."""
        deadline = time.monotonic() + duration_s
        while time.monotonic() < deadline:
            self.loop.tick(20)

    def ask(self, client: CommandClient, code: int, header=None, kind=None, **options):
        """Ask and wait: the decoded header for a kind, else the command; errors are raised."""
        data = encode_header(header) if isinstance(header, msgspec.Struct) else header or b""
        done: list[Command | MQMeshError] = []
        client.request(code, done.append, header=data, **options)
        self.until(lambda: done)
        if isinstance(done[0], MQMeshError):
            raise done[0]
        return decode_header(kind, done[0].header) if kind else done[0]

    def close(self) -> None:
        """Close everything; no callback may have failed."""
        while self._closers:
            self._closers.pop()()
        self.loop.close()
        self.transport.close(linger_ms=0)
        assert self.loop.callback_failures == 0


@pytest.fixture
def served_by() -> str:
    """Name what serves connections without keys; files that try both override it."""
    return "streams"


@pytest.fixture
def wire(served_by) -> Iterator[Wire]:
    """An event loop with real sockets, turned by hand."""
    wire = Wire(by_libzmq=served_by == "libzmq", by_loop=served_by == "streams of loops")
    yield wire
    wire.close()


@pytest.fixture
def channel_to(wire, served_by):
    """Makes channels: of plain streams, or libzmq's as where there are keys."""

    def make(where, busy_poll=None):
        if served_by == "libzmq":
            return wire.closing(BlockingChannel(wire.context, where, busy_poll=busy_poll))
        return wire.closing(PlainChannel(where, busy_poll=busy_poll))

    return make


@pytest.fixture
def wires() -> Iterator[Callable[..., Wire]]:
    """Make wires with keys and guards; all are closed with the test."""
    made: list[Wire] = []

    def make(ring: KeyRing | None, guard: Guard | None) -> Wire:
        made.append(Wire(ring, guard))
        return made[-1]

    yield make
    for wire in made:
        wire.close()


@contextmanager
def _peer_process(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def peer_process():
    """Run Python source in a process of its own until it prints `ready`; killed at the end."""
    return _peer_process
