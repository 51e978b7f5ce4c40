"""PING in every state, timers that end, refusals while a role cannot serve."""

from __future__ import annotations

import pytest
from harness.peers import KeptPeer

from mqmesh.errors import BrokerNotAvailable, UnsupportedCommand
from mqmesh.metrics import Labelled, Readings, gauge
from mqmesh.protocol.admin import GetAccessListRequest, RoleInfo, RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.command import (
    EMPTY_REPLY,
    decode_frame,
    decode_header,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import RequestCode, ServedBy, served_by
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import GetRouteRequest
from mqmesh.refusals import Refusals
from mqmesh.roles.listings import LISTINGS
from mqmesh.roles.shell import HOLD_UP_MS, RoleShell
from mqmesh.testing.clock import ManualClock


class Planned:
    """A timer that only knows whether it goes on."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class PlannedWorld:
    """A transport that keeps what it is asked to call, and its loop."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = self
        self.callback_failures = 2
        self.longest_turn_ns = 0
        self.guard = None
        self.serve = Served
        self.timers: list[tuple[int, object, Planned]] = []

    def call_every(self, interval_ms, callback) -> Planned:
        self.timers.append((interval_ms, callback, Planned()))
        return self.timers[-1][2]


class Served:
    """A command server that serves whom the test says."""

    def __init__(self, handlers, on_disconnect=None, limits=None) -> None:
        self.handlers = handlers
        self.ticks: list[int] = []
        self.closed, self.tick_ms = 0, 250
        self.peer_count, self.requests, self.held_bytes = 3, 7, 11
        self.malformed_frames = self.dropped_replies = self.hung_up = self.silent = 0
        self.refusals = Refusals()

    def ask(self, code, header=None):
        data = b"" if header is None else encode_header(header)
        command = decode_frame(encode_frame(code, 1, header=data))
        return self.handlers[code](Request(KeptPeer(b"p"), command))

    def tick(self, now_ms) -> None:
        self.ticks.append(now_ms)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def shell():
    world = PlannedWorld()
    shell = RoleShell(ServedBy.NAMESRV, "namesrv", "n1", world)
    shell.clock, shell.loop = world.clock, world
    return shell


def ping(server) -> RoleInfo:
    return decode_header(RoleInfo, server.ask(RequestCode.PING).header)


def test_ping_tells_state_and_uptime_and_is_answered_in_every_state(shell):
    server = shell.open()
    assert (ping(server).state, ping(server).uptime_ms) == ("starting", 0)
    shell.ready()
    shell.clock.advance(30)
    told = ping(server)
    assert (told.role, told.name, told.state, told.uptime_ms) == ("namesrv", "n1", "running", 30)
    shell.stopping()
    assert ping(server).state == "stopping"


def test_what_has_no_handler_is_refused_and_after_the_stop_everything(shell):
    route = RequestCode.GET_ROUTEINFO_BY_TOPIC
    server = shell.open({route: lambda request, header: EMPTY_REPLY})
    assert set(server.handlers) == set(served_by(ServedBy.NAMESRV))
    assert server.ask(route, GetRouteRequest("t")) is EMPTY_REPLY
    with pytest.raises(BrokerNotAvailable, match="n1 is starting"):
        server.ask(RequestCode.PUT_KV_CONFIG)
    shell.stopping()
    with pytest.raises(BrokerNotAvailable, match="n1 is stopping"):
        server.ask(route, GetRouteRequest("t"))


def test_without_security_there_is_no_access_list_whatever_else_is_refused(shell):
    server = shell.open()
    shell.dispatch.refuse("n1 follows another one")
    with pytest.raises(UnsupportedCommand, match="security is off here"):
        server.ask(RequestCode.GET_ACCESS_LIST, GetAccessListRequest())


def test_every_role_tells_its_metrics(shell):
    shell.expose((gauge("topics", "topics", len),), lambda: ["a", "b"])
    server = shell.open()
    server.refusals.note("SYSTEM_BUSY", "planned")
    ping(server)
    asked = server.ask(RequestCode.GET_BROKER_RUNTIME_INFO, RuntimeInfoRequest())
    told = Readings(decode_header(RuntimeInfo, asked.header).metrics)
    expected = {"state": "starting", "topics": 2, "connections": 3, "callback_failures_total": 2}
    assert {name: told[name] for name in expected} == expected
    assert told.number("refusals_total", "system_busy") == 1
    assert told.number("command_requests_total", "ping") == 1


def test_the_longest_turn_is_told_to_all_who_look_and_forgotten_in_time(shell):
    shell.loop.longest_turn_ns = 7_000_000
    assert [shell.look_at_turns() for _ in range(2)] == [7, 7]
    shell.clock.advance(HOLD_UP_MS)
    shell.loop.longest_turn_ns = 2_000_000
    assert [shell.look_at_turns() for _ in range(2)] == [7, 2]
    shell.clock.advance(HOLD_UP_MS)
    assert [shell.look_at_turns() for _ in range(2)] == [2, 0]


def test_very_many_metrics_are_told_in_pages_and_anew_by_one_that_forgot_them(shell):
    topics = [f"t{number}" for number in range(2_500)]
    told = Labelled(topics, lambda name: (name,), len)
    shell.expose((gauge("sizes", "sizes", lambda _: told, labels=("topic",)),), lambda: None)
    server = shell.open()

    def ask(listing=0, place=0):
        request = RuntimeInfoRequest(listing, place)
        answer = server.ask(RequestCode.GET_BROKER_RUNTIME_INFO, request)
        return decode_header(RuntimeInfo, answer.header)

    page, found = ask(), []
    listing = page.listing
    while page.next_place > 0:
        found += page.metrics
        page = ask(listing, page.next_place)
        assert page.listing == listing
    found += page.metrics
    names = [one.metric.name for one in found]
    assert names[-1] == "folded_label_sets"
    assert [name for name in set(names) if names.count(name) > 1] == ["sizes"]  # it went on
    assert len(set(names)) == len(Readings(found))
    assert Readings(found).number("sizes", "t7") == 2
    one, others = ask(), [ask() for _ in range(LISTINGS)]
    for place in ((one.listing, one.next_place), (others[-1].listing, 7)):
        again = ask(*place)
        assert again.listing not in {one.listing, *(other.listing for other in others)}
        assert (again.next_place, again.metrics[0]) == (1, one.metrics[0])


def test_timers_end_with_the_role_and_closing_twice_does_no_harm(shell):
    server = shell.open()
    shell.every(10, lambda: None)
    shell.look_after_peers()
    (_, _, first), (_, look, second) = shell.loop.timers
    look()
    assert server.ticks == [shell.clock.monotonic_ms()]
    shell.close()
    shell.close()
    assert first.cancelled
    assert second.cancelled
    assert (server.closed, shell.server) == (1, None)
    look()
    assert len(server.ticks) == 1


def test_a_shell_that_was_never_opened_closes(shell):
    shell.close()
    assert shell.server is None
