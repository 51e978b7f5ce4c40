"""What `mqmesh ha status` says below its table."""

from __future__ import annotations

import msgspec

from mqmesh.cli.admin.ha_status import is_well, notes_of
from mqmesh.protocol.replication import HaSetting, HaStatus, SettingDiffers
from mqmesh.sdk.admin.ha_admin import ReplicaReport


def report(broker_id, **status):
    told = HaStatus("a", broker_id, "FOLLOWING", 4, 0, 100, 100, voters=[1, 2, 3])
    return ReplicaReport("a", broker_id, f"h{broker_id}", msgspec.structs.replace(told, **status))


def test_a_group_that_is_as_usual_says_who_leads_since_when_and_why():
    leader = report(1, role="MASTER", switched_ms=1_000, reason="for a test")
    assert notes_of([leader, report(2), report(3)]) == [
        "a: replicas 1, 2, 3; epoch 4 since 1970-01-01T00:00:01.000Z (why: for a test)"
    ]


def test_whatever_is_not_as_usual_is_told():
    leader = report(1, failsafe=True, paused=True)
    late = report(2, connected=False, problem="it hangs")
    silent = ReplicaReport("a", 3, "h3", None, "no answer")
    notes = notes_of([leader, late, silent])
    assert notes[1:] == [
        "a: no word from replica 3",
        "a: failover is paused, see `mqmesh ha resume a`",
        "a: replica 1 leads without the coordinator; nobody is elected",
        "a: replica 2: it hangs",
    ]
    assert [is_well(one) for one in (leader, late, silent)] == [True, False, False]
    assert is_well(report(4, connected=False, role="OUTSIDE"))


def test_settings_that_are_not_in_force_or_differ_are_told_by_name_and_value():
    one = report(1, settings=[HaSetting("lease_ttl_ms", "3000")])
    other = report(
        2,
        settings=[HaSetting("lease_ttl_ms", "4000")],
        differing=[SettingDiffers("ack_replicas", "none", "all")],
    )
    assert notes_of([one, other])[-2:] == [
        "a: replica 2: ha.ack_replicas = none is not in force, all is",
        (
            "a: ha.lease_ttl_ms differs: 3000 at [1], 4000 at [2]; see "
            "`mqmesh ha settings --set lease_ttl_ms=…`"
        ),
    ]


def test_a_group_whose_master_is_promoted_has_nothing_to_say():
    assert notes_of([report(0, role="MASTER", voters=[])]) == []
