"""Times that clients have messages for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqmesh.errors import MQMeshError, RequestTimeout, StaleReceipt
from mqmesh.protocol.delivery import MessageLease, SettleAction, Settlement
from mqmesh.roles.gateway.grpc.handles import Receipt
from mqmesh.roles.gateway.grpc.leases import RENEWED_MS, ClientLeases
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease
from mqmesh.testing.clock import ManualClock

LENGTH_MS = 30_000


class Noted:
    """Reports that a broker would get, each answered at once unless it ``waits``."""

    def __init__(self) -> None:
        self.all: list[Settlement] = []
        self.error: MQMeshError | None = None
        self.waits = False
        self._waiting: list[Callable[[MQMeshError | None], None]] = []

    def add(self, *arguments: Any) -> None:
        one: Settlement = arguments[4]
        done: Callable[[MQMeshError | None], None] = arguments[5]
        self.all.append(one)
        if self.waits:
            self._waiting.append(done)
        else:
            done(self.error)

    def answer(self, error: MQMeshError | None) -> None:
        """Answers the reports that wait."""
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(error)

    def take(self) -> list[tuple[str, list[int], int]]:
        """Returns the reports since the last call: action, offsets, delay."""
        found = [
            (
                SettleAction(one.action).name,
                [
                    one.first + bit
                    for bit in range(32)
                    if int.from_bytes(one.bits, "little") >> bit & 1
                ],
                one.delay_ms,
            )
            for one in self.all
        ]
        self.all = []
        return found


class Scene:
    """Leases with a clock, and what was reported."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.noted = Noted()
        self.leases = ClientLeases(self.noted, self.clock.monotonic_ms, 100)  # type: ignore[arg-type]

    def add(self, *offsets: int, number: int = 5, renewed: bool = False) -> None:
        lease = MessageLease(number, 0, 10, 20, len(offsets), 1, LENGTH_MS)
        held = HeldLease("b", "t", lease, 0, self.clock.monotonic_ms() + LENGTH_MS)
        self.leases.add("me", "g", held, offsets, renewed, self)

    def change(self, offset: int, length_ms: int) -> list[MQMeshError | None]:
        found: list[MQMeshError | None] = []
        one = self.leases.find(receipt(offset))
        assert one is not None
        self.leases.change(one, offset, length_ms, found.append)
        return found

    def wait(self, ms: int) -> list[tuple[str, list[int], int]]:
        for _ in range(ms // 250):
            self.clock.advance(250)
            self.leases.tick()
        return self.noted.take()


def receipt(offset: int, number: int = 5) -> Receipt:
    return Receipt("b", number, 0, offset, False)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nothing_is_said_of_a_lease_that_ends_by_itself(scene):
    scene.add(10, 11)
    assert scene.wait(2 * LENGTH_MS) == []
    assert scene.leases.messages == 0


def test_a_message_with_a_shorter_time_is_given_back_alone(scene):
    scene.add(10, 11, 12)
    assert scene.change(11, 2_000) == [None]
    assert scene.wait(1_750) == []
    assert scene.wait(250) == [("NACK", [11], 0)]
    assert scene.leases.find(receipt(11)) is None
    assert scene.leases.messages == 2


def test_a_message_with_a_longer_time_keeps_its_lease_but_not_the_others(scene):
    scene.add(10, 11)
    assert scene.change(10, 50_000) == [None]
    assert scene.noted.take() == [("EXTEND", [10, 11], 50_000)]
    assert scene.wait(LENGTH_MS) == [("NACK", [11], 0)]
    assert scene.wait(20_000) == []
    assert scene.leases.messages == 0


def test_leases_are_renewed_while_their_client_works_up_to_a_limit(scene):
    scene.add(10, 11, renewed=True)
    scene.leases.take(receipt(11))
    assert scene.wait(LENGTH_MS // 3 - 250) == []
    assert scene.wait(500) == [("EXTEND", [10], LENGTH_MS)]
    reports = scene.wait(RENEWED_MS)
    assert {name for name, _, _ in reports} == {"EXTEND"}
    assert len(reports) == pytest.approx(RENEWED_MS * 3 / LENGTH_MS, rel=0.1)
    assert scene.wait(LENGTH_MS) == []
    assert scene.leases.messages == 0


def test_a_lease_that_somebody_else_has_is_forgotten(scene):
    scene.add(10, renewed=True)
    scene.noted.error = StaleReceipt("another has it", code=33)
    scene.wait(LENGTH_MS)
    assert scene.leases.messages == 0


def test_a_lease_is_extended_again_when_its_broker_did_not_answer(scene):
    scene.add(10, renewed=True)
    scene.noted.error = RequestTimeout("nobody answers")
    tries = scene.wait(LENGTH_MS // 2)
    assert len(tries) > 5
    scene.noted.error = None
    assert len(scene.wait(LENGTH_MS // 3)) == 1
    assert scene.leases.messages == 1
    scene.noted.error = RequestTimeout("nobody answers")
    scene.wait(2 * LENGTH_MS)
    assert scene.leases.messages == 0, "it ended at the broker"


def test_an_extension_counts_from_the_answer_of_the_broker(scene):
    scene.add(10, renewed=True)
    scene.noted.waits = True
    assert len(scene.wait(LENGTH_MS + 5_000)) == 1, "no other one while it has no answer"
    assert scene.leases.messages == 1
    scene.noted.answer(RequestTimeout("nobody answered"))
    scene.wait(500)
    assert scene.leases.messages == 0, "it ended at the broker"


def test_a_longer_time_that_was_refused_does_not_count(scene):
    scene.add(10)
    scene.noted.error = RequestTimeout("nobody answers")
    assert scene.change(10, 50_000) == [scene.noted.error]
    scene.noted.error = None
    assert [name for name, _, _ in scene.wait(2 * LENGTH_MS)] == ["EXTEND"]
    assert scene.leases.messages == 0


def test_what_is_renewed_is_given_back_when_the_client_is_gone(scene):
    scene.add(10, 11, renewed=True)
    scene.add(12, number=6)
    scene.leases.client_left("me")
    assert scene.noted.take() == [("RETURN", [10, 11], -1)]
    assert scene.wait(LENGTH_MS) == []
    scene.leases.client_left("me")
    assert scene.leases.messages == 0


def test_what_did_not_reach_its_client_is_given_back(scene):
    scene.add(10, 11)
    one = scene.leases.find(receipt(10))
    scene.leases.take(receipt(11))
    for _ in range(2):
        scene.leases.give_back(one.held)
    assert scene.noted.take() == [("RETURN", [10], -1)]
    assert scene.leases.messages == 0


def test_what_a_connection_gave_last_is_not_renewed_when_it_ended(scene):
    scene.add(10, renewed=True)
    scene.wait(1_000)
    scene.add(11, number=6, renewed=True)
    scene.leases.source_ended("me", "another", 0)
    scene.leases.source_ended("me", scene, scene.clock.monotonic_ms())
    assert {tuple(offsets) for _, offsets, _ in scene.wait(2 * LENGTH_MS)} == {(10,)}
    assert scene.leases.messages == 1


def test_a_new_master_is_shown_what_there_is(scene):
    scene.add(10, 11)
    scene.wait(10_000)
    scene.leases.show("me", "another broker")
    assert scene.noted.take() == []
    scene.leases.show("me", "b")
    assert scene.noted.take() == [("EXTEND", [10, 11], LENGTH_MS - 10_000)]


def test_an_answer_that_comes_once_more_takes_the_place_of_the_first(scene):
    scene.add(10, 11)
    scene.add(11)
    assert scene.leases.messages == 1
    assert scene.leases.find(receipt(10)) is None


def test_no_more_is_received_than_can_be_kept(scene):
    assert not scene.leases.is_full
    for number in range(10):
        scene.add(*range(10, 20), number=number + 1)
    assert scene.leases.is_full
