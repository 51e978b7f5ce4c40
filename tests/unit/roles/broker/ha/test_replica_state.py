"""Who a replica is, what it has promised, and when it is another one."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.coordination.interface import MemberIncarnation
from mqmesh.errors import BrokerNotAvailable, ConfigError, CorruptRecord
from mqmesh.roles.broker.ha.replica_state import (
    DRAWN_BITS,
    ReplicaState,
    decode_replica_state,
    encode_replica_state,
    first_state,
)

STATE = ReplicaState(
    log_id=7,
    replica_id=2,
    identity="zw7t",
    promised_epoch=5,
    incarnation=3,
    boot_id="monday",
    place="12-34",
)


def test_a_promise_is_for_ever():
    assert STATE.promise(6).promised_epoch == 6
    assert STATE.promise(5) is STATE
    with pytest.raises(BrokerNotAvailable, match="epoch 4 is over for replica 2"):
        STATE.promise(4)


@pytest.mark.parametrize(
    ("boot_id", "place", "syncs", "incarnation"),
    [
        ("monday", "12-34", False, 3),
        ("monday", "12-35", True, 78),
        ("tuesday", "12-34", False, 78),
        ("tuesday", "12-34", True, 3),
        ("tuesday", "12-35", True, 78),
    ],
)
def test_who_may_have_lost_records_is_somebody_else(boot_id, place, syncs, incarnation):
    started = STATE.started(boot_id, place, syncs=syncs, drawn=77)
    assert started.member == MemberIncarnation(2, incarnation)
    assert (started.boot_id, started.place) == (boot_id, place)
    assert started.promised_epoch == 5


def test_a_second_start_of_the_process_changes_nothing():
    started = STATE.started("tuesday", "12-34", syncs=False, drawn=77)
    assert started.started("tuesday", "12-34", syncs=False, drawn=78) is started


def test_every_incarnation_that_is_drawn_can_be_kept():
    for drawn in (0, 2**DRAWN_BITS - 1):
        state = first_state(7, 2, identity="i", boot_id="b", place="p", drawn=drawn)
        assert decode_replica_state(encode_replica_state(state)) == state
        assert decode_replica_state(encode_replica_state(STATE.renewed(drawn)))


def test_the_document_comes_back_and_is_the_golden_one(golden):
    assert decode_replica_state(encode_replica_state(STATE)) == STATE
    assert golden.read_bytes() == encode_replica_state(STATE)
    assert decode_replica_state(golden.read_bytes()) == STATE


@pytest.fixture
def golden(project_root):
    return project_root / "tests" / "data" / "replica-state-v1.json"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"replica": None},
        {"replica": {"replica_id": 0}},
        {"replica": {"replica_id": 65}},
        {"replica": {"promised_epoch": 2**32}},
        {"replica": {"incarnation": 0}},
        {"replica": {"identity": ""}},
    ],
)
def test_another_document_is_refused(change):
    document = msgspec.json.decode(encode_replica_state(STATE))
    replica = document["replica"] | (change.get("replica") or {})
    changed = document | change | {"replica": replica if change.get("replica", 1) else None}
    with pytest.raises(CorruptRecord, match="replica-state"):
        decode_replica_state(msgspec.json.encode(changed))


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"\xff", b"[" * 5_000])
def test_no_document_at_all_is_refused(document):
    with pytest.raises(CorruptRecord):
        decode_replica_state(document)


def test_a_copy_of_another_ones_store_begins_a_replica_of_its_own():
    one = STATE.promise(9)
    assert one.adopted(one.replica_id, "elsewhere", identity="x") is one
    other = one.adopted(5, "elsewhere", identity="x").started(
        "b", "elsewhere", syncs=True, drawn=77
    )
    assert (other.replica_id, other.identity, other.member) == (5, "x", MemberIncarnation(5, 78))
    assert other.promised_epoch == 9


def test_another_ones_store_itself_is_refused():
    with pytest.raises(ConfigError, match=r"the store of replica 2, and broker_id is 5.*remove"):
        STATE.adopted(5, STATE.place, identity="x")
