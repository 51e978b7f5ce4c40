"""Settlements on their way to a broker that is not there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

from mqmesh.errors import ClientClosed, EndpointUnreachable
from mqmesh.protocol.delivery import MessageLease, SettleAction
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease
from mqmesh.sdk.consumer.receiving.settler import MOST_AT_ONCE, Settler, Settling
from mqmesh.testing.clock import ManualClock


class Client:
    """A client whose broker is gone; calls wait for ``turn``."""

    client_id = "member"

    def __init__(self):
        self.loop = SimpleNamespace(clock=ManualClock())
        self.later = []

    def call_later(self, _delay_ms, callback):
        self.later.append(callback)

    def request(self, _broker, _code, on_answer, **_options):
        on_answer(EndpointUnreachable("nobody is there"))

    def turn(self):
        callbacks, self.later = self.later, []
        for callback in callbacks:
            callback()


def test_a_report_alone_has_all_of_its_settlements_or_is_none():
    settler = Settler(Client(), "broker-a", "group", "topic", {}, lambda: False, nullcontext())
    some = [
        Settling(
            HeldLease(
                "broker-a", "topic", MessageLease(at, 0, at, at + 1, 1, 1, 60_000), 1, 60_000
            ),
            1,
            SettleAction.ACK,
            60_000,
            lambda _: None,
        )
        for at in range(MOST_AT_ONCE + 1)
    ]
    assert settler.take_alone(some) is None
    report = settler.take_alone(some[1:])
    assert report is not None
    assert len(report.settlements) == MOST_AT_ONCE


def test_what_waits_for_another_try_ends_when_the_consumer_is_closed():
    client, outcomes = Client(), []
    settler = Settler(client, "broker-a", "group", "topic", {}, lambda: False, nullcontext())
    held = HeldLease("broker-a", "topic", MessageLease(1, 0, 0, 2, 2, 1, 60_000), 0b11, 60_000)
    give_up_ms = client.loop.clock.monotonic_ms() + 60_000
    settler.add(
        *(Settling(held, bit, SettleAction.ACK, give_up_ms, outcomes.append) for bit in (1, 2))
    )
    client.turn()
    client.turn()
    assert (outcomes, settler.is_idle) == ([], False), "they are tried again"
    closed = ClientClosed("closed")
    settler.fail_all(closed)
    assert outcomes == [closed, closed]
