"""When the lead goes to a replica that is preferred."""

from __future__ import annotations

import msgspec

from mqmesh.coordination.interface import GroupState, MemberIncarnation
from mqmesh.roles.broker.ha.lead.switch_over import AGAIN_MS, IN_SET_MS, Preference

WALL_MS = 1_700_000_000_000
STATE = GroupState(
    log_id=7, epoch=5, master=1, in_sync=tuple(MemberIncarnation(one, 1) for one in (1, 2, 3))
)


def due(preference, now_ms, *preferred, state=STATE, wall_ms=WALL_MS):
    return preference.due(state, 1, preferred, now_ms, wall_ms)


def test_a_preferred_replica_is_to_lead_once_it_was_in_sync_for_a_minute():
    preference = Preference()
    assert due(preference, 100, 3) is None
    assert due(preference, 99 + IN_SET_MS, 3) is None
    assert due(preference, 100 + IN_SET_MS, 2, 3) == 3, "2 has its own minute"
    assert due(preference, 101 + IN_SET_MS, 3) is None, "nobody is asked again and again"
    assert due(preference, 100 + 2 * IN_SET_MS, 3) == 3


def test_one_that_goes_meanwhile_begins_anew():
    preference = Preference()
    smaller = msgspec.structs.replace(STATE, in_sync=STATE.in_sync[:2])
    due(preference, 0, 3)
    assert due(preference, IN_SET_MS, 3, state=smaller) is None
    assert due(preference, IN_SET_MS, 3) is None
    assert due(preference, 2 * IN_SET_MS, 3) == 3


def test_a_leader_that_is_preferred_itself_stays_and_so_does_one_whose_failover_is_paused():
    preference = Preference()
    paused = msgspec.structs.replace(STATE, paused=True)
    for now_ms in (0, IN_SET_MS):
        assert due(preference, now_ms, 1, 3) is None
        assert due(preference, now_ms, 3, state=paused) is None


def test_not_twice_within_ten_minutes_whoever_leads():
    preference = Preference()
    state = msgspec.structs.replace(STATE, preferred_ms=WALL_MS)
    due(preference, 0, 3, state=state)
    assert due(preference, IN_SET_MS, 3, state=state, wall_ms=WALL_MS + AGAIN_MS - 1) is None
    assert due(preference, IN_SET_MS, 3, state=state, wall_ms=WALL_MS + AGAIN_MS) == 3


def test_a_clock_that_is_behind_forbids_nothing():
    preference = Preference()
    state = msgspec.structs.replace(STATE, preferred_ms=WALL_MS)
    due(preference, 0, 3, state=state)
    assert due(preference, IN_SET_MS, 3, state=state, wall_ms=WALL_MS - 1) == 3
