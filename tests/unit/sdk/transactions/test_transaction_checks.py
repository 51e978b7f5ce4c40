"""Check-backs at a client: each message by itself, whatever the listener does."""

from __future__ import annotations

import pytest

from mqmesh.batch.half_batch import half_parts
from mqmesh.batch.payload import encode_payload
from mqmesh.message import Message
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.transactions import CheckTransactionState, Decision
from mqmesh.sdk.transactions.transaction_checks import CheckService
from mqmesh.sdk.transactions.transaction_ends import HalfPlace
from mqmesh.sdk.transactions.transactions import LocalTransactionState
from mqmesh.testing.clock import ManualClock

STATES = {
    b"yes": LocalTransactionState.COMMIT,
    b"no": LocalTransactionState.ROLLBACK,
    b"perhaps": LocalTransactionState.UNKNOWN,
    b"nonsense": "COMMIT",
}


class Pool:
    """Plays the threads: tasks run when the test says so."""

    def __init__(self) -> None:
        self.tasks: list = []

    @property
    def waiting(self) -> int:
        return len(self.tasks)

    def submit(self, task) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Ends:
    """Takes the answers."""

    def __init__(self) -> None:
        self.sent: list[tuple[HalfPlace, int, Decision]] = []

    def add(self, place, ordinal, decision, deadline_ms, on_ended) -> None:
        self.sent.append((place, ordinal, decision))


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def ends():
    return Ends()


@pytest.fixture
def asked():
    return []


@pytest.fixture
def service(pool, ends, asked):
    def check(message):
        asked.append((message.body, message.message_id))
        if message.body == b"throws":
            raise ValueError("planned")
        return STATES[message.body]

    return CheckService("pg", check, ends, pool, ManualClock())


TOKEN = b"token of a check"


def question(*bodies: bytes, group="pg", first_ordinal=0, ordinals=None) -> Command:
    parts = half_parts(
        encode_payload([Message("t", body) for body in bodies]),
        producer_group=group,
        real_topic="t",
        real_queue_id=0,
        has_immunity=False,
        producer_id=7,
        first_sequence=40 + first_ordinal,
        born_timestamp=1,
    )
    wanted = list(range(first_ordinal, first_ordinal + len(bodies)))
    header = CheckTransactionState(
        group, 100, wanted if ordinals is None else ordinals, 1, first_ordinal, TOKEN
    )
    return Command(39, 0, 2, memoryview(encode_header(header)), memoryview(b"".join(parts)))


def test_what_is_known_is_answered_and_nothing_else(service, pool, ends, asked):
    service.on_question("a", question(b"yes", b"no", b"perhaps", b"throws", b"nonsense", b"yes"))
    pool.run()
    place = HalfPlace("a", 100, 7, 40, TOKEN)
    assert ends.sent == [
        (place, 0, Decision.COMMIT),
        (place, 1, Decision.ROLLBACK),
        (place, 5, Decision.COMMIT),
    ]
    assert len(asked) == 6
    assert asked[0][1].endswith(f"{40:016X}")


def test_a_part_of_a_batch_keeps_its_place(service, pool, ends):
    service.on_question("a", question(b"yes", first_ordinal=3))
    pool.run()
    assert ends.sent == [(HalfPlace("a", 100, 7, 40, TOKEN), 3, Decision.COMMIT)]


def test_what_is_being_asked_about_is_not_asked_about_again(service, pool, asked):
    service.on_question("a", question(b"yes"))
    service.on_question("a", question(b"yes"))
    pool.run()
    assert len(asked) == 1
    service.on_question("a", question(b"yes"))
    pool.run()
    assert len(asked) == 2


def test_what_runs_in_this_process_is_not_asked_about(service, pool, asked):
    service.running.add(("a", 100, 0))
    service.on_question("a", question(b"yes", b"no"))
    pool.run()
    assert [body for body, _ in asked] == [b"no"]


@pytest.mark.parametrize(
    "command",
    [
        question(b"yes", group="others"),
        question(b"yes", ordinals=[9]),
        question(b"yes", ordinals=[]),
        Command(39, 0, 2, memoryview(b"\x00"), memoryview(b"")),
        Command(39, 0, 2, question(b"yes").header, memoryview(b"garbage")),
    ],
)
def test_what_makes_no_sense_is_not_answered(service, pool, ends, asked, command):
    service.on_question("a", command)
    pool.run()
    assert ends.sent == asked == []


def test_a_flood_of_questions_is_bounded(service, pool, asked, monkeypatch):
    monkeypatch.setattr("mqmesh.sdk.transactions.transaction_checks.MAX_CHECKS_WAITING", 1)
    for _ in range(5):
        service.on_question("a", question(b"yes"))
    assert pool.waiting == 2
