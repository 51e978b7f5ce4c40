"""What is confirmed, and what is acknowledged to producers."""

from __future__ import annotations

import itertools

import pytest

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation
from mqmesh.errors import BrokerNotAvailable, InvalidArgument
from mqmesh.roles.broker.ha.confirm import AckPolicy, ConfirmedLog, ConfirmRule, rule_of

ONE, TWO, THREE = (MemberIncarnation(number, 1) for number in (1, 2, 3))
TWO_AGAIN = MemberIncarnation(2, 2)
EVERYBODY = (ONE, TWO, THREE)
ALL_THREE = ConfirmRule(EVERYBODY, 3)
EPOCH = 5


def leader(rule=ALL_THREE, *, marker_end=0, at=100) -> ConfirmedLog:
    """Replica 1 leads, has 1,000 bytes, and has sent all of them to the others."""
    log = ConfirmedLog(EPOCH, ONE, rule, marker_end)
    for member in rule.members[1:]:
        log.on_opened(member, at)
        log.on_sent(member.replica_id, 1_000)
    log.on_own(1_000)
    return log


@pytest.mark.parametrize(
    ("mode", "copies"),
    [
        (AckReplicas.NONE, 3),
        (AckReplicas.ONE, 2),
        (AckReplicas.QUORUM, 2),
        (AckReplicas.ALL, 3),
    ],
)
def test_copies_that_confirm_are_those_of_the_mode(mode, copies):
    state = GroupState(log_id=7, epoch=EPOCH, master=1, in_sync=EVERYBODY, mode=mode, copies=2)
    assert rule_of(state) == ConfirmRule(EVERYBODY, copies)


@pytest.mark.parametrize(("copies", "confirmed"), [(1, 900), (2, 500), (3, 200)])
def test_confirmed_is_what_so_many_have(copies, confirmed):
    for order in itertools.permutations([(ONE, 900), (TWO, 500), (THREE, 200)]):
        assert ConfirmRule(EVERYBODY, copies).position(dict(order)) == confirmed


def test_too_small_a_set_confirms_nothing():
    assert ConfirmRule((ONE,), 2).position({ONE: 900}) == 0


def test_the_slowest_member_confirms_in_mode_all():
    log = leader()
    assert log.on_ack(2, EPOCH, 700) == 100
    assert log.on_ack(3, EPOCH, 400) == 400
    assert log.on_ack(3, EPOCH, 800) == 700


def test_the_own_disk_counts_like_a_follower():
    log = ConfirmedLog(EPOCH, ONE, ConfirmRule((ONE, TWO), 2), 0)
    log.on_opened(TWO, 0)
    log.on_sent(2, 1_000)
    log.on_ack(2, EPOCH, 1_000)
    assert log.on_own(300) == 300


def test_a_member_without_connection_holds_the_rest_back_with_what_it_acknowledged():
    log = leader()
    log.on_ack(2, EPOCH, 600)
    log.on_ack(3, EPOCH, 900)
    log.on_disconnected(2)
    assert log.on_ack(3, EPOCH, 1_000) == 600


def test_nothing_is_confirmed_before_the_marker():
    log = leader(ConfirmRule(EVERYBODY, 2), marker_end=500)
    assert log.on_ack(2, EPOCH, 499) == 0
    assert log.on_ack(2, EPOCH, 500) == 500


def test_a_larger_set_holds_back_before_the_record_has_it():
    log = leader(ConfirmRule((ONE, TWO), 2))
    log.on_opened(THREE, 100)
    log.on_sent(3, 1_000)
    log.on_changing(ConfirmRule(EVERYBODY, 3))
    assert log.on_ack(2, EPOCH, 1_000) == 100
    assert log.on_ack(3, EPOCH, 300) == 300
    assert log.on_changed(ConfirmRule(EVERYBODY, 3)) == 300


def test_a_smaller_set_confirms_once_the_record_has_it():
    log = leader()
    log.on_ack(2, EPOCH, 1_000)
    log.on_changing(ConfirmRule((ONE, TWO), 2))
    assert log.confirmed == 100
    assert log.on_changed(ConfirmRule((ONE, TWO), 2)) == 1_000


def test_a_change_that_was_not_made_leaves_the_old_set():
    log = leader()
    log.on_ack(2, EPOCH, 1_000)
    log.on_changing(ConfirmRule((ONE, TWO), 2))
    assert log.on_changed(ConfirmRule(EVERYBODY, 3)) == 100


def test_it_never_goes_back():
    log = leader(ConfirmRule(EVERYBODY, 2))
    log.on_ack(2, EPOCH, 800)
    assert log.on_changed(ConfirmRule(EVERYBODY, 3)) == 800


def test_another_incarnation_is_another_member():
    log = leader(ConfirmRule((ONE, TWO), 2))
    log.on_ack(2, EPOCH, 300)
    log.on_opened(TWO_AGAIN, 100)
    log.on_sent(2, 1_000)
    assert log.on_ack(2, EPOCH, 1_000) == 300
    log.on_changing(ConfirmRule((ONE, TWO_AGAIN), 2))
    assert log.on_changed(ConfirmRule((ONE, TWO_AGAIN), 2)) == 1_000


def test_what_a_follower_had_under_another_incarnation_confirms_nothing_more():
    log = ConfirmedLog(EPOCH, ONE, ConfirmRule((ONE, TWO), 2), 0)
    log.on_own(100)
    log.on_opened(TWO, 300)
    log.on_opened(TWO_AGAIN, 50)
    assert log.on_own(1_000) == log.confirmed == 100


def test_what_a_follower_acknowledged_and_lost_confirms_nothing_more():
    log = ConfirmedLog(EPOCH, ONE, ConfirmRule((ONE, TWO), 2), 0)
    log.on_own(100)
    log.on_opened(TWO, 300)
    log.on_lost(TWO)
    assert log.on_own(1_000) == log.confirmed == 100


def test_a_follower_that_lost_acknowledged_records_is_refused():
    log = leader()
    log.on_ack(2, EPOCH, 600)
    log.on_disconnected(2)
    with pytest.raises(InvalidArgument, match="up to 599 and had acknowledged 600"):
        log.on_opened(TWO, 599)
    assert 2 not in log.links


@pytest.mark.parametrize(
    ("replica_id", "epoch", "position", "reason"),
    [
        (2, EPOCH, 1_001, "was sent the log up to 1000"),
        (2, EPOCH, 2**63 - 1, "was sent the log up to 1000"),
        (2, EPOCH, 199, "it had 200"),
        (2, EPOCH - 1, 900, "acknowledges epoch 4"),
        (2, EPOCH + 1, 900, "acknowledges epoch 6"),
        (4, EPOCH, 900, "has not opened"),
    ],
)
def test_a_report_that_cannot_be_moves_nothing(replica_id, epoch, position, reason):
    log = leader()
    log.on_ack(2, EPOCH, 200)
    log.on_ack(3, EPOCH, 1_000)
    with pytest.raises(InvalidArgument, match=reason):
        log.on_ack(replica_id, epoch, position)
    assert log.confirmed == 200
    assert log.links[2].has == 200


@pytest.mark.parametrize("mode", AckReplicas)
def test_what_is_confirmed_is_acknowledged_whoever_is_connected(mode):
    log = leader(ConfirmRule(EVERYBODY, 2))
    log.on_ack(2, EPOCH, 500)
    policy = AckPolicy(mode, minimum=2)
    assert policy.acknowledged(log) == 500
    log.on_disconnected(2)
    log.on_disconnected(3)
    assert policy.acknowledged(log) == 500, "nor is more of it"


def test_one_does_not_count_who_is_far_behind():
    log = leader(ConfirmRule((ONE, TWO), 2))
    AckPolicy(AckReplicas.ONE, refuses_below=True, fall_behind_bytes=900).check(log, 1_000)
    with pytest.raises(BrokerNotAvailable, match="connected or near enough"):
        AckPolicy(AckReplicas.ONE, refuses_below=True, fall_behind_bytes=899).check(log, 1_000)


def test_a_set_below_the_minimum_acknowledges_nothing_and_refuses():
    log = leader(ConfirmRule((ONE,), 1))
    assert log.confirmed == 1_000
    assert AckPolicy(AckReplicas.ALL, minimum=2).acknowledged(log) == 0
    assert AckPolicy(AckReplicas.ALL, minimum=1).acknowledged(log) == 1_000
    AckPolicy(AckReplicas.ALL, minimum=2).check(log, 1_000)
    with pytest.raises(BrokerNotAvailable, match=r"1 replicas are in sync, 2 must be \(min_in_"):
        AckPolicy(AckReplicas.ALL, minimum=2, refuses_below=True).check(log, 1_000)


def test_the_minimum_is_asked_of_both_sets_during_a_change():
    log = leader(ConfirmRule((ONE, TWO), 2))
    policy = AckPolicy(AckReplicas.ALL, minimum=2, refuses_below=True)
    policy.check(log, 1_000)
    log.on_changing(ConfirmRule((ONE,), 1))
    with pytest.raises(BrokerNotAvailable):
        policy.check(log, 1_000)


def test_a_quorum_that_is_not_there_is_refused_before_the_put():
    log = leader(ConfirmRule(EVERYBODY, 2))
    policy = AckPolicy(AckReplicas.QUORUM, refuses_below=True)
    log.on_disconnected(2)
    policy.check(log, 1_000)
    log.on_disconnected(3)
    with pytest.raises(BrokerNotAvailable, match="ack_replicas quorum"):
        policy.check(log, 1_000)
