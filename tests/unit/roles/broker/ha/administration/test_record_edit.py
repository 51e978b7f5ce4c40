"""A change of a group's record that anybody may make, whatever others do meanwhile."""

from __future__ import annotations

import msgspec

from mqmesh.coordination.interface import (
    Conflict,
    CoordinatorUnavailable,
    GroupState,
    MemberIncarnation,
    OutcomeUnknown,
    SessionId,
    StateRecord,
)
from mqmesh.errors import InvalidArgument
from mqmesh.roles.broker.ha.administration.record_edit import MOST_TRIES, RecordEdit

STATE = GroupState(log_id=7, epoch=4, master=1, in_sync=(MemberIncarnation(1, 1),))
PAUSED = msgspec.structs.replace(STATE, paused=True)


class Desk:
    """A coordinator that answers as it is told, and who asks for a pause."""

    def __init__(self, *answers, record=None, session="s"):
        self.record = record or StateRecord(3, STATE)
        self.answers = list(answers)
        self.asked = []
        self.outcome = None
        self.waits = []
        self.edit = RecordEdit(
            self,
            "g",
            lambda: session and SessionId(session),
            lambda state: msgspec.structs.replace(state, paused=True),
            self.done,
            call_later=lambda delay_ms, callback: self.waits.append(callback),
        )
        self.edit.begin()

    def done(self, outcome):
        assert self.outcome is None, "one outcome"
        self.outcome = outcome

    def read(self, group, on_done):
        on_done(self.record)

    def change(self, group, version, state, session, on_done):
        self.asked.append((version, state))
        on_done(self.answers.pop(0))


def test_it_is_made_on_what_is_there():
    desk = Desk(4)
    assert desk.asked == [(3, PAUSED)]
    assert desk.outcome == PAUSED


def test_what_is_so_already_is_not_made():
    desk = Desk(record=StateRecord(3, PAUSED))
    assert (desk.asked, desk.outcome) == ([], PAUSED)


def test_who_is_too_late_makes_it_on_the_newer_record():
    newer = msgspec.structs.replace(STATE, epoch=5)
    desk = Desk(Conflict("late", StateRecord(8, newer)), 9)
    assert desk.asked[1] == (8, msgspec.structs.replace(newer, paused=True))
    assert desk.outcome.epoch == 5


def test_an_outcome_that_nobody_knows_is_asked_for_again_until_the_version_moves():
    desk = Desk(OutcomeUnknown("lost"), OutcomeUnknown("lost"), 4)
    assert desk.outcome is None
    desk.waits.pop()()
    desk.waits.pop()()
    assert desk.asked == [(3, PAUSED)] * 3
    assert desk.outcome == PAUSED
    made = Desk(OutcomeUnknown("lost"))
    made.record = StateRecord(4, PAUSED)
    made.waits.pop()()
    assert (len(made.asked), made.outcome) == (1, PAUSED)


def test_a_record_that_never_rests_is_left():
    desk = Desk(*[Conflict("late", StateRecord(8, STATE))] * MOST_TRIES)
    assert isinstance(desk.outcome, CoordinatorUnavailable)
    assert len(desk.asked) == MOST_TRIES


def test_without_a_record_or_a_session_nothing_is_made():
    assert isinstance(Desk(record=StateRecord(0, None)).outcome, InvalidArgument)
    assert isinstance(Desk(session=None).outcome, CoordinatorUnavailable)
    away = CoordinatorUnavailable("away")
    assert Desk(record=away).outcome is away
    assert Desk(away).outcome is away
